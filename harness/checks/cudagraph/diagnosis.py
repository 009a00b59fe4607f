"""Find why a graph's step is wrong: moved memory, frozen values, or a cause that is not the graph.

Runs only after a fault, so it may be slow. It repeats the step without a graph, with a new impl and builder, and
without padding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.cudagraph.metadata_trace import MetadataTrace
from attncheck.harness.checks.cudagraph.probe import Probe, ProbeStep
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.cudagraph.session import CapturedBucket, GraphSession
from attncheck.harness.checks.cudagraph.step_faults import step_fault
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth
from attncheck.reports.run_file.causes import ALTERNATIVE, UNKNOWN, likely_causes

_NAMED = 3


@dataclass(frozen=True)
class DiagnosedStep:
    """One step: ``turn`` of ``probe`` in ``session``. ``make`` creates sessions of the probe, for either pool."""

    probe: Probe
    turn: ProbeStep
    questions: ProbeProblems
    session: GraphSession
    make: Callable[..., GraphSession]

    @property
    def conventions(self) -> Conventions:
        """The conventions of the backend."""
        return self.session.backend.conventions

    def afresh(self, *, is_pool_finite: bool) -> GraphSession:
        """Return a new session of the probe."""
        return self.make(is_pool_finite=is_pool_finite)

    def fault_without_graph(self, session: GraphSession, *, is_padded: bool = True) -> str | None:
        """Return what is wrong with this step if ``forward`` runs without a graph, or None if it is right."""
        problem, truth = self._problem_and_truth(is_padded=is_padded)
        try:
            taken = session.step(self.turn, problem, None)
        except StageError as failure:
            return failure.raised.in_words
        faults = (step_fault(problem, truth, self.conventions, one.seen, one.pool) for one in taken)
        return next((fault for fault in faults if fault is not None), None)

    def cause_without_graph(self) -> str | None:
        """Return the likely cause of a wrong output of this step without a graph, or None if none is known."""
        problem, truth = self._problem_and_truth()
        try:
            taken = self.session.step(self.turn, problem, None)
        except StageError:
            return None
        findings = (check_numerics(problem, truth, one.seen) for one in taken)
        meanings = (finding.meaning for finding in findings if isinstance(finding, Broken))
        return next((meaning for meaning in meanings if likely_causes(meaning)), None)

    def _problem_and_truth(self, *, is_padded: bool = True) -> tuple[Problem, Truth]:
        case = self.questions.case(self.probe, self.turn, is_padded=is_padded)
        return self.questions.problem(case), self.questions.truth(case)


def lets_nan_through(step: DiagnosedStep) -> bool:
    """Return whether the step is wrong only because of NaN in slots that no request owns.

    If so, the graph is not the cause. The step runs without a graph, with a new impl and builder, and without padding,
    whose NaN rows are another fault.
    """
    if step.session.is_pool_finite:
        return False

    def is_wrong(*, is_pool_finite: bool) -> bool:
        session = step.afresh(is_pool_finite=is_pool_finite)
        return step.fault_without_graph(session, is_padded=False) is not None

    try:
        return is_wrong(is_pool_finite=False) and not is_wrong(is_pool_finite=True)
    except StageError:  # a new session cannot be set up
        return False


def why_wrong(step: DiagnosedStep, capture: CapturedBucket, made_of: MetadataTrace, index: int) -> str:
    """Return the cause in words. ``made_of``: trace of the step's metadata, from the builder of graph ``index``."""
    without_graph = step.fault_without_graph(step.session)
    if without_graph is not None:
        return _why_wrong_anyway(step, without_graph)
    graph = capture.graphs[index]
    moved = [path for path in graph.trace.moved(made_of) if path in graph.read]
    reshaped = [path for path in graph.trace.reshaped(made_of) if path in graph.read]
    changed = graph.trace.changed(made_of)
    builder = "build_for_drafting" if step.turn.draft_index is not None else "build"
    causes = []
    if moved:
        more = f" and {len(moved) - _NAMED} more" if len(moved) > _NAMED else ""
        causes.append(
            f"{builder} puts {', '.join(moved[:_NAMED])}{more} into new memory; the graph reads the memory of capture"
        )
    if reshaped:
        causes.append(f"shapes are frozen at capture, and {builder} gives {', '.join(reshaped[:_NAMED])} another one")
    if read := graph.recording.host_reads():
        causes.append(f"numbers are frozen at capture, which forward took from the host: {'; '.join(read[:_NAMED])}")
    elif changed:
        causes.append(f"numbers are frozen at capture, such as these: {'; '.join(changed[:_NAMED])}")
    if not causes:
        causes.append("something that forward read or decided at capture is frozen (a plan, a shape, a branch)")
    return f"the same step is right without a graph: {'; and '.join(causes)}"


def _why_wrong_anyway(step: DiagnosedStep, fault: str) -> str:
    first = replace(step, turn=replace(step.turn, gains_pages=False))  # omits the earlier, shorter step
    try:
        anew = first.fault_without_graph(step.afresh(is_pool_finite=step.session.is_pool_finite))
    except StageError as failure:
        anew = failure.raised.message
    if anew is None:
        return "wrong without a graph, too, but right with a new impl and builder: something is kept from earlier steps"
    padding = step.questions.case(step.probe, step.turn).batch.padding
    if (padding.requests or padding.tokens) and step.fault_without_graph(step.session, is_padded=False) is None:
        return (
            "wrong without a graph, too, and right without padding: padding (query length 0, seq_lens "
            f"{step.conventions.pad_seq_len}, slot -1, rows of NaN) is not left alone"
        )
    cause, *others = (step.cause_without_graph() or "").split(ALTERNATIVE)
    if not cause:
        return f"{UNKNOWN}wrong without a graph, too: {fault}"
    return ALTERNATIVE.join((f"{cause}, without a graph, too", *others))
