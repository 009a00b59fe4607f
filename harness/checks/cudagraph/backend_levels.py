"""The CUDA-graph levels of one backend over a run: one layer plays every probe, and the others play a share."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.cudagraph.coverage import Trait, assign_probes, plainest, traits_of
from attncheck.harness.checks.cudagraph.measurement import (
    LevelMeasurement,
    declared_level,
    measure_by_share,
    measure_level,
)
from attncheck.harness.checks.cudagraph.probe_problems import ProbeProblems
from attncheck.harness.checks.cudagraph.probes import ALIKE, PAIRED
from attncheck.harness.driver.foreign_code import StageError, declared_reasons
from attncheck.reference.spec import AttentionCGSupport, BatchSpec, RequestSpec


def layer_and_cache(case: Case) -> Case:
    """Return the case reduced to what its CUDA-graph level depends on."""
    return Case(
        suite="cudagraph",
        id="layer",
        layer=case.layer,
        cache=replace(case.cache, num_blocks=None, first_block=None),
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
        specs, on = (case.layer, case.cache, case.batch), str(self._device)
        try:
            return not (
                declared_reasons(partial(self._backend.unsupported_reasons, *specs))
                or declared_reasons(partial(self._backend.unavailable_case_reasons, on, *specs))
            )
        except StageError:
            return False


def _traits(layers: Iterable[Case]) -> list[frozenset[Trait]]:
    return [traits_of(each.layer, each.cache) for each in layers]
