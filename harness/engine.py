"""Evaluation: a plan of cases and backends turned into records. Execution (where a process runs) is not its business.

An exception or a refusal of a backend is a record, never the end of a run; a case that cannot see what it asks about is
kept aside as a fault of the question. Must not know: files, terminals, pytest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

import attncheck
from attncheck.backends.contract import AttentionBackend
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.answerable import unanswered_reasons
from attncheck.harness.checks import cache_write, claims, containment, lse, next_step, numerics
from attncheck.harness.checks.cudagraph import GraphDesk, unexamined_reasons
from attncheck.harness.dump import dump_case
from attncheck.harness.environment import collect_environment
from attncheck.harness.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.functions.desk import FUNCTION_PATHS, FunctionDesk
from attncheck.harness.memory import shortage
from attncheck.harness.observation import Observation, Raised, capture
from attncheck.harness.outcomes import Circumstances, record_of, unavailable
from attncheck.harness.problem import Problem, build_problem
from attncheck.harness.runner import Session
from attncheck.harness.stages import StageError, declared_reasons
from attncheck.harness.truth import Truth, truth_of
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.records import Environment, Record

OURSELVES = "attncheck itself"
"""The stage of an exception that no backend raised: a fault of attncheck, which ends the command line with 3."""


@dataclass(frozen=True)
class Missing:
    """A backend that cannot be loaded on this machine, and why: each of its cases is ``unavailable``."""

    name: str
    ref: str
    reasons: tuple[str, ...]
    version: str = ""

    @property
    def features(self) -> frozenset[str]:
        """Unknown, since it cannot be loaded."""
        return frozenset()


@dataclass(frozen=True)
class Plan:
    """What is to be examined. ``checks`` of None: those each case asks for, or all.

    ``backends``: those that are examined in this process.
    """

    cases: tuple[Case, ...]
    backends: tuple[LoadedBackend | Missing, ...] = ()
    checks: tuple[str, ...] | None = None
    device: str = "cpu"
    seed: int = 0
    dump: Path | None = None

    def checks_of(self, case: Case) -> tuple[str, ...]:
        """The checks to make of ``case``, in the order they are reported."""
        asked = set(BACKEND_CHECKS if case.checks is None else case.checks)
        return tuple(name for name in BACKEND_CHECKS if name in asked and (self.checks is None or name in self.checks))


def environment_of(device: str) -> Environment:
    """The circumstances of an examination on ``device``, with the numerical policy that is in force while it lasts."""
    with _exact_float32():
        return collect_environment(device)


def _ignore(_stage: str) -> None:
    """For callers who need not know what is being done."""


class Examiner:
    """Examines a plan, pair by pair. Problem and truth of the latest case are kept for the backends that follow.

    blind: cases that could not be put at all; the command line ends with exit code 2 if there are any. environment:
    whose digest the records carry; None: this process's.
    """

    def __init__(self, plan: Plan, environment: Environment | None = None) -> None:
        self.plan = plan
        self.blind: list[QuestionError] = []
        self.device = torch.device(plan.device)
        self.environment = environment or environment_of(plan.device)
        self._latest: tuple[Case, Problem, Truth] | None = None
        self._faults: dict[Case, QuestionError] = {}
        self._graphs = GraphDesk(plan.seed, self.device)
        self._circumstances = Circumstances(plan.seed, self.environment.digest, attncheck.__version__)

    def run(self) -> Iterator[Record]:
        """Every record, grouped by case, then by backend."""
        for case in self.plan.cases:
            for backend in self.plan.backends:
                yield from self.examine(case, backend)

    def examine(self, case: Case, backend: LoadedBackend | Missing) -> list[Record]:
        """The records of one pair; empty where the case itself is at fault (see ``blind``)."""
        return list(self.records(case, backend))

    def records(
        self, case: Case, backend: LoadedBackend | Missing, begin: Callable[[str], None] = _ignore
    ) -> Iterator[Record]:
        """The same, each as it is found; ``begin`` is told of every stage that is entered, such as ``check lse``."""
        checks = self.plan.checks_of(case)
        if isinstance(backend, Missing):
            for check in checks:
                yield unavailable(self._circumstances, case, backend, check, backend.reasons)
            return
        with _exact_float32(), _current(self.device):
            yield from self._records(case, backend, checks, begin)

    def fault_of(self, case: Case) -> QuestionError | None:
        """Why the case could not be put, if it was tried and could not."""
        return self._faults.get(case)

    def _records(
        self, case: Case, backend: LoadedBackend, checks: tuple[str, ...], begin: Callable[[str], None]
    ) -> Iterator[Record]:
        def same_for_all(finding: Finding) -> list[Record]:
            return [record_of(self._circumstances, case, backend, check, finding, 0.0) for check in checks]

        def gone(reasons: tuple[str, ...]) -> list[Record]:
            return [unavailable(self._circumstances, case, backend, check, reasons) for check in checks]

        cls = backend.backend
        begin("declarations")
        try:
            absent = declared_reasons(lambda: self._unavailable(cls, case))
            reasons = declared_reasons(lambda: cls.unsupported_reasons(case.layer, case.cache, case.batch))
        except StageError as failure:
            yield from same_for_all(failure.raised)
            return
        if absent:
            yield from gone(absent)
            return
        unanswered = unanswered_reasons(case)
        if unanswered:
            yield from same_for_all(NotExamined(unanswered, "attncheck"))
            return
        if case in self._faults:
            return
        begin("the preparation of the case")
        if self._latest is None or self._latest[0] != case:
            self._latest = None  # before free memory is looked at: the case before needs none any more
            lacking = shortage(case, self.device)
            if lacking is not None:
                yield from gone((lacking,))
                return
        try:
            desk = self._desk(case, backend, reasons)
        except StageError as failure:
            yield from same_for_all(failure.raised)
            return
        except QuestionError as error:
            self._faults[case] = error.with_traceback(None)  # whose frames hold the case's tensors
            self.blind.append(error)
            return
        except (MemoryError, torch.OutOfMemoryError) as error:
            reason = f"out of memory while the truth was computed: {error}"
            yield from gone((reason,))
            return
        for check in checks:
            begin(f"check {check}")
            began = perf_counter()
            try:
                finding = desk.examine(check)
            except StageError as failure:  # a check enters the backend's code, its codec, as well
                finding = failure.raised
            except Exception as error:  # noqa: BLE001 (ours: one case is lost and told, the rest of the run is not)
                finding = capture(OURSELVES, error)
            record = record_of(self._circumstances, case, backend, check, finding, perf_counter() - began)
            if isinstance(finding, Broken) and self.plan.dump is not None:
                desk.dump(self.plan.dump, backend.name)  # whoever stops at this record will not come back
            yield record

    def _unavailable(self, backend: type[AttentionBackend], case: Case) -> list[str]:
        device, asked = self.plan.device, (case.layer, case.cache, case.batch)
        return [*backend.unavailable_reasons(device), *backend.unavailable_case_reasons(device, *asked)]

    def _desk(self, case: Case, backend: LoadedBackend, reasons: tuple[str, ...]) -> "_Desk | FunctionDesk":
        if case.batch.path.name in FUNCTION_PATHS:
            return FunctionDesk(backend.backend, case, self.plan.seed, self.device, reasons)
        return _Desk(backend, *self._problem_and_truth(case), self.device, reasons, self._graphs)

    def _problem_and_truth(self, case: Case) -> tuple[Problem, Truth]:
        if self._latest is None or self._latest[0] != case:
            problem = build_problem(case, self.plan.seed)
            self._latest = (case, problem, truth_of(problem, self.device))
        return self._latest[1:]


def unasked(check: str, case: Case, features: frozenset[str]) -> NotExamined | None:
    """Why ``check`` asks a backend of these features nothing, as far as can be told without it; None: it asks."""
    if case.batch.path.name in FUNCTION_PATHS:
        return None
    if check == "lse" and "lse" not in features:
        return NotExamined(("feature 'lse' is not declared",))
    if check == "cudagraph" and (reasons := unexamined_reasons(case)):
        return NotExamined(reasons, "attncheck")
    return None


class _Desk:
    """One case of one backend: the session and the first observation are shared by the checks that need them."""

    def __init__(
        self,
        backend: LoadedBackend,
        problem: Problem,
        truth: Truth,
        device: torch.device,
        reasons: tuple[str, ...],
        graphs: GraphDesk,
    ) -> None:
        self._backend, self._problem, self._truth = backend.backend, problem, truth
        self._device, self._reasons, self._graphs = device, reasons, graphs
        self._session: Session | Raised | None = None
        self._seen: Observation | Raised | None = None

    def dump(self, folder: Path, backend: str) -> None:
        """The case as a file, with the first observation if the backend was driven at all."""
        dump_case(folder, self._problem, self._truth, backend, self._seen)

    def examine(self, check: str) -> Finding:
        """The finding of one check."""
        if self._reasons:
            return self._undeclared(check)
        if (skipped := unasked(check, self._problem.case, self._backend.features)) is not None:
            return skipped
        if check == "cudagraph":
            return self._graphs.examine(self._backend, self._problem.case)
        session, seen = self._observe()
        if check == "claims":
            if isinstance(session, Raised):
                return claims.broken_promise(session)
            return claims.examine_declared(session, seen)
        if isinstance(session, Raised):
            return session
        if isinstance(seen, Raised):
            return seen
        match check:
            case "numerics":
                first = numerics.examine(self._problem, self._truth, seen)
                if not isinstance(first, Holds):
                    return first
                return next_step.examine(self._problem, self._truth, session, first)
            case "lse":
                return lse.examine(self._problem, self._truth, seen, self._backend.conventions)
            case "cache_write":
                return cache_write.examine(self._problem, session, seen)
            case "containment":
                return containment.examine(self._problem, self._truth, session, seen)
            case _:
                raise ValueError(f"check {check!r} has no examiner; known: {', '.join(BACKEND_CHECKS)}")

    def _undeclared(self, check: str) -> Finding:
        if check != "claims":
            return NotExamined(self._reasons)
        skipped = claims.unprobed(self._problem, self._backend.features)
        if skipped is not None:
            return skipped
        session, seen = self._observe()
        attempt = session if isinstance(session, Raised) else seen
        return claims.examine_undeclared(self._problem, self._truth, attempt, self._reasons)

    def _observe(self) -> tuple[Session | Raised, Observation | Raised]:
        if self._session is None:
            try:
                self._session = Session(self._backend, self._problem, self._device)
            except StageError as failure:
                self._session = failure.raised
        if self._seen is None:
            self._seen = self._session if isinstance(self._session, Raised) else self._session.run()
        return self._session, self._seen


@contextmanager
def _exact_float32() -> Iterator[None]:
    """No TF32 while anything is examined, whatever the caller's setting: float32 means float32.

    torch keeps two accounts of it and refuses to read the old one where only the new one was set: both are put back.
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


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one, as a worker does: a kernel launched by hand goes there, wherever its tensors are."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield
