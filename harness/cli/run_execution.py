"""Executes one run: selects, prepares, examines, and writes each record to the run file as it arrives.

Progress goes to stderr, and nothing to stdout. Loads torch only for what this process examines: a provider, or
backends with ``--in-process``.
"""

import contextlib
import faulthandler
import gc
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attncheck.errors import ClusterError, WriteError
from attncheck.harness.cli.executors import Processes, case_examiner, open_processes, open_providers
from attncheck.harness.cli.families import survey_notes, with_families
from attncheck.harness.cli.interruption import signal_of
from attncheck.harness.cli.output import print_stderr
from attncheck.harness.cli.resuming import found_in, read_part
from attncheck.harness.cli.run_files import make_dump_folder, open_run
from attncheck.harness.cli.run_options import RunOptions
from attncheck.harness.run.selection import Selection, choose_rounds, choose_timing
from attncheck.harness.truth.shared_folder import truths_folder
from attncheck.harness.workers.worker_process import WorkerProcess
from attncheck.reports.run_file.header import RunHeader, SurveyedBackend
from attncheck.reports.run_file.records import FALLEN_SHORT, Record
from attncheck.reports.run_file.store import Run

if TYPE_CHECKING:
    from attncheck.harness.cli.provider_process import InProcessProviders, ProviderExaminer
    from attncheck.harness.providers.records import PlannedProviders
    from attncheck.harness.run.expectations import Expectations, HasNames
    from attncheck.harness.run.plan import RunPlan
    from attncheck.harness.run.preparation import RunSettings

_ONE_PROCESS = "timed in this one process: how far times of different processes lie apart is not known"
_AT_FIRST = "at the first record that did not pass (--exitfirst)"
_DEVICE_LOST = "when this process lost the device (a run without --in-process goes on in a fresh one)"


@dataclass(frozen=True)
class FinishedRun:
    """Results of a run. ``path``: its run file, or None if none was written.

    ``blind``: errors of cases that could not be examined.
    ``unmet``: a line for each expectation that fails the run.
    ``unseen``: a line for each expectation that was not confirmed but does not fail the run.
    ``stopped``: why the run ended early; empty if it did not.
    ``ended_by``: the exception to raise after the report: a signal, an unwritable run file or stdout, or a lost
    cluster.
    """

    path: Path | None
    header: RunHeader
    records: tuple[Record, ...]
    blind: tuple[str, ...] = ()
    unmet: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    stopped: str = ""
    ended_by: KeyboardInterrupt | WriteError | ClusterError | None = None


def execute_run(
    options: RunOptions,
    begin: Callable[[RunHeader], None],
    end: Callable[[FinishedRun], None] | None = None,
    spare: WorkerProcess | None = None,
    see: Callable[[Record], None] | None = None,
) -> FinishedRun:
    """Execute the run of ``options``; ``begin`` is called with its header before the first case is examined.

    ``end`` is called with the result, before the processes of the backends have ended.
    ``see`` is called with each record as it arrives. If it is None, progress is shown on stderr.
    ``spare``: a process started in advance. It is used for the first backend, then closed.

    Raises:
        QuestionError: the options name something that does not exist, cannot be loaded, or examines nothing.
    """
    selection = options.select()
    options, surveyed = with_families(options, selection)
    timing = choose_timing(selection, limit_s=options.time_limit, warm=options.warm_cache, kernels=options.kernels)
    is_timed = options.backend_refs is not None and selection.is_timed
    rounds = choose_rounds(options.rounds, is_timed=is_timed, in_process=options.in_process)
    make_dump_folder(options.dump)
    with (
        open_processes(options, selection, spare, timing.limit_s) as processes,
        open_providers(options, selection) as providers,
    ):
        from attncheck.harness.run.preparation import RunSettings

        settings = RunSettings(
            device=options.device,
            seed=options.seed,
            dump=options.dump,
            timing=timing,
            rounds=rounds,
            shard=options.shard,
            truths=truths_folder() if options.cache else None,
            until_failure=options.until_failure,
        )
        apart = None if options.in_process else processes
        finished = _execute(options, selection, settings, apart, providers, begin, see, surveyed)
        if finished.ended_by is not None:
            processes.close(at_once=True)
        if end is not None:
            end(finished)
        return finished


def _execute(
    options: RunOptions,
    selection: Selection,
    settings: "RunSettings",
    processes: Processes | None,
    providers: "ProviderExaminer | InProcessProviders | None",
    begin: Callable[[RunHeader], None],
    see: Callable[[Record], None] | None,
    surveyed: Sequence[SurveyedBackend],
) -> FinishedRun:
    from attncheck.harness.cli.progress import Tally, progress_for
    from attncheck.harness.run.outcomes import Circumstances
    from attncheck.harness.run.preparation import make_header, prepare_run
    from attncheck.harness.run.timing_rounds import count_questions

    chooser = providers.chooser if providers is not None and options.backend_refs is None else None
    fits_pages = options.ray is None  # a node accepts no other suites once it has described a backend
    prepared = prepare_run(
        selection,
        options.backend_refs,
        settings,
        pool=processes,
        chooser=chooser,
        fits_pages=fits_pages,
        keeps_unavailable=bool(surveyed),
    )
    plan, environment = prepared.plan, prepared.environment
    functions = None if providers is None else providers.plan(plan.cases, plan.device)
    infos = [each.info for each in prepared.backends]
    is_timed = options.backend_refs is not None and prepared.selection.is_timed
    one_process = (_ONE_PROCESS,) if is_timed and processes is None else ()
    notes = (*prepared.notes, *one_process, *prepared.choice_notes, *survey_notes(surveyed), *options.notes)
    positional = (prepared.selection, plan, infos, environment)
    header = make_header(*positional, expect=options.expect, command=options.command, notes=notes, surveyed=surveyed)
    if functions is not None:
        from attncheck.harness.providers.records import header_with_providers

        header = header_with_providers(header, functions)
    earlier = None if options.resume is None else read_part(options.resume, header)
    records: list[Record] = [] if earlier is None else list(earlier.records)
    plan = replace(plan, found=found_in(records, plan.rounds))
    prepared = replace(prepared, plan=plan)
    examiner = case_examiner(
        prepared, processes, warms=options.warm, jobs=options.jobs, folder=options.folder, deadline=options.deadline
    )
    circumstances = Circumstances(options.seed, environment.digest, environment.attncheck)
    expectations = _expectations(options, prepared.selection, plan, functions, header)
    if expectations is not None:
        for record in records:
            expectations.recall(record)
    if earlier is not None and earlier.complete:
        begin(header)
        return _as_it_ended(earlier, expectations)
    with contextlib.suppress(io.UnsupportedOperation):  # a captured stderr has no descriptor to write to
        faulthandler.enable()  # print where a kernel killed the process
    if options.in_process:
        gc.freeze()  # as in a backend's process: skip torch's many objects in later collections
    count = count_questions(plan, [info.ref for info in infos]) + (functions.count if functions else 0)
    tally = Tally(count, plan.rounds)
    path: Path | None = None
    try:
        with open_run(options.output, options.folder, header, options.keep, earlier) as writer:
            path = writer.path
            begin(header)
            with (
                contextlib.closing(examiner.run()) as examined,
                progress_for(
                    count,
                    rounds=plan.rounds,
                    silent=see is not None or (options.in_process and not options.verbose),
                    verbose=options.verbose,
                    is_timed=is_timed,
                    color=options.color,
                ) as progress,
            ):
                found = itertools.chain(examined, providers.run(circumstances) if providers else ())
                judged = found if expectations is None else map(expectations.apply, found)
                stopped = take_records(
                    judged, records, (tally.see, writer.add, see or progress.see), maxfail=options.maxfail
                )
            blind = tuple(map(str, examiner.blind))
            unmet = tuple(expectations.unmet(stopped_early=bool(stopped))) if expectations else ()
            unseen = tuple(expectations.unseen()) if expectations and not stopped else ()
            for error in (*blind, *unmet):
                writer.fail(error)
        return FinishedRun(path, header, tuple(records), blind, unmet, unseen, stopped)
    except (KeyboardInterrupt, WriteError, ClusterError) as error:
        if not records and path is None:
            raise
        if isinstance(error, KeyboardInterrupt):
            how = f"interrupted by {signal_of(error).name}"
        elif isinstance(error, ClusterError):
            how = "stopped, since the cluster is lost"
        else:
            how = f"stopped, since {error.name} cannot be written"
        stopped = f"{how}: {tally.done} of {tally.cases} cases"
        return FinishedRun(path, header, tuple(records), stopped=stopped, ended_by=error)


def _as_it_ended(run: Run, expectations: "Expectations | None") -> FinishedRun:
    """Return the result of a run that is complete already, so that the command ends as that run did."""
    print_stderr(f"note: {run.path} is complete: nothing is left to examine")
    lines = expectations.unmet() if expectations else ()
    unmet = tuple(error for error in run.errors if error in lines)
    blind = tuple(error for error in run.errors if error not in lines)
    unseen = tuple(expectations.unseen()) if expectations else ()
    return FinishedRun(Path(run.path), run.header, run.records, blind, unmet, unseen)


def _expectations(
    options: RunOptions,
    selection: Selection,
    plan: "RunPlan",
    functions: "PlannedProviders | None",
    header: RunHeader,
) -> "Expectations | None":
    if options.expect is None:
        return None
    from attncheck.harness.run.expectation_file import load_expectations
    from attncheck.harness.run.expectations import Expectations

    known: tuple[HasNames, ...] = ()
    selected: tuple[HasNames, ...] = ()
    if functions is not None:
        from attncheck.harness.providers.records import SubjectIdentity

        known, selected = (tuple(map(SubjectIdentity, keys)) for keys in (functions.known, functions.subjects))
    return Expectations(
        load_expectations(options.expect),
        cases=(*selection.all_cases, *known),
        selected=(*filter(plan.is_in_shard, selection.cases), *selected),
        backends=[backend.name for backend in header.backends],
        checks=header.checks,
        today=datetime.now(UTC).date(),
        strict=options.strict_expect,
    )


def take_records(
    found: Iterator[Record],
    records: list[Record],
    see: Sequence[Callable[[Record], None]],
    *,
    maxfail: int | None,
) -> str:
    """Append each record to ``records``, call each of ``see`` with it, and return why the run ended early, or "".

    ``maxfail``: the number of failed records after which the run stops, or None for no limit.
    """
    from attncheck.harness.run.lost_device import DeviceLostError

    def keep(record: Record) -> bool:
        records.append(record)
        for each in see:
            each(record)
        return record.outcome in FALLEN_SHORT

    short = 0
    try:
        for record in found:
            short += keep(record)
            if maxfail is not None and short >= maxfail:
                return _AT_FIRST if maxfail == 1 else f"after {maxfail} records that did not pass (--maxfail {maxfail})"
    except DeviceLostError as lost:
        keep(lost.record)
        return _DEVICE_LOST
    return ""
