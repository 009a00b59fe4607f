"""The process of one backend: imports torch, then the backend, and examines the requested cases one by one.

Answers have a pipe of their own, separate from what the backend prints. A copy of the process that the backend made
with ``os.fork`` and that returns from the backend's call must not answer, too: it ends at its first answer.
"""

import atexit
import faulthandler
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attncheck.cases.model import Case
from attncheck.errors import BackendLoadError, InternalError, QuestionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.device import accelerator_of, accelerators_in_use
from attncheck.harness.host import end_with
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.preparation import Gpu, gpus_alike, refuse_other_gpu
from attncheck.harness.workers.limits import MemoryLimits, keep_within, with_limit_named
from attncheck.harness.workers.printed import STACK_SIGNAL, flush_c_streams, mark_of
from attncheck.harness.workers.process import RefusedError
from attncheck.harness.workers.process_tree import adopt_orphans
from attncheck.harness.workers.protocol import (
    EVENT,
    FAULT,
    REFUSED,
    RESULT,
    HarnessFailure,
    Message,
    Refused,
    signature_of,
    write_answer,
)
from attncheck.harness.workers.sharing import has_mps, refuse_missing_mps
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import FALLEN_SHORT, Crashed, Record

if TYPE_CHECKING:
    from attncheck.harness.run.evaluate import Examiner
    from attncheck.harness.run.outcomes import Backend

_NEEDS_TERMINAL = "breakpoint() needs --in-process: the process of a backend has no terminal"


class PipeClosedError(InternalError):
    """A pipe to the run is closed: the run has ended, or the backend closed descriptors that it did not open."""


class WorkerPipes:
    """The worker's pipes to the run: calls, answers, and printed output. :meth:`answer` ends a forked copy."""

    def __init__(self, reading: int, writing: int, printing: int) -> None:
        self._process = os.getpid()
        self._calls = os.fdopen(reading, "rb", closefd=False)
        self._writing, self._printing = writing, printing
        self._token = b""
        self._method: Callable[..., Any] = Server.choose_device
        for descriptor in (reading, writing):
            os.set_inheritable(descriptor, False)  # programs that the backend starts must not get them

    def serve(self, server: "Server") -> None:
        """Run the methods of ``server`` that the run calls, until it calls no more.

        Raises:
            PipeClosedError: the pipe to the run is closed.
        """
        while line := self._receive():
            self._token, name, arguments = line.split(b" ", 2)
            self._method = getattr(type(server), name.decode())
            signature = signature_of(self._method)
            emit = {"emit": partial(self.answer, EVENT)} if EVENT in signature.answers else {}
            try:
                result = self._method(server, *signature.arguments.validate_json(arguments), **emit)
            except RefusedError as refused:
                self.answer(REFUSED, Refused(reason=str(refused), raised=refused.raised))
            else:
                if signature.is_answered:
                    self.answer(RESULT, result)

    def mark(self, case: str) -> None:
        """Mark in the printed output that ``case`` begins."""
        flush_c_streams()
        with suppress(OSError):  # the backend has closed it, so that no output follows
            os.write(self._printing, mark_of(case))

    def answer(self, kind: bytes, value: object) -> None:
        """Send an answer to the latest call completely.

        Raises:
            PipeClosedError: the pipe to the run is closed.
        """
        if os.getpid() != self._process:
            os._exit(0)  # the worker itself answers; two answers would mix in the pipe
        rest = memoryview(write_answer(self._token, self._method, kind, value))
        try:
            while rest:
                rest = rest[os.write(self._writing, rest) :]
        except OSError as error:
            raise PipeClosedError from error

    def fail(self, error: BaseException) -> None:
        """Answer the latest call with a failure of attncheck itself; before the first call, wait for it.

        Raises:
            PipeClosedError: the pipe to the run is closed.
        """
        if not self._token:  # without it, the run takes the answer for a line of the backend
            self._token, _, _ = self._receive().partition(b" ")
        line = traceback.format_exception_only(error)[-1].strip()
        self.answer(FAULT, HarnessFailure(error=line, traceback="".join(traceback.format_exception(error))))

    def _receive(self) -> bytes:
        """Return the line of the next call; empty if there will be none."""
        try:
            return self._calls.readline()
        except (OSError, ValueError) as error:
            raise PipeClosedError from error


def main(words: list[str]) -> None:
    """Serve the run as the process of a backend; started by :mod:`attncheck.harness.workers.process`.

    ``words``: the descriptors of the pipe to read and the pipe to write, and the process id of the run.
    """
    reading, writing, run = map(int, words)
    serve(reading, writing, run)
    leave()


def serve(reading: int, writing: int, run: int, make: "Callable[[WorkerPipes], Server] | None" = None) -> None:
    """Serve the process ``run`` through these descriptors until it calls no more.

    ``make``: makes the server; None for one of cases.
    """
    sys.argv[:] = ["attncheck"]
    adopt_orphans()  # so that all that the backend starts stays below this process, and is found
    if not end_with(run):
        return
    # Print a stack if a kernel kills the process, even if the backend has closed stderr.
    printing = os.dup(2)
    faulthandler.enable(printing)
    faulthandler.register(STACK_SIGNAL, printing)
    pipes = WorkerPipes(reading, writing, printing)
    try:
        pipes.serve((make or CaseServer)(pipes))
    except PipeClosedError:
        sys.exit("a pipe between attncheck and this process is closed")
    except (Exception, SystemExit) as error:  # noqa: BLE001 (ours, or a backend's outside of guarded calls)
        pipes.fail(error)


def leave() -> None:
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
def imports_kept() -> Iterator[None]:
    """Disable garbage collection for imports, and exempt the imported objects from later collections.

    torch alone creates so many objects that scanning them takes a tenth of its import time, each time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _TritonFinder(MetaPathFinder):
    """Lets each kernel be compiled once, from the moment at which this process imports Triton; it may never do so."""

    def find_spec(self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "triton" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            with suppress(ImportError, AttributeError):  # a version of Triton without what we replace
                from attncheck.harness.workers.triton_cache import compile_once

                compile_once()

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec


def import_torch() -> None:
    """Import torch and what loads backends, and prepare this process for Triton."""
    if not any(isinstance(finder, _TritonFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TritonFinder())
    with imports_kept():
        import attncheck.harness.run.backend_loading  # noqa: F401


class DeviceChosen(Message):
    """The device of a run, notes on the choice, and the environment of an examination on it.

    ``gpus``: GPUs that processes may use in parallel; empty unless the device is ``cuda``. ``processes``: how many may
    use each GPU at once. ``has_mps``: whether MPS can serve them.
    """

    device: str
    notes: tuple[str, ...]
    environment: Environment
    gpus: tuple[Gpu, ...] = ()
    processes: int = 1
    has_mps: bool = False


class Stage(Message):
    """A stage of the case, such as ``check lse``, begins. ``reference_s``: seconds that the case's truth took."""

    name: str
    reference_s: float = 0.0


class Server:
    """The methods that each process serves."""

    def choose_device(self, wanted: str | None, wishes: tuple[str, ...]) -> DeviceChosen:
        """Choose the device of a run. ``wanted``: by the user; ``wishes``: of the suites."""
        from attncheck.harness.run.evaluate import environment_of
        from attncheck.harness.run.preparation import suite_device

        try:
            device, notes = suite_device(wishes, wanted)
        except QuestionError as error:
            raise RefusedError(str(error)) from error
        gpus, gpu_notes = gpus_alike(device)
        accelerator = accelerator_of(device)
        return DeviceChosen(
            device=device,
            notes=(*notes, *gpu_notes),
            environment=environment_of(device),
            gpus=gpus,
            processes=1 if accelerator is None else accelerator.most_processes(),
            has_mps=accelerator is not None and accelerator.can_serve_several() and has_mps(),
        )


class Imports(Message):
    """What a process imports before any backend.

    ``functions``: a case examines a function of the backend.
    """

    checks: tuple[str, ...] = BACKEND_CHECKS
    functions: bool = True


def import_checks(imports: Imports) -> None:
    """Import the modules of these checks."""
    from attncheck.harness.checks import case_checks

    with imports_kept():
        case_checks.import_checks(imports.checks, functions=imports.functions)


class Assignment(Message):
    """The run that the process works for. ``suites``: references of the suites of its cases.

    ``cases``: the keys of all selected cases; None for every case. ``by_default``, ``is_short``: each backend gets the
    cases of :func:`~attncheck.harness.run.selection.default_cases`. ``shares_probes``: as in
    :class:`~attncheck.harness.run.evaluate.RunPlan`. ``digests``: of each suite as the run has read it; a suite file
    that has changed since is refused. ``environment``: the run's circumstances, whose digest the records contain.
    ``timing``: settings of the check ``timing``. ``dump``, ``truths``: absolute paths. ``memory``: limits that the
    process enforces. ``gpu``: UUID of the GPU that the process must use, with exactly that environment; None for no
    such check.
    """

    suites: tuple[str, ...]
    cases: tuple[str, ...] | None = None
    by_default: bool = False
    is_short: bool = False
    shares_probes: bool = True
    digests: tuple[str, ...]
    device: str
    seed: int
    dump: Path | None
    truths: Path | None = None
    environment: Environment
    timing: TimingSettings
    memory: MemoryLimits = MemoryLimits()
    gpu: str | None = None


class Examined(Message):
    """A case is over. ``blind``: why it could not be examined at all.

    ``lost``: the record of the check that lost the device; the remaining checks are still due, in another process.
    """

    blind: str | None = None
    lost: Crashed | None = None


class CaseServer(Server):
    """Examines cases of one backend. The run calls :meth:`prepare`, :meth:`load`, :meth:`assign`, then the others."""

    def __init__(self, pipes: WorkerPipes, handed_over: "Backend | None" = None) -> None:
        """``handed_over``: the backend, if it is already loaded."""
        import_torch()
        self._pipes = pipes
        self._imports = Imports()
        self._backend = handed_over
        self._stores_truths = False
        self._refusal: QuestionError | None = None
        self._described: BackendDescription | None = None

    def prepare(self, imports: Imports) -> None:
        """Import what will be needed."""
        self._imports = imports
        import_checks(imports)

    def load(self, ref: str) -> None:
        """Load the backend with this reference."""
        from attncheck.backends.registry import BUILTIN
        from attncheck.harness.run.backend_loading import load_backend

        self._stores_truths = ref in BUILTIN
        try:
            if self._backend is None:
                self._backend = load_backend(ref, self._imports.checks, functions=self._imports.functions)
        except QuestionError as error:
            self._refusal = error

    def assign(self, assignment: Assignment) -> None:
        """Work for this run from now on."""
        from attncheck.harness.run.backend_loading import describe_backend

        self._memory, self._device = assignment.memory, assignment.device
        if self._backend is None:
            return
        try:
            if self._described is None:
                refuse_missing_mps(assignment.device)
                refuse_other_gpu(assignment.device, assignment.gpu, assignment.environment)
                keep_within(assignment.memory, assignment.device)
                self._described = describe_backend(self._backend, assignment.device)
            self._examiner = _examiner(assignment, self._described, stores_truths=self._stores_truths)
        except QuestionError as error:
            self._refusal = error
        else:
            self._cases = {case.key: case for case in self._examiner.plan.cases}

    def describe(self) -> BackendDescription:
        """Return the description of the backend."""
        if self._refusal is not None:
            raised = self._refusal.raised if isinstance(self._refusal, BackendLoadError) else ""
            raise RefusedError(str(self._refusal), raised)
        assert self._described is not None
        return self._described

    def reasons_against(self, cases: tuple[Case, ...]) -> tuple[tuple[str, ...], ...]:
        """Return why the backend's declarations exclude each of the cases; an empty tuple if they do not."""
        from attncheck.harness.run.backend_loading import reasons_against

        assert self._backend is not None
        return tuple(reasons_against(self._backend, self._device, cases))

    def examine(
        self,
        case: str,
        checks: tuple[str, ...],
        number: int,
        drawn: Case | None,
        emit: Callable[[Stage | Record], None],
    ) -> Examined:
        """Make ``checks`` on one selected case, given by its key ``suite/id``, in round ``number``.

        ``drawn``: the case itself, if no suite contains it. The events are stages that begin, and records.
        """
        from attncheck.harness.run.outcomes import DeviceLostError

        assert self._backend is not None
        examiner, chosen = self._examiner, drawn or self._cases[case]

        def begin(stage: str) -> None:
            emit(Stage(name=stage, reference_s=examiner.reference_s))

        self._pipes.mark(case)
        try:
            for record in examiner.records(chosen, self._backend, begin, checks=checks, round_number=number):
                if record.outcome in FALLEN_SHORT:
                    flush_c_streams()  # since the run adds the printed output to the record
                emit(with_limit_named(_without_debugger(record), self._memory))
        except DeviceLostError as lost:
            return Examined(lost=lost.record)
        fault = examiner.fault_of(chosen)
        return Examined(blind=None if fault is None else str(fault))


def _examiner(assignment: Assignment, description: "BackendDescription", *, stores_truths: bool = False) -> "Examiner":
    """Return the examiner for the assignment. Raises QuestionError if a suite has changed since the run began."""
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
        dump=assignment.dump,
        chosen=chosen,
        timing=assignment.timing,
        shares_probes=assignment.shares_probes,
        truths=assignment.truths,
    )
    return Examiner(plan, assignment.environment, stores_truths=stores_truths)


def _without_debugger(record: Record) -> Record:
    """Return ``record``, with a message that explains why a debugger ended at once: it had no terminal."""
    if record.outcome != "errored" or record.error_type != "BdbQuit":
        return record
    return record.model_copy(update={"message": _NEEDS_TERMINAL})
