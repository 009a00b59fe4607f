"""The check ``cudagraph``: the level that a backend reaches, measured over its probes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any, Literal

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.cudagraph.play import (
    GraphSession,
    PlayedProbe,
    ProbeFault,
    ProbeProblems,
    UnmeasuredProbe,
    play_probe,
    refused_batches,
)
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
from attncheck.reference.spec import AttentionCGSupport, AttentionType, BatchSpec, RequestSpec
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

# Measure a backend's CUDA-graph level for one layer and cache, by playing probes from the lowest level up.
#
# A backend reaches a level if all probes of this level and of all lower ones pass.

OVER_NUMBERS = (
    "the probes had huge finite numbers in slots that no request owns: NaN there reaches the output without a "
    "graph, too (see containment)"
)

_VARLEN = "get_varlen_cudagraph_max_query_len"
_MISMATCH = "supports_device_cpu_query_lens_mismatch"

_PLAYED = {DRAFT_UPDATE: "drafting", BLOCK_TABLE: "buckets"}
"""Claims that a probe examines: the name of the probe, which is played with the claimed method."""


@dataclass(frozen=True)
class LevelMeasurement:
    """The measured level of one backend on one layer and cache. ``broke``: the first probe that did not pass, and why.

    ``reached``: the highest level whose probes all passed.
    """

    declared: AttentionCGSupport
    reached: AttentionCGSupport
    levels: GraphLevels
    broke: tuple[Probe, ProbeFault | UnmeasuredProbe] | None


def measure_level(
    backend: type[AttentionBackend],
    questions: ProbeProblems,
    device: torch.device,
    declared: AttentionCGSupport | None = None,
) -> LevelMeasurement:
    """Play the probes until one breaks, lowest level first.

    ``declared``: the declared level. If it is None, it is read from the backend.

    Slots that no request owns contain NaN. If NaN reaches the output without a graph too, this probe and all later
    ones are played with finite numbers instead, since a CUDA-graph level makes no claim about foreign memory. Raise
    StageError if the backend's declarations raise. Raise it also if the backend fails without a graph, on decodes or on
    the steps of a level that it declares.
    """
    for _, (_, *others) in groupby(questions.probes, key=attrgetter("level")):
        questions.compute_together(others)  # a level breaks most often at its first probe
    return _Plays(backend, questions, device, declared).measure(questions.probes)


def measure_by_share(
    backend: type[AttentionBackend],
    questions: ProbeProblems,
    device: torch.device,
    share: Collection[str],
    full: LevelMeasurement,
    case: str,
) -> LevelMeasurement:
    """Play the probes of ``share``; if they come out as in ``full``, return its level. Else play all probes, as above.

    ``full``: the measurement of a layer of ``case`` with the same declared level, which played every probe. The share
    is played up to the level measured there. The probe that broke there is played too if it belongs to a declared level
    or to the share: first on its smallest batch, and if that passes, in full. A probe whose batches the backend refuses
    counts as broken without being played.
    """
    plays = _Plays(backend, questions, device, full.declared)
    end, kind = (None, type(None)) if full.broke is None else (full.broke[0], type(full.broke[1]))
    below = [probe for probe in questions.probes if probe.name in share and probe.level.value <= full.reached.value]
    whole = [probe for probe in questions.probes if end is not None and probe.name == end.name]
    questions.compute_together(below)
    unplayed = takewhile(lambda probe: probe not in whole, questions.probes)
    if any(refused_batches(backend, probe, questions) for probe in unplayed):
        return plays.measure(questions.probes)
    with suppress(StageError):  # playing all probes below raises it again if it ends the measurement
        if end is not None and end.name not in share and end.level.value > plays.declared.value:
            part = plays.measure(below, case)
            if part.broke is None:
                levels = part.levels.model_copy(update={"measured": full.levels.measured})
                return LevelMeasurement(part.declared, full.reached, levels, full.broke)
            return plays.measure(questions.probes)
        for last in ([_on_smallest_batch(probe) for probe in whole], whole):
            part = plays.measure([*below, *last], case)
            if part.broke is not None and (part.broke[0].name not in _names(whole) or isinstance(part.broke[1], kind)):
                break
        if _names(whole) == ([] if part.broke is None else [part.broke[0].name]):
            return part
    return plays.measure(questions.probes)


def _on_smallest_batch(probe: Probe) -> Probe:
    """Return the probe with one request per micro-batch, or with two requests if they differ in length.

    It keeps the first graph and the first step only. If it breaks, so does the level.
    """
    bucket, requests = probe.buckets[0], probe.turns[0].requests
    is_uniform = bucket.query_len is not None or len(requests) == 1
    few = requests[: probe.num_micro_batches] if is_uniform else (requests[0], requests[-1])
    small = replace(bucket, num_reqs=len(few), num_tokens=sum(query_len for query_len, _ in few))
    return replace(probe, buckets=(small,), turns=(replace(probe.turns[0], requests=few),))


class _Plays:
    """The probes of one layer and cache. Each is played once per kind of pool."""

    def __init__(
        self,
        backend: type[AttentionBackend],
        questions: ProbeProblems,
        device: torch.device,
        declared: AttentionCGSupport | None,
    ) -> None:
        self._backend, self._questions, self._device = backend, questions, device
        self.declared = declared or declared_level(backend, questions)
        self._recorder = recorder_for(device)
        self._results: dict[tuple[Probe, bool], PlayedProbe | StageError] = {}

    def measure(self, probes: Iterable[Probe], played_in_full: str = "") -> LevelMeasurement:
        """Play ``probes`` until one breaks. ``played_in_full``: the case on whose layer all probes were played.

        If it is "", play those of declared claims, too.
        """
        entries: list[GraphProbe] = []
        notes: tuple[str, ...] = ()
        padding: list[PaddingRows] = []
        broke: tuple[Probe, ProbeFault | UnmeasuredProbe] | None = None
        for probe in probes:
            entry = partial(GraphProbe, name=probe.name, level=_name(probe.level))
            if broke is not None:
                entries.append(
                    entry(outcome="not run", reason=f"probe {broke[0].name!r} of {broke[0].level.name} broke")
                )
                continue
            played = self._played(probe, is_pool_finite=bool(notes))
            if isinstance(played.broke, ProbeFault) and played.broke.is_leak:
                notes = (OVER_NUMBERS,)
                played = self._played(probe, is_pool_finite=True)
            padding.append(played.padding_rows)
            outcome = played.broke
            if outcome is None:
                entries.append(entry(outcome="passed"))
                continue
            broke = (probe, outcome)
            what: Literal["failed", "not examined"] = "failed" if isinstance(outcome, ProbeFault) else "not examined"
            entries.append(entry(outcome=what, reason=str(outcome)))
        reached = AttentionCGSupport.ALWAYS if broke is None else AttentionCGSupport(broke[0].level.value - 1)
        is_known = broke is None or isinstance(broke[1], ProbeFault)
        levels = GraphLevels(
            declared=_name(self.declared),
            measured=_name(reached) if is_known else None,
            recorder=self._recorder.name,
            probes=tuple(entries),
            played_in_full=played_in_full,
            notes=notes,
            padding_rows=worst_padding(padding),
            claims=() if played_in_full else tuple(self._claims(reached, is_pool_finite=bool(notes))),
        )
        return LevelMeasurement(self.declared, reached, levels, broke)

    def _claims(self, reached: AttentionCGSupport, *, is_pool_finite: bool) -> Iterator[GraphClaim]:
        """Yield the declared claims and their outcomes. ``reached``: the level whose probes passed without a claim."""
        for name, value in self._declared_claims.items():
            claim = partial(GraphClaim, name=name, value=value)
            probe = next((each for each in self._questions.probes if each.name == _PLAYED.get(name)), None)
            if probe is None or reached is AttentionCGSupport.NEVER:
                yield claim(
                    outcome="not examined", reason="no probe of a graph passed" if probe else "no probe examines it"
                )
                continue
            broke = self._played(replace(probe, claim=name), is_pool_finite=is_pool_finite).broke
            if broke is None:
                yield claim(outcome="passed")
            elif isinstance(broke, ProbeFault):
                yield claim(outcome="failed", reason=str(broke))
            else:
                yield claim(outcome="not examined", reason=str(broke))

    @cached_property
    def _declared_claims(self) -> Mapping[str, bool | int]:
        """The claims by name, without those of value False or None."""
        names = (*_PLAYED, _VARLEN, _MISMATCH)
        if not any(hasattr(each, name) for each in (self._backend, self._backend.get_builder_cls()) for name in names):
            return {}
        drafting = next(probe for probe in self._questions.probes if probe.drafts)
        problems = [self._questions.problem(self._questions.case(drafting, turn)) for turn in drafting.turns]

        def read() -> dict[str, bool | int]:
            builder = GraphSession(self._backend, drafting, problems, self._device, self._recorder).builders[0]
            # As in vLLM, an instance declares the first two, and the third counts between NEVER and ALWAYS only.
            values: dict[str, bool | int] = {name: bool(getattr(builder, name, False)) for name in _PLAYED}
            if hasattr(builder, _VARLEN) and self.declared.name not in ("NEVER", "ALWAYS"):
                spec, config = builder_arguments(self._backend, problems)
                values[_VARLEN] = int(builder.get_varlen_cudagraph_max_query_len(config, spec) or 0)
            values[_MISMATCH] = bool(getattr(self._backend, _MISMATCH, bool)())
            return values

        with suppress(StageError):  # the probe "drafting" reports it
            return {name: value for name, value in call_backend("declaration", read).items() if value}
        return {}

    def _played(self, probe: Probe, *, is_pool_finite: bool) -> PlayedProbe:
        key = probe, is_pool_finite
        if key not in self._results:
            try:
                self._results[key] = play_probe(
                    self._backend, probe, self._questions, self._device, self._recorder, is_pool_finite=is_pool_finite
                )
            except StageError as failure:
                # A backend must run decodes and the levels it declares. A failure above those is a fault of the probe.
                own = max(self.declared.value, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE.value)
                is_due = probe.level.value <= own and not probe.claim
                self._results[key] = (
                    failure if is_due else PlayedProbe(ProbeFault(f"{failure.raised.in_words}, without a graph, too"))
                )
        result = self._results[key]
        if isinstance(result, StageError):
            raise result
        return result


def declared_level(backend: type[AttentionBackend], questions: ProbeProblems) -> AttentionCGSupport:
    """Return the level that the builder class declares for this layer and cache.

    Read it from vLLM's class method ``get_cudagraph_support`` if there is one, else from the attribute
    ``cudagraph_support``. A member of another enum is accepted by its name. Raise StageError if the declaration raises
    or is not a level.
    """
    return level_for(backend, questions.problem(questions.smallest))


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


def _names(probes: Iterable[Probe]) -> list[str]:
    return [probe.name for probe in probes]


def _name(level: AttentionCGSupport) -> GraphLevel:
    return GRAPH_LEVELS[level.value]


# The CUDA-graph levels of one backend over a run: one layer plays every probe, and the others play a share.


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


@dataclass(frozen=True)
class _Group:
    """Layers and caches of one declared level, in order. ``plain``: the plainest; ``first_case``: key of its case."""

    declared: AttentionCGSupport
    layers: tuple[Case, ...]
    plain: Case
    first_case: str

    def shares(self, full: LevelMeasurement) -> Mapping[Case, frozenset[str]]:
        """Return the probes that each layer plays. ``full``: the measurement of the plainest layer."""
        passed = [probe.name for probe in full.levels.probes if probe.outcome == "passed"]
        is_declared = full.broke is None or full.broke[0].level.value <= full.declared.value
        broken = [] if passed or full.broke is None or is_declared else [full.broke[0].name]
        paired = [name for name in passed if name in PAIRED]
        assigned = assign_probes(_traits(self.layers), [*passed, *broken], paired, ALIKE)
        return dict(zip(self.layers, assigned, strict=True))


class BackendLevels:
    """Measures the layers and caches of ``cases``, which are the run's cases that measure the level of ``backend``.

    Layers with the same declared level share their probes. ``questions``: returns the probes of a layer and cache.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        cases: Iterable[Case],
        device: torch.device,
        questions: Callable[[Case], ProbeProblems],
    ) -> None:
        self._backend, self._device, self._questions = backend, device, questions
        self._groups = self._grouped(cases)
        self._full: dict[Case, LevelMeasurement] = {}
        self._shares: dict[Case, Mapping[Case, frozenset[str]]] = {}

    def measure(self, layer_case: Case) -> LevelMeasurement:
        """Measure one layer and cache. Raise QuestionError, or StageError if the backend fails."""
        group = self._groups.get(layer_case)
        if group is None or layer_case == group.plain:
            return self._measured_in_full(layer_case)
        if group.plain not in self._shares:
            self._share_out(group)
        shares = self._shares[group.plain]
        if not shares:
            return self._measured_in_full(layer_case)
        full = self._full[group.plain]
        return measure_by_share(
            self._backend, self._questions(layer_case), self._device, shares[layer_case], full, group.first_case
        )

    def _measured_in_full(self, layer_case: Case) -> LevelMeasurement:
        if layer_case not in self._full:
            declared = self._groups[layer_case].declared if layer_case in self._groups else None
            self._full[layer_case] = measure_level(self._backend, self._questions(layer_case), self._device, declared)
        return self._full[layer_case]

    def _share_out(self, group: _Group) -> None:
        """Distribute the probes that pass on the plainest layer; distribute none if it has no level.

        The probe that breaks there is distributed too if its level is above the declared one.
        """
        self._shares[group.plain] = {}
        with suppress(Exception):  # the plainest layer's own cases report it
            self._shares[group.plain] = group.shares(self._measured_in_full(group.plain))

    def _grouped(self, cases: Iterable[Case]) -> dict[Case, _Group]:
        """Return the group of each layer and cache. Omit those whose declared level cannot be read."""
        first_cases: dict[Case, str] = {}
        for case in cases:
            if self._is_served(case):
                first_cases.setdefault(layer_and_cache(case), case.key)
        members: dict[AttentionCGSupport, list[Case]] = {}
        for layer_case in first_cases:
            try:
                members.setdefault(declared_level(self._backend, self._questions(layer_case)), []).append(layer_case)
            except (StageError, QuestionError):
                continue
        groups: dict[Case, _Group] = {}
        for declared, layers in members.items():
            plain = layers[plainest(_traits(layers))]
            groups |= dict.fromkeys(layers, _Group(declared, tuple(layers), plain, first_cases[plain]))
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
"""Number of layers whose problems and truths are kept: the layer that plays every probe, and the latest one."""


class GraphLevelCheck:
    """Findings of one run by layer and cache. Each backend is measured once per layer and cache.

    ``cache``: stores the truths of the probes. If None, each truth is computed.
    """

    def __init__(self, seed: int, device: torch.device, cache: TruthCache | None = None) -> None:
        self._seed, self._device, self._cache = seed, device, cache
        self._levels: dict[type[AttentionBackend], BackendLevels] = {}
        self._findings: dict[tuple[type[AttentionBackend], Case], Finding | Raised] = {}
        self._questions: dict[Case, ProbeProblems] = {}

    def examine(
        self, backend: type[AttentionBackend], case: Case, cases: Callable[[], Iterable[Case]] = tuple
    ) -> Finding:
        """Return the finding for the layer and cache of ``case``. Raise StageError if no level can be measured.

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
        found = self._findings[backend, layer_case]
        if isinstance(found, Raised):
            raise StageError(found)
        return found

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


CHECKS = {"cudagraph": Check(_check, _not_applicable)}
