"""The first line of a run file: what was asked, of which backends, on which machine, with which versions."""

import hashlib
import json
from typing import Literal

from pydantic import Field

from attncheck.reports.run_file.timings import RunFileValue

FORMAT = 1
"""Version of the run file. Raised when an older reader would misread a newer file; what it refuses, such as an outcome
or a key it does not know, it does not misread."""


class Environment(RunFileValue):
    """The machine and the versions a run was made with. ``driver`` and ``capability`` are None on a CPU."""

    attncheck: str
    python: str
    torch: str
    numpy: str
    platform: str
    cpu: str
    cores: int
    device: str
    device_name: str
    capability: str | None = None
    driver: str | None = None
    deterministic: bool = False
    tf32: bool = False
    git_commit: str | None = None

    @property
    def digest(self) -> str:
        """12 hex digits over every field: equal digests, equal circumstances."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


class BackendInfo(RunFileValue):
    """A backend of the run: its conventions are the differences that are not bugs, shown beside its name.

    ``required_environment``: the environment variables its process was started with, as it requires.
    """

    name: str
    ref: str
    version: str = ""
    conventions: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    features: tuple[str, ...] = ()
    required_environment: dict[str, str] = Field(default_factory=dict)


class SuiteInfo(RunFileValue):
    """A suite of the run: ``ref`` is what to type after ``--suite``, ``digest`` stands for the cases selected."""

    name: str
    ref: str
    cases: int
    digest: str = ""


class RunHeader(RunFileValue):
    """First line of a run file. ``started`` is an ISO 8601 time with its offset; ``command`` the words typed.

    ``rounds``: in how many processes of each backend, one after another, it was timed.
    """

    kind: Literal["header"] = "header"
    format: int = FORMAT
    started: str
    environment: Environment
    suites: tuple[SuiteInfo, ...]
    checks: tuple[str, ...]
    device: str
    seed: int
    rounds: int = 1
    backends: tuple[BackendInfo, ...]
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def suite_ref(self, name: str) -> str:
        """What to type after ``--suite`` for the suite called ``name``; the name itself if the header lacks it."""
        return next((suite.ref for suite in self.suites if suite.name == name), name)
