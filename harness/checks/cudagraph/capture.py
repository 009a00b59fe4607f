"""Captures one ``forward`` of a backend: metadata for capture, warm-ups, the graph, and what ``forward`` returned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, Recorder, Recording, UnseenError
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.driver.persistent_inputs import map_tensors
from attncheck.reference import CommonAttentionMetadata


@dataclass(frozen=True)
class CapturedForward:
    """A captured ``forward``, and what it returned at capture: the contents of that are every replay's own."""

    recording: Recording
    returned: object

    def replay(self) -> object:
        """Return what ``forward`` would return."""
        self.recording.replay()
        return self.returned

    def launch(self) -> object:
        """Return the same, to be timed: the device is not waited for."""
        self.recording.launch()
        return self.returned


def capture_forward(
    recorder: Recorder,
    call: ForwardCall,
    build: Callable[[CommonAttentionMetadata], Any],
    enter: Callable[[ForwardCall, Any], object],
    on_metadata: Callable[[Any], object] = lambda _metadata: None,
) -> CapturedForward | CaptureError | UnseenError:
    """Capture ``enter`` of ``call``, whose memory the replays read, and of the metadata that ``build`` makes.

    ``on_metadata`` sees the metadata of every warm-up and of the capture. Raises StageError where building or warming
    up breaks.
    """
    returned: list[object] = []

    def prepare() -> Forward:
        lent = map_tensors(call, Tensor.detach)  # a run that resizes what it was lent must not spoil the next
        metadata = call_backend("build for capture", lambda: build(lent.common))
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
