"""From findings to records: outcomes, descriptions of backends, and lost devices."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from attncheck.backends.declarations import needs_of
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.errors import AttncheckError, BackendUnavailableError
from attncheck.harness.checks.findings import Broken, Finding, Holds, Measurements, NotExamined
from attncheck.harness.device import KINDS, accelerators_in_use
from attncheck.harness.driver.observation import Raised
from attncheck.reports.run_file import records
from attncheck.reports.run_file.causes import WITHIN_TIME, raised_at
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import (
    Crashed,
    Ended,
    Errored,
    Failed,
    Passed,
    Record,
    TimedOut,
    Unavailable,
    Unsupported,
    without_outcome,
)

if TYPE_CHECKING:
    import torch

# No other module decides on an outcome: not the evaluation of cases, nor the processes, nor the providers.

OURSELVES = records.OURSELVES

IMPORT = "the import"
"""The stage of a failure in a backend's own code while it is loaded."""

_HANG_S = 10.0
"""Seconds after which a check that the end of ``--within`` stops may hang, so that it fails the run."""


@dataclass(frozen=True)
class ProcessEnd:
    """How a backend's process ended. ``limit_s``: the time limit that it exceeded, or None.

    The other fields are those of the records.
    """

    cause: str
    output: str = ""
    native_stack: str = ""
    limit_s: float | None = None
    recurrence: Literal["", "always", "after", "flaky"] = ""
    after: str = ""


@dataclass(frozen=True)
class Circumstances:
    """Fields that all records of a run share; ``round`` is shared by the records of one process."""

    seed: int
    environment: str
    attncheck_version: str
    round: int = 0


class RecordedQuestion(Protocol):
    """What a record is about: a case, or a function of a provider."""

    @property
    def suite(self) -> str:
        """Name of the suite."""

    @property
    def id(self) -> str:
        """Id within the suite."""

    @property
    def hash(self) -> str:
        """12 hex digits that identify the content."""


RecordedFinding = Finding | Raised | BackendUnavailableError
"""What a record states of a check: its finding, what the backend raised, or why it cannot run on this machine."""


def record_of(
    circumstances: Circumstances,
    case: RecordedQuestion,
    backend: "Backend",
    check: str,
    finding: RecordedFinding,
    duration_s: float = 0.0,
) -> Record:
    """Return the record of one finding.

    A backend that raised has the outcome ``errored`` whatever the exception, since it had declared to support the case.
    """
    common = identity_of(circumstances, case, backend, check) | {"duration_s": round(duration_s, 6)}
    match finding:
        case Holds(figures, notes):
            return Passed(**common, **_measured(finding), figures=dict(figures), notes=notes)
        case Broken():
            names = ("summary", "meaning", "details", "finding", "concerns")
            own = {name: getattr(finding, name) for name in names}
            return Failed(**common, **_measured(finding), figures=dict(finding.figures), **own)
        case NotExamined(reasons, by):
            return Unsupported(**common, **_measured(finding), reasons=reasons, by=by)
        case BackendUnavailableError():
            return Unavailable(**common, reasons=finding.reasons)
        case Raised():
            return Errored(
                **common,
                stage=finding.stage,
                error_type=finding.error_type,
                message=finding.message,
                traceback=finding.trace,
            )


def _measured(finding: Measurements) -> dict[str, Any]:
    """Return the measured values of ``finding`` by record field; a record without that field rejects it."""
    values = {each.name: getattr(finding, each.name) for each in fields(Measurements)}
    return {name: value for name, value in values.items() if value is not None}


def ended(
    circumstances: Circumstances,
    case: RecordedQuestion,
    backend: "Backend",
    check: str,
    stage: str,
    end: ProcessEnd,
) -> Ended | Unavailable:
    """Return the record of a check without result: the backend's process ended during ``stage`` or before.

    A check that the time by ``--within`` did not reach, or stopped soon after its begin, is ``unavailable``.
    """
    identity = identity_of(circumstances, case, backend, check)
    if WITHIN_TIME in end.cause and end.limit_s is not None and (not stage or end.limit_s < _HANG_S):
        stopped = f"stopped after {end.limit_s:.3g} s, since {WITHIN_TIME} was over; the backend may only be slow"
        return Unavailable(**identity, reasons=(stopped if stage else end.cause,))
    values = identity | {"stage": stage} | asdict(end)
    if end.limit_s is not None:
        return TimedOut(**values)
    del values["limit_s"]
    return Crashed(**values)


def absent(circumstances: Circumstances, case: RecordedQuestion, backend: "BackendDescription", check: str) -> Record:
    """Return the record of a check of a backend that was not loaded."""
    if isinstance(backend.failure, ProcessEnd):
        return ended(circumstances, case, backend, check, IMPORT, backend.failure)
    finding = backend.failure or BackendUnavailableError(backend.name, backend.unavailable_reasons)
    return record_of(circumstances, case, backend, check, finding)


def identity_of(circumstances: Circumstances, case: RecordedQuestion, backend: "Backend", check: str) -> dict[str, Any]:
    """Return the fields that name what a record is about, the same in each of its outcomes."""
    return {
        "suite": case.suite,
        "case_id": case.id,
        "case_hash": case.hash,
        "check": check,
        "seed": circumstances.seed,
        "backend": backend.name,
        "backend_ref": backend.ref,
        "backend_version": backend.version,
        "environment": circumstances.environment,
        "attncheck_version": circumstances.attncheck_version,
        "round": circumstances.round,
        "needs": needs_of(case.layer, case.cache, case.batch, backend.features) if isinstance(case, Case) else (),
    }


# Detects that a backend lost the device. Loads no torch when imported.
#
# After an illegal memory access every CUDA call of the process raises. The call that raises first may be one of the
# harness. The check that ran is still recorded as `crashed`.


class DeviceLostError(AttncheckError):
    """A backend lost the device, so this process can no longer use it. ``record``: that of the check."""

    def __init__(self, record: Crashed) -> None:
        self.record = record
        super().__init__(
            f"backend {record.backend}, case {record.case}, {record.stage}: {record.cause}; "
            "start a new process for what follows"
        )


def raise_if_device_is_lost(record: Record, device: "torch.device") -> None:
    """Raise DeviceLostError if the check of ``record`` lost the device, or left a CUDA error that the harness hit."""
    cause = _loss(device) or _error_met(record, device)
    if cause is not None:
        raise DeviceLostError(_crashed_instead(record, cause))


def is_device_error(error: Exception, device: "torch.device") -> bool:
    """Return whether the device raised ``error`` or is lost; out of memory is neither."""
    return _is_lasting(type(error).__name__, str(error)) or _loss(device) is not None


def _loss(device: "torch.device") -> str | None:
    """Return how a device in use was lost, with its message, or None if each still works."""
    for used in accelerators_in_use(device):
        try:
            used.module().synchronize(used.index)
        except RuntimeError as error:
            if not _lacks_memory(str(error)):
                return f"the device was lost: {_first_line(error)}; {used.remedy}"
    return None


def _error_met(record: Record, device: "torch.device") -> str | None:
    """Return the error of the device that a call of the harness hit, or None.

    A library that ignores the status of its launch leaves the error for the next torch call to raise.
    """
    if not isinstance(record, Errored) or record.stage != OURSELVES:
        return None
    if not _is_lasting(record.error_type, record.message):
        return None
    words = record.traceback.rpartition(f"{record.error_type}: ")[2]  # message has no line breaks left
    used, *_ = *accelerators_in_use(device), KINDS[0]()  # a GPU raised it, wherever the case is examined
    return f"a {used.type.upper()} error was left behind: {_first_line(words)}; {used.remedy}"


def _is_lasting(error_type: str, message: str) -> bool:
    return error_type == "AcceleratorError" and not _lacks_memory(message)


def _lacks_memory(message: str) -> bool:
    return "out of memory" in message


def _first_line(error: object) -> str:
    return next(iter(str(error).splitlines()), "no message")


def _crashed_instead(record: Record, cause: str) -> Crashed:
    """Return the record of the same check as ``crashed``, with the line of the backend that raised, if there is one."""
    kept = {name: value for name, value in without_outcome(record).items() if name in Crashed.model_fields}
    stage, place = f"check {record.check}", ""
    if isinstance(record, Errored) and record.stage not in (OURSELVES, stage):
        stage = f"{stage}, in {record.stage}"
        place = raised_at(record.traceback).replace(", in ", " in ")  # as the fault handler writes it
    return Crashed(**kept, stage=stage, cause=cause, output=place and f"{place}\n")


# Descriptions of backends, which may be loaded in other processes. Loads no torch.


class BackendDescription(BaseModel):
    """What a backend declares about itself, and why it is not here, if so.

    ``unavailable_reasons``: why it cannot run on the run's device on this machine; empty if it can.
    ``is_loaded``: False if it could not be loaded, for these reasons or because of ``failure``.
    ``failure``: what its own code raised at the import, or how its process ended. The stage of an exception is
    attncheck itself if attncheck raised it, perhaps because the backend left the process broken.
    ``default_suite``: the suite used if the user names none.
    ``page_sizes``: the page sizes it accepts, in tokens. ``page_multiples``: it accepts every multiple of these.
    ``layouts``: the cache layouts it accepts. Each of these three is empty if unknown.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")

    info: BackendInfo
    is_loaded: bool = True
    is_mla: bool = False
    is_ssm: bool = False
    default_suite: str = "smoke"
    page_sizes: tuple[int, ...] = ()
    page_multiples: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    unavailable_reasons: tuple[str, ...] = ()
    failure: ProcessEnd | Raised | None = None

    @property
    def name(self) -> str:
        """The name in reports."""
        return self.info.name

    @property
    def ref(self) -> str:
        """The reference to give to ``--backend``."""
        return self.info.ref

    @property
    def version(self) -> str:
        """The version; empty if unknown."""
        return self.info.version

    @property
    def features(self) -> frozenset[str]:
        """The features that it declares; empty if unknown."""
        return frozenset(self.info.features)

    @property
    def reason(self) -> str:
        """Why the backend could not be loaded or cannot run here; empty if it can."""
        match self.failure:
            case ProcessEnd(cause=reason) | Raised(message=reason):
                return reason
            case None:
                return "; ".join(self.unavailable_reasons)


Backend = LoadedBackend | BackendDescription
"""A backend of this process, or the description of one that is in another process or not here."""


def not_loaded(ref: str, why: Sequence[str] | ProcessEnd | Raised, name: str = "") -> BackendDescription:
    """Return the description of a backend that could not be loaded, with the reasons or with how loading failed.

    ``name``: if it is empty, the name is derived from ``ref``.
    """
    if not name:
        place, _, attribute = ref.rpartition(":")
        name = attribute if place else Path(ref).stem
    info = BackendInfo(name=name, ref=ref, version="")
    if isinstance(why, ProcessEnd | Raised):
        return BackendDescription(info=info, is_loaded=False, failure=why)
    return BackendDescription(info=info, is_loaded=False, unavailable_reasons=tuple(why))


def missing_variables(required: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``required`` that ``environment`` lacks or has with another value."""
    return {name: value for name, value in required.items() if environment.get(name) != value}
