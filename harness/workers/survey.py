"""List what a reference such as ``vllm:*`` matches: every backend of a library, and why it cannot run here, if so.

A fork of this process loads the backends one after another, and reports each at once. If a backend ends that process,
another fork continues after it.
"""

import os
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from attncheck.backends import registry
from attncheck.errors import AttncheckError, BackendLoadError, BackendUnavailableError, QuestionError
from attncheck.harness.workers.limits import Limit
from attncheck.harness.workers.pool import WorkerError, chosen_device_of
from attncheck.harness.workers.process import ProcessEndedError, WorkerProcess, fork_worker
from attncheck.harness.workers.protocol import (
    Begun,
    ChooseDevice,
    Done,
    HarnessFailure,
    Refused,
    Surveyed,
    SurveyFamily,
)
from attncheck.harness.workers.worker import WorkerPipes, next_request, serve
from attncheck.reports.run_file.header import SurveyedBackend

_LONGEST = 240
"""Characters kept of a reason."""


def survey(family: str, device: str | None, wishes: Sequence[str], limit: Limit) -> tuple[SurveyedBackend, ...]:
    """Return every backend of a family (``vllm``), in the order of its library.

    ``device``, ``wishes``: those of the user and of the suites. ``limit``: for one backend.

    Raises:
        QuestionError: there is no such family or device, or the library cannot be imported.
        WorkerError: attncheck itself failed in the process.
    """
    ref = f"{family}:*"
    if family not in registry.SURVEYS:
        known = ", ".join(f"{name}:*" for name in registry.SURVEYS)
        raise BackendLoadError(ref, f"{family!r} is no family of backends", allowed=f"write {known}")
    found: list[SurveyedBackend] = []
    while True:
        name = ""
        with WorkerProcess(start=lambda _: fork_worker(partial(serve, work=_serve))) as process:
            process.ref = process.printed.label = ref
            process.send(ChooseDevice(wanted=device, wishes=tuple(wishes)))
            chosen = chosen_device_of(process, limit)
            process.send(SurveyFamily(family=family, device=chosen.device, num_reported=len(found)))
            try:
                while not isinstance(answer := process.receive(limit), Done):
                    match answer:
                        case Begun():
                            name = answer.stage
                        case Surveyed():
                            found.append(answer.backend)
                        case Refused():
                            raise BackendLoadError(ref, answer.reason)
                        case HarnessFailure():
                            raise WorkerError(ref, answer)
            except ProcessEndedError as ended:
                if not name:
                    raise BackendLoadError(ref, f"the process that lists its backends ended: {ended}") from None
                found.append(SurveyedBackend(name=name, reason=f"its process ended while it was loaded: {ended}"))
            else:
                return tuple(found)


def _serve(pipes: WorkerPipes) -> None:
    """Report the backends of a family to the run."""
    request = next_request(pipes)
    if not isinstance(request, SurveyFamily):
        return
    from attncheck.backends import interpreter

    # Set before Triton is imported: a backend that runs in Triton's interpreter counts as available.
    os.environ.update(interpreter.required_environment(request.device))
    library = import_module(registry.SURVEYS[request.family])
    try:
        names = library.member_names()
    except ImportError as error:
        pipes.send(Refused(reason=f"its library cannot be imported: {error}"))
        return
    for name in names[request.num_reported :]:
        ref = f"{request.family}:{name}"
        pipes.send(Begun(stage=ref))
        reason = _reason_against(ref, request.device)
        declared, level = library.declared_by(name)
        pipes.send(Surveyed(backend=SurveyedBackend(name=ref, reason=reason, declared=declared, level=level)))
    pipes.send(Done())


def _reason_against(ref: str, device: str) -> str:
    """Return the first reason why the backend cannot run on ``device``, without paths, or "" if it can."""
    from attncheck.harness.run.backend_loading import unavailable_reasons

    try:
        reasons: Sequence[str] = unavailable_reasons(registry.load(ref), device)
    except BackendUnavailableError as error:
        reasons = error.reasons
    except BackendLoadError as error:
        reasons = (error.reason,)
    except (QuestionError, AttncheckError) as error:
        reasons = (str(error),)
    first = reasons[0].partition("\n")[0].partition(" (/")[0] if reasons else ""
    return first if len(first) <= _LONGEST else f"{first[:_LONGEST]}..."
