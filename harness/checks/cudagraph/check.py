"""The check ``cudagraph``: the level that a backend reaches, measured over its probes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.cudagraph.probes import (
    ALIKE,
    BLOCK_TABLE,
    DRAFT_UPDATE,
    PAIRED,
    Probe,
    Trait,
    assign_probes,
    plainest,
    traits_of,
)
from attncheck.harness.checks.cudagraph.recorder import recorder_for
from attncheck.harness.checks.cudagraph.replay import (
    GraphSession,
    ProbedBackend,
    ProbeOutcome,
    ProbeProblems,
    refused_batches,
    run_probe,
)
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase, SelectedCases
from attncheck.harness.driver.construction import builder_arguments
from attncheck.harness.driver.foreign_code import (
    StageError,
    call_backend,
    unavailable_case_reasons,
    unsupported_reasons,
)
from attncheck.harness.driver.observation import Raised
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import TruthCache
from attncheck.reference.spec import AttentionCGSupport, AttentionType
from attncheck.reference.step_spec import BatchSpec, RequestSpec
from attncheck.reports.run_file.graph_levels import (
    CUDAGRAPH,
    GRAPH_LEVELS,
    GraphClaim,
    GraphLevel,
    GraphLevels,
    GraphProbe,
    PaddingRows,
    worst_padding,
)

# Measure a backend's CUDA-graph level for one layer and cache, by running probes from the lowest level up.
#
# A backend reaches a level if all probes of this level and of all lower ones pass.

OVER_NUMBERS = (
    "the probes had huge finite numbers in slots that no request owns: NaN there reaches the output without a "
    "graph, too (see containment)"
)

_VARLEN = "get_varlen_cudagraph_max_query_len"
_MISMATCH = "supports_device_cpu_query_lens_mismatch"

_EXAMINED = {DRAFT_UPDATE: "drafting", BLOCK_TABLE: "buckets"}
"""Claims that a probe examines: the name of the probe, which is run with the claimed method."""


@dataclass(frozen=True)
class LevelMeasurement:
    """The measured level of one backend on one layer and cache. ``broke``: the first probe that did not pass, and why.

    ``reached``: the highest level whose probes all passed.
    """

    declared: AttentionCGSupport
    reached: AttentionCGSupport
    levels: GraphLevels
    broke: tuple[Probe, ProbeOutcome] | None

    @property
    def end(self) -> tuple[str, str]:
        """The name and the outcome of the probe that did not pass; if all passed, "" and "passed"."""
        return ("", "passed") if self.broke is None else (self.broke[0].name, self.broke[1].outcome)


def measure_level(backend: type[AttentionBackend], problems: ProbeProblems, device: torch.device) -> LevelMeasurement:
    """Run the probes until one breaks, lowest level first.

    Slots that no request owns contain NaN. If NaN reaches the output without a graph too, this probe and all later
    ones are run with finite numbers instead, since a CUDA-graph level makes no claim about foreign memory. Raise
    StageError if the backend's declarations raise. Raise it also if the backend fails without a graph, on decodes or on
    the steps of a level that it declares.
    """
    for _, (_, *others) in groupby(problems.probes, key=attrgetter("level")):
        problems.compute_together(others)  # a level breaks most often at its first probe
    return _Measurer(backend, problems, device).measure(problems.probes)


def measure_by_share(
    backend: type[AttentionBackend],
    problems: ProbeProblems,
    device: torch.device,
    share: Collection[str],
    full: LevelMeasurement,
    case: str,
) -> LevelMeasurement:
    """Run the probes of ``share``; if they come out as in ``full``, return its level. Else run all probes, as above.

    ``full``: the measurement of a layer of ``case`` with the same declared level, which ran every probe. The share is
    run up to the level measured there. The probe that broke there is run too if it belongs to a declared level or to
    the share: first on its smallest batch, and if that passes, in full. A probe whose batches the backend refuses
    counts as broken without being run.
    """
    measurer = _Measurer(backend, problems, device)
    below = [probe for probe in problems.probes if probe.name in share and probe.level.value <= full.reached.value]
    end = None if full.broke is None else full.broke[0]
    whole = [probe for probe in problems.probes if probe.name == full.end[0]]
    problems.compute_together(below)
    earlier = takewhile(lambda probe: probe not in whole, problems.probes)
    if any(refused_batches(backend, probe, problems) for probe in earlier):
        return measurer.measure(problems.probes)
    with suppress(StageError):  # running all probes below raises it again if it ends the measurement
        if end is not None and end.name not in share and end.level.value > measurer.declared.value:
            part = measurer.measure(below, case)
            if part.broke is None:
                levels = part.levels.model_copy(update={"measured": full.levels.measured})
                return LevelMeasurement(part.declared, full.reached, levels, full.broke)
            return measurer.measure(problems.probes)
        part = measurer.measure([*below, *map(_on_smallest_batch, whole)], case)
        if part.end != full.end and part.end[0] in ("", full.end[0]):
            part = measurer.measure([*below, *whole], case)
        if part.end[0] == full.end[0]:
            return part
    return measurer.measure(problems.probes)


def _on_smallest_batch(probe: Probe) -> Probe:
    """Return the probe with one request per micro-batch, or with two requests if they differ in length.

    It keeps the first graph and the first step only. If it breaks, so does the level.
    """
    bucket, requests = probe.buckets[0], probe.steps[0].requests
    is_uniform = bucket.query_len is not None or len(requests) == 1
    few = requests[: probe.num_micro_batches] if is_uniform else (requests[0], requests[-1])
    small = replace(bucket, num_reqs=len(few), num_tokens=sum(query_len for query_len, _ in few))
    return replace(probe, buckets=(small,), steps=(replace(probe.steps[0], requests=few),))


class _Measurer:
    """Measures one layer and cache. Each probe is run once per kind of pool."""

    def __init__(self, backend: type[AttentionBackend], problems: ProbeProblems, device: torch.device) -> None:
        self._probed = ProbedBackend(backend, problems, device, recorder_for(device))
        self.declared = declared_level(backend, problems)
        self._outcomes: dict[tuple[Probe, bool], ProbeOutcome | StageError] = {}

    def measure(self, probes: Iterable[Probe], played_in_full: str = "") -> LevelMeasurement:
        """Run ``probes`` until one breaks. ``played_in_full``: the case on whose layer all probes were run.

        If it is "", run those of declared claims, too.
        """
        entries: list[GraphProbe] = []
        notes: tuple[str, ...] = ()
        padding: list[PaddingRows] = []
        broke: tuple[Probe, ProbeOutcome] | None = None
        for probe in probes:
            entry = partial(GraphProbe, name=probe.name, level=_name(probe.level))
            if broke is not None:
                reason = f"probe {broke[0].name!r} of {broke[0].level.name} broke"
                entries.append(entry(outcome="not run", reason=reason))
                continue
            found = self._outcome(probe, is_pool_finite=bool(notes))
            if found.is_leak:
                notes = (OVER_NUMBERS,)
                found = self._outcome(probe, is_pool_finite=True)
            padding.append(found.padding_rows)
            entries.append(entry(outcome=found.outcome, reason=found.reason))
            if found.outcome != "passed":
                broke = probe, found
        reached = AttentionCGSupport.ALWAYS if broke is None else AttentionCGSupport(broke[0].level.value - 1)
        is_known = broke is None or broke[1].outcome == "failed"
        levels = GraphLevels(
            declared=_name(self.declared),
            measured=_name(reached) if is_known else None,
            recorder=self._probed.recorder.name,
            probes=tuple(entries),
            played_in_full=played_in_full,
            notes=notes,
            padding_rows=worst_padding(padding),
            claims=() if played_in_full else tuple(self._claims(reached, is_pool_finite=bool(notes))),
        )
        return LevelMeasurement(self.declared, reached, levels, broke)

    def _claims(self, reached: AttentionCGSupport, *, is_pool_finite: bool) -> Iterator[GraphClaim]:
        """Yield the declared claims and their outcomes. ``reached``: the level whose probes passed without a claim."""
        probes = {probe.name: probe for probe in self._probed.problems.probes}
        for name, value in self._declared_claims().items():
            claim = partial(GraphClaim, name=name, value=value)
            if name not in _EXAMINED:
                yield claim(outcome="not examined", reason="no probe examines it")
            elif reached is AttentionCGSupport.NEVER:
                yield claim(outcome="not examined", reason="no probe of a graph passed")
            else:
                probe = replace(probes[_EXAMINED[name]], claim=name)
                found = self._outcome(probe, is_pool_finite=is_pool_finite)
                yield claim(outcome=found.outcome, reason=found.reason)

    def _declared_claims(self) -> Mapping[str, bool | int]:
        """Return the claims by name, without those of value False or None."""
        backend, problems = self._probed.backend, self._probed.problems
        names = (*_EXAMINED, _VARLEN, _MISMATCH)
        if not any(hasattr(each, name) for each in (backend, backend.get_builder_cls()) for name in names):
            return {}

        def read() -> dict[str, bool | int]:
            session = GraphSession(self._probed, next(probe for probe in problems.probes if probe.drafts))
            builder = session.builders[0]
            # As in vLLM, an instance declares the first two, and the third counts between NEVER and ALWAYS only.
            values: dict[str, bool | int] = {name: bool(getattr(builder, name, False)) for name in _EXAMINED}
            if hasattr(builder, _VARLEN) and self.declared.name not in ("NEVER", "ALWAYS"):
                spec, config = builder_arguments(backend, [session.problem(step) for step in session.steps])
                values[_VARLEN] = int(builder.get_varlen_cudagraph_max_query_len(config, spec) or 0)
            values[_MISMATCH] = bool(getattr(backend, _MISMATCH, bool)())
            return values

        with suppress(StageError):  # the probe "drafting" reports it
            return {name: value for name, value in call_backend("declaration", read).items() if value}
        return {}

    def _outcome(self, probe: Probe, *, is_pool_finite: bool) -> ProbeOutcome:
        key = probe, is_pool_finite
        if key not in self._outcomes:
            try:
                self._outcomes[key] = run_probe(self._probed, probe, is_pool_finite=is_pool_finite)
            except StageError as failure:
                # A backend must run decodes and the levels it declares. A failure above those is a fault of the probe.
                own = max(self.declared.value, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value)
                is_due = probe.level.value <= own and not probe.claim
                fault = ProbeOutcome("failed", f"{failure.raised.in_words}, without a graph, too")
                self._outcomes[key] = failure if is_due else fault
        found = self._outcomes[key]
        if isinstance(found, StageError):
            raise found
        return found


def declared_level(backend: type[AttentionBackend], problems: ProbeProblems) -> AttentionCGSupport:
    """Return the level that the builder class declares for this layer and cache.

    Read it from vLLM's class method ``get_cudagraph_support`` if there is one, else from the attribute
    ``cudagraph_support``. A member of another enum is accepted by its name. Raise StageError if the declaration raises
    or is not a level.
    """
    return level_for(backend, problems.problem(problems.smallest))


def level_for(backend: type[AttentionBackend], problem: Problem) -> AttentionCGSupport:
    """Return the declared level for the layer and cache of ``problem``, as :func:`declared_level` does."""

    def read_level() -> AttentionCGSupport:
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

    return call_backend("declaration", read_level)


def _name(level: AttentionCGSupport) -> GraphLevel:
    return GRAPH_LEVELS[level.value]


# The CUDA-graph levels of one backend over a run: every probe runs on one layer, and a share of them on each other.


def layer_and_cache(case: Case) -> Case:
    """Return the case reduced to what its CUDA-graph level depends on."""
    return Case(
        suite="cudagraph",
        id="layer",
        layer=case.layer,
        cache=case.cache.unplaced,
        batch=BatchSpec(requests=(RequestSpec(query_len=1),)),
        tolerance=case.tolerance,
        inputs=case.inputs,
    )


class _Group:
    """Layers and caches of one declared level. Every probe runs on the plainest of them, a share on each other.

    ``measure``: measures a layer and cache by every probe.
    """

    def __init__(self, layers: Sequence[Case], measure: Callable[[Case], LevelMeasurement]) -> None:
        self._layers, self._measure = layers, measure
        self.plain = layers[plainest(_traits(layers))]

    @cached_property
    def full(self) -> LevelMeasurement:
        """The measurement of the plainest layer. Raise StageError or QuestionError if it has no level."""
        return self._measure(self.plain)

    @cached_property
    def shares(self) -> Mapping[Case, frozenset[str]]:
        """The probes that run on each layer; empty if the plainest layer has no level.

        They pass on the plainest layer. The one that breaks there is shared too if no other passes and its level is
        above the declared one.
        """
        try:
            full = self.full
        except Exception:  # noqa: BLE001 (the plainest layer's own cases report it)
            return {}
        passed = [probe.name for probe in full.levels.probes if probe.outcome == "passed"]
        is_declared = full.broke is None or full.broke[0].level.value <= full.declared.value
        broken = [] if passed or full.broke is None or is_declared else [full.broke[0].name]
        paired = [name for name in passed if name in PAIRED]
        assigned = assign_probes(_traits(self._layers), [*passed, *broken], paired, ALIKE)
        return dict(zip(self._layers, assigned, strict=True))


class BackendLevels:
    """Measures the layers and caches of ``cases``, which are the run's cases that measure the level of ``backend``.

    Layers with the same declared level share their probes. ``problems``: returns the probes of a layer and cache.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        cases: Iterable[Case],
        device: torch.device,
        problems: Callable[[Case], ProbeProblems],
    ) -> None:
        self._backend, self._device, self._problems = backend, device, problems
        self._first_cases: dict[Case, str] = {}
        for case in cases:
            if self._is_served(case):
                self._first_cases.setdefault(layer_and_cache(case), case.key)
        self._groups = self._grouped()

    def measure(self, layer_case: Case) -> LevelMeasurement:
        """Measure one layer and cache. Raise QuestionError, or StageError if the backend fails."""
        group = self._groups.get(layer_case)
        if group is not None and layer_case == group.plain:
            return group.full
        if group is None or not group.shares:
            return self._measured_in_full(layer_case)
        problems, share = self._problems(layer_case), group.shares[layer_case]
        first_case = self._first_cases[group.plain]
        return measure_by_share(self._backend, problems, self._device, share, group.full, first_case)

    def _measured_in_full(self, layer_case: Case) -> LevelMeasurement:
        return measure_level(self._backend, self._problems(layer_case), self._device)

    def _grouped(self) -> dict[Case, _Group]:
        """Return the group of each layer and cache. Omit those whose declared level cannot be read."""
        members: dict[AttentionCGSupport, list[Case]] = {}
        for layer_case in self._first_cases:
            try:
                members.setdefault(declared_level(self._backend, self._problems(layer_case)), []).append(layer_case)
            except (StageError, QuestionError):
                continue
        groups: dict[Case, _Group] = {}
        for layers in members.values():
            groups |= dict.fromkeys(layers, _Group(layers, self._measured_in_full))
        return groups

    def _is_served(self, case: Case) -> bool:
        try:
            return not (
                unsupported_reasons(self._backend, case)
                or unavailable_case_reasons(self._backend, case, str(self._device))
            )
        except StageError:
            return False


def _traits(layers: Iterable[Case]) -> list[frozenset[Trait]]:
    return [traits_of(each.layer, each.cache) for each in layers]


# `cudagraph`: the measured `AttentionCGSupport` level of a backend is at least the declared one.
#
# A level belongs to a layer and a cache, so cases with equal layer and cache share one measurement. A lower measured
# level fails the check, and so does a false claim besides the level; a higher level adds a note. Cannot see: batches
# larger than the probes'. The emulation also cannot see work hidden from torch's dispatcher, or a branch of the backend
# that runs on a GPU only.

_KEPT = 2
"""Number of layers whose problems and truths are kept: the layer on which every probe runs, and the latest one."""


class GraphLevelCheck:
    """Findings of one run by layer and cache. Each backend is measured once per layer and cache.

    ``cache``: stores the truths of the probes. If None, each truth is computed.
    """

    def __init__(self, seed: int, device: torch.device, cache: TruthCache | None = None) -> None:
        self._seed, self._device, self._cache = seed, device, cache
        self._levels: dict[type[AttentionBackend], BackendLevels] = {}
        self._findings: dict[tuple[type[AttentionBackend], Case], Finding | Raised] = {}
        self._problems: dict[Case, ProbeProblems] = {}

    def examine(
        self, backend: type[AttentionBackend], case: Case, cases: Callable[[], Iterable[Case]] = tuple
    ) -> Finding:
        """Return the finding for the layer and cache of ``case``. Raise StageError if no level can be measured.

        ``cases``: returns the run's cases that run this check on the backend. If it returns none, every probe runs.
        """
        layer_case = layer_and_cache(case)
        if (backend, layer_case) not in self._findings:
            if backend not in self._levels:
                measured = (each for each in cases() if not unexamined_reasons(each))
                self._levels[backend] = BackendLevels(backend, measured, self._device, self._problems_of)
            try:
                self._findings[backend, layer_case] = judge_level(self._levels[backend].measure(layer_case))
            except QuestionError as error:
                self._findings[backend, layer_case] = NotExamined((str(error),), "attncheck")
            except StageError as failure:
                self._findings[backend, layer_case] = failure.raised
        found = self._findings[backend, layer_case]
        if isinstance(found, Raised):
            raise StageError(found)
        return found

    def _problems_of(self, case: Case) -> ProbeProblems:
        """Return the probes of a layer and cache. Keep the latest two for the next backends."""
        found = self._problems.pop(case, None) or ProbeProblems(case, self._seed, self._device, self._cache)
        self._problems[case] = found
        if len(self._problems) > _KEPT:
            del self._problems[next(iter(self._problems))]
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
    is_unseen = measurement.end[1] == "not examined"
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
            notes.append(f"above {reached.name} nothing is known: probe {broke[0].name!r} {broke[1].reason}")
        return Holds(figures, tuple(notes), graph=graph)
    probe, found = broke
    if is_unseen:
        return NotExamined((f"level {declared.name}, probe {probe.name!r}: {found.reason}",), "attncheck", graph=graph)
    return Broken(
        f"declared {declared.name}, measured {reached.name}: probe {probe.name!r} broke: {found.what}",
        figures,
        found.why,
        (f"the probe shows whether {probe.establishes}", *false),
        graph=graph,
    )


def _check(case: CheckedCase) -> Finding:
    levels = case.shared.get(GraphLevelCheck, lambda: GraphLevelCheck(case.problem.seed, case.device, case.truths))
    selected = case.shared.get(SelectedCases, SelectedCases)
    return levels.examine(case.backend, case.problem.case, lambda: selected.cases_with(case.loaded.ref, CUDAGRAPH))


def _not_applicable(case: Case, _features: frozenset[str]) -> NotExamined | None:
    reasons = unexamined_reasons(case)
    return NotExamined(reasons, "attncheck") if reasons else None


CHECKS = {"cudagraph": Check(_check, _not_applicable)}
