"""Real CUDA graphs: warms up on a side stream, rehearses, and captures ``torch.cuda.CUDAGraph``.

One recorder has one memory pool, which all of its graphs share, as those of a serving engine do. A capture in which
the host waits for the device is spoilt, and may spoil the process: so the last warm-up is a rehearsal in which every
synchronising call raises, and nothing is captured whose rehearsal raised. Imports on a machine without a GPU.
Must not know: probes, backends, what is judged.
"""

import gc
import linecache
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import CellType, FunctionType, ModuleType

import torch
from torch import Tensor

from attncheck.harness.graphs.recorder import CaptureError, Forward, RecorderName, Violation

WARM_UPS = 1
"""Runs before the rehearsal: what compiles, tunes or allocates at the first call may wait for the device there."""

SYNCHRONISED = "called a synchronizing CUDA operation"
"""What torch says where its sync-debug mode forbids to wait for the device."""


class CudaRecording:
    """A captured graph. ``held`` keeps alive what it may read, so that a stale read is wrong and never wild."""

    def __init__(self, graph: torch.cuda.CUDAGraph, held: tuple[object, ...]) -> None:
        self._graph = graph
        self._held = held

    def replay(self) -> None:
        """Launch the graph on the current stream, and wait until it is done: its errors are raised here."""
        self._graph.replay()
        torch.cuda.current_stream().synchronize()

    def reads(self, tensor: Tensor) -> bool | None:
        """Cannot be told: a graph does not say which addresses its kernels were given."""
        return None

    def released(self) -> tuple[str, ...]:
        """Cannot be told either, and all that ``forward`` could reach is kept alive."""
        return ()


class CudaRecorder:
    """Makes graphs on one device; see :class:`attncheck.harness.graphs.recorder.Recorder`."""

    name: RecorderName = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._spoilt: list[torch.cuda.CUDAGraph] = []

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
            return CudaRecording(self._capture(forward), (forward, *tensors_within(forward)))

    def _rehearse(self, forward: Forward) -> None:
        """As under capture, without one: what waits for the device raises before anything is spoilt."""
        with self._side_stream(), _said_to_be_capturing(), _syncs_raise():
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
        self._spoilt.append(graph)  # torch's allocators may still ask it which streams are its own
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
def _said_to_be_capturing() -> Iterator[None]:
    """Backends ask torch whether the stream is capturing, and read on the host only where it is not."""
    asked = torch.cuda.is_current_stream_capturing
    setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # noqa: B010 (mypy: no function is assigned to)
    try:
        yield
    finally:
        setattr(torch.cuda, "is_current_stream_capturing", asked)  # noqa: B010 (the same)


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


def violation_of(error: BaseException) -> Violation:
    """What ``error`` says about ``forward``, with the innermost line that is neither torch's nor the harness's."""
    waited = next((each for each in _chain(error) if SYNCHRONISED in str(each)), None)
    blamed = _blame(waited or error)
    where = f"{blamed.filename}:{blamed.lineno} in {blamed.name}" if blamed else ""
    if waited is not None:
        return Violation("host read", (blamed and _expression(blamed)) or SYNCHRONISED, where)
    first, *_ = str(error).strip().splitlines() or [""]
    return Violation("error", f"{type(error).__name__}: {first}", where)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """``error``, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _blame(error: BaseException) -> traceback.FrameSummary | None:
    own = None
    frames = traceback.walk_tb(error.__traceback__)
    for (frame, _), summary in zip(frames, traceback.extract_tb(error.__traceback__), strict=False):
        module = str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] != "torch" and not module.startswith("attncheck.harness."):
            own = summary
    return own


def _expression(frame: traceback.FrameSummary) -> str:
    """The source of the call that raised; its first line, where it has more."""
    line = linecache.getline(frame.filename, frame.lineno or 0)
    if frame.lineno != frame.end_lineno or frame.colno is None:
        return line.strip()
    return line.encode()[frame.colno : frame.end_colno].decode().strip()
