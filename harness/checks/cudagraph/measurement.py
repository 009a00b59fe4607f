"""Measure a backend's CUDA-graph level for one layer and cache, by playing probes from the lowest level up.

A backend reaches a level if all probes of this level and of all lower ones pass.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, partial
from itertools import groupby, takewhile
from operator import attrgetter
from typing import Any, Literal

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.harness.checks.cudagraph.probe import BLOCK_TABLE, DRAFT_UPDATE, Probe
from attncheck.harness.checks.cudagraph.probe_play import (
    PlayedProbe,
    ProbeFault,
    UnmeasuredProbe,
    play_probe,
    refused_batches,
)
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.cudagraph.recorder import recorder_for
from attncheck.harness.checks.cudagraph.session import GraphSession
from attncheck.harness.driver.construction import builder_arguments
from attncheck.harness.driver.foreign_code import StageError, call_backend
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reports.run_file.graph_levels import (
    GRAPH_LEVELS,
    GraphClaim,
    GraphLevel,
    GraphLevels,
    GraphProbe,
    PaddingRows,
    worst_padding,
)

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
