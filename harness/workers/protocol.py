"""The messages between a run and a backend's process: one line of JSON each, over two pipes.

::

    the run                        the process
      (starts it) ---------------->  imports torch
      Prepare, Load -------------->  imports the checks, then the backend
      ChooseDevice --------------->  (sent to one process of a run)
                  <---------------- DeviceChosen, or Refused
      Assignment ----------------->
                  <---------------- Described, or Refused
      Examine(case)  ------------->
                  <---------------- Begun(stage) and records, any number of each
                  <---------------- Done, or DeviceLost
      GetReasons(cases) ---------->  (only if cases are drawn)
                  <---------------- Reasons
      (closes the pipe) ---------->  ends

Any answer may be replaced by ``HarnessFailure``: attncheck itself failed in the process.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from attncheck.cases.model import Case
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.run.outcomes import BackendDescription, Circumstances
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.workers.limits import MemoryLimits
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.run_file.header import BackendInfo, Environment, SurveyedBackend
from attncheck.reports.run_file.records import Crashed, Record


class _Message(BaseModel):
    """Base of messages: immutable, without unknown keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Prepare(_Message):
    """Import what will be needed, before any backend.

    ``functions``: a case examines a function of the backend. ``libraries``: those that the backend imports; a library
    that cannot be imported is skipped.
    """

    kind: Literal["prepare"] = "prepare"
    checks: tuple[str, ...] = BACKEND_CHECKS
    functions: bool = True
    libraries: tuple[str, ...] = ()


class Load(_Message):
    """Load the backend with this reference."""

    kind: Literal["load"] = "load"
    ref: str


class ChooseDevice(_Message):
    """Choose the device of a run. ``wanted``: by the user; ``wishes``: of the suites."""

    kind: Literal["choose_device"] = "choose_device"
    wanted: str | None
    wishes: tuple[str, ...]


class Assignment(_Message):
    """The run that the process works for. ``suites``: references of the suites of its cases.

    ``cases``: the keys of all selected cases; None for every case. ``by_default``, ``is_short``: each backend gets the
    cases of :func:`~attncheck.harness.run.selection.default_cases`. ``shares_probes``: as in
    :class:`~attncheck.harness.run.evaluate.RunPlan`. ``digests``: of each suite as the run has read it; a suite file
    that has changed since is refused. ``environment``: the run's circumstances, whose digest the records contain.
    ``timing``: settings of the check ``timing``. ``dump``, ``truths``: absolute paths. ``memory``: limits that the
    process enforces. ``gpu``: UUID of the GPU that the process must use, with exactly that environment; None for no
    such check.
    """

    kind: Literal["assignment"] = "assignment"
    suites: tuple[str, ...]
    cases: tuple[str, ...] | None = None
    by_default: bool = False
    is_short: bool = False
    shares_probes: bool = True
    digests: tuple[str, ...]
    device: str
    seed: int
    dump: str | None
    truths: str | None = None
    environment: Environment
    timing: TimingSettings
    memory: MemoryLimits = MemoryLimits()
    gpu: str | None = None


class Examine(_Message):
    """Make ``checks`` on one selected case, given by its key ``suite/id``, in ``round``.

    ``drawn``: the case itself, if no suite contains it.
    """

    kind: Literal["examine"] = "examine"
    case: str
    checks: tuple[str, ...]
    round: int = 0
    drawn: Case | None = None


class GetReasons(_Message):
    """Return why the backend's declarations exclude each of these cases."""

    kind: Literal["get_reasons"] = "get_reasons"
    cases: tuple[Case, ...]


class LoadProviders(_Message):
    """Import the providers ``refs``, to examine them on ``device`` with the batches of ``cases``."""

    kind: Literal["load_providers"] = "load_providers"
    refs: tuple[str, ...]
    cases: tuple[Case, ...]
    device: str
    circumstances: Circumstances


class ExamineFunction(_Message):
    """Examine one function of a provider. The answer is its record."""

    kind: Literal["examine_function"] = "examine_function"
    provider: BackendInfo
    function: str


class SurveyFamily(_Message):
    """Report all backends of a ``family`` that may run on ``device``, except the first ``num_reported``."""

    kind: Literal["survey_family"] = "survey_family"
    family: str
    device: str
    num_reported: int


class Surveyed(_Message):
    """One backend of a family."""

    kind: Literal["surveyed"] = "surveyed"
    backend: SurveyedBackend


class ProvidersLoaded(_Message):
    """The providers were imported. ``infos``, ``notes``: for the header of the run."""

    kind: Literal["providers_loaded"] = "providers_loaded"
    infos: tuple[BackendInfo, ...]
    notes: tuple[str, ...]


class DeviceChosen(_Message):
    """The device of a run, notes on the choice, and the environment of an examination on it.

    ``gpus``: GPUs that processes may use in parallel; empty unless the device is ``cuda``.
    """

    kind: Literal["device_chosen"] = "device_chosen"
    device: str
    notes: tuple[str, ...]
    environment: Environment
    gpus: tuple[Gpu, ...] = ()


class Described(_Message):
    """The backend was loaded, or is unavailable."""

    kind: Literal["described"] = "described"
    description: BackendDescription


class Reasons(_Message):
    """Why the backend excludes each case of :class:`GetReasons`; an empty tuple if it declares support."""

    kind: Literal["reasons"] = "reasons"
    reasons: tuple[tuple[str, ...], ...]


class Refused(_Message):
    """The request was wrong: no such device or backend, or a suite has changed.

    ``raised``: type of the exception that the backend's own code raised while it was loaded, or "".
    """

    kind: Literal["refused"] = "refused"
    reason: str
    raised: str = ""


class Begun(_Message):
    """A stage of the case, such as ``check lse``, begins. ``reference_s``: seconds that the case's truth took."""

    kind: Literal["begun"] = "begun"
    stage: str
    reference_s: float = 0.0


class Done(_Message):
    """The last answer about a case. ``blind``: why the case could not be examined at all."""

    kind: Literal["done"] = "done"
    blind: str | None = None


class DeviceLost(_Message):
    """A check lost the device, and the process ends. ``record``: of that check; the remaining ones are still due."""

    kind: Literal["device_lost"] = "device_lost"
    record: Crashed


class HarnessFailure(_Message):
    """attncheck itself failed: ``error`` in one line, and the traceback."""

    kind: Literal["fault"] = "fault"
    error: str
    traceback: str


Request = (
    Prepare | Load | ChooseDevice | Assignment | Examine | GetReasons | LoadProviders | ExamineFunction | SurveyFamily
)
Answer = (
    DeviceChosen
    | Described
    | ProvidersLoaded
    | Surveyed
    | Reasons
    | Refused
    | Begun
    | Record
    | Done
    | DeviceLost
    | HarnessFailure
)

_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def parse_request(line: bytes) -> Request:
    """Return the request on a line. Raises pydantic.ValidationError for anything else."""
    return _REQUEST.validate_json(line)


def parse_answer(line: bytes) -> Answer:
    """Return the answer on a line. Raises pydantic.ValidationError for anything else."""
    return _ANSWER.validate_json(line)


def format_message(message: Request | Answer) -> bytes:
    """Return one line of JSON with its newline; parsing it returns an equal message."""
    return message.model_dump_json().encode() + b"\n"
