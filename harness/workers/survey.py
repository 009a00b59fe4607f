"""List what a reference such as ``vllm:*`` matches: every backend of a library, and why it cannot run here, if so.

A fork of this process loads the backends one after another, and reports each at once. If a backend ends that process,
another fork continues after it.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from attncheck.backends import registry
from attncheck.errors import AttncheckError, BackendLoadError, BackendUnavailableError, QuestionError
from attncheck.harness.workers.limits import Limit
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, WorkerProcess
from attncheck.harness.workers.starting import fork_worker
from attncheck.harness.workers.worker import Server, Stage, serve
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
        with WorkerProcess(start=lambda _: fork_worker(partial(serve, make=lambda _: SurveyServer()))) as process:
            process.ref = process.printed.label = ref
            chosen = process.call(limit, SurveyServer.choose_device, device, tuple(wishes))
            process.send(SurveyServer.survey, family, chosen.device, len(found))
            try:
                while not isinstance(answer := process.receive(limit), int):
                    if isinstance(answer, Stage):
                        name = answer.name
                    else:
                        found.append(answer)
            except RefusedError as refused:
                raise BackendLoadError(ref, str(refused)) from None
            except ProcessEndedError as ended:
                if not name:
                    raise BackendLoadError(ref, f"the process that lists its backends ended: {ended}") from None
                found.append(SurveyedBackend(name=name, reason=f"its process ended while it was loaded: {ended}"))
            else:
                return tuple(found)


class SurveyServer(Server):
    """Reports the backends of a family."""

    def survey(
        self, family: str, device: str, num_reported: int, emit: Callable[[Stage | SurveyedBackend], None]
    ) -> int:
        """Report all backends of a family that may run on ``device``, except the first ones; return how many it has.

        ``num_reported``: how many are left out. The events are the loading of a backend, which begins, and its report.
        """
        from attncheck.backends import interpreter
        from attncheck.harness.run.backend_loading import claims_in_header

        # Set before Triton is imported: a backend that runs in Triton's interpreter counts as available.
        os.environ.update(interpreter.required_environment(device))
        library = import_module(registry.SURVEYS[family])
        try:
            names = library.member_names()
        except ImportError as error:
            raise RefusedError(f"its library cannot be imported: {error}") from error
        for name in names[num_reported:]:
            ref = f"{family}:{name}"
            emit(Stage(name=ref))
            reason = _reason_against(ref, device)
            declared, claims, level = library.declared_by(name)
            emit(
                SurveyedBackend(
                    name=ref, reason=reason, declared=declared, claims=claims_in_header(claims), level=level
                )
            )
        return len(names)


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
