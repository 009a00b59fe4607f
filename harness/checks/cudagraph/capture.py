"""Captures one ``forward`` of a backend: metadata for capture, warm-ups, the graph, and what ``forward`` returned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from attncheck.harness.checks.cudagraph.metadata_trace import MetadataTrace, parts_of, trace
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, Recorder, Recording, UnseenError
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward import BackendLayer, OutputBuffers
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.persistent_inputs import map_tensors
from attncheck.harness.problem.problem import Problem
from attncheck.reference import CommonAttentionMetadata

Group = Sequence[tuple[Any, ForwardCall]]
"""What one graph holds: calls, each with the builder of its metadata."""
Lent = TypeVar("Lent")
Built = TypeVar("Built")


@dataclass(frozen=True)
class CapturedForward:
    """A captured ``forward``, and what it returned at capture: the contents of that are every replay's own."""

    recording: Recording
    returned: Any

    def replay(self) -> Any:
        """Return what ``forward`` would return."""
        self.recording.replay()
        return self.returned

    def launch(self) -> object:
        """Return the same, to be timed: the device is not waited for."""
        self.recording.launch()
        return self.returned


@dataclass(frozen=True)
class CapturedGraph(CapturedForward):
    """One captured graph, and what its metadata were made of. ``read``: paths the graph reads.

    ``buffers``: those of each call in it.
    """

    buffers: tuple[OutputBuffers, ...]
    trace: MetadataTrace
    read: frozenset[str]


def capture_group(
    recorder: Recorder,
    layer: BackendLayer,
    problem: Problem,
    group: Group,
    kv_cache: Tensor,
    build: Callable[[Any, CommonAttentionMetadata], Any],
) -> CapturedGraph | CaptureError | UnseenError:
    """Capture the calls of ``group`` in one graph: all metadata are built first. Raises StageError as below."""
    buffers = tuple(layer.output_buffers(problem, call) for _, call in group)
    parts: dict[str, object] = {}

    def on_metadata(metadata: list[Any]) -> None:
        parts.clear()
        parts.update(parts_of(alone(metadata)))

    captured = capture_forward(
        recorder,
        lambda: [(builder, map_tensors(call, Tensor.detach)) for builder, call in group],
        lambda lent: [build(builder, call.common) for builder, call in lent],
        lambda lent, metadata: [
            layer.enter(call, kv_cache, own, answer)
            for (_, call), own, answer in zip(lent, metadata, buffers, strict=True)
        ],
        on_metadata,
    )
    if not isinstance(captured, CapturedForward):
        return captured
    reads = captured.recording.reads
    read = frozenset(path for path, part in parts.items() if isinstance(part, Tensor) and reads(part) is not False)
    made_of = trace(parts)
    parts.clear()  # a graph must not live on what a capture's metadata would have let go of
    return CapturedGraph(captured.recording, captured.returned, buffers, made_of, read)


def alone(metadata: Sequence[Any]) -> Any:
    """Return one call's metadata, or those of all calls."""
    return metadata[0] if len(metadata) == 1 else metadata


def capture_forward(
    recorder: Recorder,
    lend: Callable[[], Lent],
    build: Callable[[Lent], Built],
    enter: Callable[[Lent, Built], object],
    on_metadata: Callable[[Built], object] = lambda _metadata: None,
) -> CapturedForward | CaptureError | UnseenError:
    """Capture ``enter`` of what ``lend`` returns, whose memory the replays read, and of what ``build`` makes of it.

    ``lend`` returns new aliases at each call: a run that resizes what it was lent must not spoil the next.
    ``on_metadata`` sees what was built for every warm-up and for the capture. Raises StageError where building or
    warming up breaks.
    """
    returned: list[object] = []

    def prepare() -> Forward:
        lent = lend()
        metadata = call_backend("build for capture", lambda: build(lent))
        on_metadata(metadata)
        returned.clear()  # what a warm-up returned is not the graph's
        return lambda: returned.append(enter(lent, metadata))

    def attempt() -> Recording | CaptureError | UnseenError:
        try:
            return recorder.record(prepare)
        except (CaptureError, UnseenError) as refusal:
            return refusal.with_traceback(None)  # its frames hold the graph, and this refusal

    recording = call_backend("warm-up for capture", attempt)
    if isinstance(recording, CaptureError | UnseenError):
        return recording
    return CapturedForward(recording, returned[-1])
