"""``attncheck.examine``: the examination as one call, for notebooks, kernel tuners and judges of generated kernels.

Prints nothing, and writes a file only by :meth:`Examination.save`. What a candidate does is a record; a wrong question
raises, and a lost GPU.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

import torch

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.registry import LoadedBackend, load_object
from attncheck.errors import (
    BackendLoadError,
    BackendUnavailableError,
    ExaminationFailedError,
    RunFileError,
    SelectionError,
    UnknownNameError,
)
from attncheck.harness.checks.timing.check import TimingCheck
from attncheck.harness.checks.timing.settings import TimingSettings
from attncheck.harness.run.backend_loading import load_backend
from attncheck.harness.run.evaluation import Examiner
from attncheck.harness.run.plan import UnavailableBackend
from attncheck.harness.run.preparation import RunSettings, make_header, prepare_run
from attncheck.harness.run.selection import check_timed, select_cases
from attncheck.harness.truth.shared_folder import truths_folder
from attncheck.harness.workers.process_control import fork_worker
from attncheck.harness.workers.supervisor import Supervisor
from attncheck.harness.workers.time_limits import TimeLimits, read_limit
from attncheck.harness.workers.worker import serve, serve_cases
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.harness.workers.worker_settings import WorkerSettings
from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.repro import python_ref
from attncheck.reports.analysis.summary import RunSummary, RunVerdict, summarise
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, Record, RunFooter
from attncheck.reports.run_file.store import Run, RunWriter, count_outcomes, now, read_run
from attncheck.reports.terminal import run as terminal
from attncheck.reports.terminal.columns import Style

Candidate = str | type[AttentionBackend] | Callable[..., object]


@dataclass(frozen=True, repr=False)
class Examination:
    """What an examination found: ``header`` says what was asked where, ``records`` what was found, ``footer`` when."""

    header: RunHeader
    records: tuple[Record, ...]
    footer: RunFooter

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Return the examination that a run file holds, of :meth:`save` or of ``attncheck run``.

        Raises:
            RunFileError: the file cannot be read, or the run was cut off.
        """
        run = read_run(fspath(path))
        if run.footer is None:
            raise RunFileError(run.path, "the run was cut off; `attncheck report` shows what it found until then")
        return cls(run.header, run.records, run.footer)

    @cached_property
    def summary(self) -> RunSummary:
        """The records counted, by check, by suite, and what was not examined."""
        return summarise(self.records, checks=self.header.checks)

    @property
    def verdict(self) -> RunVerdict:
        """``passed``, ``failed``, or ``not examined`` where every case was unsupported or unavailable."""
        return "failed" if self.footer.errors else self.summary.verdict

    @property
    def passed(self) -> bool:
        """Whether something was examined and nothing fell short."""
        return self.verdict == "passed"

    @property
    def failures(self) -> tuple[Record, ...]:
        """The records that fell short: wrong answers and errors."""
        return self.summary.short

    @property
    def worst_share(self) -> float | None:
        """The largest share of the error budget any row used; above 1.0 an answer is wrong. None: nothing measured."""
        return self.summary.total.worst_share

    def check(self) -> None:
        """Return only if the examination passed.

        Raises:
            ExaminationFailedError: it did not; the message has the counts and the findings.
        """
        __tracebackhide__ = True  # pytest shows the line of the caller
        if not self.passed:
            raise ExaminationFailedError(f"{self._counts}\n\n{self._report(quiet=True)}")

    def save(self, path: str | PathLike[str]) -> None:
        """Write a run file, which ``attncheck report`` and ``attncheck compare`` read.

        Raises:
            RunFileError: the file exists already, or cannot be written.
        """
        with RunWriter(Path(path), self.header) as writer:
            for record in self.records:
                writer.add(record)
            for error in self.footer.errors:
                writer.fail(error)

    def render(self, report_format: str) -> str:
        """Return the report that ``attncheck report --format`` gives: ``markdown``, ``html``, ``junit``, ...

        Raises:
            UnknownNameError: there is no such format.
            MissingExtraError: the format needs a package that is not installed.
        """
        if report_format not in FORMATS:
            raise UnknownNameError("report format", report_format, list(FORMATS))
        run = Run("examination", self.header, self.records, self.footer)
        return FORMATS[report_format].render_runs((run,), Style()).text

    def __str__(self) -> str:
        """Return the report a terminal would show."""
        return f"{terminal.opening(self.header)}\n\n{self._report()}"

    def __repr__(self) -> str:
        """Return one line, and below it the findings where the examination did not pass."""
        line = f"<Examination {self._counts}>"
        return line if self.passed else f"{line}\n\n{self._report(quiet=True)}"

    @property
    def _counts(self) -> str:
        return phrases.closing(self.summary, self.footer.errors)

    def _report(self, *, quiet: bool = False) -> str:
        return terminal.render(self.header, self.records, errors=self.footer.errors, quiet=quiet)

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows that prefers Markdown."""
        return self.render("markdown")

    def _repr_html_(self) -> str:
        """Return what a notebook shows that prefers HTML: the report of a terminal, with nothing to execute."""
        return f"<pre>{escape(str(self))}</pre>"


def examine(
    candidate: Candidate,
    suite: str | Sequence[str] = (),
    *,
    cases: str | Sequence[str] = (),
    checks: str | Sequence[str] = (),
    device: str | None = None,
    seed: int = 0,
    stop_at_first: bool = False,
    timing: TimingSettings | None = None,
    timeout: float | None = None,
    **kernel_options: Any,
) -> Examination:
    """Examine one candidate and return typed records and a verdict.

    Args:
        candidate: a backend's name or reference (``"torch_sdpa"``, ``"./mine.py:Mine"``), an ``AttentionBackend``
            class, or a function ``fn(query, key_cache, value_cache, metadata, params, out)``, which is wrapped by
            :func:`attncheck.kernel_backend`.
        suite: names of built-in suites, or paths of case files; none: smoke, or interpreted where the candidate's
            kernels are interpreted.
        cases: patterns on ``suite/id`` or on the id; none: every case.
        checks: names of checks; none: all that apply, but for ``timing``, which is made by name.
        device: ``cpu``, ``cuda`` or ``cuda:N``; None: the best there is.
        seed: seed of the inputs.
        stop_at_first: return with the first record that falls short.
        timing: how the check ``timing`` takes its times, once, in this process; None: as the command line does.
        timeout: seconds for each check of a case; the candidate is examined in a process of its own, and what ends or
            hangs there is a record. A reference is loaded in a fresh process; a class or a function is examined in a
            copy of this one (by fork), which has no use of CUDA if this one has used it. None: here, without a limit.
        kernel_options: for a function, what :func:`attncheck.kernel_backend` takes (``name=``, ``features=``, ...).

    Raises:
        QuestionError: the question is wrong: an unknown suite, case, check, backend or device, a broken case file, a
            class that breaks the contract, a backend that cannot run here. What a candidate itself raises is a record.
        DeviceLostError: the candidate lost the GPU, by an illegal access for instance; every CUDA call of this process
            raises from then on. ``error.record`` is that of the check.
    """
    selection = select_cases(_listed(suite), _listed(cases), _listed(checks))
    if timing is not None:
        check_timed(selection, "timing=")
    settings = RunSettings(device=device, seed=seed, timing=timing or TimingSettings(), truths=truths_folder())
    with ExitStack() as stack:
        if timeout is None:
            backend = _load(candidate, kernel_options)
            prepared = prepare_run(selection, (backend.ref,), settings, loaded=(backend,), fits_pages=True)
            clocks = TimingCheck(torch.device(prepared.plan.device), prepared.plan.timing)
            examiner: Examiner | Supervisor = Examiner(prepared.plan, prepared.environment, clocks)
        else:
            ref, pool = _apart(candidate, kernel_options, timeout)
            stack.enter_context(pool)
            prepared = prepare_run(selection, (ref,), settings, pool=pool, fits_pages=True)
            examiner = Supervisor(prepared.plan, prepared.backends, pool, prepared.environment)
        infos = [each.info for each in prepared.backends]
        header = make_header(prepared.selection, prepared.plan, infos, prepared.environment, notes=prepared.notes)
        records: list[Record] = []
        for record in examiner.run():
            records.append(record)
            if stop_at_first and record.outcome in FALLEN_SHORT:
                break
        if examiner.blind:
            raise examiner.blind[0]
    return Examination(header, tuple(records), RunFooter(finished=now(), counts=count_outcomes(records)))


def _apart(candidate: Candidate, kernel_options: dict[str, Any], timeout: float) -> tuple[str, WorkerPool]:
    """Return the reference of the candidate, and what starts its processes."""
    settings = WorkerSettings(TimeLimits(read_limit("timeout=", timeout)))
    if isinstance(candidate, str) and not kernel_options:
        return candidate, WorkerPool(settings=settings)
    backend = _load(candidate, kernel_options)
    if torch.cuda.is_initialized():
        raise SelectionError(
            f"timeout= copies this process, which has used CUDA, so that the copy cannot; give a reference to "
            f"{backend.name}, such as ./mine.py:{backend.name}"
        )
    work = partial(serve_cases, handed_over=backend)
    return backend.ref, WorkerPool(settings=settings, start=lambda _: fork_worker(partial(serve, work=work)))


def _listed(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _load(candidate: Candidate, kernel_options: dict[str, Any]) -> LoadedBackend | UnavailableBackend:
    """Return the backend that the candidate names, is or is wrapped in."""
    if isinstance(candidate, str | type) and kernel_options:
        raise SelectionError(f"{', '.join(kernel_options)}: options for a function, and this is {candidate!r}")
    if isinstance(candidate, str):
        return load_backend(candidate)
    if isinstance(candidate, type):
        return _handed_over(candidate)
    if not callable(candidate):
        raise SelectionError(f"{candidate!r} is no candidate; give a backend's name, a backend class or a function")
    options: dict[str, Any] = {"name": getattr(candidate, "__name__", "kernel")} | kernel_options
    try:
        return _handed_over(kernel_backend(candidate, **options))
    except (TypeError, ValueError) as error:
        raise BackendLoadError(str(options["name"]), str(error)) from error


def _handed_over(backend: type) -> LoadedBackend | UnavailableBackend:
    """A class from Python; how to repeat its failures must be told in Python, too."""
    try:
        loaded = load_object(backend)
    except BackendUnavailableError as error:
        return UnavailableBackend(error.name, python_ref(error.name), error.reasons)
    return replace(loaded, ref=python_ref(loaded.name))
