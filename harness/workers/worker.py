"""The process of one backend: imports torch, then the backend, and examines the requested cases one by one.

Answers have a pipe of their own, separate from what the backend prints. A copy of the process that the backend made
with ``os.fork`` and that returns from the backend's call must not answer, too: it ends at its first answer.
"""

import atexit
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from attncheck.errors import BackendLoadError, InternalError, QuestionError
from attncheck.harness.device import accelerators_in_use
from attncheck.harness.run.preparation import gpus_alike, refuse_other_gpu
from attncheck.harness.workers.limits import MemoryLimits, keep_within, with_limit_named
from attncheck.harness.workers.process import STACK_SIGNAL, adopt_orphans, flush_c_streams, mark_of
from attncheck.harness.workers.protocol import (
    Answer,
    Assignment,
    Begun,
    ChooseDevice,
    Described,
    DeviceChosen,
    DeviceLost,
    Done,
    Examine,
    GetReasons,
    HarnessFailure,
    Load,
    Prepare,
    Reasons,
    Refused,
    Request,
    format_message,
    parse_request,
)
from attncheck.reports.run_file.records import FALLEN_SHORT, Record

if TYPE_CHECKING:
    from attncheck.cases.model import Case
    from attncheck.harness.run.evaluate import Examiner
    from attncheck.harness.run.outcomes import Backend, BackendDescription

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_NEEDS_TERMINAL = "breakpoint() needs --in-process: the process of a backend has no terminal"


class PipeClosedError(InternalError):
    """A pipe to the run is closed: the run has ended, or the backend closed descriptors that it did not open."""


class WorkerPipes:
    """The worker's pipes to the run: requests, answers, and printed output. :meth:`send` ends a forked copy."""

    def __init__(self, reading: int, writing: int, printing: int) -> None:
        self._process = os.getpid()
        self._requests = os.fdopen(reading, "rb", closefd=False)
        self._writing, self._printing = writing, printing
        for descriptor in (reading, writing):
            os.set_inheritable(descriptor, False)  # programs that the backend starts must not get them

    def receive(self) -> Request | None:
        """Return the next request, or None if there will be none.

        Raises:
            PipeClosedError: the pipe to the run is closed.
        """
        try:
            line = self._requests.readline()
        except (OSError, ValueError) as error:
            raise PipeClosedError from error
        return parse_request(line) if line else None

    def mark(self, case: str) -> None:
        """Mark in the printed output that ``case`` begins."""
        flush_c_streams()
        with suppress(OSError):  # the backend has closed it, so that no output follows
            os.write(self._printing, mark_of(case))

    def send(self, answer: Answer) -> None:
        """Send one answer completely.

        Raises:
            PipeClosedError: the pipe to the run is closed.
        """
        if os.getpid() != self._process:
            os._exit(0)  # the worker itself answers; two answers would mix in the pipe
        rest = memoryview(format_message(answer))
        try:
            while rest:
                rest = rest[os.write(self._writing, rest) :]
        except OSError as error:
            raise PipeClosedError from error


def main(words: list[str]) -> None:
    """Serve the run as the process of a backend; started by :mod:`attncheck.harness.workers.process`.

    ``words``: the descriptors of the pipe to read and the pipe to write, and the process id of the run.
    """
    reading, writing, run = map(int, words)
    serve(reading, writing, run)
    _leave()


def serve(reading: int, writing: int, run: int, work: Callable[[WorkerPipes], None] | None = None) -> None:
    """Serve the process ``run`` through these descriptors until it sends nothing more.

    ``work``: answers its requests; None for :func:`serve_cases`.
    """
    sys.argv[:] = ["attncheck"]
    if sys.platform == "linux":  # a killed run cannot end this process, which may be busy for hours
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    adopt_orphans()  # so that all that the backend starts stays below this process, and is found
    if os.getppid() != run:
        return  # the run was killed before the line above
    # Print a stack if a kernel kills the process, even if the backend has closed stderr.
    printing = os.dup(2)
    faulthandler.enable(printing)
    faulthandler.register(STACK_SIGNAL, printing)
    pipes = WorkerPipes(reading, writing, printing)
    try:
        (work or serve_cases)(pipes)
    except PipeClosedError:
        sys.exit("a pipe between attncheck and this process is closed")
    except (Exception, SystemExit) as error:  # noqa: BLE001 (ours, or a backend's outside of guarded calls)
        line = traceback.format_exception_only(error)[-1].strip()
        pipes.send(HarnessFailure(error=line, traceback="".join(traceback.format_exception(error))))


def _leave() -> None:
    """Run exit handlers and end the process at once, unless it used a GPU; then let Python end it.

    Without this, Python takes a tenth of a second or more to free torch's objects.
    """
    if "torch" not in sys.modules or accelerators_in_use():
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    flush_c_streams()
    os._exit(0)


@contextmanager
def _imports_kept() -> Iterator[None]:
    """Disable garbage collection for imports, and exempt the imported objects from later collections.

    torch alone creates so many objects that scanning them takes a tenth of its import time, each time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def serve_cases(pipes: WorkerPipes, handed_over: "Backend | None" = None) -> None:
    """Examine cases of one backend as the run requests. ``handed_over``: the backend, if it is already loaded."""
    with _imports_kept():
        from attncheck.backends.registry import BUILTIN
        from attncheck.harness.checks.case_checks import import_checks
        from attncheck.harness.run.backend_loading import describe_backend, load_backend, reasons_against
        from attncheck.harness.run.evaluate import Examiner  # noqa: F401 (before the backend)

        prepare = pipes.receive()
        if not isinstance(prepare, Prepare):
            return
        import_checks(prepare.checks, functions=prepare.functions)
        for library in prepare.libraries:
            with suppress(ImportError):
                import_module(library)
    load = next_request(pipes)
    if not isinstance(load, Load):
        return
    backend: Backend | QuestionError
    try:
        backend = handed_over or load_backend(load.ref, prepare.checks, functions=prepare.functions)
    except QuestionError as error:
        backend = error
    assignment = next_request(pipes)
    if not isinstance(assignment, Assignment):
        return
    try:
        if isinstance(backend, QuestionError):
            raise backend
        refuse_other_gpu(assignment.device, assignment.gpu, assignment.environment)
        keep_within(assignment.memory, assignment.device)
        description = describe_backend(backend, assignment.device)
        examiner = _examiner(assignment, description, stores_truths=load.ref in BUILTIN)
    except QuestionError as error:
        raised = error.raised if isinstance(error, BackendLoadError) else ""
        pipes.send(Refused(reason=str(error), raised=raised))
        return
    pipes.send(Described(description=description))
    cases = {case.key: case for case in examiner.plan.cases}
    while isinstance(request := pipes.receive(), Examine | GetReasons | Assignment):
        if isinstance(request, Assignment):
            examiner = _examiner(request, description, stores_truths=load.ref in BUILTIN)
            cases = {case.key: case for case in examiner.plan.cases}
        elif isinstance(request, GetReasons):
            pipes.send(Reasons(reasons=reasons_against(backend, assignment.device, request.cases)))
        else:
            _examine(pipes, examiner, backend, request.drawn or cases[request.case], request, assignment.memory)


def next_request(pipes: WorkerPipes) -> Request | None:
    """Answer requests for a device, and return the next other request."""
    while isinstance(request := pipes.receive(), ChooseDevice):
        pipes.send(_choose_device(request))
    return request


def _choose_device(request: ChooseDevice) -> DeviceChosen | Refused:
    from attncheck.harness.run.evaluate import environment_of
    from attncheck.harness.run.preparation import suite_device

    try:
        device, notes = suite_device(request.wishes, request.wanted)
    except QuestionError as error:
        return Refused(reason=str(error))
    gpus, gpu_notes = gpus_alike(device)
    return DeviceChosen(device=device, notes=(*notes, *gpu_notes), environment=environment_of(device), gpus=gpus)


def _examiner(assignment: Assignment, description: "BackendDescription", *, stores_truths: bool = False) -> "Examiner":
    """Return the examiner for the assignment. Raises QuestionError if a suite has changed since the run began."""
    from pathlib import Path

    from attncheck.cases.loader import load_suite
    from attncheck.harness.run.evaluate import Examiner
    from attncheck.harness.run.selection import RunPlan, Selection, default_cases

    suites = tuple(map(load_suite, assignment.suites))
    for suite, digest in zip(suites, assignment.digests, strict=True):
        if suite.hash != digest:
            raise QuestionError(f"{suite.path} has changed since the run began")
    every = (case for suite in suites for case in suite.cases)
    cases = tuple(case for case in every if assignment.cases is None or case.key in assignment.cases)
    selection = Selection(suites, assignment.suites, cases, checks=None)
    chosen = default_cases(selection, [description], is_short=assignment.is_short) if assignment.by_default else {}
    plan = RunPlan(  # without checks: the run sends them with each case
        cases=cases,
        device=assignment.device,
        seed=assignment.seed,
        dump=None if assignment.dump is None else Path(assignment.dump),
        chosen=chosen,
        timing=assignment.timing,
        shares_probes=assignment.shares_probes,
        truths=None if assignment.truths is None else Path(assignment.truths),
    )
    return Examiner(plan, assignment.environment, stores_truths=stores_truths)


def _examine(
    pipes: WorkerPipes,
    examiner: "Examiner",
    backend: "Backend",
    case: "Case",
    request: Examine,
    memory: MemoryLimits,
) -> None:
    from attncheck.harness.run.outcomes import DeviceLostError

    def begin(stage: str) -> None:
        pipes.send(Begun(stage=stage, reference_s=examiner.reference_s))

    pipes.mark(case.key)
    try:
        for record in examiner.records(case, backend, begin, checks=request.checks, round_number=request.round):
            if record.outcome in FALLEN_SHORT:
                flush_c_streams()  # since the run adds the printed output to the record
            pipes.send(with_limit_named(_without_debugger(record), memory))
    except DeviceLostError as lost:
        pipes.send(DeviceLost(record=lost.record))
        os._exit(1)  # Python's finalization may wait for the device
    fault = examiner.fault_of(case)
    pipes.send(Done(blind=None if fault is None else str(fault)))


def _without_debugger(record: Record) -> Record:
    """Return ``record``, with a message that explains why a debugger ended at once: it had no terminal."""
    if record.outcome != "errored" or record.error_type != "BdbQuit":
        return record
    return record.model_copy(update={"message": _NEEDS_TERMINAL})
