"""What a run examines, as plain data: cases, checks, device and settings. Loads no torch."""

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
    """A backend that cannot be loaded on this machine, and why: each of its cases is ``unavailable``."""

    name: str
    ref: str
    reasons: tuple[str, ...]
    version: str = ""

    @property
    def features(self) -> frozenset[str]:
        """Unknown, since it cannot be loaded."""
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
    ``shard_keys``: the keys of the cases in the shard, or None if the run is not divided. All cases take part in the
    sharing of CUDA-graph probes, so that merged shards equal an undivided run.
    ``found``: the records that an earlier part of the run has: reference, case key, check and round.
    ``shares_probes``: whether layers and caches share the probes of CUDA graphs. If not, each plays all of them.
    ``truths``: the folder of stored truths, or None if all are computed.
    ``until_failure``: whether each check of a backend is made only until it falls short, or the whole backend is
    examined until its first check does.
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
        """The cases that the backend of this reference is asked."""
        return tuple(case for case in self.cases if self.includes(ref, case))

    def includes(self, ref: str, case: Case) -> bool:
        """Return whether ``case`` is selected for the backend of this reference, in any shard."""
        return ref not in self.chosen or case.key in self.chosen[ref]

    def checks_left(self, ref: str, case: Case, number: int = 0) -> tuple[str, ...]:
        """The checks of ``case`` that the backend of this reference is still to be asked in round ``number``."""
        return tuple(check for check in self.checks_of(case) if (ref, case.key, check, number) not in self.found)

    def is_in_shard(self, case: Case) -> bool:
        """Whether this run examines ``case``."""
        return self.shard_keys is None or case.key in self.shard_keys

    def examined_cases_of(self, ref: str) -> tuple[Case, ...]:
        """The cases that this run examines of :meth:`cases_of`."""
        return tuple(case for case in self.cases_of(ref) if self.is_in_shard(case))

    def checks_of(self, case: Case) -> tuple[str, ...]:
        """The checks to make of ``case``, in the order they are reported."""
        return checks_of(case, self.checks)

    def cases_asking(self, ref: str, check: str) -> tuple[Case, ...]:
        """Return the cases that ask the backend of this reference for ``check``, but for those of functions.

        Empty where nothing is shared between them.
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
