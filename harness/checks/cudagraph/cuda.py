"""Real CUDA graphs: warms up on a side stream, rehearses, and captures ``torch.cuda.CUDAGraph``.

One recorder has one memory pool, which all of its graphs share, as those of a serving engine do. A capture in which
the host waits for the device is spoilt, and may spoil the process: so the last warm-up is a rehearsal in which every
synchronising call raises, and nothing is captured whose rehearsal raised. Imports on a machine without a GPU.

A graph goes on using memory that was released since its capture, whatever the allocator has put there meanwhile. So
memory that a graph may use is kept alive, and overwritten once the backend has released it: a graph that reads it gives
wrong answers every time, and one that writes it is found out. Zero, an index that every table has, causes no wild read.
"""

import gc
import linecache
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from traceback import extract_tb, walk_tb
from types import CellType, FunctionType, ModuleType
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attncheck.errors import InternalError
from attncheck.harness.checks.cudagraph.call_sites import SourceLine, call_site_of
from attncheck.harness.checks.cudagraph.recorder import (
    CaptureError,
    Forward,
    RecorderName,
    Released,
    Violation,
    count_uses,
)

WARM_UPS = 1
"""Runs before the rehearsal: what compiles, tunes or allocates at the first call may wait for the device there."""

SYNCHRONISED = "called a synchronizing CUDA operation"
"""What torch says where its sync-debug mode forbids to wait for the device."""

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


class CudaRecorder:
    """Makes graphs on one device; see :class:`attncheck.harness.checks.cudagraph.recorder.Recorder`."""

    name: RecorderName = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._memory = HeldMemory()
        self._unended: list[torch.cuda.CUDAGraph] = []

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
            self._rehearse(prepare())
            torch.cuda.synchronize()  # what a warm-up's kernels did wrong belongs to it, not to the capture
            forward = prepare()
            blocks = self._memory.of(tensors_within(forward))
            return CudaRecording(self._capture(forward), blocks)

    def _rehearse(self, forward: Forward) -> None:
        """As under capture, without one: what waits for the device raises before anything is spoilt."""
        with self._side_stream(), _as_under_capture(), _syncs_raise():
            try:
                forward()
            except Exception as error:
                raise CaptureError((violation_of(error),)) from error

    def _capture(self, forward: Forward) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream()
        raised: Exception | None = None
        try:
            # torch itself waits for the device where a capture begins: only forward must not.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    with _syncs_raise():
                        forward()
                except Exception as error:  # noqa: BLE001 (raised again below: the capture must be ended first)
                    raised = error
        except Exception as error:  # noqa: BLE001 (the same)
            self._recover(graph, current)
            raised = raised or error
        if raised is not None:
            raise CaptureError((violation_of(raised),)) from raised
        return graph

    def _recover(self, graph: torch.cuda.CUDAGraph, current: torch.cuda.Stream) -> None:
        """After a capture that could not be ended: torch has left its stream current, and its pool recording."""
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):  # it was not recording after all
            torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
        self._unended.append(graph)  # torch's allocators may still ask it which streams are its own
        with suppress(RuntimeError):  # a device that is lost says so at its next use
            torch.cuda.synchronize()

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)


@contextmanager
def _syncs_raise() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _as_under_capture() -> Iterator[None]:
    """While torch says that the stream is capturing: many a backend reads on the host only where it is not.

    ``torch.cuda.synchronize`` raises, which the sync-debug mode lets pass.
    """
    stand_ins = {"is_current_stream_capturing": lambda: True, "synchronize": _refuse_to_wait}
    own = {name: getattr(torch.cuda, name) for name in stand_ins}
    vars(torch.cuda).update(stand_ins)
    try:
        yield
    finally:
        vars(torch.cuda).update(own)


def _refuse_to_wait(*_: object) -> None:
    raise RuntimeError(SYNCHRONISED)


def violation_of(error: BaseException) -> Violation:
    """What ``error`` says about ``forward``, and which line of the backend it comes from."""
    waited = next((each for each in _chain(error) if SYNCHRONISED in str(each)), None)
    if waited is not None:
        place = call_site_of(waited)
        return Violation("host read", _expression(waited, place.line) or SYNCHRONISED, str(place))
    first, *_ = str(error).strip().splitlines() or [""]
    return Violation("error", f"{type(error).__name__}: {first}", str(call_site_of(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _expression(error: BaseException, line: SourceLine | None) -> str:
    """The source of the call on ``line`` that raised ``error``; the whole line, where the call has more than one."""
    for (frame, number), summary in zip(walk_tb(error.__traceback__), extract_tb(error.__traceback__), strict=False):
        if line == SourceLine(frame.f_code, number):
            source = linecache.getline(summary.filename, number)
            if summary.colno is None or summary.end_lineno != number:
                return source.strip()
            return source.encode()[summary.colno : summary.end_colno].decode()
    return ""


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
