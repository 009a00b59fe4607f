"""The plan of a run as plain data: cases, checks, device and settings. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from attncheck.backends.declarations import FUNCTION_PATHS
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.run.selection import checks_of, unanswered_reasons


@dataclass(frozen=True)
class UnavailableBackend:
    """A backend that cannot be loaded on this machine, and the reasons; all its cases are ``unavailable``."""

    name: str
    ref: str
    reasons: tuple[str, ...]
    version: str = ""

    @property
    def features(self) -> frozenset[str]:
        """Always empty: the features are unknown without loading the backend."""
        return frozenset()


@dataclass(frozen=True)
class RunPlan:
    """What a run examines.

    ``checks``: names of checks. If it is None, each case gets the checks it names, or all.
    ``backends``: the backends that this process examines.
    ``chosen``: the keys of a backend's cases, by its reference. A backend without an entry gets all cases.
    ``timing``: settings of the check ``timing``.
    ``rounds``: the number of processes of each backend that are timed, one after another.
    ``shard``: the name of the shard, such as ``2/7``; empty if the run is not divided.
    ``shard_keys``: the keys of the cases in the shard, or None if the run is not divided. CUDA-graph probes are divided
    among all cases of the run, in any shard, so that merged shards equal an undivided run.
    ``found``: the records that an earlier part of the run has: reference, case key, check and round.
    ``shares_probes``: whether cases of one layer and cache divide the CUDA-graph probes among them. If not, each case
    runs all of them.
    ``truths``: the folder of stored truths, or None to compute all of them.
    ``until_failure``: ``check`` stops each check of a backend at its first failure, ``backend`` stops the whole
    backend. Empty runs everything.
    """

    cases: tuple[Case, ...]
    backends: tuple[LoadedBackend | UnavailableBackend, ...] = ()
    checks: tuple[str, ...] | None = None
    device: str = "cpu"
    seed: int = 0
    dump: Path | None = None
    chosen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    shard: str = ""
    shard_keys: frozenset[str] | None = None
    timing: TimingSettings = field(default_factory=TimingSettings)
    rounds: int = 1
    found: frozenset[tuple[str, str, str, int]] = frozenset()
    shares_probes: bool = True
    truths: Path | None = None
    until_failure: Literal["", "check", "backend"] = ""

    def cases_of(self, ref: str) -> tuple[Case, ...]:
        """Return the cases selected for the backend of this reference, in any shard."""
        return tuple(case for case in self.cases if self.includes(ref, case))

    def includes(self, ref: str, case: Case) -> bool:
        """Return whether ``case`` is selected for the backend of this reference, in any shard."""
        return ref not in self.chosen or case.key in self.chosen[ref]

    def checks_left(self, ref: str, case: Case, number: int = 0) -> tuple[str, ...]:
        """Return the checks of ``case`` that have no record yet for this backend in round ``number``."""
        return tuple(check for check in self.checks_of(case) if (ref, case.key, check, number) not in self.found)

    def is_in_shard(self, case: Case) -> bool:
        """Return whether ``case`` is in this run's shard."""
        return self.shard_keys is None or case.key in self.shard_keys

    def examined_cases_of(self, ref: str) -> tuple[Case, ...]:
        """Return the cases of :meth:`cases_of` that are in this run's shard."""
        return tuple(case for case in self.cases_of(ref) if self.is_in_shard(case))

    def checks_of(self, case: Case) -> tuple[str, ...]:
        """Return the checks to run for ``case``, in the order of reports."""
        return checks_of(case, self.checks, self.device)

    def cases_with(self, ref: str, check: str) -> tuple[Case, ...]:
        """Return the cases on which this backend runs ``check``, except those of function paths.

        Empty if cases do not share probes.
        """
        if not self.shares_probes:
            return ()
        return tuple(
            case
            for case in self.cases_of(ref)
            if check in self.checks_of(case)
            and case.batch.path.name not in FUNCTION_PATHS
            and not unanswered_reasons(case)
        )
