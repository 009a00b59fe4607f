"""Send one request about a case to a backend's process, and collect its records."""

from collections.abc import Callable, Generator
from dataclasses import dataclass

from attncheck.harness.run.outcomes import ProcessEnd
from attncheck.harness.workers.protocol import (
    Begun,
    Described,
    DeviceChosen,
    DeviceLost,
    Done,
    Examine,
    HarnessFailure,
    ProvidersPlanned,
    Reasons,
    Refused,
    Surveyed,
)
from attncheck.harness.workers.time_limits import Limit
from attncheck.harness.workers.worker_process import ProcessEndedError, WorkerProcess
from attncheck.reports.run_file.records import Record

WAITING = "the wait for this case"
"""The stage before the process begins the first stage of the case."""

Work = Generator[WorkerProcess | None, None, None]
"""A generator that yields the process whose answer it waits for, or None after it has made progress."""


@dataclass(frozen=True)
class Stopped:
    """The process ended during ``stage``."""

    stage: str
    end: ProcessEnd


def request_records(
    process: WorkerProcess,
    request: Examine,
    limit_of: Callable[[str, float], Limit],
    take: Callable[[Record], None],
) -> Generator[WorkerProcess | None, None, Done | DeviceLost | HarnessFailure | Stopped]:
    """Send ``request``, call ``take`` with each record, and return the last answer, or how the process ended.

    Yields as :data:`Work` does. ``limit_of``: returns the time limit of a stage, from its name and the seconds that the
    reference took for the case.
    """
    process.send(request)
    stage, limit = WAITING, limit_of(WAITING, 0.0)
    try:
        while True:
            match answer := process.answer(limit):
                case None:
                    yield process
                case Begun():
                    stage, limit = answer.stage, limit_of(answer.stage, answer.reference_s)
                case Done() | HarnessFailure() | DeviceLost():
                    return answer
                case DeviceChosen() | Described() | ProvidersPlanned() | Surveyed() | Reasons() | Refused():
                    raise RuntimeError(f"the process of {process.ref} answered a case by {answer.kind!r}")
                case record:
                    take(record)
                    yield None
    except ProcessEndedError as ended:
        return Stopped(stage, ended.end)
