"""``cudagraph``: the measured ``AttentionCGSupport`` level of a backend is at least the declared one.

A level belongs to a layer and a cache, so cases with equal layer and cache share one measurement. A lower measured
level fails the check, and so does a false claim besides the level; a higher level adds a note. Cannot see: batches
larger than the probes'. The emulation also cannot see work hidden from torch's dispatcher, or a branch of the backend
that runs on a GPU only.
"""

from collections.abc import Callable, Iterable

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.cudagraph.backend_levels import BackendLevels, layer_and_cache
from attncheck.harness.checks.cudagraph.measurement import LevelMeasurement
from attncheck.harness.checks.cudagraph.probe_play import UnmeasuredProbe
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase, SelectedCases
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.truth.truth_cache import TruthCache
from attncheck.reference.spec import AttentionCGSupport, AttentionType
from attncheck.reports.run_file.graph_levels import CUDAGRAPH

_KEPT = 2
"""Number of layers whose problems and truths are kept: the layer that plays every probe, and the latest one."""


class GraphLevelCheck:
    """Findings of one run by layer and cache. Each backend is measured once per layer and cache.

    ``cache``: stores the truths of the probes. If None, each truth is computed.
    """

    def __init__(self, seed: int, device: torch.device, cache: TruthCache | None = None) -> None:
        self._seed, self._device, self._cache = seed, device, cache
        self._levels: dict[type[AttentionBackend], BackendLevels] = {}
        self._findings: dict[tuple[type[AttentionBackend], Case], Finding] = {}
        self._questions: dict[Case, ProbeProblems] = {}

    def examine(
        self, backend: type[AttentionBackend], case: Case, cases: Callable[[], Iterable[Case]] = tuple
    ) -> Finding:
        """Return the finding for the layer and cache of ``case``. If no level can be measured, return what was raised.

        ``cases``: returns the run's cases that run this check on the backend. If it returns none, every probe is
        played.
        """
        reasons = unexamined_reasons(case)
        if reasons:
            return NotExamined(reasons, "attncheck")
        layer_case = layer_and_cache(case)
        if (backend, layer_case) not in self._findings:
            if backend not in self._levels:
                measured = (each for each in cases() if not unexamined_reasons(each))
                self._levels[backend] = BackendLevels(backend, measured, self._device, self._questions_of)
            try:
                self._findings[backend, layer_case] = judge_level(self._levels[backend].measure(layer_case))
            except QuestionError as error:
                self._findings[backend, layer_case] = NotExamined((str(error),), "attncheck")
            except StageError as failure:
                self._findings[backend, layer_case] = failure.raised
        return self._findings[backend, layer_case]

    def _questions_of(self, case: Case) -> ProbeProblems:
        """Return the probes of a layer and cache. Keep the latest two for the next backends."""
        found = self._questions.pop(case, None) or ProbeProblems(case, self._seed, self._device, self._cache)
        self._questions[case] = found
        if len(self._questions) > _KEPT:
            del self._questions[next(iter(self._questions))]
        return found


def unexamined_reasons(case: Case) -> tuple[str, ...]:
    """Return why no graph is captured for this case. Empty if its layer and cache are measured."""
    if case.layer.attn_type != AttentionType.DECODER:
        return (f"attn_type {case.layer.attn_type}: graphs are captured for decoder layers",)
    if case.batch.path.name == "local":
        return ("path local: every step builds new virtual batches, and no graph is captured for them",)
    return ()


def judge_level(measurement: LevelMeasurement) -> Finding:
    """Compare a measurement with the declared level."""
    declared, reached, broke = measurement.declared, measurement.reached, measurement.broke
    graph = measurement.levels
    passed = sum(probe.outcome == "passed" for probe in graph.probes)
    figures = {"declared_level": declared.value, "measured_level": reached.value, "probes_passed": passed}
    is_unseen = broke is not None and isinstance(broke[1], UnmeasuredProbe)
    holds = declared.value <= reached.value
    false = [f"declares {each.name}, and {each.reason}" for each in graph.claims if each.outcome == "failed"]
    if false and (holds or is_unseen):
        return Broken(false[0], figures, details=tuple(false[1:]), graph=graph)
    # NEVER declares no capture, so only a probe that ran, and broke or passed, confirms it.
    if broke is None or (holds and not (is_unseen and reached is AttentionCGSupport.NEVER)):
        notes = [*graph.notes]
        if reached.value > declared.value:
            notes.append(f"head-room: {declared.name} is declared, {reached.name} measured")
        if broke is not None and is_unseen:
            notes.append(f"above {reached.name} nothing is known: probe {broke[0].name!r} {broke[1]}")
        return Holds(figures, tuple(notes), graph=graph)
    probe, reason = broke
    if isinstance(reason, UnmeasuredProbe):
        return NotExamined((f"level {declared.name}, probe {probe.name!r}: {reason}",), "attncheck", graph=graph)
    return Broken(
        f"declared {declared.name}, measured {reached.name}: probe {probe.name!r} broke: {reason.what}",
        figures,
        reason.why,
        (f"the probe shows whether {probe.establishes}", *false),
        graph=graph,
    )


def _check(case: CheckedCase) -> Finding:
    cache = case.shared.get(TruthCache, lambda: TruthCache(case.device))
    levels = case.shared.get(GraphLevelCheck, lambda: GraphLevelCheck(case.problem.seed, case.device, cache))
    selected = case.shared.get(SelectedCases, SelectedCases)
    return levels.examine(case.backend, case.problem.case, lambda: selected.cases_with(case.loaded.ref, CUDAGRAPH))


def _not_applicable(case: Case, _features: frozenset[str]) -> NotExamined | None:
    reasons = unexamined_reasons(case)
    return NotExamined(reasons, "attncheck") if reasons else None


CHECK = Check(_check, _not_applicable)
