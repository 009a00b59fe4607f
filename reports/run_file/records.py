"""What a run leaves behind: one frozen, typed value a line of a run file.

A run is a :class:`RunHeader`, any number of records, and a :class:`RunFooter`. A record says who was asked which case,
which check looked, and what came of it. Each outcome is a class of its own with the fields that outcome has:
a failure has figures and a summary, an unsupported case has reasons, and nothing has both. Models are strict about
their keys: a line this version does not understand is an error, never half a record.

Must not know: torch, tensors, cases, backends. A report renders on a laptop from these values alone.
"""

import hashlib
import json
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.timings import Frozen, Timing

FORMAT = 1
"""Version of the run file. Raised when an older reader would misread a newer file; what it refuses, such as an outcome
or a key it does not know, it does not misread."""

Figure = int | float
Outcome = Literal["passed", "failed", "errored", "crashed", "unsupported", "unavailable", "xfailed", "xpassed"]

OUTCOMES: tuple[Outcome, ...] = (
    "passed",
    "failed",
    "errored",
    "crashed",
    "unsupported",
    "unavailable",
    "xfailed",
    "xpassed",
)
"""Every outcome, in the order they are reported."""

FALLEN_SHORT: frozenset[Outcome] = frozenset({"failed", "errored", "crashed", "xpassed"})
"""Outcomes that make a run fail: a wrong answer, an error, a death, and an expected failure that no longer is one."""

EXAMINED: frozenset[Outcome] = frozenset({"passed", "failed", "errored", "crashed", "xfailed", "xpassed"})
"""Outcomes of a case that was really put to the backend; the others say why it was not."""


UTILITIES = "utilities"
"""The check, and the suite, of records about a provider: one a function, whose name is the case's id."""

BUDGET_SHARE = "budget_share"
"""The figure that says which share of the error budget the worst row used; above 1.0 the answer is wrong."""


class RecordKey(NamedTuple):
    """What makes a record the same record: a run holds each key once."""

    suite: str
    case_id: str
    case_hash: str
    check: str
    seed: int
    backend: str
    backend_version: str
    environment: str
    attncheck_version: str
    round: int = 0

    def __str__(self) -> str:
        which = f", round {self.round}" if self.round else ""
        return f"{self.suite}/{self.case_id}, check {self.check}, seed {self.seed}, backend {self.backend}{which}"


class _RecordBase(Frozen):
    """What every record says. ``backend_ref`` is what to type after ``--backend``; ``environment`` is a digest.

    ``needs``: the features the case takes, and its sizes and forms as ``key=value`` (``head_size=64``). ``round``: in
    which of the backend's processes it was asked, where it is asked in several, each time anew.
    """

    kind: Literal["record"] = "record"
    suite: str
    case_id: str
    case_hash: str
    check: str
    seed: int
    backend: str
    backend_ref: str
    backend_version: str
    environment: str
    attncheck_version: str
    round: int = 0
    needs: tuple[str, ...] = ()
    duration_s: float = 0.0

    @property
    def key(self) -> RecordKey:
        """The identity of this record within a run."""
        return RecordKey(**{name: getattr(self, name) for name in RecordKey._fields})

    @property
    def case(self) -> str:
        """``suite/id``: what people call the case."""
        return f"{self.suite}/{self.case_id}"


class Passed(_RecordBase):
    """The check holds. ``figures`` measure by how much, ``notes`` say what a reader should know all the same.

    Here and in the other outcomes: ``graph`` only of the check ``cudagraph``, ``timing`` only of the check ``timing``.
    """

    outcome: Literal["passed"] = "passed"
    figures: dict[str, Figure] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    graph: GraphLevels | None = None
    timing: Timing | None = None


class Failed(_RecordBase):
    """The answer is wrong. ``summary``: one line, where and how much; ``meaning``: what it looks like, if known."""

    outcome: Literal["failed"] = "failed"
    figures: dict[str, Figure] = Field(default_factory=dict)
    summary: str
    meaning: str | None = None
    details: tuple[str, ...] = ()
    graph: GraphLevels | None = None
    timing: Timing | None = None


class Errored(_RecordBase):
    """Something raised. ``stage`` is where: construct, build, forward, declaration, ..."""

    outcome: Literal["errored"] = "errored"
    stage: str
    error_type: str
    message: str
    traceback: str = ""


class Crashed(_RecordBase):
    """The backend's process died. ``stage`` is what it was doing (``check numerics``), ``cause`` what ended it.

    ``cause``: ``killed by SIGABRT``, ``left with exit code 3``. ``output``: the end of what the process printed, with
    the stack that :mod:`faulthandler` leaves there. The checks of a case that the death kept from being made have the
    same stage, cause and output.
    """

    outcome: Literal["crashed"] = "crashed"
    stage: str
    cause: str
    output: str = ""


class Unsupported(_RecordBase):
    """Not examined: the backend declares it cannot (``by`` backend), or no code of attncheck asks it yet."""

    outcome: Literal["unsupported"] = "unsupported"
    reasons: tuple[str, ...] = Field(min_length=1)
    by: Literal["backend", "attncheck"] = "backend"
    graph: GraphLevels | None = None


class Unavailable(_RecordBase):
    """Not examined: it cannot run on this machine."""

    outcome: Literal["unavailable"] = "unavailable"
    reasons: tuple[str, ...] = Field(min_length=1)


class XFailed(_RecordBase):
    """Fell short, as expected. ``underlying`` and ``summary``: what happened; ``reason``: why it was expected."""

    outcome: Literal["xfailed"] = "xfailed"
    underlying: Literal["failed", "errored", "crashed"]
    summary: str
    reason: str
    graph: GraphLevels | None = None
    timing: Timing | None = None


class XPassed(_RecordBase):
    """Expected to fall short for ``reason``, and passed: the expectation is out of date."""

    outcome: Literal["xpassed"] = "xpassed"
    reason: str
    graph: GraphLevels | None = None
    timing: Timing | None = None


Record = Annotated[
    Passed | Failed | Errored | Crashed | Unsupported | Unavailable | XFailed | XPassed, Field(discriminator="outcome")
]
"""One examined property of one case of one backend."""


def graph_of(record: Record) -> GraphLevels | None:
    """The CUDA-graph levels a record carries; None for other checks, and where nothing was examined."""
    return None if isinstance(record, Errored | Crashed | Unavailable) else record.graph


def timing_of(record: Record) -> Timing | None:
    """The times a record carries; None for other checks, and where nothing was timed."""
    return record.timing if isinstance(record, Passed | Failed | XFailed | XPassed) else None


class Environment(Frozen):
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


class BackendInfo(Frozen):
    """A backend of the run: its conventions are the differences that are not bugs, shown beside its name.

    ``required_environment``: the environment variables its process was started with, as it requires.
    """

    name: str
    ref: str
    version: str = ""
    conventions: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    features: tuple[str, ...] = ()
    required_environment: dict[str, str] = Field(default_factory=dict)


class SuiteInfo(Frozen):
    """A suite of the run: ``ref`` is what to type after ``--suite``, ``digest`` stands for the cases selected."""

    name: str
    ref: str
    cases: int
    digest: str = ""


class RunHeader(Frozen):
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


class RunFooter(Frozen):
    """Last line of a run file that came to its end. ``counts`` are per outcome, ``errors`` failed the run besides."""

    kind: Literal["footer"] = "footer"
    finished: str
    counts: dict[Outcome, int]
    errors: tuple[str, ...] = ()


Line = Annotated[RunHeader | Record | RunFooter, Field(discriminator="kind")]

_LINE: TypeAdapter[RunHeader | Record | RunFooter] = TypeAdapter(Line)


def parse_line(text: str | bytes) -> RunHeader | Record | RunFooter:
    """The value written on one line of a run file.

    Raises:
        pydantic.ValidationError: not JSON, a kind or outcome nobody knows, a missing or an unknown key.
    """
    return _LINE.validate_json(text)


def format_line(line: RunHeader | Record | RunFooter) -> str:
    """One line of JSON without its newline; :func:`parse_line` gives the equal value back."""
    return line.model_dump_json()
