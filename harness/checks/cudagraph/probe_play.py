"""Plays one probe of a CUDA-graph level, from its captures to its last step, and finds what is wrong."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.checks.cudagraph.capture import CapturedGraph
from attncheck.harness.checks.cudagraph.diagnosis import DiagnosedStep, lets_nan_through, why_wrong
from attncheck.harness.checks.cudagraph.probe import Bucket, Probe, ProbeStep
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recorder, Released, UnseenError, UnwatchedRecorder
from attncheck.harness.checks.cudagraph.session import CapturedBucket, GraphSession
from attncheck.harness.checks.cudagraph.step_faults import capture_fault, step_fault
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.harness.problem.problem import Problem
from attncheck.reports.run_file.causes import UNKNOWN

_TOLD = 10
"""Most requests of a step whose lengths a message lists."""


@dataclass(frozen=True)
class ProbeFault:
    """A probe came out wrong. ``what``: where and how much; ``why``: what it looks like, if that is known.

    ``is_leak``: it is wrong for NaN in slots that nobody owns, with a graph or without.
    """

    what: str
    why: str | None = None
    is_leak: bool = False

    def __str__(self) -> str:
        return self.what if self.why is None else f"{self.what}; {self.why}"


@dataclass(frozen=True)
class UnmeasuredProbe:
    """A probe that nothing can be said about here, and why."""

    reason: str

    def __str__(self) -> str:
        return f"cannot be examined here: {self.reason}"


def play_probe(
    backend: type[AttentionBackend],
    probe: Probe,
    questions: ProbeProblems,
    device: torch.device,
    recorder: Recorder,
    *,
    is_pool_finite: bool,
) -> ProbeFault | UnmeasuredProbe | None:
    """Play one probe from capture to its last step; return None where all came out right.

    Raises StageError where the backend cannot be set up, or makes no step even without a graph.
    """
    refused = refused_batches(backend, probe, questions)
    if refused is not None:
        return refused
    turns = [turn for turn in probe.turns if turn.bucket is not None or not _declined(backend, probe, turn, questions)]
    problems = [questions.problem(questions.case(probe, turn)) for turn in turns]
    make = partial(GraphSession, backend, probe, problems, device, recorder)
    session = make(is_pool_finite=is_pool_finite)
    captures: list[CapturedBucket] = []
    for bucket in probe.buckets:
        capture = _captured(session, bucket, turns[0], problems[0])
        if isinstance(capture, UnmeasuredProbe):
            unwatched = GraphSession(backend, probe, problems, device, UnwatchedRecorder())
            return _fault_unwatched(unwatched, probe.buckets[: len(captures) + 1]) or capture
        if not isinstance(capture, CapturedBucket):
            return capture
        captures.append(capture)
    for turn, problem in zip(turns, problems, strict=True):
        step = DiagnosedStep(probe, turn, questions, session, make)
        try:
            wrong = _take(step, problem, None if turn.bucket is None else captures[turn.bucket])
        except StageError as failure:
            wrong = ProbeFault(f"{_in_words(step)}: {failure.raised.in_words}")
        if wrong is not None:
            return replace(wrong, is_leak=lets_nan_through(step)) if isinstance(wrong, ProbeFault) else wrong
    return None


def _captured(
    session: GraphSession, bucket: Bucket, turn: ProbeStep, problem: Problem
) -> CapturedBucket | ProbeFault | UnmeasuredProbe:
    """The graphs of a bucket. Raises StageError where the backend cannot even make a step without one."""
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
    """Return the fault of a backend that raises in captures with a new impl, where nothing watches it, or None.

    What is raised once, such as for the first call of a shape, is raised again by a new impl. What the watch causes is
    not.
    """
    for bucket in buckets:
        try:
            session.capture(bucket)
        except StageError as failure:
            return ProbeFault(f"{failure.raised.in_words} ({bucket})")
    return None


def refused_batches(backend: type[AttentionBackend], probe: Probe, questions: ProbeProblems) -> ProbeFault | None:
    """Return the fault of a probe whose batches for a graph the backend declines, or None."""
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


def _take(step: DiagnosedStep, problem: Problem, capture: CapturedBucket | None) -> ProbeFault | UnmeasuredProbe | None:
    """One step of a probe: what is wrong with it, and why."""
    if capture is not None:
        for graph in capture.graphs:
            for memory in graph.recording.released():
                return _let_go(graph, memory)
    truth = step.questions.truth(problem.case)
    taken = step.session.step(step.turn, problem, capture)
    for index, one in enumerate(taken):
        fault = step_fault(problem, truth, step.conventions, one)
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
    return None


def _let_go(graph: CapturedGraph, memory: Released) -> ProbeFault:
    """Return the fault of a graph that uses released memory: the allocator may give it to another tensor."""
    what = "the graph uses memory that has been let go since capture"
    path = graph.trace.path_of(memory.start, memory.end)
    if path is None:
        return ProbeFault(f"{what}: {memory}", "a workspace or constant was replaced, or belonged to one run alone")
    return ProbeFault(
        f"{what}: {path} ({memory})", f"build puts {path} into new memory; the graph reads that of capture"
    )


def _hidden(step: DiagnosedStep, problem: Problem) -> str | None:
    """Whether work of forward is hidden from the emulation: then its replays say nothing about a graph's.

    It is where the step is right without a graph, and wrong even by a graph captured at this very step. What hidden
    work left in memory of the backend's own is another step's by then, where addresses were given away.
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
            other = step.questions.problem(step.questions.case(step.probe, others[0]))
            step.session.step(others[0], other, None)
        taken = step.session.step(step.turn, problem, capture)
    except StageError as failure:
        return failure.raised.in_words
    truth = step.questions.truth(problem.case)
    if all(step_fault(problem, truth, step.conventions, one) is None for one in taken):
        return None
    return (
        "forward does work that torch's dispatcher does not see, and that replaying its operators does not repeat "
        "(a kernel launched outside of a custom operator: torch.library.custom_op makes it visible)"
    )


def _in_words(step: DiagnosedStep) -> str:
    """Return the step in words."""
    requests = step.turn.requests
    lengths = ", ".join(f"{query_len} of {seq_len}" for query_len, seq_len in requests[:_TOLD])
    if len(requests) > _TOLD:
        lengths += f" and {len(requests) - _TOLD} more"
    where = "without a graph" if step.turn.bucket is None else f"graph for {step.probe.buckets[step.turn.bucket]}"
    draft = "" if step.turn.draft_index is None else f"draft {step.turn.draft_index} by build_for_drafting, "
    return f"{draft}{where}, requests {lengths}"
