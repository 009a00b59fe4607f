"""Real CUDA graphs: warm up on a side stream, rehearse, and capture a ``torch.cuda.CUDAGraph``.

All graphs of a recorder share one memory pool, as in a serving engine. If the host waits for the device during a
capture, the capture fails, and the process may become unusable. The last warm-up is therefore a rehearsal in which
every synchronizing call raises, and a capture follows only if nothing raised. Imports on a machine without a GPU.

A graph keeps using memory that was released after its capture, whatever the allocator stores there. So memory that a
graph may use is kept alive, and overwritten once the backend has released it. A graph that reads it then gives wrong
results every time, and a graph that writes it is detected. Integers are overwritten with 0, which is a valid index in
every table, so that no kernel reads out of bounds.
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
"""Runs before the rehearsal. The first call may compile, tune or allocate, and so may wait for the device."""

_NAN = 0xFF
"""Byte that makes a NaN in every floating-point type if all bytes of a number have this value."""


class ReleasedMemoryError(InternalError):
    """A replay wrote to memory that was released after the capture and may now belong to another tensor."""


@dataclass(eq=False)
class MemoryBlock:
    """The whole storage of a tensor, as bytes. ``value``: the byte that overwrites it."""

    memory: Tensor
    value: int
    is_spoilt: bool = False

    def spoil(self) -> None:
        """Overwrite the block if it has no other user: NaN for floating-point tensors, zeros for others."""
        if not self.is_spoilt and count_uses(self.memory) == count_uses(torch.empty(1)):
            self.memory.fill_(self.value)
            self.is_spoilt = True

    def was_written(self) -> bool:
        """Return whether the block was written to after it was overwritten."""
        return self.is_spoilt and bool(self.memory.ne(self.value).any())


class HeldMemory:
    """Memory blocks by address. Graphs that use the same memory share a block, which lives as long as one of them."""

    def __init__(self) -> None:
        self._blocks: WeakValueDictionary[int, MemoryBlock] = WeakValueDictionary()

    def of(self, tensors: Iterable[Tensor]) -> tuple[MemoryBlock, ...]:
        """Return the blocks of ``tensors``, each once. The tensors themselves are not kept alive."""
        found: dict[int, MemoryBlock] = {}
        for tensor in tensors:
            if tensor.layout == torch.strided and tensor.data_ptr():
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
                block = MemoryBlock(memory, _NAN if tensor.is_floating_point() else 0)
                found.setdefault(memory.data_ptr(), self._blocks.setdefault(memory.data_ptr(), block))
        return tuple(found.values())


class CudaRecording:
    """A captured graph. ``blocks``: memory allocated before the capture that the graph may use."""

    def __init__(self, graph: torch.cuda.CUDAGraph, blocks: tuple[MemoryBlock, ...]) -> None:
        self._graph = graph
        self._blocks = blocks

    def replay(self) -> None:
        """Launch the graph on the current stream and wait for it, so that its errors are raised here.

        First overwrite released memory, so that reading it shows in the output. Raise :class:`ReleasedMemoryError` if
        the graph writes to such memory.
        """
        for block in self._blocks:
            block.spoil()
        self._graph.replay()
        torch.cuda.current_stream().synchronize()
        if any(block.was_written() for block in self._blocks):
            raise ReleasedMemoryError("the graph wrote to memory that has been let go of since its capture")

    def launch(self) -> None:
        """Launch the graph on the current stream without waiting for it."""
        self._graph.replay()

    def reads(self, tensor: Tensor) -> bool | None:
        """Return None, because a graph does not reveal the addresses that its kernels use."""
        return None

    def host_reads(self) -> tuple[str, ...]:
        """Return nothing, because CUDA does not record reads of host memory."""
        return ()

    def hands_out_memory(self) -> bool:
        """Return False, because a capture contains all work on its stream, including work that torch does not see."""
        return False

    def released(self) -> tuple[Released, ...]:
        """Return nothing, because released memory is detected only at a replay; see :meth:`reads`."""
        return ()


@dataclass(frozen=True)
class CaptureStream:
    """The side stream that all recorders of a device share. cuBLAS keeps a workspace per stream (32 MiB on some GPUs).

    ``unended``: graphs whose capture could not be ended. torch's host allocator keeps a pointer to such a graph for the
    life of the process and queries it for its streams, so the graph must stay alive.
    """

    stream: torch.cuda.Stream
    unended: list[torch.cuda.CUDAGraph] = field(default_factory=list)


@cache
def capture_stream(device: torch.device) -> CaptureStream:
    """Return the side stream of ``device``."""
    return CaptureStream(torch.cuda.Stream(device))


class CudaRecorder:
    """Captures graphs on one device; see :class:`attncheck.harness.checks.cudagraph.recorder.Recorder`."""

    name: RecorderName = "cuda"

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # once, not before each capture: it takes longer than a capture
        self._device = device
        self._side = capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._memory = HeldMemory()

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because a tensor's device shows whether it is on the host."""
        return nullcontext()

    def mark_host(self, *tensors: Tensor) -> None:
        """Do nothing, because a tensor's device shows whether it is on the host."""

    def record(self, prepare: Callable[[], Forward]) -> CudaRecording:
        """Warm up, rehearse and capture, each with a new result of ``prepare`` on the current stream.

        Raise :class:`CaptureError` for an exception in the rehearsal or the capture. Exceptions of ``prepare`` and of
        warm-ups propagate.
        """
        with torch.cuda.device(self._device):
            for _ in range(WARM_UPS):
                forward = prepare()
                with self._side_stream():
                    forward()
            if violation := self._rehearse(prepare()):
                raise CaptureError((violation,))
            torch.cuda.synchronize()  # so that errors of the warm-up's kernels are not raised in the capture
            forward = prepare()
            blocks = self._memory.of(tensors_within(forward))
            graph = self._capture(forward)
            if isinstance(graph, Violation):
                raise CaptureError((graph,))
            return CudaRecording(graph, blocks)

    def _rehearse(self, forward: Forward) -> Violation | None:
        with self._side_stream():
            return rehearse(forward)

    def _capture(self, forward: Forward) -> torch.cuda.CUDAGraph | Violation:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        violation: Violation | None = None
        try:
            # Freeing an earlier graph or memory would invalidate the capture, so garbage collection is paused. torch
            # itself waits for the device at the start of a capture; only forward must not wait.
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
        """Clean up after a capture that could not be ended: torch leaves its stream current and its pool recording."""
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # the pool may not be recording
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            torch._C._cuda_releasePool(current.device_index, self._pool)  # torch calls this only after an ended capture
        self._pool = torch.cuda.graph_pool_handle()
        self._side.unended.append(graph)
        with suppress(RuntimeError):  # a lost device raises again at its next use
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
    """Return every tensor reachable from ``root`` through closures, bound arguments, attributes and containers.

    For functions only closures are followed, and classes and modules are skipped, because ``root`` does not own
    globals.
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
