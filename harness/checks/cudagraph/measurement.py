"""Measures a backend's CUDA-graph level for one layer and cache: probe after probe, level after level.

A level is measured where its probes, and those of all lower ones, come out right.
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.checks.cudagraph.diagnosis import DiagnosedStep, lets_nan_through, why_wrong
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.cudagraph.probes import Bucket, Probe, ProbeStep
from attncheck.harness.checks.cudagraph.recorder import CaptureError, Recorder, Released, UnseenError, recorder_for
from attncheck.harness.checks.cudagraph.session import CapturedBucket, CapturedGraph, GraphSession
from attncheck.harness.checks.cudagraph.step_faults import capture_fault, step_fault
from attncheck.harness.driver.construction import builder_arguments
from attncheck.harness.driver.foreign_code import StageError, call_backend, declared_reasons
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS, GraphLevel, GraphLevels, GraphProbe

_TOLD = 10
"""Requests of a step whose lengths are told."""

OVER_NUMBERS = (
    "the probes were played with huge finite numbers in slots that nobody owns: NaN there reaches the output without a "
    "graph, too (see containment)"
)


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


@dataclass(frozen=True)
class LevelMeasurement:
    """All that is known of one backend on one layer and cache. ``broke``: the first probe that did not come out right.

    ``reached``: the highest level all of whose probes came out right.
    """

    declared: AttentionCGSupport
    reached: AttentionCGSupport
    levels: GraphLevels
    broke: tuple[Probe, ProbeFault | UnmeasuredProbe] | None


def measure_level(backend: type[AttentionBackend], questions: ProbeProblems, device: torch.device) -> LevelMeasurement:
    """Plays the probes until one breaks; a level is looked at only if the ones below hold.

    NaN stands in slots that nobody owns, until it is seen to reach the output without a graph, too: that one probe, and
    those behind it, are played with finite numbers there, since a level says nothing about foreign memory.
    Raises StageError where the backend's declarations do, and where it breaks without a graph on decodes or on the
    steps of a level that it declares.
    """
    declared = declared_level(backend, questions)
    recorder = recorder_for(device)
    told: list[GraphProbe] = []
    notes: tuple[str, ...] = ()
    broke: tuple[Probe, ProbeFault | UnmeasuredProbe] | None = None
    for probe in questions.probes:
        entry = partial(GraphProbe, name=probe.name, level=_name(probe.level))
        if broke is not None:
            told.append(entry(outcome="not run", reason=f"probe {broke[0].name!r} of {broke[0].level.name} broke"))
            continue
        try:
            outcome = _play(backend, probe, questions, device, recorder, is_pool_finite=bool(notes))
            if isinstance(outcome, ProbeFault) and outcome.is_leak:
                notes = (OVER_NUMBERS,)
                outcome = _play(backend, probe, questions, device, recorder, is_pool_finite=True)
        except StageError as failure:
            # A decode, and what is declared, a backend has to be able to do; of batches above nothing is promised.
            if probe.level.value <= max(declared.value, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value):
                raise
            outcome = ProbeFault(f"{failure.raised.in_words}, without a graph, too")
        if outcome is None:
            told.append(entry(outcome="passed"))
            continue
        broke = (probe, outcome)
        told.append(entry(outcome="failed" if isinstance(outcome, ProbeFault) else "not examined", reason=str(outcome)))
    reached = AttentionCGSupport.ALWAYS if broke is None else AttentionCGSupport(broke[0].level.value - 1)
    is_known = broke is None or isinstance(broke[1], ProbeFault)
    measured = _name(reached) if is_known else None
    levels = GraphLevels(
        declared=_name(declared), measured=measured, recorder=recorder.name, probes=tuple(told), notes=notes
    )
    return LevelMeasurement(declared, reached, levels, broke)


def declared_level(backend: type[AttentionBackend], questions: ProbeProblems) -> AttentionCGSupport:
    """What the builder class declares for this layer and cache: by vLLM's class method, else by the attribute.

    Another library's enum of the same names counts. Raises StageError where the declaration raises, or is no level.
    """
    probe = questions.probes[0]
    return level_for(backend, questions.problem(questions.case(probe, probe.turns[0])))


def level_for(backend: type[AttentionBackend], problem: Problem) -> AttentionCGSupport:
    """The same for the layer and cache of ``problem``."""

    def ask() -> AttentionCGSupport:
        builder: Any = backend.get_builder_cls()
        if hasattr(builder, "get_cudagraph_support"):
            spec, config = builder_arguments(backend, [problem])
            source, level = "get_cudagraph_support's answer", builder.get_cudagraph_support(config, spec)
        else:
            source, level = "cudagraph_support", builder.cudagraph_support
        if not isinstance(level, Enum) or level.name not in AttentionCGSupport.__members__:
            allowed = ", ".join(AttentionCGSupport.__members__)
            raise TypeError(f"{source} is {level!r}: must be one of AttentionCGSupport's {allowed}")
        return AttentionCGSupport[level.name]

    return call_backend("declaration", ask)


def _name(level: AttentionCGSupport) -> GraphLevel:
    return GRAPH_LEVELS[level.value]


def _play(
    backend: type[AttentionBackend],
    probe: Probe,
    questions: ProbeProblems,
    device: torch.device,
    recorder: Recorder,
    *,
    is_pool_finite: bool,
) -> ProbeFault | UnmeasuredProbe | None:
    """One probe from capture to its last step; None: all came out right.

    Raises StageError where the backend cannot be set up, or makes no step even without a graph.
    """
    turns, refused = _askable(backend, probe, questions)
    if refused is not None:
        return refused
    problems = [questions.problem(questions.case(probe, turn)) for turn in turns]
    make = partial(GraphSession, backend, probe, problems, device, recorder)
    session = make(is_pool_finite=is_pool_finite)
    captures: list[CapturedBucket] = []
    for bucket in probe.buckets:
        capture = _captured(session, bucket, turns[0], problems[0])
        if not isinstance(capture, CapturedBucket):
            return capture
        captures.append(capture)
    for turn, problem in zip(turns, problems, strict=True):
        step = DiagnosedStep(probe, turn, questions, session, make)
        try:
            wrong = _take(step, problem, None if turn.bucket is None else captures[turn.bucket])
        except StageError as failure:
            wrong = ProbeFault(f"{_told(step)}: {failure.raised.in_words}")
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


def _askable(
    backend: type[AttentionBackend], probe: Probe, questions: ProbeProblems
) -> tuple[list[ProbeStep], ProbeFault | None]:
    """The turns the backend does not decline, or what it means that it declines a graph's: then no graph serves it."""
    turns = []
    for turn in probe.turns:
        case = questions.case(probe, turn)
        reasons = declared_reasons(partial(backend.unsupported_reasons, case.layer, case.cache, case.batch))
        if not reasons:
            turns.append(turn)
        elif turn.bucket is not None:
            return [], ProbeFault(f"the backend declares that it does not serve such batches: {'; '.join(reasons)}")
    return turns, None


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
            return ProbeFault(f"{_told(step)}: {fault}", "this step was made without a graph, between replays")
        if step.session.recorder.name == "emulated" and (hidden := _hidden(step, problem)):
            return UnmeasuredProbe(hidden)
        return ProbeFault(f"{_told(step)}: {fault}", why_wrong(step, capture, one.trace, index))
    return None


def _let_go(graph: CapturedGraph, memory: Released) -> ProbeFault:
    """Memory that only the graph holds is anybody's as soon as the allocator is asked for some."""
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


def _told(step: DiagnosedStep) -> str:
    """The step in words."""
    requests = step.turn.requests
    lengths = ", ".join(f"{query_len} of {seq_len}" for query_len, seq_len in requests[:_TOLD])
    if len(requests) > _TOLD:
        lengths += f" and {len(requests) - _TOLD} more"
    where = "without a graph" if step.turn.bucket is None else f"graph for {step.probe.buckets[step.turn.bucket]}"
    draft = "" if step.turn.draft_index is None else f"draft {step.turn.draft_index} by build_for_drafting, "
    return f"{draft}{where}, requests {lengths}"
