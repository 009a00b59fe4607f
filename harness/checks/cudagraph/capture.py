"""Capture one ``forward`` of a backend: build metadata, warm up, record the graph, and keep what it returned."""

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
"""The calls in one graph, each with the builder of its metadata."""
Lent = TypeVar("Lent")
Built = TypeVar("Built")


@dataclass(frozen=True)
class CapturedForward:
    """A captured ``forward``, and what it returned at capture. Each replay writes its output to those tensors."""

    recording: Recording
    returned: Any

    def replay(self) -> Any:
        """Replay, and return what ``forward`` would return."""
        self.recording.replay()
        return self.returned

    def launch(self) -> object:
        """Replay for timing, without waiting for the device; return the same as :meth:`replay`."""
        self.recording.launch()
        return self.returned


@dataclass(frozen=True)
class CapturedGraph(CapturedForward):
    """One captured graph, and the trace of its metadata. ``read``: paths of tensors that the graph may read.

    ``buffers``: the output buffers of each call in it.
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
    *,
    is_updated: bool = False,
) -> CapturedGraph | CaptureError | UnseenError:
    """Capture the calls of ``group`` in one graph, after building all metadata.

    ``is_updated``: the graph begins with ``update_draft_decode_metadata``. Raise StageError as :func:`capture_forward`
    does.
    """
    buffers = tuple(layer.output_buffers(problem, call) for _, call in group)
    parts: dict[str, object] = {}

    def on_metadata(metadata: list[Any]) -> None:
        parts.clear()
        parts.update(parts_of(alone(metadata)))

    def enter(lent: Group, metadata: list[Any]) -> list[object]:
        if is_updated:
            for (builder, _), own in zip(lent, metadata, strict=True):
                builder.update_draft_decode_metadata(own)
        return [
            layer.enter(call, kv_cache, own, answer)
            for (_, call), own, answer in zip(lent, metadata, buffers, strict=True)
        ]

    captured = capture_forward(
        recorder,
        lambda: [(builder, map_tensors(call, Tensor.detach)) for builder, call in group],
        lambda lent: [build(builder, call.common) for builder, call in lent],
        enter,
        on_metadata,
    )
    if not isinstance(captured, CapturedForward):
        return captured
    reads = captured.recording.reads
    read = frozenset(path for path, part in parts.items() if isinstance(part, Tensor) and reads(part) is not False)
    made_of = trace(parts)
    parts.clear()  # the graph must not depend on memory that only the capture's metadata keep alive
    return CapturedGraph(captured.recording, captured.returned, buffers, made_of, read)


def alone(metadata: Sequence[Any]) -> Any:
    """Return the only element, or all metadata if there are several calls."""
    return metadata[0] if len(metadata) == 1 else metadata


def capture_forward(
    recorder: Recorder,
    lend: Callable[[], Lent],
    build: Callable[[Lent], Built],
    enter: Callable[[Lent, Built], object],
    on_metadata: Callable[[Built], object] = lambda _metadata: None,
) -> CapturedForward | CaptureError | UnseenError:
    """Capture ``enter`` on what ``lend`` returns, whose memory replays read, and on what ``build`` returns for it.

    ``lend`` must return new aliases on each call, so that a run that resizes them does not affect the next.
    ``on_metadata`` is called with what was built for each warm-up and for the capture. Raise StageError if building or
    warming up fails.
    """
    returned: list[object] = []

    def prepare() -> Forward:
        lent = lend()
        metadata = call_backend("build for capture", lambda: build(lent))
        on_metadata(metadata)
        returned.clear()  # discards what a warm-up returned
        return lambda: returned.append(enter(lent, metadata))

    def attempt() -> Recording | CaptureError | UnseenError:
        try:
            return recorder.record(prepare)
        except (CaptureError, UnseenError) as refusal:
            return refusal.with_traceback(None)  # the traceback's frames would keep the graph and this exception alive

    recording = call_backend("warm-up for capture", attempt)
    if isinstance(recording, CaptureError | UnseenError):
        return recording
    return CapturedForward(recording, returned[-1])
