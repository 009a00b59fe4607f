"""The messages between a run and the process of a backend: one line of JSON each, over two pipes.

::

    the run                        the process
      (starts it) ---------------->  loads torch
      Prepare, Load -------------->  loads the checks, then the backend
      ChooseDevice --------------->
                  <---------------- DeviceChosen, or Refused; one process of a run is asked
      Assignment ----------------->
                  <---------------- Described, or Refused
      Examine(case)  ------------->
                  <---------------- Begun(stage), then a record, as often as there is something to tell
                  <---------------- Done, or DeviceLost
      AskReasons(cases) ---------->  (only where cases are drawn)
                  <---------------- Reasons
      (closes the pipe) ---------->  ends

``HarnessFailure`` may come in place of any answer: attncheck itself failed there.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from attncheck.cases.model import Case
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.gpus import Gpu
from attncheck.harness.workers.memory_limits import MemoryLimits
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.run_file.header import BackendInfo, Environment, SurveyedBackend
from attncheck.reports.run_file.records import Crashed, Record


class _Message(BaseModel):
    """Immutable, without unknown keys."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid")


class Prepare(_Message):
    """Imports what will be needed, before any backend.

    ``functions``: a case examines a function of the backend. ``libraries``: those that the backend imports; one that
    cannot be imported is left to the backend.
    """

    kind: Literal["prepare"] = "prepare"
    checks: tuple[str, ...] = BACKEND_CHECKS
    functions: bool = True
    libraries: tuple[str, ...] = ()


class Load(_Message):
    """Loads the backend of this reference."""

    kind: Literal["load"] = "load"
    ref: str


class ChooseDevice(_Message):
    """Asks for the device of a run. ``wanted``: by the user; ``wishes``: by the suites."""

    kind: Literal["choose_device"] = "choose_device"
    wanted: str | None
    wishes: tuple[str, ...]


class Assignment(_Message):
    """What a run is about. ``suites``: by reference, those of its cases; which cases, each :class:`Examine` says.

    ``cases``: the keys of all that are selected; None: every case. ``by_default``, ``is_short``: each backend gets the
    cases of :func:`~attncheck.harness.run.selection.default_cases`.
    ``shares_probes``: as in :class:`~attncheck.harness.run.evaluation.RunPlan`. ``digests``: of each suite as
    the run has read it; a file that reads otherwise by now is refused. ``environment``: the run's circumstances, whose
    digest the records carry. ``timing``: how the check of that name takes its times. ``dump``, ``truths``: absolute
    paths. ``memory``: what the process keeps within. ``gpu``: the UUID of the GPU that the process has to use, in that
    very environment; None: this is not compared.
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
    """Asks for ``checks`` of one case of those selected, by its key, ``suite/id``, in that ``round``.

    ``drawn``: the case itself where no suite has it.
    """

    kind: Literal["examine"] = "examine"
    case: str
    checks: tuple[str, ...]
    round: int = 0
    drawn: Case | None = None


class AskReasons(_Message):
    """Asks why the backend does not answer each of these cases, by its own declarations."""

    kind: Literal["ask_reasons"] = "ask_reasons"
    cases: tuple[Case, ...]


class PlanProviders(_Message):
    """Imports the providers of the run, which examine on ``device``."""

    kind: Literal["plan_providers"] = "plan_providers"
    device: str
    seed: int


class ExamineProviders(_Message):
    """Asks for all functions of all providers, from that of index ``first`` on. ``environment``: the run's digest."""

    kind: Literal["examine_providers"] = "examine_providers"
    first: int
    environment: str


class SurveyFamily(_Message):
    """Asks for all backends of a ``family``, to run on ``device``, but for the first ``told``."""

    kind: Literal["survey_family"] = "survey_family"
    family: str
    device: str
    told: int


class Surveyed(_Message):
    """One backend of a family."""

    kind: Literal["surveyed"] = "surveyed"
    backend: SurveyedBackend


class ProvidersPlanned(_Message):
    """What is asked of each provider of ``infos``: ``subjects``, of all that are ``known``."""

    kind: Literal["providers_planned"] = "providers_planned"
    infos: tuple[BackendInfo, ...]
    subjects: tuple[str, ...]
    known: tuple[str, ...]
    notes: tuple[str, ...]


class DeviceChosen(_Message):
    """The device of a run, notes on the choice, and the environment of an examination on it.

    ``gpus``: those that processes may use side by side; empty: the device is not all of them.
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
    """Why the backend does not answer each case it was asked about; no reason: it declares that it does."""

    kind: Literal["reasons"] = "reasons"
    reasons: tuple[tuple[str, ...], ...]


class Refused(_Message):
    """The question was wrong: no such device or backend, or a suite has changed.

    ``raised``: the type of the exception that the backend's own code raised while it was loaded; empty: none.
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
    """Nothing more comes of this case. ``blind``: why it could not be put at all."""

    kind: Literal["done"] = "done"
    blind: str | None = None


class DeviceLost(_Message):
    """A check lost the device, and the process ends. ``record``: of that check; those behind it are still due."""

    kind: Literal["device_lost"] = "device_lost"
    record: Crashed


class HarnessFailure(_Message):
    """attncheck itself failed: ``error`` in a line, and the traceback."""

    kind: Literal["fault"] = "fault"
    error: str
    traceback: str


Request = (
    Prepare | Load | ChooseDevice | Assignment | Examine | AskReasons | PlanProviders | ExamineProviders | SurveyFamily
)
Answer = (
    DeviceChosen
    | Described
    | ProvidersPlanned
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
    """The request on a line; pydantic.ValidationError for anything else."""
    return _REQUEST.validate_json(line)


def parse_answer(line: bytes) -> Answer:
    """The answer on a line; pydantic.ValidationError for anything else."""
    return _ANSWER.validate_json(line)


def format_message(message: Request | Answer) -> bytes:
    """One line of JSON with its newline; parsing gives the equal value back."""
    return message.model_dump_json().encode() + b"\n"
