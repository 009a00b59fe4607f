"""The command ``run``: its executors, its execution, and what it prints."""

import contextlib
import faulthandler
import gc
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from attncheck.errors import BackendLoadError, ClusterError, SelectionError, WriteError
from attncheck.harness.cli.common import (
    ColorChoice,
    make_folder,
    print_foreign,
    print_stderr,
    printing_to_stdout,
    show_printed,
    signal_of,
    terminal_width,
    use_color,
)
from attncheck.harness.cli.options import Given, read_config, read_options
from attncheck.harness.cli.progress import Tally, display, ignore
from attncheck.harness.cli.reports import read_reports, write_reports
from attncheck.harness.cli.run_files import (
    found_in,
    kept_folder,
    kept_run,
    measured_costs,
    only_failed,
    open_run,
    read_part,
    report_command,
    resume_command,
)
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import DeviceLostError
from attncheck.harness.run.preparation import first_refs
from attncheck.harness.run.run import Executor, Run, See
from attncheck.harness.run.selection import Selection
from attncheck.harness.workers.limits import only_passed, passed_environment, variables_read, worker_settings
from attncheck.harness.workers.pool import WorkerPool, imports_of
from attncheck.harness.workers.ray import RayCluster
from attncheck.harness.workers.starting import ForkServer
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import MOST, RunHeader, SurveyedBackend
from attncheck.reports.run_file.records import (
    FALLEN_SHORT,
    Record,
    RunFooter,
    is_not_reached,
)
from attncheck.reports.run_file.store import Run as StoredRun
from attncheck.reports.run_file.store import count_outcomes, lacking_in_words, now
from attncheck.reports.run_file.timings import TIMING

if TYPE_CHECKING:
    from attncheck.harness.cli.provider_process import ProviderProcess
    from attncheck.harness.providers.examine import Function, Providers

# Expands references such as `vllm:*` to the backends of the library that can run here.

_ALL = ":*"
"""Suffix of a reference to all backends of a family."""


def with_families(options: RunOptions, selection: Selection) -> tuple[RunOptions, tuple[SurveyedBackend, ...]]:
    """Return the options with each ``NAME:*`` expanded, and a survey of all backends of these families.

    Raises:
        QuestionError: there is no such family, its library cannot be imported, none of its backends can run here, or
            there are too many backends or suites.
    """
    refs: dict[str, None] = {}
    surveyed: list[SurveyedBackend] = []
    for ref in options.backends:
        if not ref.endswith(_ALL):
            refs[ref] = None
            continue
        from attncheck.harness.workers.survey import survey

        limit = worker_settings(options).limits.of_loading
        found = survey(ref.removesuffix(_ALL), options.device, selection.device_wishes, limit)
        able = [each.name for each in found if not each.reason]
        if not able:
            raise BackendLoadError(
                ref, f"none of its {len(found)} backends can run here", allowed="; ".join(_left(found))
            )
        refs.update(dict.fromkeys(able))
        surveyed += found
    for what, count in (("backends", len(refs) + len(options.providers)), ("suites", len(selection.suites))):
        if count > MOST:
            raise SelectionError(f"{count} {what}: a run has at most {MOST}; split them into several runs")
    return (replace(options, backends=tuple(refs)) if surveyed else options), tuple(surveyed)


def survey_notes(surveyed: Sequence[SurveyedBackend]) -> tuple[str, ...]:
    """Return the number of backends of the families that can run, and for each reason the backends that cannot."""
    if not surveyed:
        return ()
    able = sum(not each.reason for each in surveyed)
    return (f"{able} of {len(surveyed)} backends of {_family(surveyed)} can run here", *_left(surveyed))


def _family(surveyed: Sequence[SurveyedBackend]) -> str:
    return ", ".join(dict.fromkeys(each.name.partition(":")[0] + _ALL for each in surveyed))


def _left(surveyed: Sequence[SurveyedBackend]) -> Iterator[str]:
    """Yield a line for each reason, with the backends that cannot run because of it."""
    names: dict[str, list[str]] = {}
    for each in surveyed:
        if each.reason:
            own = each.name.partition(":")[2]
            names.setdefault(each.reason.replace(own, "it"), []).append(own)
    yield from (f"not examined: {', '.join(own)}: {reason}" for reason, own in names.items())


# Where the cases of a run are examined: in processes on this machine, on a Ray cluster, or in this process.


@contextmanager
def open_executor(options: RunOptions, selection: Selection, server: ForkServer | None) -> Iterator[Executor]:
    """Yield what loads the backends of ``options`` and examines; end all its processes on leaving.

    ``server``: forks the processes of backends, and has begun ahead.

    Raises:
        SelectionError: timing is requested on a Ray cluster, or its options are invalid.
        ClusterError, MissingExtraError: the Ray cluster cannot be used.
    """
    timing = options.timing
    if options.in_process:
        from attncheck.harness.run.backend_loading import ThisProcess

        yield ThisProcess()
        return
    imports, settings = imports_of(selection), worker_settings(options)
    settings = replace(settings, limits=replace(settings.limits, sampling_s=timing.limit_s))
    if options.ray is not None:
        if selection.is_timed:
            reason = f"the check {TIMING} compares times of one device, and a cluster has many"
            raise SelectionError(f"--executor ray: {reason}; take times by a run on one machine")
        with RayCluster(
            options.ray,
            imports,
            lambda line: print_stderr(f"note: {line}"),
            device=options.device,
            jobs=options.jobs,
            workers=settings,
        ) as cluster:
            yield cluster
        return
    with WorkerPool(show_printed if options.show_output else None, server, imports, settings) as pool:
        if options.backend_refs is not None:
            pool.start(first_refs(options.backend_refs, selection.suites))
        yield pool


# Executes one run: selects, prepares, examines, and writes each record to the run file as it arrives.
#
# Progress goes to stderr, and nothing to stdout. Loads torch only for what this process examines: a provider, or
# backends with `--in-process`.

_ONE_PROCESS = "timed in this one process: how far times of different processes lie apart is not known"
_DEVICE_LOST = "when this process lost the device (a run without --in-process goes on in a fresh one)"


@dataclass(frozen=True)
class FinishedRun:
    """Results of a run. ``path``: its run file, or None if none was written.

    ``blind``: errors of cases that could not be examined.
    ``unmet``: a line for each expectation that fails the run.
    ``unseen``: a line for each expectation that was not confirmed but does not fail the run. ``notes``: lines on how it
    was examined.
    ``stopped``: a sentence on why the run ended early; empty if it did not.
    ``ended_by``: the exception to raise after the report: a signal, an unwritable run file or stdout, or a lost
    cluster.
    """

    path: Path | None
    header: RunHeader
    records: tuple[Record, ...]
    blind: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stopped: str = ""
    ended_by: KeyboardInterrupt | WriteError | ClusterError | None = None

    @property
    def can_be_resumed(self) -> bool:
        """Whether the run has a run file that ``--resume`` takes."""
        return self.path is not None and self.path.suffix == ".jsonl"

    @property
    def stored(self) -> StoredRun:
        """The run as it is read from its file; without a footer if it was ended by an exception."""
        footer = None
        if self.ended_by is None:
            counts = count_outcomes(self.records)
            footer = RunFooter(finished=now(), counts=counts, errors=(*self.blind, *self.unmet))
        return StoredRun(str(self.path or ""), self.header, self.records, footer)


def execute_run(
    options: RunOptions,
    begin: Callable[[RunHeader], None] = ignore,
    end: Callable[[FinishedRun], None] = ignore,
    server: ForkServer | None = None,
    see: See | None = None,
) -> FinishedRun:
    """Execute the run of ``options``; ``begin`` is called with its header before the first case is examined.

    ``end`` is called with the result, before the processes of the backends have ended.
    ``see`` is called with each record as it arrives. If it is None, progress is shown on stderr.
    ``server``: forks the processes of backends, and has begun ahead.

    Raises:
        QuestionError: the options name something that does not exist, cannot be loaded, or examines nothing.
    """
    with _opened(options, server) as execution:
        finished = execution.finish(begin, see)
        if finished.ended_by is not None:
            execution.executor.close(at_once=True)
        end(finished)
        return finished


@contextmanager
def _opened(options: RunOptions, server: ForkServer | None) -> Iterator["_Execution"]:
    """Yield the run of ``options``, ready to begin; end all processes on leaving."""
    selection = options.select()
    options, surveyed = with_families(options, selection)
    if options.dump is not None and not options.dry_run:  # early: an unwritable path must not end a run at a failure
        make_folder(options.dump, f"--dump {options.dump}")
    opening: AbstractContextManager[Any] = nullcontext()
    if options.providers and not options.in_process:
        from attncheck.harness.cli.provider_process import ProviderProcess

        opening = closing(ProviderProcess(options, show_printed if options.show_output else None))
    with open_executor(options, selection, server) as executor, opening as process:
        yield _Execution(options, selection, executor, process, surveyed)


class _Execution:
    """A run with its providers, its expectations and, if it is resumed, its first part."""

    def __init__(
        self,
        options: RunOptions,
        selection: Selection,
        executor: Executor,
        process: "ProviderProcess | None",
        surveyed: Sequence[SurveyedBackend],
    ) -> None:
        run = Run.open(
            selection,
            options,
            executor,
            chooser=process if options.backend_refs is None else None,
            keeps_unavailable=bool(surveyed),
            fits_pages=executor.fits_pages,
        )
        self.executor, self._options = executor, options
        self._is_timed = options.backend_refs is not None and run.selection.is_timed
        one_process = (_ONE_PROCESS,) if self._is_timed and options.in_process else ()
        notes = (*run.notes, *one_process, *run.choice_notes, *survey_notes(surveyed), *options.notes)
        self._header = run.header(notes, surveyed)
        self._providers: Providers | ProviderProcess | None = None
        self._functions: tuple[Function, ...] = ()
        all_functions: tuple[Function, ...] = ()
        if options.providers:
            from attncheck.harness.cli.provider_process import load_providers
            from attncheck.harness.providers.examine import functions_of, header_with_providers

            self._providers = load_providers(run, process)
            all_functions, self._functions = functions_of(), functions_of(options.functions)
            self._header = header_with_providers(
                self._header, self._providers.infos, self._functions, self._providers.notes
            )
        self._earlier = None if options.resume is None else read_part(options.resume, self._header)
        if self._earlier is not None:
            records = list(self._earlier.records)
            plan = replace(run.plan, found=found_in(records, run.plan.rounds))
            run = replace(run, plan=plan, records=records)
        self._run = run
        self._expectations = run.expectations(self._header, all_functions, self._functions)
        self._examiner = executor.examiner(run, partial(measured_costs, options.folder, run.environment.device_name))
        num_providers = len(self._providers.infos) if self._providers else 0
        self._tally = Tally(run.num_questions + num_providers * len(self._functions), run.plan.rounds)

    @property
    def plan_text(self) -> str:
        """What would run: the number of cases of each backend by check, then the cases, then the estimated time."""
        from attncheck.reports.terminal import run as terminal

        plan = self._run.plan
        lines = [terminal.opening(self._header, width=terminal_width())]
        costs = measured_costs(self._options.folder, self._run.environment.device_name)
        seconds = dict[str, list[float | None]]()
        cases = dict[str, None]()
        for backend in self._run.backends:
            counts = Counter[str]()
            for case in plan.examined_cases_of(backend.ref) if not backend.reason else ():
                checks = plan.checks_left(backend.ref, case)
                counts.update(checks)
                cases |= dict.fromkeys([case.key] if checks else [])
                for check in checks:
                    rounds = plan.rounds if check == TIMING else 1
                    seconds.setdefault(check, []).extend([costs.get((backend.ref, case.hash, check))] * rounds)
            by_check = ", ".join(f"{check} {plural(count, 'case')}" for check, count in counts.items())
            lines.append(f"{backend.name}: {by_check or f'nothing: {backend.reason}'}")
        if self._functions:
            lines.append(f"{', '.join(self._options.providers)}: {plural(len(self._functions), 'function')}")
        lines.append(f"cases: {', '.join(cases) or 'none'}")
        return "\n".join([*lines, _estimate(seconds)])

    def finish(self, begin: Callable[[RunHeader], None], see: See | None) -> FinishedRun:
        """Examine what is left, and write the run file. ``begin``, ``see``: as in :func:`execute_run`."""
        if self._earlier is not None and self._earlier.complete:
            begin(self._header)
            return self._as_it_ended(self._earlier)
        options = self._options
        run = self._run
        expectations = self._expectations
        tally = self._tally
        with contextlib.suppress(io.UnsupportedOperation):  # a captured stderr has no descriptor to write to
            faulthandler.enable()  # print where a kernel killed the process
        if options.in_process:
            gc.freeze()  # as in a backend's process: skip torch's many objects in later collections
        functions: Iterable[Record] = ()
        if self._providers is not None:
            functions = starmap(self._providers.examine, product(self._providers.infos, self._functions))
        progress = (
            display(options, tally, run.plan.device, is_timed=self._is_timed) if see is None else nullcontext(see)
        )
        path: Path | None = None
        stopped = ""
        try:
            with open_run(options.output, options.folder, self._header, options.keep, self._earlier) as writer:
                path = writer.path
                begin(self._header)
                with progress as shown:
                    try:
                        sees = (tally.see, writer.add, shown)
                        if run.examine(self._examiner, *sees, functions=functions, expectations=expectations):
                            stopped = f"stopped {_after_failures(options.maxfail)}{tally.rest}"
                    except DeviceLostError:
                        stopped = f"stopped {_DEVICE_LOST}{tally.rest}"
                blind = tuple(map(str, self._examiner.blind))
                is_short = bool(stopped) or any(map(is_not_reached, run.records))
                unmet = tuple(expectations.unmet(stopped_early=bool(stopped))) if expectations else ()
                unseen = tuple(expectations.unseen()) if expectations and not is_short else ()
                for error in (*blind, *unmet):
                    writer.fail(error)
            notes = self._examiner.notes
            return FinishedRun(path, self._header, tuple(run.records), blind, unmet, unseen, notes, stopped)
        except (KeyboardInterrupt, WriteError, ClusterError) as error:
            if not run.records and path is None:
                raise
            stopped = f"{_ended_by(error)}: {tally.done} of {tally.cases} cases begun{tally.rest}"
            return FinishedRun(path, self._header, tuple(run.records), stopped=stopped, ended_by=error)

    def _as_it_ended(self, stored: StoredRun) -> FinishedRun:
        """Return the result of a run that is complete already, or refuse a run in part."""
        if any(map(is_not_reached, stored.records)):
            advice = "repeat it with more time, or without --within, and with another --output"
            raise SelectionError(f"--resume {stored.path}: it ended by --within, and its results are final; {advice}")
        expectations = self._expectations
        print_stderr(f"note: {stored.path} is complete: nothing is left to examine")
        lines = expectations.unmet() if expectations else ()
        unmet = tuple(error for error in stored.errors if error in lines)
        blind = tuple(error for error in stored.errors if error not in lines)
        unseen = tuple(expectations.unseen()) if expectations else ()
        return FinishedRun(Path(stored.path), stored.header, stored.records, blind, unmet, unseen)


def _ended_by(error: KeyboardInterrupt | WriteError | ClusterError) -> str:
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted by {signal_of(error).name}"
    if isinstance(error, ClusterError):
        return "stopped, since the cluster is lost"
    return f"stopped, since {error.name} cannot be written"


def _estimate(seconds: Mapping[str, Sequence[float | None]]) -> str:
    """Return the time of all checks in words.

    ``seconds``: by check, what it took in an earlier run for each case of each backend, or None if it was not made.
    """
    known = {check: [each for each in found if each is not None] for check, found in seconds.items()}
    made = [check for check, found in known.items() if found]
    if not made:
        return "time: no estimate, since no kept run on this device has these checks"
    total = sum(sum(known[check]) / len(known[check]) * len(seconds[check]) for check in made)
    words = f"{total:.0f} s" if total < 100 else f"{total / 60:.0f} min"
    counts = f"{sum(map(len, known.values()))} of {sum(map(len, seconds.values()))}"
    unknown = ", ".join(check for check in seconds if check not in made)
    without = f"starts of processes{', and ' * bool(unknown)}{unknown}"
    return f"time: about {words}, an estimate from {counts} checks in kept runs; without {without}"


def _after_failures(maxfail: int | None) -> str:
    if maxfail == 1:
        return "at the first record that did not pass (-x)"
    return f"after {maxfail} records that did not pass (--maxfail {maxfail})"


# `attncheck run`: examines backends with the cases of suites, writes a run file and prints the table.


def run_command(
    context: typer.Context, given: Given, server: ForkServer | None, *, began: float, color: ColorChoice
) -> int:
    """Execute the run that is ``given``, print it, and return the exit code.

    ``server``: forks the processes of backends, and has begun ahead. ``began``: when the command did,
    by time.monotonic().
    """
    environment = dict(os.environ)
    options = _options_of(given, context.obj or (), color)
    reports = read_reports(options.reports)
    if options.in_process:
        context.with_resource(only_passed(options.pass_env))
    if options.dry_run:
        with _opened(options, server) as execution:
            print_foreign(execution.plan_text)
        return 0

    def print_result(finished: "FinishedRun") -> None:
        reader = report_command(finished.path) if finished.path else ""
        with printing_to_stdout(finished.path):
            _print_report(finished, reader, quiet=options.quiet, verbose=options.verbose, color=use_color(color))
            for info in finished.header.backends:
                _print_not_passed(info.ref, environment, options.pass_env)
            if options.durations is not None:
                _print_durations(finished.records, options.durations or None)
            where = "no run file (--no-output)" if finished.path is None else f"run file: {finished.path}"
            print_foreign(f"{time.monotonic() - began:.1f} s, {where}")
            write_reports(reports, finished.stored)

    finished = execute_run(options, ignore if options.quiet else _print_opening, print_result, server)
    if finished.ended_by is not None:
        raise finished.ended_by
    return _exit_code(finished, by_name="backends" in given or "providers" in given)


def _options_of(given: Given, command: Sequence[str], color: ColorChoice) -> RunOptions:
    """Return the options that the command line and ``[tool.attncheck]`` give."""
    config = read_config(Path.cwd())
    options = read_options(
        config.completed(given),
        color=color is not ColorChoice.NEVER,
        notes=(config.note,) if config.note else (),
        command=tuple(command),
    )
    if options.providers and options.cases:
        from attncheck.harness.providers.examine import split_patterns

        functions, cases = split_patterns(options.cases, options.suite_refs)
        options = replace(options, functions=functions, cases=cases)
    folder = options.folder or kept_folder()
    if options.last_failed:
        options = only_failed(options, kept_run(folder))
    return replace(
        options,
        folder=None if options.no_output else folder,
        maxfail=1 if options.exitfirst else options.maxfail,
    )


def _print_opening(header: "RunHeader") -> None:
    from attncheck.reports.terminal import run as terminal

    with printing_to_stdout():
        typer.echo(terminal.opening(header, width=terminal_width()))


def _print_report(finished: "FinishedRun", reader: str, *, quiet: bool, verbose: bool, color: bool) -> None:
    from attncheck.reports.terminal import run as terminal

    if not quiet:
        typer.echo()
    errors = [*finished.blind, *finished.unmet]
    text = terminal.render(
        finished.header,
        finished.records,
        errors=errors,
        complete=finished.stored.complete,
        color=color,
        width=terminal_width(),
        quiet=quiet,
        verbose=verbose and not quiet,
        reader=reader,
    )
    typer.echo(text, color=color)
    for line in (*finished.unseen, *finished.notes, *filter(None, [finished.stopped])):
        print_foreign(line)
    if finished.ended_by is not None and finished.path is not None and finished.can_be_resumed:
        print_foreign(f"resume: {resume_command(finished.header.command, finished.path)}")


def _print_not_passed(ref: str, environment: Mapping[str, str], patterns: Sequence[str]) -> None:
    """Print which variables of ``environment`` the file of a backend reads and does not get."""
    from attncheck.reports.analysis.places import file_of

    if not (file := file_of(ref)):
        return
    absent = environment.keys() - passed_environment(environment, patterns).keys()
    if names := ",".join(sorted(variables_read(Path(file)) & absent)):
        print_foreign(f"read by {file} and not passed to it: {names}; add --pass-env {names}")


def _print_durations(records: "Sequence[Record]", count: int | None) -> None:
    slowest = sorted(records, key=lambda record: record.duration_s, reverse=True)[:count]
    typer.echo(f"slowest {len(slowest)} of {len(records)} checks of cases")
    for record in slowest:
        print_foreign(f"  {record.duration_s:8.2f} s  {record.backend}  {record.case}  {record.check}")


def _exit_code(finished: "FinishedRun", *, by_name: bool) -> int:
    """Return exit code 0, 1 or 3; ``by_name``: whether the command line names a backend or provider.

    Raises:
        SelectionError: a case could not be examined, or a named backend or the whole run had no case examined.
    """
    from attncheck.harness.run.outcomes import OURSELVES

    records = finished.records
    ours = [record for record in records if record.outcome == "errored" and record.stage == OURSELVES]
    if ours:
        print_stderr(f"attncheck itself failed at {ours[0].case}: {ours[0].error_type}: {ours[0].message}")
        return 3
    if finished.unmet or any(record.outcome in FALLEN_SHORT for record in records):
        return 1
    if finished.blind:
        raise SelectionError("some cases are too weak to detect the feature they test; fix them (see the errors above)")
    if finished.stored.lacking:
        hint = "; complete it by --resume" if finished.can_be_resumed else ""
        raise SelectionError(f"the run is incomplete: {lacking_in_words(finished.stored)}{hint}")
    _refuse_empty_run(records, finished.header, by_name=by_name)
    return 0


def _refuse_empty_run(records: "Sequence[Record]", header: "RunHeader", *, by_name: bool) -> None:
    """Raise SelectionError if the run, or with ``by_name`` one of its backends or providers, has no case examined.

    Single backends of a family such as ``vllm:*`` may have none, and those of a shard, unless their time was over.

    A case that was refused as declared (``refusals``) counts as examined only if no other check was requested.
    """
    from attncheck.reports.analysis import phrases
    from attncheck.reports.analysis.summary import summarise

    only_refusals = header.checks == ("refusals",)
    summary = summarise([record for record in records if only_refusals or record.check != "refusals"])
    late = {record.backend for record in records if is_not_reached(record)}
    spared = {each.name for each in header.surveyed}
    if header.shard:
        spared |= {each.name for each in header.backends} - late
    for backend in header.backends if by_name else ():
        if backend.name in spared:
            continue
        tally = summary.by_backend.get(backend.name)
        if tally is None or not tally.examined:
            gaps = [gap for gap in summary.gaps if gap.backend == backend.name]
            reasons = dict.fromkeys(map(phrases.gap_reasons, gaps))
            why = f": {'; '.join(islice(reasons, 3))}"
            if not gaps:  # each suite of a run without --suite is for some backends only
                others = " --suite ".join(dict.fromkeys(case.suite for case in header.cases))
                why = f"; no selected case is in its default suite: add --suite {others}"
            elif all(gap.outcome == "unsupported" and gap.by == "backend" for gap in gaps):
                why += "; select cases and checks that it supports"
            if backend.name in summary.providers:
                raise SelectionError(f"provider {backend.name!r} offers none of these functions")
            refused = any(each.backend == backend.name and each.check == "refusals" for each in records)
            other = " by a check other than refusals" if refused and not only_refusals else ""
            raise SelectionError(f"no case of backend {backend.name!r} was examined{other}{why}")
    if not summary.total.examined and (late or not header.shard):
        raise SelectionError("nothing was examined; the table lists the reasons")
