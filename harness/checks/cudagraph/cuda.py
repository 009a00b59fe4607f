"""Real CUDA graphs: warms up on a side stream, rehearses, and captures ``torch.cuda.CUDAGraph``.

One recorder has one memory pool, which all of its graphs share, as those of a serving engine do. A capture in which
the host waits for the device is spoilt, and may spoil the process: so the last warm-up is a rehearsal in which every
synchronising call raises, and nothing is captured whose rehearsal raised. Imports on a machine without a GPU.

A graph goes on using memory that was released since its capture, whatever the allocator has put there meanwhile. So
memory that a graph may use is kept alive, and overwritten once the backend has released it: a graph that reads it gives
wrong answers every time, and one that writes it is found out. Zero, an index that every table has, causes no wild read.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from types import CellType, FunctionType, ModuleType
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attncheck.errors import InternalError
from attncheck.harness.checks.cudagraph.recorder import (
    CaptureError,
    Forward,
    RecorderName,
    Released,
    Violation,
    count_uses,
)
from attncheck.harness.checks.cudagraph.rehearsal import rehearse, syncs_raise, violation_of
from attncheck.harness.driver.foreign_code import collection_paused

WARM_UPS = 1
"""Runs before the rehearsal: what compiles, tunes or allocates at the first call may wait for the device there."""

_NAN = 0xFF
"""A byte that makes NaN of every floating type, when it fills all bytes of a number."""


class ReleasedMemoryError(InternalError):
    """A replay wrote to memory that nobody has held since the capture, and that may be anybody's by then."""


@dataclass(eq=False)
class MemoryBlock:
    """All memory that a tensor is part of, as bytes; ``value`` is the byte that it is spoilt with."""

    memory: Tensor
    value: int
    is_spoilt: bool = False

    def spoil(self) -> None:
        """Overwrite it, if nobody else holds it any more: NaN where floating-point numbers were, zeros elsewhere."""
        if not self.is_spoilt and count_uses(self.memory) == count_uses(torch.empty(1)):
            self.memory.fill_(self.value)
            self.is_spoilt = True

    def was_written(self) -> bool:
        """Whether anybody has written to it since it was spoilt."""
        return self.is_spoilt and bool(self.memory.ne(self.value).any())


class HeldMemory:
    """Blocks by their address. Graphs that use the same memory share its block, and it lives as long as one of them."""

    def __init__(self) -> None:
        self._blocks: WeakValueDictionary[int, MemoryBlock] = WeakValueDictionary()

    def of(self, tensors: Iterable[Tensor]) -> tuple[MemoryBlock, ...]:
        """The memory of ``tensors``, each block once; the tensors themselves are not held."""
        found: dict[int, MemoryBlock] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.data_ptr():
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                block = MemoryBlock(memory, _NAN if tensor.is_floating_point() else 0)
                found.setdefault(memory.data_ptr(), self._blocks.setdefault(memory.data_ptr(), block))
        return tuple(found.values())


class CudaRecording:
    """A captured graph, and the ``blocks`` of memory from before the capture that it may use."""

    def __init__(self, graph: torch.cuda.CUDAGraph, blocks: tuple[MemoryBlock, ...]) -> None:
        self._graph = graph
        self._blocks = blocks

    def replay(self) -> None:
        """Launch the graph on the current stream, and wait until it is done: its errors are raised here.

        Raises :class:`ReleasedMemoryError`. What a graph reads of such memory shows in its answers.
        """
        for block in self._blocks:
            block.spoil()
        self._graph.replay()
        torch.cuda.current_stream().synchronize()
        if any(block.was_written() for block in self._blocks):
            raise ReleasedMemoryError("the graph wrote to memory that has been let go of since its capture")

    def launch(self) -> None:
        """Launch the graph on the current stream, and nothing else."""
        self._graph.replay()

    def reads(self, tensor: Tensor) -> bool | None:
        """Cannot be told: a graph does not say which addresses its kernels were given."""
        return None

    def host_reads(self) -> tuple[str, ...]:
        """Cannot be told: reading host memory is nothing to CUDA."""
        return ()

    def hands_out_memory(self) -> bool:
        """A capture holds whatever works on its stream, by whom ever it was launched."""
        return False

    def released(self) -> tuple[Released, ...]:
        """Cannot be told before a replay, for the same reason."""
        return ()


@dataclass(frozen=True)
class CaptureStream:
    """The side stream of all recorders of a device: cuBLAS keeps a workspace for each stream, 32 MiB on some GPUs.

    ``unended``: graphs whose capture could not be ended. torch's allocator of host memory keeps a pointer to such a
    graph as long as the process lives, and asks it which streams are its own.
    """

    stream: torch.cuda.Stream
    unended: list[torch.cuda.CUDAGraph] = field(default_factory=list)


@cache
def capture_stream(device: torch.device) -> CaptureStream:
    """Return the one of ``device``."""
    return CaptureStream(torch.cuda.Stream(device))


class CudaRecorder:
    """Makes graphs on one device; see :class:`attncheck.harness.checks.cudagraph.recorder.Recorder`."""

    name: RecorderName = "cuda"

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # once, not before each capture: it takes longer than a capture
        self._device = device
        self._side = capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._memory = HeldMemory()

    def watching(self) -> AbstractContextManager[None]:
        """Nothing: CUDA itself knows what lies on the host."""
        return nullcontext()

    def mark_host(self, *tensors: Tensor) -> None:
        """Nothing: CUDA itself knows what lies on the host."""

    def record(self, prepare: Callable[[], Forward]) -> CudaRecording:
        """Warm up, rehearse, capture, each with what ``prepare`` builds anew on the current stream.

        Raises :class:`CaptureError` for what the rehearsal or the capture raised, and whatever ``prepare`` or a
        warm-up raises.
        """
        with torch.cuda.device(self._device):
            for _ in range(WARM_UPS):
                forward = prepare()
                with self._side_stream():
                    forward()
            if violation := self._rehearse(prepare()):
                raise CaptureError((violation,))
            torch.cuda.synchronize()  # what a warm-up's kernels did wrong belongs to it, not to the capture
            forward = prepare()
            blocks = self._memory.of(tensors_within(forward))
            graph = self._capture(forward)
            if isinstance(graph, Violation):
                raise CaptureError((graph,))
            return CudaRecording(graph, blocks)

    def _rehearse(self, forward: Forward) -> Violation | None:
        """Why nothing must be captured: what waits for the device in a capture spoils it."""
        with self._side_stream():
            return rehearse(forward)

    def _capture(self, forward: Forward) -> torch.cuda.CUDAGraph | Violation:
        """The graph, or why there is none.

        No garbage is collected meanwhile: to free an earlier graph, or memory, would spoil the capture.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        violation: Violation | None = None
        try:
            # torch itself waits for the device where a capture begins: only forward must not.
            with collection_paused(), torch.cuda.graph(graph, pool=self._pool, stream=self._side.stream):
                try:
                    with syncs_raise():
                        forward()
                except Exception as error:  # noqa: BLE001 (the capture must be ended first)
                    violation = violation_of(error)
        except Exception as error:  # noqa: BLE001 (the same)
            self._recover(graph, current)
            violation = violation or violation_of(error)
        return violation or graph

    def _recover(self, graph: torch.cuda.CUDAGraph, current: torch.cuda.Stream) -> None:
        """After a capture that could not be ended: torch has left its stream current, and its pool recording."""
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # it was not recording after all
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            torch._C._cuda_releasePool(current.device_index, self._pool)  # which only an ended capture does itself
        self._pool = torch.cuda.graph_pool_handle()
        self._side.unended.append(graph)
        with suppress(RuntimeError):  # a device that is lost says so at its next use
            torch.cuda.synchronize()

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        current, side = torch.cuda.current_stream(), self._side.stream
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            current.wait_stream(side)


def tensors_within(root: object) -> list[Tensor]:
    """Every tensor that ``root`` holds: through closures, arguments bound, attributes, containers.

    Of a function only its closure is followed, and classes and modules not at all: what is global is not held by it.
    """
    found: list[Tensor] = []
    seen = {id(root)}
    pending = [root]
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            found.append(item)
        if isinstance(item, type | ModuleType):
            continue
        held: list[object] | tuple[CellType, ...] = (
            item.__closure__ or () if isinstance(item, FunctionType) else gc.get_referents(item)
        )
        for each in held:
            if id(each) not in seen:
                seen.add(id(each))
                pending.append(each)
    return found
