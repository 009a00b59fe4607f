"""A step as a captured graph, where what the backend declares lets a model runner replay such a batch.

Must not know: clocks, what is judged.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.checks.cudagraph.check import unexamined_reasons
from attncheck.harness.checks.cudagraph.measurement import level_for
from attncheck.harness.checks.cudagraph.persistent_inputs import each_of
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Forward, Recorder, Recording, UnseenError
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.forward_calls import ForwardCall
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import AttentionCGSupport, BatchSpec


@dataclass(frozen=True)
class Replay:
    """A captured ``forward``, and what it returned: the contents of that are every replay's own."""

    recording: Recording
    returned: object

    def forward(self) -> object:
        """What ``forward`` would return; the device is not waited for."""
        self.recording.launch()
        return self.returned


def allows_graph(backend: type[AttentionBackend], problem: Problem) -> bool:
    """Whether the level that the backend declares holds for such a batch. Raises StageError where it is no level."""
    if unexamined_reasons(problem.case):
        return False
    return level_for(backend, problem).value >= level_of(problem.case.batch).value


def level_of(batch: BatchSpec) -> AttentionCGSupport:
    """The lowest level whose graphs hold such a batch."""
    query_lens = {request.query_len for request in batch.requests}
    if query_lens == {1}:
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return AttentionCGSupport.UNIFORM_BATCH if len(query_lens) == 1 else AttentionCGSupport.ALWAYS


def capture(
    recorder: Recorder, builder: Any, call: ForwardCall, bind: Callable[[ForwardCall, object], Forward]
) -> Replay | CaptureError | UnseenError:
    """The graph of ``call``, whose memory its replays read; ``bind`` makes a ``forward`` of a call and its metadata.

    Raises StageError where building or warming up breaks.
    """
    returned: list[object] = []

    def prepare() -> Forward:
        lent = each_of(call, Tensor.detach)  # a run that resizes what it was lent must not spoil the next
        metadata = call_backend("build for capture", lambda: builder.build_for_cudagraph_capture(lent.common))
        forward = bind(lent, metadata)
        returned.clear()  # what a warm-up returned is not the graph's

        def run() -> None:
            with torch.no_grad():
                returned.append(forward())

        return run

    def attempt() -> Recording | CaptureError | UnseenError:
        try:
            return recorder.record(prepare)
        except (CaptureError, UnseenError) as refusal:
            return refusal

    recording = call_backend("warm-up for capture", attempt)
    if isinstance(recording, CaptureError | UnseenError):
        return recording
    return Replay(recording, returned[-1])
