"""Play one probe of a CUDA-graph level, from its captures to its last step, and return its fault."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.checks.containment import padding_rows
from attncheck.harness.checks.cudagraph.capture import CapturedGraph
from attncheck.harness.checks.cudagraph.diagnosis import DiagnosedStep, lets_nan_through, why_wrong
from attncheck.harness.checks.cudagraph.probe import Bucket, Probe, ProbeStep
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recorder, Released, UnseenError, UnwatchedRecorder
from attncheck.harness.checks.cudagraph.session import CapturedBucket, GraphSession
from attncheck.harness.checks.cudagraph.step_faults import capture_fault, step_fault
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.problem.problem import Problem
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.causes import UNKNOWN
from attncheck.reports.run_file.graph_levels import PaddingRows, worst_padding

_TOLD = 10
"""Most requests whose lengths a message lists."""


@dataclass(frozen=True)
class ProbeFault:
    """The fault of a probe. ``what``: where and how much. ``why``: the likely cause, if found.

    ``is_leak``: the cause is NaN in slots that no request owns, which also occurs without a graph.
    """

    what: str
    why: str | None = None
    is_leak: bool = False

    def __str__(self) -> str:
        return self.what if self.why is None else f"{self.what}; {self.why}"


@dataclass(frozen=True)
class UnmeasuredProbe:
    """A probe that cannot be judged on this machine, with the reason."""

    reason: str

    def __str__(self) -> str:
        return f"cannot be examined here: {self.reason}"


@dataclass(frozen=True)
class PlayedProbe:
    """``broke``: why the probe did not pass, or None. ``padding_rows``: their worst state after right steps."""

    broke: ProbeFault | UnmeasuredProbe | None
    padding_rows: PaddingRows = "not examined"


def play_probe(
    backend: type[AttentionBackend],
    probe: Probe,
    questions: ProbeProblems,
    device: torch.device,
    recorder: Recorder,
    *,
    is_pool_finite: bool,
) -> PlayedProbe:
    """Play one probe from capture to its last step.

    Raise StageError if the backend cannot be set up, or cannot run a step even without a graph.
    """
    refused = refused_batches(backend, probe, questions)
    if refused is not None:
        return PlayedProbe(refused)
    turns = [turn for turn in probe.turns if turn.bucket is not None or not _declined(backend, probe, turn, questions)]
    problems = [questions.problem(questions.case(probe, turn)) for turn in turns]
    make = partial(GraphSession, backend, probe, problems, device, recorder)
    session = make(is_pool_finite=is_pool_finite)
    captures: list[CapturedBucket] = []
    for bucket in probe.buckets:
        capture = _captured(session, bucket, turns[0], problems[0])
        if isinstance(capture, UnmeasuredProbe):
            unwatched = GraphSession(backend, probe, problems, device, UnwatchedRecorder())
            return PlayedProbe(_fault_unwatched(unwatched, probe.buckets[: len(captures) + 1]) or capture)
        if not isinstance(capture, CapturedBucket):
            return PlayedProbe(capture)
        captures.append(capture)
    padding: PaddingRows = "not examined"
    for turn, problem in zip(turns, problems, strict=True):
        step = DiagnosedStep(probe, turn, questions, session, make)
        try:
            result = _take(step, problem, None if turn.bucket is None else captures[turn.bucket])
        except StageError as failure:
            result = ProbeFault(f"{_in_words(step)}: {failure.raised.in_words}")
        if isinstance(result, ProbeFault):
            return PlayedProbe(replace(result, is_leak=lets_nan_through(step)), padding)
        if isinstance(result, UnmeasuredProbe):
            return PlayedProbe(result, padding)
        padding = worst_padding([padding, result])
    return PlayedProbe(None, padding)


def _captured(
    session: GraphSession, bucket: Bucket, turn: ProbeStep, problem: Problem
) -> CapturedBucket | ProbeFault | UnmeasuredProbe:
    """Capture and return the graphs of a bucket. Raise StageError if the backend fails even without a graph."""
    try:
        capture = session.capture(bucket)
    except StageError as failure:
        session.step(turn, problem, None)
        return ProbeFault(f"{failure.raised.in_words} ({bucket})")
    if isinstance(capture, CaptureError):
        return ProbeFault(f"forward cannot be captured ({bucket}): {capture}")
    if isinstance(capture, UnseenError):
        return UnmeasuredProbe(str(capture))
    fault = capture_fault(problem, capture)
    return capture if fault is None else ProbeFault(f"{fault} ({bucket})")


def _fault_unwatched(session: GraphSession, buckets: tuple[Bucket, ...]) -> ProbeFault | None:
    """Return what the backend raises in a capture with a new impl and no watch, or None if it raises nothing.

    A new impl raises again what the first impl raised once only, such as on the first call of a shape. An exception
    caused by the watch does not occur here.
    """
    for bucket in buckets:
        try:
            session.capture(bucket)
        except StageError as failure:
            return ProbeFault(f"{failure.raised.in_words} ({bucket})")
    return None


def refused_batches(backend: type[AttentionBackend], probe: Probe, questions: ProbeProblems) -> ProbeFault | None:
    """Return a fault if the backend declares that it refuses batches of the probe's graphs, else None."""
    for turn in probe.turns:
        reasons = [] if turn.bucket is None else _declined(backend, probe, turn, questions)
        if reasons:
            return ProbeFault(f"the backend declares that it does not serve such batches: {'; '.join(reasons)}")
    return None


def _declined(
    backend: type[AttentionBackend], probe: Probe, turn: ProbeStep, questions: ProbeProblems
) -> tuple[str, ...]:
    case = questions.case(probe, turn)
    return declared_reasons(partial(backend.unsupported_reasons, case.layer, case.cache, case.batch))


def _take(
    step: DiagnosedStep, problem: Problem, capture: CapturedBucket | None
) -> ProbeFault | UnmeasuredProbe | PaddingRows:
    """Run one step of a probe; return its fault and the cause, or the state of its padding rows if it is right."""
    if capture is not None:
        for graph in capture.graphs:
            for memory in graph.recording.released():
                return _let_go(graph, memory)
    truth = step.questions.truth(problem.case)
    taken = step.session.step(step.turn, problem, capture)
    for index, one in enumerate(taken):
        fault = step_fault(problem, truth, step.conventions, one.seen, one.pool)
        if fault is None:
            continue
        if capture is None:
            return ProbeFault(
                f"{_in_words(step)}: {fault}", f"{UNKNOWN}this step was made without a graph, between replays"
            )
        if one.seen.changed:
            return ProbeFault(f"{_in_words(step)}: {fault}", "build or the graph writes to buffers of the model runner")
        if step.session.recorder.name == "emulated" and (hidden := _hidden(step, problem)):
            return UnmeasuredProbe(hidden)
        return ProbeFault(f"{_in_words(step)}: {fault}", why_wrong(step, capture, one.trace, index))
    return worst_padding(padding_rows(problem, one.seen, step.conventions)[0] for one in taken)


def _let_go(graph: CapturedGraph, memory: Released) -> ProbeFault:
    """Return the fault of a graph that uses released memory, which the allocator may give to another tensor."""
    what = "the graph uses memory that has been let go since capture"
    path = graph.trace.path_of(memory.start, memory.end)
    if path is None:
        return ProbeFault(f"{what}: {memory}", "a workspace or constant was replaced, or belonged to one run alone")
    return ProbeFault(
        f"{what}: {path} ({memory})", f"build puts {path} into new memory; the graph reads that of capture"
    )


def _hidden(step: DiagnosedStep, problem: Problem) -> str | None:
    """Return why work of ``forward`` is hidden from the emulation, whose replays then prove nothing, or None.

    Work is hidden if the step is right without a graph, but wrong with a graph captured at this very step.
    """
    if step.fault_without_graph(step.session) is not None:
        return None
    try:
        capture = step.session.capture_step(step.turn, problem)
        if isinstance(capture, UnseenError):
            return str(capture)
        if isinstance(capture, CaptureError):
            return None
        others = [turn for turn in step.probe.turns if turn.requests != step.turn.requests]
        if others and any(graph.recording.hands_out_memory() for graph in capture.graphs):
            # Overwrite what hidden work left in the backend's own memory by running another step.
            other = step.questions.problem(step.questions.case(step.probe, others[0]))
            step.session.step(others[0], other, None)
        taken = step.session.step(step.turn, problem, capture)
    except StageError as failure:
        return failure.raised.in_words
    truth = step.questions.truth(problem.case)
    if all(step_fault(problem, truth, step.conventions, one.seen, one.pool) is None for one in taken):
        return None
    return (
        "forward does work that torch's dispatcher does not see, and that replaying its operators does not repeat "
        "(a kernel launched outside of a custom operator: torch.library.custom_op makes it visible)"
    )


def _in_words(step: DiagnosedStep) -> str:
    requests = step.turn.requests
    lengths = ", ".join(f"{query_len}/{seq_len}" for query_len, seq_len in requests[:_TOLD])
    if len(requests) > _TOLD:
        lengths += f" and {len(requests) - _TOLD} more"
    bucket = None if step.turn.bucket is None else step.probe.buckets[step.turn.bucket]
    where = "step without a graph, with" if bucket is None else f"graph captured for {bucket}, replayed with"
    draft = "" if step.turn.draft_index is None else f"draft {step.turn.draft_index} by build_for_drafting, "
    return f"{draft}{where} {plural(len(requests), 'request')} (query_len/seq_len {lengths})"
