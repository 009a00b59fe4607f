"""One run: what it examines and where, its records as they arrive, and the header of its run file.

The command line, ``attncheck.examine``, the pytest plugin, ``fuzz`` and ``warm`` all open their runs here, so that they
report the same errors. An executor loads the backends and examines: in this process, in others, or on a cluster. Loads
no torch if the backends have processes of their own.
"""

import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attncheck.cases.model import Case
from attncheck.cases.outline import keys_of, shape_of
from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.run.outcomes import BackendDescription, DeviceLostError, RecordedQuestion
from attncheck.harness.run.preparation import choose_backends, refuse_unavailable
from attncheck.harness.run.selection import (
    DEFAULT_ROUNDS,
    RunPlan,
    Selection,
    check_seed,
    count_questions,
    default_cases,
    default_suites,
    fit_pages,
)
from attncheck.harness.truth.shared_folder import truths_folder
from attncheck.reference.spec import BACKEND_CHECKS, default_checks
from attncheck.reports.run_file.header import (
    CaseInfo,
    Environment,
    RecordOptions,
    RunHeader,
    SuiteInfo,
    SurveyedBackend,
)
from attncheck.reports.run_file.records import FALLEN_SHORT, Record
from attncheck.reports.run_file.store import now
from attncheck.reports.run_file.timings import TIMING

if TYPE_CHECKING:
    from attncheck.harness.run.expectations import Expectations
    from attncheck.harness.run.options import RunOptions

Costs = Mapping[tuple[str, str, str], float]
"""Seconds that a check took in earlier runs, by reference of the backend, hash of the case and check."""

See = Callable[[Record], None]
"""Function that is called with each record as it arrives."""


class DeviceChooser(Protocol):
    """One or more processes in which a run examines, and which choose its device."""

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment on it."""


class Describer(DeviceChooser, Protocol):
    """Loads and describes the backends of a run."""

    def begin(self, selection: Selection, plan: RunPlan, environment: Environment) -> None:
        """Accept the run to examine. Call it before :meth:`describe`, and again if the run changes."""

    def describe(self, refs: Sequence[str]) -> Sequence[BackendDescription | QuestionError]:
        """Return the description of each of ``refs``, or the reason why it names no backend to examine."""


class CaseExaminer(Protocol):
    """Examines the cases of a plan."""

    @property
    def blind(self) -> list[QuestionError]:
        """Errors of cases that could not be examined at all."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how the run was examined, for the end of its report."""

    def run(self) -> Generator[Record, None, None]:
        """Yield each record as it is found."""


class Executor(Describer, Protocol):
    """Where a run examines: this process, other processes of this machine, or a cluster."""

    @property
    def fits_pages(self) -> bool:
        """Whether it accepts other suites once it has described a backend, so that page sizes can be fitted."""

    def examiner(self, run: "Run", costs: Callable[[], Costs] = dict) -> CaseExaminer:
        """Return what examines the questions of ``run``.

        ``costs``: reads what checks took in earlier runs, by which the work may be divided.
        """

    def close(self, *, at_once: bool = False) -> None:
        """End all processes. May be called repeatedly."""


@dataclass(frozen=True)
class Run:
    """A run that is ready to begin: its plan, its environment, its backends, and notes on how they were chosen.

    ``selection``: the selection narrowed to the suites of the backends. ``notes``: on the device and the suites.
    ``choice_notes``: on the choice of backends. ``records``: those found so far.
    """

    options: "RunOptions"
    selection: Selection
    plan: RunPlan
    environment: Environment
    backends: tuple[BackendDescription, ...] = ()
    notes: tuple[str, ...] = ()
    choice_notes: tuple[str, ...] = ()
    records: list[Record] = field(default_factory=list)

    @classmethod
    def open(
        cls,
        selection: Selection,
        options: "RunOptions",
        describer: Describer,
        *,
        chooser: DeviceChooser | None = None,
        timing: TimingSettings | None = None,
        keeps_unavailable: bool = False,
        fits_pages: bool = False,
    ) -> "Run":
        """Open the run of ``selection`` over the backends of ``options``, which are loaded by ``describer``.

        ``chooser``: chooses the device. If it is None, ``describer`` does. ``timing``: None for that of ``options``.
        ``keeps_unavailable``: whether named backends that cannot run here stay in the run instead of being refused.
        ``fits_pages``: whether default page sizes and layouts of suites are replaced if the named backends do not
        accept them (:func:`fit_pages`).

        Raises:
            QuestionError: the device is not there, the seed is negative, a backend cannot be loaded, or a named one
                cannot run here.
            WorkerError: attncheck itself failed in one of the processes.
        """
        refs = options.backend_refs
        is_in_rounds = refs is not None and selection.is_timed and not options.in_process
        device, notes, environment = (chooser or describer).choose_device(selection.device_wishes, options.device)
        plan = RunPlan(
            cases=selection.cases,
            checks=selection.checks_on(device),
            device=device,
            seed=check_seed(options.seed),
            dump=options.dump,
            timing=timing or options.timing,
            rounds=options.rounds or (DEFAULT_ROUNDS if is_in_rounds else 1),
            truths=truths_folder() if options.cache else None,
            until_failure=options.until_failure,
            telling_first=options.deadline not in (None, math.inf),
        )
        if refs is None:
            return cls(options, selection, plan, environment, (), notes)
        selection = replace(selection, is_short=not refs and selection.by_default and not selection.names_cases)
        describer.begin(selection, plan, environment)
        backends, choice_notes = choose_backends(refs, selection.suites, selection.cases, describer.describe)
        if refs and not keeps_unavailable:
            refuse_unavailable(backends)
        if refs and fits_pages:
            suites = default_suites(selection, backends) if selection.by_default else {}
            fitted, page_notes = fit_pages(selection, backends, suites)
            notes = (*notes, *page_notes)
            if fitted is not selection:
                selection, plan = fitted, replace(plan, cases=fitted.cases)
                describer.begin(selection, plan, environment)
        if selection.by_default:
            suites = default_suites(selection, backends)
            chosen = default_cases(selection, backends, is_short=selection.is_short)
            notes = (*notes, *_suite_notes(selection, suites, chosen))
            selection = selection.of_suites(suites.values(), frozenset().union(*chosen.values()))
            plan = replace(plan, cases=selection.cases, chosen=chosen)
        if options.shard is not None:
            plan = replace(plan, shard=options.shard, shards=options.shard.numbers(selection.cases))
        return cls(options, selection, plan, environment, backends, notes, choice_notes)

    @property
    def num_questions(self) -> int:
        """How many times the whole run gives a case to a process of a backend."""
        return count_questions(self.plan, [each.ref for each in self.backends])

    def header(self, notes: Sequence[str] | None = None, surveyed: Sequence[SurveyedBackend] = ()) -> RunHeader:
        """Return the header of the run file. ``notes``: None for those of the run; notes of the suites are appended."""
        plan, selection, expect = self.plan, self.selection, self.options.expect
        checks = plan.checks or _checks_of(plan)
        options = RecordOptions(expect="" if expect is None else digest_of(expect))
        if TIMING in checks:
            times = {"time_limit": plan.timing.limit_s, "warm_cache": plan.timing.warm, "kernels": plan.timing.kernels}
            options = options.model_copy(update=times)
        counts = {suite.name: sum(case.suite == suite.name for case in plan.cases) for suite in selection.suites}
        suite_notes = (f"suite {suite.name}: {note}" for suite in selection.suites for note in suite.notes)
        return RunHeader(
            started=now(),
            environment=self.environment,
            suites=tuple(
                SuiteInfo(name=suite.name, ref=ref, cases=counts[suite.name], digest=suite.hash)
                for suite, ref in zip(selection.suites, selection.refs, strict=True)
            ),
            cases=tuple(map(self._case_info, plan.cases)),
            checks=checks,
            device=plan.device,
            seed=plan.seed,
            rounds=plan.rounds,
            shard="" if plan.shard is None else str(plan.shard),
            backends=tuple(each.info.model_copy(update={"files": _files_of(each)}) for each in self.backends),
            surveyed=tuple(surveyed),
            options=options,
            command=self.options.command,
            notes=(*(self.notes if notes is None else notes), *suite_notes),
        )

    def _case_info(self, case: Case) -> CaseInfo:
        names = tuple(each.name for each in self.backends if self.plan.includes(each.ref, case))
        return CaseInfo(
            suite=case.suite,
            id=case.id,
            shape=shape_of(case),
            description=case.description,
            keys=keys_of(case),
            weight=case.weight,
            checks=() if self.plan.until_failure or not names else self.plan.checks_of(case),
            backends=() if len(names) == len(self.backends) else names,
            shard=self.plan.shards.get(case.key, 0),
        )

    def expectations(
        self, header: RunHeader, known: Sequence[RecordedQuestion] = (), selected: Sequence[RecordedQuestion] = ()
    ) -> "Expectations | None":
        """Return the expectations of the option ``expect``, with the records so far, or None without that option.

        ``known``, ``selected``: the functions of providers that can be examined, and those that are, besides cases.
        """
        if self.options.expect is None:
            return None
        from attncheck.harness.run.expectations import Expectations, load_expectations

        expectations = Expectations(
            load_expectations(self.options.expect),
            cases=(*self.selection.all_cases, *known),
            selected=(*filter(self.plan.is_in_shard, self.selection.cases), *selected),
            backends=[backend.name for backend in header.backends],
            checks=header.checks,
            today=datetime.now(UTC).date(),
            strict=self.options.strict_expect,
        )
        for record in self.records:
            expectations.recall(record)
        return expectations

    def examine(
        self,
        examiner: CaseExaminer,
        *see: See,
        functions: Iterable[Record] = (),
        expectations: "Expectations | None" = None,
    ) -> bool:
        """Examine everything; return whether the run ended early, after ``maxfail`` records that did not pass.

        Each record, judged by ``expectations``, is appended to :attr:`records`, then each of ``see`` is called with it.
        ``functions``: the records of providers, which follow those of the backends.

        Raises:
            DeviceLostError: a backend lost the device of this process; the record of its check is the last one.
        """
        short, maxfail = 0, self.options.maxfail
        with closing(examiner.run()) as examined:
            try:
                for found in chain(examined, functions):
                    record = found if expectations is None else expectations.apply(found)
                    self._keep(record, see)
                    short += record.outcome in FALLEN_SHORT
                    if maxfail is not None and short >= maxfail:
                        return True
            except DeviceLostError as lost:
                self._keep(lost.record, see)
                raise
        return False

    def _keep(self, record: Record, see: Sequence[See]) -> None:
        self.records.append(record)
        for each in see:
            each(record)


def _suite_notes(
    selection: Selection, suites: Mapping[str, str], chosen: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """Return a note on each backend's suite, and on cases that a default run omits.

    Empty if all backends get one complete suite.
    ``suites``, ``chosen``: by reference, the suite of a backend and the keys of its cases in ``selection``.
    """
    refs_of: dict[str, list[str]] = {}
    is_short = False
    for ref, suite in suites.items():
        num_chosen = len(chosen[ref])
        all_cases = sum(case.suite == suite for case in selection.cases)
        what = f"suite {suite}" if all_cases else f"no case of suite {suite}"
        if num_chosen < all_cases:
            is_short = True
            what = f"{num_chosen} of {all_cases} cases of suite {suite}"
        refs_of.setdefault(what, []).append(ref)
    if len(refs_of) < 2 and not is_short:
        return ()
    parts = [f"{', '.join(refs)}: {what}" for what, refs in refs_of.items()]
    return ("; ".join([*parts, "--case '*' selects all"] if is_short else parts),)


def _checks_of(plan: RunPlan) -> tuple[str, ...]:
    """Return the default checks and those that a case of the plan names."""
    named = {check for case in plan.cases for check in case.checks or ()}
    return tuple(check for check in BACKEND_CHECKS if check in {*default_checks(plan.device), *named})


def _files_of(backend: BackendDescription) -> dict[str, str]:
    """Return the digests of the files of a backend; if it was not loaded, of the file that its reference names."""
    digest = file_digest(backend.ref)
    named = {Path(backend.ref.rpartition(":")[0] or backend.ref).name: digest} if digest else {}
    return backend.info.files or named


def file_digest(ref: str) -> str:
    """Return the digest of the .py file in a backend reference; empty if it names none."""
    file = Path(ref.rpartition(":")[0] or ref)
    return digest_of(file) if file.suffix == ".py" else ""


def digest_of(file: Path) -> str:
    """Return the first 12 hex digits of the SHA-256 of ``file``; empty if it is not a file."""
    if not file.is_file():
        return ""
    with file.open("rb") as content:  # read in pieces: a compiled library may be large
        return hashlib.file_digest(content, "sha256").hexdigest()[:12]
