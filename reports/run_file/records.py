"""The lines of a run file as frozen, typed values.

A run is a :class:`RunHeader`, any number of records, and a :class:`RunFooter`. A record names the backend, the case and
the check, and has their outcome. Each outcome is a class with its own fields: a failure has figures and a summary, an
unsupported case has reasons. A new measurement of a check is a field of :class:`MeasuredRecord` and of the harness's
``Measurements``. Unknown keys are errors, so that no line is read in part. Reports need only these values, not the
machine of the run.
"""

import json
import math
from operator import attrgetter
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer, model_validator
from pydantic_core import PydanticSerializationError

from attncheck.reports.run_file.bits import Bits
from attncheck.reports.run_file.causes import BACKEND_TIME, NOT_REACHED, cause_of_end, cause_of_error, cause_of_failure
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import CheckName, RunHeader
from attncheck.reports.run_file.timings import RunFileValue, Timing, Whole


class RecordKey(NamedTuple):
    """The fields that identify a record within a run; a run has each key at most once."""

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


_KEY_OF = attrgetter(*RecordKey._fields)


class RecordBase(RunFileValue):
    """The fields of every record. ``backend_ref``: the ``--backend`` argument. ``environment``: a digest.

    ``needs``: the features the case needs, and its sizes and forms as ``key=value`` (``head_size=64``). ``round``: the
    number of the worker process, from 0, for a check that is repeated in several processes.
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
        """Share one set of field names among all records, since a set for each takes more memory than its values."""
        object.__setattr__(self, "__pydantic_fields_set__", _FIELDS)

    @property
    def key(self) -> RecordKey:
        """The identity of this record within a run."""
        return RecordKey._make(_KEY_OF(self))

    @property
    def case(self) -> str:
        """``suite/id`` of the case."""
        return f"{self.suite}/{self.case_id}"


_FIELDS = set(RecordBase.model_fields)
"""The set of field names shared by all records; pydantic reads it only for ``exclude_unset``, which run files avoid."""


class LevelRecord(RecordBase):
    """A record that may have CUDA-graph levels, even if the case was not examined.

    ``graph``: of the check ``cudagraph``; None for other checks.
    """

    graph: GraphLevels | None = None

    @model_serializer(mode="wrap")
    def _with_measurements_last(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields to write, with the measurements last, since they are long."""
        written: dict[str, Any] = write(self)
        return written | {name: written.pop(name) for name in _MEASUREMENTS if name in written}


class MeasuredRecord(LevelRecord):
    """A record that may have measurements because the case was examined. A new kind of measurement is a field here.

    ``chosen_kernels``: of the checks ``numerics`` and ``timing``, the kernels that a library chose, by the backend's
    names; empty if unknown. ``bits``: of the check ``bitwise``. ``timing``: of the check ``timing``.
    """

    chosen_kernels: tuple[str, ...] = ()
    bits: Bits | None = None
    timing: Timing | None = None


_MEASUREMENTS = tuple(name for name in MeasuredRecord.model_fields if name not in RecordBase.model_fields)


Figure = Whole | float
Outcome = Literal[
    "passed", "failed", "errored", "crashed", "timed_out", "unsupported", "unavailable", "xfailed", "xpassed"
]

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""All outcomes, in the order of reports."""

FALLEN_SHORT: frozenset[Outcome] = frozenset({"failed", "errored", "crashed", "timed_out", "xpassed"})
"""Outcomes that make a run fail; ``xpassed`` is an expected failure that no longer occurs."""

EXAMINED: frozenset[Outcome] = FALLEN_SHORT | {"passed", "xfailed"}
"""Outcomes of a check that ran; records with other outcomes have the reasons why it did not."""

UTILITIES = "utilities"
"""The check, and the suite, of records about a provider: one for each function, whose name is the case's id."""

ENGINE = "engine"
"""The suite of records about an engine that serves: one case for each kind of traffic."""

ENGINE_CHECKS = frozenset({"output", "token", "position", "prefix_hit", "count", "write"})
"""The checks of these records."""

OURSELVES = "attncheck itself"
"""The stage of an exception in attncheck itself, for which the command exits with 3."""

BUDGET_SHARE = "budget_share"
"""The figure with the share of the error budget that the worst row used; above 1.0 the output is wrong."""


class Passed(MeasuredRecord):
    """The check holds. ``figures`` measure by how much, ``notes`` are further facts for a reader."""

    outcome: Literal["passed"] = "passed"
    figures: dict[str, Figure] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()


class _ShortRecord(RecordBase):
    """A record of a check that did not pass, or was expected not to.

    ``finding``: records of one backend with equal text form one finding, since they have one cause. It is computed by
    :mod:`attncheck.reports.run_file.causes`, unless the check sets it.
    """

    finding: str = ""

    @model_validator(mode="after")
    def _name_the_finding(self) -> Self:
        if not self.finding:
            object.__setattr__(self, "finding", self._words())  # frozen, but no caller has it yet
        return self

    def _words(self) -> str:
        raise NotImplementedError


class Failed(_ShortRecord, MeasuredRecord):
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


class _EndedRecord(_ShortRecord):
    """The backend's process ended, or was ended, before it finished the check.

    ``stage``: what it was doing (``check numerics``), or "" if the case did not begin. ``cause``: what ended it
    (``killed by SIGABRT``, ``left with exit code 3``). ``output``: the end of its output, with the stack that
    :mod:`faulthandler` writes there. ``native_stack``: the stack of Python and C frames, if py-spy is installed, after
    a timeout only. The checks of the case that could not run for this reason have the same values.

    ``recurrence``: the result of the same case in a fresh process. ``always``: the process ends again without earlier
    cases. ``after``: it ends only after the case ``after``, or if that is empty, after the cases before it. ``flaky``:
    it does not end again. Empty if this was not tried.
    """

    stage: str
    cause: str
    output: str = ""
    native_stack: str = ""
    recurrence: Literal["", "always", "after", "flaky"] = ""
    after: str = ""

    def _words(self) -> str:
        return cause_of_end(self.cause, self.stage, self.output, self.after)


class Crashed(_EndedRecord):
    """The backend's process died, or attncheck ended it for its use of memory or of attncheck's own pipe."""

    outcome: Literal["crashed"] = "crashed"


class TimedOut(_EndedRecord):
    """The backend exceeded a limit of ``limit_s`` seconds, and attncheck ended its process. ``cause``: which limit."""

    outcome: Literal["timed_out"] = "timed_out"
    limit_s: float


Ended = Crashed | TimedOut
"""A record of a check that the backend's process did not finish."""


class Unsupported(LevelRecord):
    """Not examined: the backend declares it cannot (``by`` backend), or attncheck does not examine it yet."""

    outcome: Literal["unsupported"] = "unsupported"
    reasons: tuple[str, ...] = Field(min_length=1)
    by: Literal["backend", "attncheck"] = "backend"


class Unavailable(RecordBase):
    """Not examined: it cannot run on this machine, or the time by ``--within`` was over before."""

    outcome: Literal["unavailable"] = "unavailable"
    reasons: tuple[str, ...] = Field(min_length=1)


class XFailed(_ShortRecord, MeasuredRecord):
    """Did not pass, as expected. ``underlying`` and ``summary``: what happened; ``reason``: why it was expected.

    ``figures``: those of the failure; empty in older files.
    """

    outcome: Literal["xfailed"] = "xfailed"
    underlying: Literal["failed", "errored", "crashed", "timed_out"]
    summary: str
    reason: str
    figures: dict[str, Figure] = Field(default_factory=dict)

    def _words(self) -> str:
        return self.reason


class XPassed(_ShortRecord, MeasuredRecord):
    """Passed, though the run expected it not to, for ``reason``."""

    outcome: Literal["xpassed"] = "xpassed"
    reason: str

    def _words(self) -> str:
        return f"passed, though expected to fail: {self.reason}"


Record = Annotated[
    Passed | Failed | Errored | Crashed | TimedOut | Unsupported | Unavailable | XFailed | XPassed,
    Field(discriminator="outcome"),
]
"""One check of one case of one backend."""


def is_not_reached(record: Record) -> bool:
    """Return whether a check has no result because the time by ``--within`` was over; it does not fail the run."""
    return isinstance(record, Unavailable) and NOT_REACHED.match(record.reasons[0]) is not None


def is_out_of_time(record: Record) -> bool:
    """Return whether a check has no result because its backend used up its time; this proves nothing on the case."""
    return is_not_reached(record) or (isinstance(record, Ended) and BACKEND_TIME in record.cause)


def graph_of(record: Record) -> GraphLevels | None:
    """Return the CUDA-graph levels of a record, or None for other checks and without an examination."""
    return record.graph if isinstance(record, LevelRecord) else None


def bits_of(record: Record) -> Bits | None:
    """Return the rungs and digests of a record, or None for other checks and without an examination."""
    return record.bits if isinstance(record, MeasuredRecord) else None


def budget_share(record: Record) -> float | None:
    """Return the share of the error budget that a record used, infinity for NaN, or None if it was not measured."""
    share = record.figures.get(BUDGET_SHARE) if isinstance(record, Passed | Failed | XFailed) else None
    return math.inf if share is not None and math.isnan(share) else share


def timing_of(record: Record) -> Timing | None:
    """Return the times of a record, or None for other checks and if nothing was timed."""
    return record.timing if isinstance(record, MeasuredRecord) else None


def chosen_kernels_of(record: Record) -> tuple[str, ...]:
    """Return the kernels that a library chose, or () if they are unknown or the case was not examined."""
    return record.chosen_kernels if isinstance(record, MeasuredRecord) else ()


def without_outcome(record: Record) -> dict[str, Any]:
    """Return the fields of a record that remain if its outcome is replaced: its identity and measurements."""
    return {name: getattr(record, name) for name in MeasuredRecord.model_fields if name in type(record).model_fields}


class RunFooter(RunFileValue):
    """Last line of a run file that came to its end. ``counts`` are per outcome, ``errors`` failed the run besides."""

    kind: Literal["footer"] = "footer"
    finished: str
    counts: dict[Outcome, int]
    errors: tuple[str, ...] = ()


Line = Annotated[RunHeader | Record | RunFooter, Field(discriminator="kind")]

_LINE: TypeAdapter[RunHeader | Record | RunFooter] = TypeAdapter(Line)


def parse_line(text: str | bytes) -> RunHeader | Record | RunFooter:
    """Parse one line.

    Raises:
        pydantic.ValidationError: the text is not JSON, has an unknown kind, or a missing or unknown key.
    """
    return _LINE.validate_json(text)


def format_line(line: RunHeader | Record | RunFooter) -> str:
    """Return one line of JSON without a newline; :func:`parse_line` returns an equal value.

    Bytes of a file name that the locale cannot decode become ``?``.
    """
    try:
        return line.model_dump_json()
    except PydanticSerializationError:
        text = json.dumps(line.model_dump(), ensure_ascii=False)
        return text.encode("utf-8", errors="replace").decode("utf-8")
