"""What a run leaves behind: one frozen, typed value a line of a run file.

A run is a :class:`RunHeader`, any number of records, and a :class:`RunFooter`. A record names the backend, the case and
the check, and has their outcome. Each outcome is a class of its own with the fields that outcome has: a failure has
figures and a summary, an unsupported case has reasons, and nothing has both. A new measurement of a check is a field of
:class:`_MeasuredRecord`, and of the harness's ``Measurements``.

Models are strict about their keys: a line this version does not understand is an error, never half a record. A report
renders on a laptop from these values alone.
"""

import json
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer, model_validator
from pydantic_core import PydanticSerializationError

from attncheck.reports.run_file.causes import cause_of_crash, cause_of_error, cause_of_failure
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import CheckName, RunHeader
from attncheck.reports.run_file.timings import RunFileValue, Timing

Figure = int | float
Outcome = Literal["passed", "failed", "errored", "crashed", "unsupported", "unavailable", "xfailed", "xpassed"]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""Every outcome, in the order they are reported."""

FALLEN_SHORT: frozenset[Outcome] = frozenset({"failed", "errored", "crashed", "xpassed"})
"""Outcomes that make a run fail: a wrong answer, an error, a death, and an expected failure that no longer is one."""

EXAMINED: frozenset[Outcome] = frozenset({"passed", "failed", "errored", "crashed", "xfailed", "xpassed"})
"""Outcomes of a case that was really put to the backend; the others say why it was not."""

UTILITIES = "utilities"
"""The check, and the suite, of records about a provider: one a function, whose name is the case's id."""

OURSELVES = "attncheck itself"
"""The stage of an exception that no backend raised: a fault of attncheck, which ends the command line with 3."""

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


class _RecordBase(RunFileValue):
    """What every record says. ``backend_ref`` is what to type after ``--backend``; ``environment`` is a digest.

    ``needs``: the features the case takes, and its sizes and forms as ``key=value`` (``head_size=64``). ``round``: in
    which of the backend's processes it was asked, where it is asked in several, each time anew.
    """

    kind: Literal["record"] = "record"
    suite: str
    case_id: str
    case_hash: str
    check: CheckName
    seed: int
    backend: str
    backend_ref: str
    backend_version: str
    environment: str
    attncheck_version: str
    round: int = 0
    needs: tuple[str, ...] = ()
    duration_s: float = 0.0

    def model_post_init(self, _context: Any) -> None:
        """Share the set of fields among all records: a set for each takes more memory than all of its values."""
        object.__setattr__(self, "__pydantic_fields_set__", _FIELDS)

    @property
    def key(self) -> RecordKey:
        """The identity of this record within a run."""
        return RecordKey(**{name: getattr(self, name) for name in RecordKey._fields})

    @property
    def case(self) -> str:
        """``suite/id``: what people call the case."""
        return f"{self.suite}/{self.case_id}"


_FIELDS = set(_RecordBase.model_fields)
"""What pydantic is told of every record; it reads it for ``exclude_unset`` alone, which a run file does without."""


class _LevelRecord(_RecordBase):
    """What a record may carry besides its outcome, even where nothing was examined; None for other checks.

    ``graph``: of the check ``cudagraph``.
    """

    graph: GraphLevels | None = None

    @model_serializer(mode="wrap")
    def _with_measurements_last(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The fields to write: what was measured is long, and comes behind the outcome."""
        written: dict[str, Any] = write(self)
        return written | {name: written.pop(name) for name in _MEASUREMENTS if name in written}


class _MeasuredRecord(_LevelRecord):
    """What a record may carry where the case was examined. A new kind of measurement is a field here.

    ``chosen_kernels``: of the checks ``numerics`` and ``timing``, the kernels that a library chose, by the backend's
    names; empty: not known. ``timing``: of the check ``timing``.
    """

    chosen_kernels: tuple[str, ...] = ()
    timing: Timing | None = None


_MEASUREMENTS = tuple(name for name in _MeasuredRecord.model_fields if name not in _RecordBase.model_fields)


class Passed(_MeasuredRecord):
    """The check holds. ``figures`` measure by how much, ``notes`` say what a reader should know all the same."""

    outcome: Literal["passed"] = "passed"
    figures: dict[str, Figure] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _ShortRecord(_RecordBase):
    """What a record says where the backend fell short.

    ``finding``: records of one backend with the same words have one cause, and are one finding. Written by
    :mod:`attncheck.reports.run_file.causes`, unless the check names it.
    """

    finding: str = ""

    @model_validator(mode="after")
    def _name_the_finding(self) -> Self:
        if not self.finding:
            object.__setattr__(self, "finding", self._words())  # frozen, but not yet seen by a caller
        return self

    def _words(self) -> str:
        """Return the words of the finding."""
        raise NotImplementedError


class Failed(_ShortRecord, _MeasuredRecord):
    """The answer is wrong. ``summary``: one line, where and how much; ``meaning``: the likely cause, if known.

    ``concerns``: the features that the likely cause is about. ``output``: the end of what the backend printed.
    """

    outcome: Literal["failed"] = "failed"
    figures: dict[str, Figure] = Field(default_factory=dict)
    summary: str
    meaning: str | None = None
    details: tuple[str, ...] = ()
    concerns: tuple[str, ...] = ()
    output: str = ""

    def _words(self) -> str:
        return cause_of_failure(self.check, self.summary, self.meaning)


class Errored(_ShortRecord):
    """Something raised. ``stage`` is where: construct, build, forward, declaration, ...

    ``output``: the end of what the backend printed.
    """

    outcome: Literal["errored"] = "errored"
    stage: str
    error_type: str
    message: str
    traceback: str = ""
    output: str = ""

    def _words(self) -> str:
        return cause_of_error(self.error_type, self.stage, self.message, self.traceback)


class Crashed(_ShortRecord):
    """The backend's process died. ``stage`` is what it was doing (``check numerics``), ``cause`` what ended it.

    ``cause``: ``killed by SIGABRT``, ``left with exit code 3``. ``output``: the end of what the process printed, with
    the stack that :mod:`faulthandler` leaves there. The checks of a case that the death kept from being made have the
    same stage, cause and output.
    """

    outcome: Literal["crashed"] = "crashed"
    stage: str
    cause: str
    output: str = ""

    def _words(self) -> str:
        return cause_of_crash(self.cause, self.stage, self.output)


class Unsupported(_LevelRecord):
    """Not examined: the backend declares it cannot (``by`` backend), or no code of attncheck asks it yet."""

    outcome: Literal["unsupported"] = "unsupported"
    reasons: tuple[str, ...] = Field(min_length=1)
    by: Literal["backend", "attncheck"] = "backend"


class Unavailable(_RecordBase):
    """Not examined: it cannot run on this machine."""

    outcome: Literal["unavailable"] = "unavailable"
    reasons: tuple[str, ...] = Field(min_length=1)


class XFailed(_ShortRecord, _MeasuredRecord):
    """Fell short, as expected. ``underlying`` and ``summary``: what happened; ``reason``: why it was expected."""

    outcome: Literal["xfailed"] = "xfailed"
    underlying: Literal["failed", "errored", "crashed"]
    summary: str
    reason: str

    def _words(self) -> str:
        return self.reason


class XPassed(_ShortRecord, _MeasuredRecord):
    """Passed, though expected to fall short for ``reason``."""

    outcome: Literal["xpassed"] = "xpassed"
    reason: str

    def _words(self) -> str:
        return f"passed, though expected to fail: {self.reason}"


Record = Annotated[
    Passed | Failed | Errored | Crashed | Unsupported | Unavailable | XFailed | XPassed, Field(discriminator="outcome")
]
"""One examined property of one case of one backend."""


def graph_of(record: Record) -> GraphLevels | None:
    """The CUDA-graph levels a record carries; None for other checks, and where nothing was examined."""
    return record.graph if isinstance(record, _LevelRecord) else None


def timing_of(record: Record) -> Timing | None:
    """The times a record carries; None for other checks, and where nothing was timed."""
    return record.timing if isinstance(record, _MeasuredRecord) else None


def chosen_kernels_of(record: Record) -> tuple[str, ...]:
    """Return the kernels that a library chose; empty where they are not known, and where nothing was examined."""
    return record.chosen_kernels if isinstance(record, _MeasuredRecord) else ()


def without_outcome(record: Record) -> dict[str, Any]:
    """The fields of a record that stay where its outcome is replaced: its identity, and what was measured."""
    return {name: getattr(record, name) for name in _MeasuredRecord.model_fields if name in type(record).model_fields}


class RunFooter(RunFileValue):
    """Last line of a run file that came to its end. ``counts`` are per outcome, ``errors`` failed the run besides."""

    kind: Literal["footer"] = "footer"
    finished: str
    counts: dict[Outcome, int]
    errors: tuple[str, ...] = ()


Line = Annotated[RunHeader | Record | RunFooter, Field(discriminator="kind")]

_LINE: TypeAdapter[RunHeader | Record | RunFooter] = TypeAdapter(Line)


def parse_line(text: str | bytes) -> RunHeader | Record | RunFooter:
    """Return the value of one line; pydantic.ValidationError: no JSON, an unknown kind, a missing or unknown key."""
    return _LINE.validate_json(text)


def format_line(line: RunHeader | Record | RunFooter) -> str:
    """One line of JSON without its newline; :func:`parse_line` gives the equal value back.

    Bytes of a file's name that the locale cannot decode become ``?``.
    """
    try:
        return line.model_dump_json()
    except PydanticSerializationError:
        text = json.dumps(line.model_dump(), ensure_ascii=False)
        return text.encode("utf-8", errors="replace").decode("utf-8")
