"""Prepares a run: from a selection of cases to the plan, the backends and the environment.

The command line, the process of a backend, ``attncheck.examine`` and the pytest plugin all prepare runs here, so that
they report the same errors. The caller chooses what examines the plan. Loads no torch if the backends have processes of
their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

from attncheck.backends.registry import LoadedBackend
from attncheck.cases.outline import keys_of, shape_of
from attncheck.errors import QuestionError
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.run.backend_choice import choose_backends, refuse_unavailable, suite_device
from attncheck.harness.run.backend_description import BackendDescription, DescribeBackends
from attncheck.harness.run.page_choice import fit_pages
from attncheck.harness.run.plan import RunPlan, UnavailableBackend
from attncheck.harness.run.selection import Selection, check_seed, default_cases, default_suites
from attncheck.harness.run.sharding import Shard
from attncheck.reference.spec import BACKEND_CHECKS, default_checks
from attncheck.reports.run_file.header import (
    BackendInfo,
    CaseInfo,
    Environment,
    RecordOptions,
    RunHeader,
    SuiteInfo,
    SurveyedBackend,
)
from attncheck.reports.run_file.store import now
from attncheck.reports.run_file.timings import TIMING


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run.

    ``device``: None selects the default device of the suites, else ``cuda`` if there is a GPU, else ``cpu``.
    ``dump``: the folder for tensors of failing cases.
    ``rounds``: the number of processes in which each backend is timed, one after another.
    ``truths``: the folder of stored truths, or None to compute all of them.
    ``shard``: the shard to examine, or None to examine all cases. ``until_failure``: as in :class:`RunPlan`.
    """

    device: str | None = None
    seed: int = 0
    dump: Path | None = None
    timing: TimingSettings = field(default_factory=TimingSettings)
    rounds: int = 1
    truths: Path | None = None
    shard: Shard | None = None
    until_failure: Literal["", "check", "backend"] = ""


class DeviceChooser(Protocol):
    """One or more processes in which a run examines, and which choose its device."""

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment on it."""


class ProcessPool(DeviceChooser, Protocol):
    """Processes that load and describe the backends of a run."""

    def begin(self, selection: Selection, plan: RunPlan, environment: Environment) -> None:
        """Give the processes the run to examine. Call it before :meth:`describe`, and again if the run changes."""

    def describe(self, refs: Sequence[str]) -> Sequence[BackendDescription | QuestionError]:
        """Return the description of each of ``refs``, or the reason why it names no backend to examine."""


@dataclass(frozen=True)
class PreparedRun:
    """The plan of a run, its environment, its backends, and notes on how they were chosen.

    ``selection``: the selection narrowed to the suites of the backends. ``notes``: on the device and the suites.
    ``choice_notes``: on the choice of backends.
    """

    selection: Selection
    plan: RunPlan
    environment: Environment
    backends: tuple[BackendDescription, ...] = ()
    notes: tuple[str, ...] = ()
    choice_notes: tuple[str, ...] = ()


def prepare_run(
    selection: Selection,
    refs: Sequence[str] | None,
    settings: RunSettings,
    *,
    pool: ProcessPool | None = None,
    chooser: DeviceChooser | None = None,
    loaded: Sequence[LoadedBackend | UnavailableBackend] = (),
    environment: Environment | None = None,
    keeps_unavailable: bool = False,
    fits_pages: bool = False,
) -> PreparedRun:
    """Plan the run of ``selection`` over the backends of ``refs``.

    ``refs``: if it is empty, the default backends are used; if it is None, the run has no backend.
    ``pool``: the processes that load the backends. If it is None, they are loaded in this process, and the plan has
    them.
    ``chooser``: chooses the device. If it is None, ``pool`` does, or this process if there is no pool.
    ``loaded``: backends that are loaded already.
    ``environment``: the environment if there is neither pool nor chooser. If it is None, it is collected in this
    process.
    ``keeps_unavailable``: whether backends of ``refs`` that cannot run here stay in the run instead of being refused.
    ``fits_pages``: whether default page sizes and layouts of suites are replaced if the backends of ``refs`` do not
    accept them (:func:`fit_pages`).

    Raises:
        QuestionError: the device is not there, the seed is negative, a backend cannot be loaded, or one of ``refs``
            cannot run here.
        WorkerError: attncheck itself failed in one of the processes.
    """
    chooser = chooser or pool
    if chooser is None:
        from attncheck.harness.run.evaluation import environment_of

        device, notes = suite_device(selection.device_wishes, settings.device)
        environment = environment or environment_of(device)
    else:
        device, notes, environment = chooser.choose_device(selection.device_wishes, settings.device)
    plan = RunPlan(
        cases=selection.cases,
        checks=selection.checks_on(device),
        device=device,
        seed=check_seed(settings.seed),
        dump=settings.dump,
        timing=settings.timing,
        rounds=settings.rounds,
        truths=settings.truths,
        until_failure=settings.until_failure,
    )
    if refs is None:
        return PreparedRun(selection, plan, environment, (), notes)
    selection = replace(selection, is_short=not refs and selection.by_default and not selection.names_cases)
    if pool is None:
        from attncheck.harness.run.backend_loading import Loader

        loader = Loader(device, loaded)
        describe: DescribeBackends = loader.describe
    else:
        pool.begin(selection, plan, environment)
        describe = pool.describe
    backends, choice_notes = choose_backends(refs, selection.suites, selection.cases, describe)
    if refs and not keeps_unavailable:
        refuse_unavailable(backends)
    if refs and fits_pages:
        suites = default_suites(selection, backends) if selection.by_default else {}
        fitted, page_notes = fit_pages(selection, backends, suites)
        notes = (*notes, *page_notes)
        if fitted is not selection:
            selection, plan = fitted, replace(plan, cases=fitted.cases)
            if pool is not None:
                pool.begin(selection, plan, environment)
    if selection.by_default:
        suites = default_suites(selection, backends)
        chosen = default_cases(selection, backends, is_short=selection.is_short)
        notes = (*notes, *suite_notes(selection, suites, chosen))
        selection = selection.of_suites(suites.values(), frozenset().union(*chosen.values()))
        plan = replace(plan, cases=selection.cases, chosen=chosen)
    if settings.shard is not None:
        plan = replace(plan, shard=str(settings.shard), shard_keys=settings.shard.cases(selection.cases))
    if pool is None:
        plan = replace(plan, backends=loader.backends(backends))
    return PreparedRun(selection, plan, environment, backends, notes, choice_notes)


def suite_notes(
    selection: Selection, suites: Mapping[str, str], chosen: Mapping[str, frozenset[str]]
) -> tuple[str, ...]:
    """Return a note on each backend's suite and on cases that a default run omits; empty if all get one complete suite.

    ``suites``, ``chosen``: by reference, the suite of a backend and the keys of its cases in ``selection``.
    """
    refs_of: dict[str, list[str]] = {}
    is_short = False
    for ref, suite in suites.items():
        num_chosen, all_cases = len(chosen[ref]), sum(case.suite == suite for case in selection.cases)
        what = f"suite {suite}" if all_cases else f"no case of suite {suite}"
        if num_chosen < all_cases:
            is_short, what = True, f"{num_chosen} of {all_cases} cases of suite {suite}"
        refs_of.setdefault(what, []).append(ref)
    if len(refs_of) < 2 and not is_short:
        return ()
    parts = [f"{', '.join(refs)}: {what}" for what, refs in refs_of.items()]
    return ("; ".join([*parts, "--case '*' selects all"] if is_short else parts),)


def make_header(
    selection: Selection,
    plan: RunPlan,
    backends: Sequence[BackendInfo],
    environment: Environment,
    *,
    expect: Path | None = None,
    command: Sequence[str] = (),
    notes: Sequence[str] = (),
    surveyed: Sequence[SurveyedBackend] = (),
) -> RunHeader:
    """Return the header of the run of ``plan`` and ``backends``; notes of the suites are appended to ``notes``."""
    checks = plan.checks or _checks_of(plan)
    options = RecordOptions(expect="" if expect is None else _digest_of(expect))
    if TIMING in checks:
        times = {"time_limit": plan.timing.limit_s, "warm_cache": plan.timing.warm, "kernels": plan.timing.kernels}
        options = options.model_copy(update=times)
    counts = {suite.name: sum(case.suite == suite.name for case in plan.cases) for suite in selection.suites}
    return RunHeader(
        started=now(),
        environment=environment,
        suites=tuple(
            SuiteInfo(name=suite.name, ref=ref, cases=counts[suite.name], digest=suite.hash)
            for suite, ref in zip(selection.suites, selection.refs, strict=True)
        ),
        cases=tuple(
            CaseInfo(
                suite=c.suite,
                id=c.id,
                shape=shape_of(c),
                description=c.description,
                keys=keys_of(c),
                weight=c.weight,
            )
            for c in plan.cases
        ),
        checks=checks,
        device=plan.device,
        seed=plan.seed,
        rounds=plan.rounds,
        shard=plan.shard,
        backends=tuple(each.model_copy(update={"digest": file_digest(each.ref)}) for each in backends),
        surveyed=tuple(surveyed),
        options=options,
        command=tuple(command),
        notes=(*notes, *(f"suite {suite.name}: {note}" for suite in selection.suites for note in suite.notes)),
    )


def file_digest(ref: str) -> str:
    """Return the first 12 hex digits of the SHA-256 of the .py file in a backend reference; empty if it names none."""
    file = Path(ref.rpartition(":")[0] or ref)
    return _digest_of(file) if file.suffix == ".py" else ""


def _digest_of(file: Path) -> str:
    """Return the first 12 hex digits of the SHA-256 of ``file``; empty if it is not a file."""
    return sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else ""


def _checks_of(plan: RunPlan) -> tuple[str, ...]:
    """Return the default checks and those that a case of the plan names."""
    named = {check for case in plan.cases for check in case.checks or ()}
    return tuple(check for check in BACKEND_CHECKS if check in {*default_checks(plan.device), *named})
