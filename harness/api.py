"""``attncheck.examine``: the examination as one call, for notebooks, kernel tuners and graders of generated kernels.

It prints nothing, and writes a file only through :meth:`Examination.save`. Whatever a candidate does becomes a record.
Invalid arguments raise an exception, and so does a lost GPU.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from inspect import signature
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Self

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.registry import load_object
from attncheck.errors import (
    BackendLoadError,
    BackendUnavailableError,
    ExaminationFailedError,
    RunFileError,
    SelectionError,
    UnknownNameError,
)
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.device import accelerators_in_use
from attncheck.harness.run.backend_loading import ThisProcess, load_backend
from attncheck.harness.run.options import RunOptions, listed
from attncheck.harness.run.outcomes import Backend, not_loaded
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import check_timed, select_cases
from attncheck.harness.workers.limits import TimeLimits, WorkerSettings, read_limit
from attncheck.harness.workers.pool import WorkerPool
from attncheck.harness.workers.starting import fork_worker
from attncheck.harness.workers.worker import CaseServer, serve
from attncheck.reports.analysis.repro import python_ref
from attncheck.reports.analysis.summary import RunSummary, RunVerdict, summarise
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file import store
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record, RunFooter
from attncheck.reports.run_file.store import count_outcomes, now, read_run, write_run
from attncheck.reports.terminal import run as terminal
from attncheck.reports.terminal.columns import Style

Candidate = str | type[AttentionBackend] | Callable[..., object]


@dataclass(frozen=True, repr=False)
class Examination:
    """Results of an examination: ``header`` (what was examined, where), ``records``, ``footer`` (end time, errors)."""

    header: RunHeader
    records: tuple[Record, ...]
    footer: RunFooter

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Load the examination from a run file, written by :meth:`save` or by ``attncheck run``.

        Raises:
            RunFileError: the file cannot be read, or the run was cut off.
        """
        run = read_run(fspath(path))
        if run.footer is None:
            raise RunFileError(run.path, "the run was cut off; `attncheck report` shows what it found until then")
        return cls(run.header, run.records, run.footer)

    @cached_property
    def summary(self) -> RunSummary:
        """Counts of the records by check and by suite, and what was not examined."""
        return summarise(self.records, checks=self.header.checks)

    @property
    def verdict(self) -> RunVerdict:
        """``passed``, ``failed``, or ``not examined`` if every case was unsupported or unavailable."""
        return "failed" if self.footer.errors else self.summary.verdict

    @property
    def passed(self) -> bool:
        """Whether at least one case was examined and none failed."""
        return self.verdict == "passed"

    @property
    def failures(self) -> tuple[Record, ...]:
        """The records that make the run fail: wrong results, errors, crashes and timeouts."""
        return self.summary.short

    @property
    def worst_share(self) -> float | None:
        """The largest share of the error budget that any row used, or None if nothing was measured.

        Above 1.0 the result is wrong.
        """
        return self.summary.total.worst_share

    def check(self) -> None:
        """Raise ExaminationFailedError unless the examination passed.

        Raises:
            ExaminationFailedError: the examination did not pass; the message has the counts and the findings.
        """
        __tracebackhide__ = True  # pytest shows the line of the caller
        if not self.passed:
            raise ExaminationFailedError(f"{self._counts}\n\n{self._report(quiet=True)}")

    def save(self, path: str | PathLike[str]) -> None:
        """Write a run file, for ``attncheck report`` and ``attncheck compare``.

        Raises:
            RunFileError: the file exists already, or cannot be written.
        """
        write_run(Path(path), self.header, self.records, self.footer.errors)

    def render(self, report_format: str) -> str:
        """Return the report that ``attncheck report --format`` writes: ``markdown``, ``html``, ``junit``, ...

        Raises:
            UnknownNameError: there is no such format.
            MissingExtraError: the format needs a package that is not installed.
        """
        if report_format not in FORMATS:
            raise UnknownNameError("report format", report_format, list(FORMATS))
        run = store.Run("examination", self.header, self.records, self.footer)
        return FORMATS[report_format].render_runs((run,), Style()).text

    def __str__(self) -> str:
        """Return the report as a terminal shows it."""
        return f"{terminal.opening(self.header)}\n\n{self._report()}"

    def __repr__(self) -> str:
        """Return one line with the counts, followed by the findings if the examination did not pass."""
        line = f"<Examination {self._counts}>"
        return line if self.passed else f"{line}\n\n{self._report(quiet=True)}"

    @property
    def _counts(self) -> str:
        return RunValues(self.header, self.records, self.footer.errors).closing()

    def _report(self, *, quiet: bool = False) -> str:
        errors, listing = self.footer.errors, 'render("markdown")'
        return terminal.render(self.header, self.records, errors=errors, quiet=quiet, listing=listing)

    def _repr_markdown_(self) -> str:
        """Return the Markdown report, for notebooks that prefer Markdown."""
        return self.render("markdown")

    def _repr_html_(self) -> str:
        """Return the terminal report as static HTML, for notebooks that prefer HTML."""
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
            class, or a function ``fn(query, key_cache, value_cache, metadata, params, out)``, which
            :func:`attncheck.kernel_backend` wraps.
        suite: names of built-in suites, or paths of case files. Default: ``smoke``, or ``interpreted`` if the
            candidate's kernels are interpreted.
        cases: patterns on ``suite/id`` or on the id. Default: every case.
        checks: names of checks. Default: all that apply except ``timing``, which runs only if it is named.
        device: ``cpu``, ``cuda`` or ``cuda:N``. None selects the default device of the suites, else ``cuda`` if there
            is a GPU, else ``cpu``.
        seed: seed of the inputs.
        stop_at_first: return after the first record that fails.
        timing: settings of the check ``timing``. Timing runs in one process, this one unless ``timeout`` is given. None
            uses the defaults of the command line.
        timeout: time limit in seconds for each check of a case. If it is given, the candidate runs in a process of its
            own, and a crash or hang there becomes a record. A reference is loaded in a fresh process. A class or a
            function runs in a fork of this process, which cannot use CUDA if this process has used it. None examines in
            this process without a limit.
        kernel_options: for a function, keyword arguments of :func:`attncheck.kernel_backend` (``name=``, ``features=``,
            ...).

    Raises:
        QuestionError: an argument is invalid: an unknown suite, case, check, backend or device, a broken case file, a
            class that violates the contract, or a backend that cannot run here. Exceptions of the candidate itself
            become records.
        DeviceLostError: the candidate lost the GPU, for instance by an illegal memory access. Every later CUDA call of
            this process raises. ``error.record`` is the record of the check.
    """
    selection = select_cases(listed(suite), listed(cases), listed(checks))
    if timing is not None:
        check_timed(selection, "timing=")
    with ExitStack() as stack:
        executor: ThisProcess | WorkerPool
        if timeout is None:
            backend = _load(candidate, kernel_options)
            ref, executor = backend.ref, ThisProcess([backend])
        else:
            ref, executor = _apart(candidate, kernel_options, timeout)
            stack.enter_context(executor)
        maxfail = 1 if stop_at_first else None
        options = RunOptions(backends=(ref,), device=device, seed=seed, rounds=1, jobs=1, maxfail=maxfail)
        run = Run.open(selection, options, executor, timing=timing, fits_pages=True)
        header, examiner = run.header(), executor.examiner(run)
        run.examine(examiner)
        if examiner.blind:
            raise examiner.blind[0]
    footer = RunFooter(finished=now(), counts=count_outcomes(run.records))
    return Examination(header, tuple(run.records), footer)


def _apart(candidate: Candidate, kernel_options: dict[str, Any], timeout: float) -> tuple[str, WorkerPool]:
    """Return the reference of the candidate, and the pool that starts its processes."""
    settings = WorkerSettings(TimeLimits(read_limit("timeout=", timeout)))
    if isinstance(candidate, str) and not kernel_options:
        return candidate, WorkerPool(settings=settings)
    backend = _load(candidate, kernel_options)
    if accelerators_in_use():
        raise SelectionError(
            f"timeout= copies this process, which has used CUDA, so that the copy cannot; give a reference to "
            f"{backend.name}, such as ./mine.py:{backend.name}"
        )
    make = partial(CaseServer, handed_over=backend)
    return backend.ref, WorkerPool(settings=settings, start=lambda _: fork_worker(partial(serve, make=make)))


def _check_options(kernel_options: Iterable[str]) -> None:
    """Raise UnknownNameError for an argument that neither :func:`examine` nor :func:`kernel_backend` has."""
    own = [name for name in signature(examine).parameters if name not in ("candidate", "kernel_options")]
    options = list(signature(kernel_backend).parameters)[1:]
    for name in kernel_options:
        if name not in options:
            raise UnknownNameError("argument of examine", name, [*own, *options])


def _load(candidate: Candidate, kernel_options: dict[str, Any]) -> Backend:
    _check_options(kernel_options)
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


def _handed_over(backend: type) -> Backend:
    """Load a class given in Python; its reference is a Python expression, so that repro commands are in Python too."""
    try:
        loaded = load_object(backend)
    except BackendUnavailableError as error:
        return not_loaded(python_ref(error.name), error.reasons, error.name)
    found = vars(sys.modules.get(backend.__module__, object)).items()
    names = [name for name, value in found if value is backend]
    return replace(loaded, ref=python_ref(names[0] if names else loaded.name))
