"""Recorders of CUDA graphs: the interface, rehearsals before a capture, and real graphs."""

import gc
import linecache
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attncheck.errors import InternalError
from attncheck.harness.device import KINDS, Accelerator, accelerator_of
from attncheck.harness.driver.foreign_code import collection_paused
from attncheck.harness.driver.observation import DRIVES, INSTALLED, is_installed

# Find the line of a backend that did something, by walking the stack or a traceback.


@dataclass(frozen=True)
class SourceLine:
    """A line of Python code. The text is created only when it is needed."""

    code: CodeType
    number: int

    @property
    def source(self) -> str:
        """The line itself, empty if it cannot be read."""
        return linecache.getline(self.code.co_filename, self.number)

    def __str__(self) -> str:
        path = Path(self.code.co_filename)
        roots = (*map(Path, reversed(INSTALLED)), Path.cwd())
        shown = next((path.relative_to(root) for root in roots if path.is_relative_to(root)), path)
        return f"{shown}:{self.number} in {self.code.co_name}"


@dataclass(frozen=True)
class CallSite:
    """Where something happened. ``line``: the backend's line, or None if no frame belongs to a backend.

    ``interpreted``: Triton's interpreter did it, which emulates a kernel.
    """

    line: SourceLine | None
    interpreted: bool

    def __str__(self) -> str:
        return "" if self.line is None else str(self.line)


def find_call_site(boundary: CodeType | None = None) -> CallSite:
    """Return the call site of the caller, searching up to the frame that runs ``boundary``."""
    return _innermost_own(_stack(sys._getframe(1), boundary))


def call_site_of(error: BaseException) -> CallSite:
    """Return the call site that raised ``error``."""
    return _innermost_own(reversed(list(walk_tb(error.__traceback__))))


def _stack(frame: FrameType | None, boundary: CodeType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None and frame.f_code is not boundary:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _innermost_own(frames: Iterable[tuple[FrameType, int]]) -> CallSite:
    """Return the innermost of ``frames`` that belongs to the backend. ``frames``: (frame, line), innermost first.

    Frames of torch and of code that drives a backend are skipped. A frame of another installed library counts only if
    no outer frame belongs to the backend: the backend is responsible for its library calls, but may itself be
    installed.
    """
    library: CallSite | None = None
    interpreted = False
    for frame, line in frames:
        module = str(frame.f_globals.get("__name__", ""))
        root = module.partition(".")[0]
        if root == "triton":
            interpreted = True
        elif root not in {"torch", "numpy"} and not f"{module}.".startswith(DRIVES):
            place = CallSite(SourceLine(frame.f_code, line), interpreted)
            if not is_installed(frame.f_code.co_filename):
                return place
            library = library or place
    return library or CallSite(None, interpreted)


# Interface of a graph recorder, which captures one `forward` and replays it in the same memory without its Python.
#
# :class:`DeviceRecorder` captures a real graph, such as a `torch.cuda.CUDAGraph`;
# :mod:`attncheck.harness.checks.cudagraph.emulation` records operators on a machine without a GPU.

Forward = Callable[[], object]
"""One call of ``forward`` with all arguments bound."""

ViolationKind = Literal["host read", "data-dependent shape", "host copy", "error"]


@dataclass(frozen=True)
class Violation:
    """Something that a captured graph cannot contain.

    ``call``: what was called, such as ``.item()``. ``where``: the backend's line, as ``file:line in function``. Empty
    if unknown. ``mixes_devices``: a GPU refuses the call without a graph, too.
    """

    kind: ViolationKind
    call: str
    where: str = ""
    mixes_devices: bool = False

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.kind}: {self.call}{place}"


class CaptureError(InternalError):
    """``forward`` cannot be captured. ``violations``: the reasons, in order of occurrence, without duplicates."""

    def __init__(self, violations: tuple[Violation, ...]) -> None:
        self.violations = violations
        super().__init__("; ".join(map(str, violations)))


class UnseenError(InternalError):
    """The recorder cannot observe what ``forward`` does, so nothing can be concluded. The message gives the reason."""


class BranchError(UnseenError):
    """The backend read the device of a tensor, and on a GPU it may take another branch than the recorded one."""


@dataclass(frozen=True)
class Released:
    """Memory that a graph uses but that only graphs keep alive: addresses in ``[start, end)``.

    ``first_used``: the first operator that used it, and the line of the backend.
    """

    start: int
    end: int
    first_used: str

    def __str__(self) -> str:
        return f"memory first used by {self.first_used}"


@dataclass(frozen=True)
class Recording:
    """One captured ``forward``, and what its recorder knows of it.

    A real graph reveals nothing: not the addresses of its kernels, nor what was read on the host. It hides no work
    either, because a capture contains all work on its stream, and only a replay detects released memory.

    replay: repeats everything that was recorded, in the same memory; exceptions of operators propagate. launch:
    replays for timing, without waiting for the device and without checking memory. reads: returns whether the graph
    was given the memory of a tensor, or None if that is unknown. host_reads: what ``forward`` read from host memory
    during capture: legal, but frozen. hands_out_memory: whether ``forward`` gave addresses to code that the recorder
    may not observe. released: returns memory that the graph uses but that only graphs keep alive; a real graph would
    read whatever the allocator has stored there since.
    """

    replay: Callable[[], object]
    launch: Callable[[], object]
    reads: Callable[[Tensor], bool | None] = lambda _tensor: None
    host_reads: tuple[str, ...] = ()
    hands_out_memory: bool = False
    released: Callable[[], tuple[Released, ...]] = tuple


@dataclass(frozen=True)
class Recorder:
    """Captures ``forward`` calls on one device. ``name``: the type of the device, or ``emulated``.

    record: warms up, then captures. Its argument builds fresh metadata and returns the call to capture. It is called
    again for each warm-up and for the capture, as in a model runner, so that values which a warm-up cached on its
    metadata are not available to the capture. Raises :class:`CaptureError` or :class:`UnseenError`; exceptions of its
    argument and of warm-ups propagate.

    The emulation tracks which memory is on the host; of a real device, each tensor shows that itself. watching: returns
    a context for calls into a backend outside ``record``. mark_host: marks tensors that are on the host by contract
    (the ``_cpu`` fields), so that reading them is no fault. with_device_of_gpu: returns a new recorder for a new impl,
    which reads the device of a GPU from its construction on; None if this one is such, or of a real device.
    """

    name: str
    record: Callable[[Callable[[], Forward]], Recording]
    watching: Callable[[], AbstractContextManager[None]] = nullcontext
    mark_host: Callable[..., None] = lambda *_tensors: None
    with_device_of_gpu: "Callable[[], Recorder] | None" = None


def record_unwatched(prepare: Callable[[], Forward]) -> Recording:
    """Record nothing: run twice what a recorder would run, as the backend runs on its own, then raise UnseenError.

    Exceptions of ``prepare`` and of the runs propagate.
    """
    for _ in range(2):
        prepare()()
    raise UnseenError("nothing is recorded")


def recorder_for(device: torch.device) -> Recorder:
    """Return a recorder of real graphs for a GPU, or the emulation for other devices."""
    accelerator = accelerator_of(device)
    if accelerator is not None and accelerator.graph_class:
        return Recorder(accelerator.type, DeviceRecorder(accelerator).record)
    from attncheck.harness.checks.cudagraph.emulation import EmulatedRecorder

    def emulation(*, device_is_gpu: bool) -> Recorder:
        emulated = EmulatedRecorder(device_is_gpu=device_is_gpu)
        other = None if device_is_gpu else partial(emulation, device_is_gpu=True)
        return Recorder("emulated", emulated.record, emulated.watching, emulated.mark_host, other)

    return emulation(device_is_gpu=False)


def count_uses(tensor: Tensor) -> int:
    """Return the number of references to the storage of ``tensor``, including one or more from this call itself."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


# Find where `forward` waits for the device, without a capture, and describe what was raised.
#
# Cannot see: waits in C++ code that does not use torch, which fail in a capture. An index by a host tensor is reported
# as a host read although it is copied to the device.

SYNCHRONISED = "called a synchronizing CUDA operation"
"""Text of torch's error if its sync-debug mode forbids waiting for the device."""

_WAITS = frozenset({"synchronize", *(f"_{kind.type}_synchronize" for kind in KINDS)})
"""C functions that wait for an event, a stream or the device but that the sync-debug mode allows."""

_FROM_PYTHON = frozenset({"tensor", "as_tensor", "asarray", "new_tensor"})
_MOVES = frozenset({"to", *(kind.type for kind in KINDS)})


def rehearse(forward: Callable[[], object], device: Accelerator) -> Violation | None:
    """Call ``forward`` with torch reporting a capture; return what a capture would not allow, or None."""
    with _capturing_pretended(device.module()):
        return first_wait(forward, device)


def first_wait(call: Callable[[], object], device: Accelerator) -> Violation | None:
    """Call ``call`` until it waits for the device; return what it did there, or what it raised, or None."""
    host_copies: set[SourceLine] = set()
    try:
        with device.waits_raise(), _calls_watched(host_copies):
            call()
    except Exception as error:  # noqa: BLE001 (whatever a backend raises)
        return violation_of(error, host_copies)
    return None


@contextmanager
def _capturing_pretended(module: Any) -> Iterator[None]:
    """Make torch report that the stream is capturing, because many backends read on the host only if it is not."""
    own = module.is_current_stream_capturing
    module.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        module.is_current_stream_capturing = own


@contextmanager
def _calls_watched(host_copies: set[SourceLine]) -> Iterator[None]:
    """Raise if a function waits that the sync-debug mode allows; add lines whose copy to the device raised.

    Python's profile function sees every C function that is called, under any imported name. If another profiler is
    active, it is left in place, and such waits fail in the capture instead.
    """

    def watch(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and getattr(called, "__name__", "") in _WAITS:
            raise RuntimeError(SYNCHRONISED)
        if event == "c_exception" and _copies_from_host(called):
            host_copies.add(SourceLine(frame.f_code, frame.f_lineno))

    if sys.getprofile() is not None:
        yield
        return
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def _copies_from_host(called: object) -> bool:
    """Return whether a C function that had to wait copies host memory to the device."""
    name = getattr(called, "__name__", "")
    owner = getattr(called, "__self__", None)
    if name in _FROM_PYTHON:
        return True
    return isinstance(owner, Tensor) and (name in _MOVES if owner.is_cpu else name == "copy_")


def violation_of(error: BaseException, host_copies: Container[SourceLine] = ()) -> Violation:
    """Return what ``error`` shows about ``forward``, with the backend's line that raised it.

    ``host_copies``: lines at which a copy to the device had to wait.
    """
    waited = next((each for each in _chain(error) if SYNCHRONISED in str(each)), None)
    if waited is not None:
        place = call_site_of(waited)
        lines = (SourceLine(frame.f_code, number) for frame, number in walk_tb(waited.__traceback__))
        kind: ViolationKind = "host copy" if any(line in host_copies for line in lines) else "host read"
        return Violation(kind, _expression(waited, place.line) or SYNCHRONISED, str(place))
    first, *_ = str(error).strip().splitlines() or [""]
    return Violation("error", f"{type(error).__name__}: {first}", str(call_site_of(error)))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _expression(error: BaseException, line: SourceLine | None) -> str:
    """Return the source of the call on ``line`` that raised ``error``, or the whole line if the call spans several."""
    for (frame, number), summary in zip(walk_tb(error.__traceback__), extract_tb(error.__traceback__), strict=False):
        if line == SourceLine(frame.f_code, number):
            source = linecache.getline(summary.filename, number)
            if summary.colno is None or summary.end_lineno != number:
                return source.strip()
            return source.encode()[summary.colno : summary.end_colno].decode()
    return ""


# Real CUDA graphs: warm up on a side stream, rehearse, and capture a `torch.cuda.CUDAGraph`.
#
# All graphs of a recorder share one memory pool, as in a serving engine. If the host waits for the device during a
# capture, the capture fails, and the process may become unusable. The last warm-up is therefore a rehearsal in which
# every synchronizing call raises, and a capture follows only if nothing raised. Imports on a machine without a GPU.
#
# A graph keeps using memory that was released after its capture, whatever the allocator stores there. So memory that a
# graph may use is kept alive, and overwritten once the backend has released it. A graph that reads it then gives wrong
# results every time, and a graph that writes it is detected. Integers are overwritten with 0, which is a valid index in
# every table, so that no kernel reads out of bounds.

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


@dataclass(frozen=True)
class CaptureStream:
    """The side stream that all recorders of a device share. cuBLAS keeps a workspace per stream (32 MiB on some GPUs).

    ``unended``: graphs whose capture could not be ended. torch's host allocator keeps a pointer to such a graph for the
    life of the process and queries it for its streams, so the graph must stay alive.
    """

    stream: Any
    unended: list[Any] = field(default_factory=list)


@cache
def capture_stream(kind: type[Accelerator], index: int | None) -> CaptureStream:
    """Return the side stream of a device."""
    return CaptureStream(kind.module().Stream(index))


class DeviceRecorder:
    """Captures graphs on one device; see :class:`Recorder`."""

    def __init__(self, device: Accelerator) -> None:
        gc.collect()  # once, not before each capture: it takes longer than a capture
        self._device, self._torch = device, device.module()
        self._side = capture_stream(type(device), device.index)
        self._pool = self._torch.graph_pool_handle()
        self._memory = HeldMemory()

    def record(self, prepare: Callable[[], Forward]) -> Recording:
        """Warm up, rehearse and capture, each with a new result of ``prepare`` on the current stream.

        Raise :class:`CaptureError` for an exception in the rehearsal or the capture. Exceptions of ``prepare`` and of
        warm-ups propagate.
        """
        with self._torch.device(str(self._device)):
            for _ in range(WARM_UPS):
                forward = prepare()
                with self._side_stream():
                    forward()
            if violation := self._rehearse(prepare()):
                raise CaptureError((violation,))
            self._torch.synchronize()  # so that errors of the warm-up's kernels are not raised in the capture
            forward = prepare()
            blocks = self._memory.of(tensors_within(forward))
            graph = self._capture(forward)
            if isinstance(graph, Violation):
                raise CaptureError((graph,))
            return Recording(partial(self._replay, graph, blocks), graph.replay)

    def _replay(self, graph: Any, blocks: tuple[MemoryBlock, ...]) -> None:
        """Launch a graph on the current stream and wait for it, so that its errors are raised here.

        ``blocks``: memory from before the capture, which the graph may use. First overwrite what was released, so that
        reading it shows in the output. Raise :class:`ReleasedMemoryError` if the graph writes to such memory.
        """
        for block in blocks:
            block.spoil()
        graph.replay()
        self._torch.current_stream().synchronize()
        if any(block.was_written() for block in blocks):
            raise ReleasedMemoryError("the graph wrote to memory that was released after the capture")

    def _rehearse(self, forward: Forward) -> Violation | None:
        with self._side_stream():
            return rehearse(forward, self._device)

    def _capture(self, forward: Forward) -> Any:
        graph = getattr(self._torch, self._device.graph_class)()
        current = self._torch.current_stream()
        violation: Violation | None = None
        try:
            # Freeing an earlier graph or memory would invalidate the capture, so garbage collection is paused. torch
            # itself waits for the device at the start of a capture; only forward must not wait.
            with collection_paused(), self._torch.graph(graph, pool=self._pool, stream=self._side.stream):
                try:
                    with self._device.waits_raise():
                        forward()
                except Exception as error:  # noqa: BLE001 (the capture must be ended first)
                    violation = violation_of(error)
        except Exception as error:  # noqa: BLE001 (the same)
            self._recover(graph, current)
            violation = violation or violation_of(error)
        return violation or graph

    def _recover(self, graph: Any, current: Any) -> None:
        """Clean up after a capture that could not be ended: torch leaves its stream current and its pool recording."""
        self._torch.set_stream(current)
        self._device.release_pool(self._pool)
        self._pool = self._torch.graph_pool_handle()
        self._side.unended.append(graph)
        with suppress(RuntimeError):  # a lost device raises again at its next use
            self._torch.synchronize()

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        current, side = self._torch.current_stream(), self._side.stream
        side.wait_stream(current)
        try:
            with self._torch.stream(side):
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
