"""What the site keeps of each run: plain values that pass between processes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

_UNUSUAL = re.compile(r"[^a-z0-9._-]+")
_HASHED = re.compile(r"-[0-9a-f]{8}$")

GENERATIONS: Mapping[str, str] = {
    "7.0": "Volta",
    "7.5": "Turing",
    "8.0": "Ampere",
    "8.6": "Ampere",
    "8.7": "Ampere",
    "8.9": "Ada",
    "9.0": "Hopper",
    "10.0": "Blackwell",
    "10.3": "Blackwell",
    "12.0": "Blackwell",
    "12.1": "Blackwell",
}
"""Generations of NVIDIA GPUs by compute capability (CUDA C++ Programming Guide, compute capabilities)."""


def slug(name: str) -> str:
    """Return ``name`` as a file name; names that differ have slugs that differ, also if letter case is ignored."""
    plain = _UNUSUAL.sub("-", name.lower()).strip("-.")[:60]
    return (
        plain
        if plain and plain == name and not _HASHED.search(name)
        else f"{plain or 'x'}-{sha256(name.encode()).hexdigest()[:8]}"
    )


@dataclass(frozen=True)
class SiteFinding:
    """A finding of one backend in one run.

    ``words``: equal for the same cause in other runs. ``title``: the cause with figures. ``case``, ``example``,
    ``repeat``: one of its cases, what happened there, and the command that repeats it. ``cases``: ``suite/id`` of all.
    """

    words: str
    title: str
    case: str
    example: str
    repeat: str
    checks: tuple[str, ...]
    cases: tuple[str, ...]
    is_expected: bool


@dataclass(frozen=True)
class SiteLevel:
    """Cases of one backend with equal CUDA-graph levels. ``broke_at``: the first probe that failed, and why."""

    declared: str
    measured: str
    head_room: str
    broke_at: str
    cases: int
    is_emulated: bool
    falls_short: bool


@dataclass(frozen=True)
class SiteSupport:
    """The measured support of one need. ``verdict``: as in :mod:`attncheck.reports.analysis.support`."""

    need: str
    verdict: str
    words: str
    is_declared: bool


@dataclass(frozen=True)
class SiteCase:
    """The result of one case of one backend.

    ``count``: as in :class:`attncheck.reports.analysis.recommendation.NeededCase`. ``outcomes``: by check. ``time``:
    median, lower and upper end of ``forward`` in nanoseconds, and the number of processes; None if it was not timed.
    ``declared_level``, ``level``: the CUDA-graph levels; "" if not examined, or not known.
    """

    needs: tuple[str, ...]
    count: str
    false: tuple[str, ...]
    outcomes: tuple[tuple[str, str], ...]
    time: tuple[float, float, float, int] | None = None
    declared_level: str = ""
    level: str = ""


@dataclass(frozen=True)
class SiteBackend:
    """One backend of one run. ``words``: the verdict and the number of cases with each result.

    ``marks``: ``interpreted`` and ``emulated``, if they apply to its verdicts.
    ``answers``: standing and words by need. ``cases``: by ``suite/id``.
    """

    name: str
    version: str
    verdict: str
    marks: tuple[str, ...]
    features: tuple[str, ...]
    conventions: str
    words: str
    false_claims: tuple[str, ...]
    could_declare: tuple[str, ...]
    findings: tuple[SiteFinding, ...]
    levels: tuple[SiteLevel, ...]
    support: tuple[SiteSupport, ...]
    answers: Mapping[str, tuple[str, str]]
    cases: Mapping[str, SiteCase]


@dataclass(frozen=True)
class SiteRun:
    """One run. ``key``: names its files in the site. ``digest``: equal for equal machines and versions.

    ``facts``: machine and versions, by label. ``descriptions``: shape and description by ``suite/id``. ``warning``: why
    the run is unfinished, "" if it is finished.
    """

    key: str
    name: str
    started: str
    device: str
    capability: str
    digest: str
    facts: Mapping[str, str]
    warning: str
    backends: tuple[SiteBackend, ...] = ()
    descriptions: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def generation(self) -> str:
        """The generation of the GPU, ``CPU``, or the bare compute capability of an unknown one."""
        if not self.capability:
            return "CPU"
        return GENERATIONS.get(self.capability, f"compute capability {self.capability}")

    @property
    def device_slug(self) -> str:
        """The file name of the device's page."""
        return slug(self.device)
