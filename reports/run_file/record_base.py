"""The common fields of records of every outcome: their identity, and the measurements they may have."""

from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pydantic import SerializerFunctionWrapHandler, model_serializer

from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import CheckName
from attncheck.reports.run_file.timings import RunFileValue, Timing


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
    names; empty if unknown. ``timing``: of the check ``timing``.
    """

    chosen_kernels: tuple[str, ...] = ()
    timing: Timing | None = None


_MEASUREMENTS = tuple(name for name in MeasuredRecord.model_fields if name not in RecordBase.model_fields)
