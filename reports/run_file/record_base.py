"""What records of every outcome share: the identity of a record, and the measurements it may carry."""

from typing import Any, Literal, NamedTuple

from pydantic import SerializerFunctionWrapHandler, model_serializer

from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import CheckName
from attncheck.reports.run_file.timings import RunFileValue, Timing


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


class RecordBase(RunFileValue):
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


_FIELDS = set(RecordBase.model_fields)
"""What pydantic has of every record; it reads it for ``exclude_unset`` alone, which a run file does without."""


class LevelRecord(RecordBase):
    """What a record may carry besides its outcome, even where nothing was examined; None for other checks.

    ``graph``: of the check ``cudagraph``.
    """

    graph: GraphLevels | None = None

    @model_serializer(mode="wrap")
    def _with_measurements_last(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """The fields to write: what was measured is long, and comes behind the outcome."""
        written: dict[str, Any] = write(self)
        return written | {name: written.pop(name) for name in _MEASUREMENTS if name in written}


class MeasuredRecord(LevelRecord):
    """What a record may carry where the case was examined. A new kind of measurement is a field here.

    ``chosen_kernels``: of the checks ``numerics`` and ``timing``, the kernels that a library chose, by the backend's
    names; empty: not known. ``timing``: of the check ``timing``.
    """

    chosen_kernels: tuple[str, ...] = ()
    timing: Timing | None = None


_MEASUREMENTS = tuple(name for name in MeasuredRecord.model_fields if name not in RecordBase.model_fields)
