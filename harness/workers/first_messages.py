"""The messages between a run and a backend's process before the first case: the device, the run, the backend."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from attncheck.backends.declarations import FUNCTION_PATHS
from attncheck.errors import InternalError, QuestionError
from attncheck.harness.run.backend_description import BackendDescription, LoadError, unloaded
from attncheck.harness.run.outcomes import OURSELVES
from attncheck.harness.workers.protocol import (
    Assignment,
    ChooseDevice,
    Described,
    DeviceChosen,
    HarnessFailure,
    Prepare,
    Refused,
)
from attncheck.harness.workers.time_limits import Limit
from attncheck.harness.workers.worker_process import ProcessEndedError, WorkerProcess
from attncheck.reports.run_file.header import Environment

if TYPE_CHECKING:
    from attncheck.harness.run.plan import RunPlan
    from attncheck.harness.run.selection import Selection


class WorkerError(InternalError):
    """attncheck itself failed in the process of a backend; exit code 3, as for a failure in the run's own process."""

    def __init__(self, ref: str, fault: HarnessFailure) -> None:
        super().__init__(f"{fault.error} (in the process of {ref})")
        self.add_note(fault.traceback)


def preparation_of(selection: "Selection", libraries: Sequence[str] = ()) -> Prepare:
    """Return what a backend's process imports before the backend.

    ``libraries``: those that the backend imports itself.
    """
    functions = any(case.batch.path.name in FUNCTION_PATHS for case in selection.cases)
    return Prepare(checks=selection.selected_checks, functions=functions, libraries=tuple(libraries))


def assignment_of(selection: "Selection", plan: "RunPlan", environment: Environment) -> Assignment:
    """Return the message that describes the run to a process."""
    return Assignment(
        suites=selection.refs,
        cases=None if selection.cases == selection.all_cases else tuple(case.key for case in selection.cases),
        by_default=selection.by_default,
        is_short=selection.is_short,
        digests=tuple(suite.hash for suite in selection.suites),
        device=plan.device,
        seed=plan.seed,
        dump=None if plan.dump is None else str(plan.dump.absolute()),
        truths=None if plan.truths is None else str(plan.truths.absolute()),
        environment=environment,
        timing=plan.timing,
    )


def device_chosen_by(
    processes: Iterable[WorkerProcess], request: ChooseDevice, limit: Limit
) -> tuple[DeviceChosen, list[str]]:
    """Return the first answer of ``processes``, the last of which has no backend.

    Also return the references of the backends in whose processes attncheck failed.

    Raises:
        QuestionError: the device that the user wants does not exist, or no process lives long enough.
        WorkerError: attncheck itself failed in the process without a backend.
    """
    cause, spoilt = "", list[str]()
    for process in processes:
        process.send(request)
        try:
            return chosen_device_of(process, limit), spoilt
        except ProcessEndedError as ended:
            cause = ended.end.cause
        except WorkerError:
            if not process.ref:
                raise
            spoilt.append(process.ref)
    raise QuestionError(f"a process without a backend ended before it named the device: {cause}")


def chosen_device_of(process: WorkerProcess, limit: Limit) -> DeviceChosen:
    """Return the device that ``process`` chose.

    Raises:
        QuestionError: the device that the user wants does not exist.
        WorkerError: attncheck itself failed in the process.
        ProcessEndedError: the process ended.
    """
    match answer := process.receive(limit):
        case DeviceChosen():
            return answer
        case Refused():
            raise QuestionError(answer.reason)
        case HarnessFailure():
            raise WorkerError(process.ref, answer)
        case _:
            raise RuntimeError(f"the process of {process.ref} chose a device by {answer.kind!r}")


def description_of(process: WorkerProcess, limit: Limit) -> BackendDescription | QuestionError:
    """Return the description of the backend of ``process``, or the error that prevents one.

    If the process ends while it loads the backend, or attncheck itself fails in it, the description contains the
    failure.
    """
    try:
        answer = process.receive(limit)
    except ProcessEndedError as ended:
        return unloaded(process.ref, ended.end)
    match answer:
        case Described():
            process.printed.label = answer.description.name
            return answer.description
        case Refused():
            if answer.raised:
                return unloaded(process.ref, LoadError(answer.raised, answer.reason))
            return QuestionError(answer.reason)
        case HarnessFailure():
            error = LoadError(WorkerError.__name__, answer.error, OURSELVES, answer.traceback)
            return unloaded(process.ref, error)
        case _:
            raise RuntimeError(f"the process of {process.ref} described itself by {answer.kind!r}")


def loaded(found: BackendDescription | QuestionError) -> BackendDescription:
    """Return ``found`` if it describes a backend that was loaded.

    Raises:
        QuestionError: the backend was not loaded.
        WorkerError: attncheck itself failed while it was loaded.
    """
    if isinstance(found, QuestionError):
        raise found
    error = found.failure
    if isinstance(error, LoadError) and error.stage == OURSELVES:
        raise WorkerError(found.ref, HarnessFailure(error=error.message, traceback=error.traceback))
    if not found.is_loaded:
        raise QuestionError(found.reason)
    return found
