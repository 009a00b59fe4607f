"""Prepare a run: GPUs, backends, their cases, and the header of the run file."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal, Protocol

from attncheck.backends import registry
from attncheck.cases.model import Case, Suite
from attncheck.cases.outline import keys_of, shape_of
from attncheck.errors import BackendUnavailableError, DeviceError, QuestionError, SelectionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.outcomes import IMPORT, Backend, BackendDescription, DescribeBackends, not_loaded
from attncheck.harness.run.selection import (
    RunPlan,
    Selection,
    Shard,
    check_seed,
    default_cases,
    default_suites,
    fit_pages,
)
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

# Finds the GPUs of one kind, for processes that each use one of them. Loads no torch when imported.


@dataclass(frozen=True)
class GpuKind:
    """Properties that GPUs of one kind share. ``memory``: in bytes."""

    name: str
    capability: str
    memory: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability}, {self.memory / 2**30:.1f} GiB"


@dataclass(frozen=True)
class Gpu:
    """A GPU for one process. ``variables``: environment variables that make it the only GPU visible to the process."""

    uuid: str
    variables: Mapping[str, str] = field(default_factory=dict)


def gpus_alike(device: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs of the same kind as GPU 0, and a note on each other GPU; none unless ``device`` is ``cuda``."""
    if device != "cuda":
        return (), ()
    import torch

    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [GpuKind(each.name, f"{each.major}.{each.minor}", each.total_memory) for each in found]
    variables = gpu_variables(len(found), os.environ, is_hip=torch.version.hip is not None)
    gpus = tuple(
        Gpu(str(getattr(each, "uuid", "")), alone)
        for each, kind, alone in zip(found, kinds, variables, strict=False)
        if kind == kinds[0]
    )
    notes = tuple(
        f"GPU {index} ({kind}) is not used: it is not of the kind of GPU 0 ({kinds[0]})"
        for index, kind in enumerate(kinds)
        if kind != kinds[0]
    )
    return gpus, notes


def gpu_variables(count: int, environment: Mapping[str, str], *, is_hip: bool) -> list[dict[str, str]]:
    """Return, for each of ``count`` GPUs visible under ``environment``, variables that make it the only visible one.

    ROCm reads both variables. Its ``ROCR_VISIBLE_DEVICES`` is applied before them, and does not change.
    """
    names = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if is_hip else ("CUDA_VISIBLE_DEVICES",)
    given = next((environment[name] for name in names if name in environment), None)
    entries = list(map(str, range(count))) if given is None else [each.strip() for each in given.split(",")]
    return [dict.fromkeys(names, entry) for entry in entries[:count]]


def refuse_other_gpu(device: str, uuid: str | None, environment: Environment) -> None:
    """Raise QuestionError unless GPU ``uuid`` is the only visible one and its environment equals ``environment``.

    ``uuid``: None accepts any GPU and any environment.
    """
    if uuid is None:
        return
    from attncheck.harness.run.evaluate import environment_of

    gpus, _ = gpus_alike(device)
    seen = [gpu.uuid for gpu in gpus]
    if seen != [uuid]:
        raise QuestionError(f"the process sees the GPUs {', '.join(seen)}, and has to use {uuid} alone")
    here, there = environment_of(device).model_dump(), environment.model_dump()
    for name, value in here.items():
        if value != there[name]:
            raise QuestionError(f"{name} on GPU {uuid} is {value!r}, and {there[name]!r} in the run")


# Selects the device of a run and the backends to examine on it. Loads no torch when imported.
#
# The command line, the pytest plugin and `attncheck.examine` all choose here, so that they report the same errors. The
# choice uses the descriptions of backends, which may be loaded in other processes. A backend that cannot run here is
# never dropped silently: it stays in the run with its reasons, or is refused with them if the user named it.


def choose_device(wanted: str | None) -> str:
    """Return ``wanted`` if this machine has it; if ``wanted`` is None, return ``cuda`` if there is a GPU, else ``cpu``.

    Raises:
        DeviceError: no such kind of device, or this machine or this torch does not have it.
    """
    import torch

    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(wanted, "no such device; give cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise DeviceError(wanted, "attncheck examines on cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        is_built = torch.backends.cuda.is_built()
        built = "finds no GPU" if is_built else "is built without CUDA"
        cure = "check the driver with nvidia-smi" if is_built else "install a torch that is built for CUDA"
        raise DeviceError(wanted, f"torch {torch.__version__} {built}; give --device cpu, or {cure}")
    if (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(wanted, f"this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return str(device)


def suite_device(wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the device of the run and notes; if the user names none, the first of the suites' ``wishes`` is used.

    Raises:
        DeviceError: the device that the user named is not there. A suite's device that is not there only gives a note.
    """
    if wanted is not None or not wishes:
        return choose_device(wanted), ()
    try:
        return choose_device(wishes[0]), ()
    except DeviceError as error:
        best = choose_device(None)
        return best, (f"the suite names {error}: examined on {best} instead",)


def first_refs(refs: Sequence[str], suites: Sequence[Suite]) -> tuple[str, ...]:
    """Return ``refs``, or if empty the default backends of the suites, or if there are none the built-in backends."""
    wishes = [name for suite in suites for name in suite.default_backends]
    return tuple(dict.fromkeys(refs or wishes or registry.builtin_names()))


def choose_backends(
    refs: Sequence[str], suites: Sequence[Suite], cases: Sequence[Case], describe: DescribeBackends
) -> tuple[tuple[BackendDescription, ...], tuple[str, ...]]:
    """Return the backends of a run, and notes on the choice.

    They are those of ``refs``. If ``refs`` is empty, they are the default backends of the suites; the built-in ones are
    added if none of these can run here. If the suites have none either, they are the built-in ones. Unless ``refs``
    names
    them, built-in backends are included only if ``cases`` have layers of the kind they serve (empty: any kind).

    A backend that cannot run here stays in the run, with its reasons. So does one that cannot be loaded, unless
    ``refs``
    names it. A backend whose own code fails during loading stays too, and its cases get that outcome.

    Raises:
        QuestionError: one of ``refs`` is an unknown name or violates the contract; all of them raise while they are
            imported; two backends have the same name.
    """
    first = first_refs(refs, suites)
    found = describe(first)
    if refs:
        for each in found:
            if isinstance(each, QuestionError):
                raise each
        failures = [None if isinstance(each, QuestionError) else each.failure for each in found]
        raised = [each for each in failures if isinstance(each, Raised) and each.stage == IMPORT]
        if len(raised) == len(found):  # nothing is left to examine
            raise QuestionError("\n".join(failure.message for failure in raised))
    descriptions = list(map(_or_not_loaded, first, found))
    notes: list[str] = []
    has_wishes = not refs and any(suite.default_backends for suite in suites)
    if has_wishes and all(each.unavailable_reasons for each in descriptions):
        others = [name for name in registry.builtin_names() if name not in first]
        defaults, notes = _serving(list(map(_or_not_loaded, others, describe(others))), cases)
        notes.insert(0, "none of the backends that the suite names can run here: the built-in ones run as well")
        descriptions += defaults
    elif not refs and not has_wishes:
        descriptions, notes = _serving(descriptions, cases)
    names = [each.name for each in descriptions]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise SelectionError(f"two of the backends are called {name!r}; examine them in two runs")
    return tuple(descriptions), tuple(notes)


def refuse_unavailable(descriptions: Sequence[BackendDescription]) -> None:
    """Raise SelectionError for the first backend that cannot run here, with its reasons."""
    for each in descriptions:
        if each.unavailable_reasons:
            raise SelectionError(str(BackendUnavailableError(each.name, each.unavailable_reasons)))


def _serving(
    descriptions: Sequence[BackendDescription], cases: Sequence[Case]
) -> tuple[list[BackendDescription], list[str]]:
    """Return the backends that serve the kinds of layers in ``cases``, and notes on the others."""
    kinds = {case.layer.mla is not None for case in cases} or {True, False}
    notes = []
    for is_mla in (True, False):
        names = [each.name for each in descriptions if each.is_mla == is_mla and is_mla not in kinds]
        if names:
            what = "no case has" if is_mla else "every case has"
            notes.append(f"not examined, since {what} a latent cache: {', '.join(names)}")
    return [each for each in descriptions if each.is_mla in kinds], notes


def _or_not_loaded(ref: str, found: BackendDescription | QuestionError) -> BackendDescription:
    """Return ``found``, or the description of an unavailable backend if ``found`` is an error.

    The user did not name this backend, so its error does not end the run: a case file may list foreign backends.
    """
    return not_loaded(ref, (str(found),), name=ref) if isinstance(found, QuestionError) else found


# Prepares a run: from a selection of cases to the plan, the backends and the environment.
#
# The command line, the process of a backend, `attncheck.examine` and the pytest plugin all prepare runs here, so that
# they report the same errors. The caller chooses what examines the plan. Loads no torch if the backends have processes
# of their own.


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
    loaded: Sequence[Backend] = (),
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
        from attncheck.harness.run.evaluate import environment_of

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
