"""The first line of a run file: suites, cases, checks, backends, machine, versions and options."""

import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from attncheck.reports.run_file.timings import Positive, RunFileValue, Whole

FORMAT = 1
"""Version of the run file. Raise it when an older reader would misread a newer file. New outcomes and keys need no
new version, since an older reader rejects them."""


_FORMER_CHECKS = {"claims": "refusals"}
"""Current names of checks by the names they have in older run files."""


def _current_check(name: object) -> object:
    return _FORMER_CHECKS.get(name, name) if isinstance(name, str) else name


CheckName = Annotated[str, BeforeValidator(_current_check)]
"""The name of a check; an older name is converted to the current one."""


MOST = 256
"""Most suites, checks and backends of a run, since reports have tables of their combinations."""

MOST_NAMES = Field(max_length=MOST)


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
        """12 hex digits over all fields, equal for equal environments."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]


class DeclaredClaim(RunFileValue):
    """A declaration of vLLM's contract that a class makes: ``value`` is ``yes``, what it depends on, or what it raises.

    What measures it: the cases that need ``feature``, those of each value of ``form``, or ``check``. ``unexamined``:
    why nothing does.
    """

    member: str
    value: str
    feature: str = ""
    form: str = ""
    check: str = ""
    unexamined: str = ""


class BackendInfo(RunFileValue):
    """A backend of the run: its conventions are allowed differences, shown beside its name.

    ``required_environment``: the environment variables its process was started with, as it requires. ``files``: 12 hex
    digits of the SHA-256 of each file of its code, except those of installed packages, Python and attncheck.
    ``digest``: in older files, that of the file that ``ref`` names; not written any more.
    """

    name: str
    ref: str
    version: str = ""
    conventions: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    features: tuple[str, ...] = ()
    claims: Annotated[tuple[DeclaredClaim, ...], MOST_NAMES] = ()
    required_environment: dict[str, str] = Field(default_factory=dict)
    files: dict[str, str] = Field(default_factory=dict)
    digest: str = Field(default="", exclude=True)


class SurveyedBackend(RunFileValue):
    """One of the backends of a reference such as ``vllm:*``.

    ``reason``: why it is not in the run; empty: it is. ``declared``: what its class declares, by the columns of its
    library's own table; empty where it cannot be imported. ``claims``: what it declares of vLLM's contract, without
    what only its layers do. ``level``: the CUDA-graph level; empty where it is unknown.
    """

    name: str
    reason: str = ""
    declared: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    claims: Annotated[tuple[DeclaredClaim, ...], MOST_NAMES] = ()
    level: str = ""


class SuiteInfo(RunFileValue):
    """A suite of the run: ``ref`` is what to type after ``--suite``, ``digest`` is that of the cases selected."""

    name: str
    ref: str
    cases: int
    digest: str = ""


class CaseInfo(RunFileValue):
    """A case of the run, as reports describe it.

    ``shape``: heads, sizes, dtype, cache, batch and modifiers in one line. ``keys``: what distinguishes cases, by case
    key (``cache.block_size``); a field at its default may be left out. ``weight``: how often the case came in recorded
    traffic; None: it was not recorded.
    ``checks``: the checks that the run makes on the case. It is empty in older files, where no record can be missed.
    ``backends``: names of the backends that get the case; empty for all of the header. ``shard``: number of the shard
    that has the case; 0 if the run is not divided.
    """

    suite: str
    id: str
    shape: str
    description: str = ""
    keys: dict[str, bool | Whole | float | str] = Field(default_factory=dict)
    weight: Positive | None = None
    checks: tuple[CheckName, ...] = ()
    backends: tuple[str, ...] = ()
    shard: int = 0


class RecordOptions(RunFileValue):
    """Options that change records and that no other field of the header shows.

    ``time_limit``, ``warm_cache``, ``kernels``: of the check ``timing``; None: it is not made. ``expect``: 12 hex
    digits of the SHA-256 of the file; empty: none was given.
    """

    time_limit: float | None = None
    warm_cache: bool | None = None
    kernels: bool | None = None
    expect: str = ""


class RunHeader(RunFileValue):
    """First line of a run file. ``started`` is an ISO 8601 time with its offset; ``command`` the words typed.

    ``cases``: empty in older files, and where only providers are examined. ``rounds``: in how many processes of each
    backend, one after another, it was timed. ``shard``: ``2/7`` for the second of seven shards of ``cases``; empty: the
    run is about all of them. ``surveyed``: every backend of a family that is selected as a whole, as ``vllm:*``.
    """

    kind: Literal["header"] = "header"
    format: int = FORMAT
    started: str
    environment: Environment
    suites: Annotated[tuple[SuiteInfo, ...], MOST_NAMES]
    cases: tuple[CaseInfo, ...] = ()
    checks: Annotated[tuple[CheckName, ...], MOST_NAMES]
    device: str
    seed: int
    rounds: int = 1
    shard: Annotated[str, Field(pattern=r"^([1-9][0-9]{0,5}/[1-9][0-9]{0,5})?$")] = ""
    backends: Annotated[tuple[BackendInfo, ...], MOST_NAMES]
    surveyed: Annotated[tuple[SurveyedBackend, ...], MOST_NAMES] = ()
    options: RecordOptions = RecordOptions()
    command: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _note_former_checks(cls, given: Any) -> Any:
        """Add a note for each check that has an older name in the file."""
        match given:
            case {"checks": [*checks]}:
                former = [name for name in checks if isinstance(name, str) and name in _FORMER_CHECKS]
            case _:  # validation rejects it
                return given
        notes = [f"the check {_FORMER_CHECKS[name]} is called {name} in this run file" for name in former]
        own = given.get("notes", ())
        return given | {"notes": (*own, *notes)} if notes and isinstance(own, list | tuple) else given

    @cached_property
    def case_by_name(self) -> dict[tuple[str, str], CaseInfo]:
        """The cases that the header lists, by suite and id."""
        return {(case.suite, case.id): case for case in self.cases}

    @property
    def shard_number(self) -> int:
        """The number of the shard that the run is; 0: it is about all cases."""
        return int(self.shard.partition("/")[0] or 0)

    @property
    def declared(self) -> dict[str, tuple[str, ...]]:
        """The features that each backend declares, by its name."""
        return {backend.name: backend.features for backend in self.backends}

    def suite_ref(self, name: str) -> str:
        """Return the ``--suite`` argument for the suite called ``name``, or the name itself if the header lacks it."""
        return next((suite.ref for suite in self.suites if suite.name == name), name)
