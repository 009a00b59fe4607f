"""Evaluate questions in this process: problem, truth, checks, and the settings of the process."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

import attncheck
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.declarations import FUNCTION_PATHS, STATE_PATH
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.errors import BackendUnavailableError, QuestionError
from attncheck.harness.checks.case_checks import AttentionChecks, CaseChecks, finding_of
from attncheck.harness.checks.findings import Broken, NotExamined
from attncheck.harness.checks.interface import CheckedCase, SelectedCases, SharedByChecks
from attncheck.harness.device import accelerator_of, collect_environment
from attncheck.harness.driver.foreign_code import (
    StageError,
    declared_reasons,
    unavailable_case_reasons,
    unsupported_reasons,
)
from attncheck.harness.driver.observation import Raised, capture_exception, passes_foreign_code
from attncheck.harness.host import is_refused_memory
from attncheck.harness.problem.problem import Problem, build_problem
from attncheck.harness.problem.sizes import shortage
from attncheck.harness.run.outcomes import (
    OURSELVES,
    Backend,
    BackendDescription,
    Circumstances,
    RecordedFinding,
    absent,
    is_device_error,
    raise_if_device_is_lost,
    record_of,
)
from attncheck.harness.run.selection import RunPlan, unanswered_reasons
from attncheck.harness.truth.truth import Truth, TruthCache
from attncheck.reports.run_file.header import Environment
from attncheck.reports.run_file.records import FALLEN_SHORT, Record
from attncheck.reports.run_file.timings import TIMING

if TYPE_CHECKING:
    from attncheck.harness.checks.timing.check import TimingCheck

# Process-wide settings during an examination: float32 precision, torch's threads, the current device.

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which a user sets the number of torch's threads."""


@contextmanager
def exact_float32() -> Iterator[None]:
    """Disable TF32 during the context, whatever the caller's setting, and restore the setting afterwards.

    torch has an old and a new setting, and refuses to read the old one if only the new one was set. Both are restored.
    """
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [product.fp32_precision for product in products]
    try:
        stated = torch.get_float32_matmul_precision()
    except RuntimeError:
        stated = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if stated is not None:
            torch.set_float32_matmul_precision(stated)
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision


def checking_threads(there: int) -> int:
    """Return the number of torch threads for all checks except ``timing``; ``there``: the current number.

    It is 1 unless the environment sets a number: on the small tensors of a case, threads mostly wait for each other.
    """
    return there if any(os.environ.get(name) for name in THREAD_VARIABLES) else 1


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Use ``number`` threads for torch's CPU operators during the context."""
    before = torch.get_num_threads()
    if before != number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if before != number:
            torch.set_num_threads(before)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Make a GPU the current device during the context, as an engine's worker does.

    A kernel launched without an explicit device runs on the current one, wherever its tensors are.
    """
    accelerator = accelerator_of(device)
    if accelerator is None:
        yield
        return
    selected = accelerator.module().device(device)
    selected.__enter__()
    try:
        yield
    finally:
        with suppress(torch.AcceleratorError):  # raised on a lost device, which is reported elsewhere
            selected.__exit__(None, None, None)


def environment_of(device: str) -> Environment:
    """Return the environment on ``device``, with the float32 policy that an examination sets."""
    with exact_float32():
        return collect_environment(device)


def _ignore(_stage: str) -> None:
    pass


class Examiner:
    """Examines a plan, one pair of case and backend at a time. Keeps problem and truth of the latest case for reuse.

    ``blind``: errors of cases that could not be examined at all. If there are any, the command line exits with code 2.
    ``environment``: its digest goes into the records. None uses the environment of this process.
    ``clocks``: the timing check. If it is None, one is built from the settings of the plan.
    ``stores_truths``: whether truths computed here are stored for other processes. Set it only in a process that runs
    no code but attncheck's.
    """

    notes = ()

    def __init__(
        self,
        plan: RunPlan,
        environment: Environment | None = None,
        clocks: "TimingCheck | None" = None,
        *,
        stores_truths: bool = False,
    ) -> None:
        self.plan = plan
        self.blind: list[QuestionError] = []
        self.device = torch.device(plan.device)
        self.environment = environment or environment_of(plan.device)
        self._timing_threads = torch.get_num_threads()
        self._num_threads = checking_threads(self._timing_threads)
        self._latest: tuple[Case, Problem, Truth] | None = None
        self._faults: dict[Case, QuestionError] = {}
        self._truths = TruthCache(
            self.device, plan.truths, machine=_arithmetic_of(self.environment), stores=stores_truths
        )
        self._shared = SharedByChecks(
            plan.timing, SelectedCases(plan.cases_with), self._truths, *(() if clocks is None else (clocks,))
        )
        self._circumstances = Circumstances(plan.seed, self.environment.digest, attncheck.__version__)

    @property
    def reference_s(self) -> float:
        """Seconds that computing the truth of the latest case took; 0 if there is none yet."""
        return 0.0 if self._latest is None else self._latest[2].computed_s

    def run(self) -> Generator[Record, None, None]:
        """Yield every record, grouped by case, then by backend."""
        over: set[tuple[str, str]] = set()
        for case in self.plan.cases:
            for backend in self.plan.backends:
                left = self.plan.checks_left(backend.ref, case)
                left = tuple(check for check in left if not over & {(backend.ref, check), (backend.ref, "")})
                if left and self.plan.includes(backend.ref, case) and self.plan.is_in_shard(case):
                    for record in self.records(case, backend, checks=left):
                        yield record
                        if self.plan.until_failure and record.outcome in FALLEN_SHORT:
                            is_over = self.plan.until_failure == "backend"
                            over.add((backend.ref, "" if is_over else record.check))
                            if is_over:
                                break

    def records(
        self,
        case: Case,
        backend: Backend,
        begin: Callable[[str], None] = _ignore,
        *,
        checks: tuple[str, ...] | None = None,
        round_number: int = 0,
    ) -> Iterator[Record]:
        """Yield the records of one pair as they are found.

        ``begin`` is called with each stage entered, such as ``check lse``. ``checks``: the checks to run, or None for
        all that the plan has for the case. ``round_number``: the round that the records carry.

        Raises:
            DeviceLostError: a check lost the device; the remaining checks do not run.
        """
        checks = self.plan.checks_of(case) if checks is None else checks
        self._circumstances = replace(self._circumstances, round=round_number)
        if isinstance(backend, BackendDescription):
            for check in checks:
                yield absent(self._circumstances, case, backend, check)
            return
        with exact_float32(), current_device(self.device), num_threads(self._num_threads):
            prepared = self._prepare(case, backend, begin)
            if prepared is None:
                return
            for check in checks:
                finding: RecordedFinding
                if isinstance(prepared, NotExamined | Raised | BackendUnavailableError):
                    finding, took = prepared, 0.0
                else:
                    begin(f"check {check}")
                    began = perf_counter()
                    finding = self._finding(prepared, check)
                    took = perf_counter() - began
                    if isinstance(finding, Broken) and self.plan.dump is not None:  # before the caller can stop
                        note = self._dump(prepared, self.plan.dump, backend.name)
                        finding = replace(finding, details=(*finding.details, *note))
                record = record_of(self._circumstances, case, backend, check, finding, took)
                raise_if_device_is_lost(record, self.device)
                yield record

    def _finding(self, prepared: CaseChecks, check: str) -> RecordedFinding:
        try:
            with num_threads(self._timing_threads if check == TIMING else self._num_threads):
                return finding_of(prepared, check)
        except StageError as failure:  # checks also call the backend's codec
            return failure.raised
        except BackendUnavailableError as error:
            return error
        except Exception as error:  # noqa: BLE001 (report it, and go on)
            # A backend's objects can run its code wherever attncheck reads them.
            stage = f"check {check}" if passes_foreign_code(error) else OURSELVES
            raised = capture_exception(stage, error)
            if is_refused_memory(raised.error_type, raised.message):
                return NotExamined((f"out of memory during the check: {raised.message}",), "attncheck")
            return raised

    def fault_of(self, case: Case) -> QuestionError | None:
        """Return the error of the case if examining it was tried and was impossible, else None."""
        return self._faults.get(case)

    def _prepare(
        self, case: Case, backend: LoadedBackend, begin: Callable[[str], None]
    ) -> CaseChecks | NotExamined | Raised | BackendUnavailableError | None:
        """Return the checks of the case, or the finding of each if none can run; None if the case is at fault."""
        cls = backend.backend
        begin("declarations")
        try:
            absent_reasons = self._unavailable(cls, case)
            # Skip the declarations of a class that cannot run here: they may raise for the same reason.
            reasons = () if absent_reasons else unsupported_reasons(cls, case)
        except StageError as failure:
            return failure.raised
        if absent_reasons:
            return BackendUnavailableError(backend.name, absent_reasons)
        unanswered = unanswered_reasons(case)
        if unanswered:
            return NotExamined(unanswered, "attncheck")
        excluded = cls.conventions.excluded_strides(case.strides)
        if excluded:
            return NotExamined((f"{excluded}: operand_strides 'rows' is declared",))
        if case in self._faults:
            return None
        begin("the preparation of the case")
        try:
            if self._latest is None or self._latest[0] != case:
                self._latest = None  # free the tensors of the previous case before free memory is measured
                lacking = shortage(case, self.device)
                if lacking is not None:
                    return BackendUnavailableError(backend.name, (lacking,))
            return self._examination(case, backend, reasons)
        except StageError as failure:
            return failure.raised
        except QuestionError as error:
            fault = error if case.key in str(error) else QuestionError(f"case {case.key}: {error}")
            self._faults[case] = fault.with_traceback(None)  # its frames would keep the case's tensors alive
            self.blind.append(fault)
            return None
        except (MemoryError, RuntimeError) as error:  # the declarations ran before and may have lost the device
            if is_refused_memory(type(error).__name__, str(error)):
                reason = f"out of memory while the truth was computed: {error}"
                return BackendUnavailableError(backend.name, (reason,))
            if not is_device_error(error, self.device):
                raise
            return capture_exception(OURSELVES, error)

    def _dump(self, examination: CaseChecks, folder: Path, backend: str) -> tuple[str, ...]:
        """Write the case to ``folder``. Return a note if writing fails; the verdict does not change."""
        try:
            with suppress(torch.AcceleratorError):  # a lost device gives no tensors
                examination.dump(folder, backend)
        except OSError as error:
            return (f"--dump {folder}: {error.strerror or error}; the tensors of this case are not there",)
        return ()

    def _unavailable(self, backend: type[AttentionBackend], case: Case) -> tuple[str, ...]:
        device = self.plan.device
        everywhere = declared_reasons(lambda: backend.unavailable_reasons(device))
        return (*everywhere, *unavailable_case_reasons(backend, case, device))

    def _examination(self, case: Case, backend: LoadedBackend, reasons: tuple[str, ...]) -> CaseChecks:
        if backend.backend.builder_only and case.batch.path.name != STATE_PATH:
            from attncheck.harness.checks.builder import BuilderChecks

            return BuilderChecks(backend.backend, case, self.plan.seed, self.device, reasons)
        if case.batch.path.name in FUNCTION_PATHS:
            from attncheck.harness.checks.functions import FunctionChecks

            return FunctionChecks(backend.backend, case, self.plan.seed, self.device, reasons)
        if case.batch.path.name == STATE_PATH or backend.backend.is_ssm():  # its impl takes no step of attention
            from attncheck.harness.checks.recurrence import RecurrenceChecks

            return RecurrenceChecks(backend.backend, case, self.plan.seed, self.device, reasons)
        if case.batch.path.name == "ranks":
            from attncheck.harness.checks.ranks.check import RankChecks

            return RankChecks(backend, *self._problem_and_truth(case), self.device, reasons)
        return AttentionChecks(CheckedCase(backend, *self._problem_and_truth(case), self.device, reasons, self._shared))

    def _problem_and_truth(self, case: Case) -> tuple[Problem, Truth]:
        if self._latest is None or self._latest[0] != case:
            problem = build_problem(case, self.plan.seed)
            self._latest = (case, problem, self._truths.truth_of(problem))
        return self._latest[1:]


def _arithmetic_of(environment: Environment) -> str:
    """Return what determines the last bits of a float64 sum, other than torch and its thread count."""
    return f"{environment.attncheck}, {environment.platform}, {environment.cpu}, {environment.device_name}"
