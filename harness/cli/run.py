"""``attncheck run``: examines backends with the cases of suites, writes a run file and prints the table."""

import os
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from attncheck.errors import SelectionError
from attncheck.harness.cli import process_arguments as processes
from attncheck.harness.cli import run_arguments as arguments
from attncheck.harness.cli.interruption import interruptible
from attncheck.harness.cli.output import (
    Color,
    ColorChoice,
    print_stderr,
    printing_to_stdout,
    show_printed,
    terminal_width,
    use_color,
)
from attncheck.harness.workers.passed_environment import only_passed, passed_environment, read_patterns, variables_read

if TYPE_CHECKING:
    from attncheck.harness.cli.run_execution import FinishedRun
    from attncheck.reports.run_file.header import RunHeader
    from attncheck.reports.run_file.records import Record


def run(
    context: typer.Context,
    backends: arguments.BackendArguments = None,
    backend: arguments.BackendOptions = None,
    provider: arguments.Providers = None,
    suite: arguments.Suites = None,
    settings: arguments.Settings = None,
    case: arguments.Cases = None,
    keywords: arguments.Keywords = None,
    last_failed: arguments.LastFailed = False,
    watch: arguments.Watch = False,
    check: arguments.Checks = None,
    skip: arguments.Skip = None,
    shard: arguments.ShardOption = None,
    rounds: arguments.Rounds = None,
    time_limit: arguments.TimeLimit = None,
    warm_cache: arguments.WarmCache = False,
    kernels: arguments.Kernels = False,
    function: arguments.Functions = None,
    device: arguments.Device = None,
    case_timeout: processes.CaseTimeout = None,
    backend_timeout: processes.BackendTimeout = None,
    memory_limit: processes.MemoryLimit = None,
    device_memory_limit: processes.DeviceMemoryLimit = None,
    pass_env: processes.PassEnv = None,
    seed: arguments.Seed = None,
    output: arguments.Output = None,
    resume: arguments.Resume = None,
    no_output: arguments.NoOutput = False,
    exitfirst: arguments.ExitFirst = False,
    maxfail: arguments.MaxFail = None,
    expect: arguments.Expect = None,
    strict_expect: arguments.StrictExpect = False,
    dump: arguments.Dump = None,
    in_process: processes.InProcess = False,
    jobs: processes.Jobs = None,
    executor: processes.Executor = processes.ExecutorChoice.LOCAL,
    ray_address: processes.RayAddress = None,
    ray_resources: processes.RayResources = None,
    ray_runtime_env: processes.RayRuntimeEnv = None,
    show_output: arguments.ShowOutput = False,
    no_warm: processes.NoWarm = False,
    no_cache: processes.NoCache = False,
    quiet: arguments.Quiet = False,
    verbose: arguments.Verbose = False,
    durations: arguments.Durations = None,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Examine backends or providers, and print the results.

    Without options, every built-in backend runs on the GPU, or on the CPU without one, in about a minute. The suite is
    smoke. Backends with interpreted kernels run a few cases of the suite interpreted, and backends for latent caches
    alone run the latent cases. `--case '*'` selects all cases. [tool.attncheck] of pyproject.toml sets defaults of
    options. Each backend runs in its own processes, so a crash costs one case. `--check timing` measures in rounds;
    each round is a fresh process that runs alone. The run file holds every record; `attncheck report` shows it.
    """
    began, environment = time.monotonic(), dict(os.environ)
    if not in_process:  # in process, Python cannot interrupt a kernel
        context.with_resource(interruptible())
    refs = (*(backends or ()), *(backend or ()))
    spare = None
    is_ray = executor is processes.ExecutorChoice.RAY
    if not in_process and not is_ray and (refs or not provider):
        from attncheck.harness.workers.worker_process import WorkerProcess

        # Start it before any import here: loading torch takes longest, and it does so meanwhile.
        show = show_printed if show_output else None
        spare = context.with_resource(WorkerProcess(show=show, pass_env=read_patterns(pass_env or ())))

    from attncheck.harness.cli.config import read_config
    from attncheck.harness.cli.last_failed import only_failed
    from attncheck.harness.cli.run_execution import execute_run
    from attncheck.harness.cli.run_files import kept_folder, newest_run
    from attncheck.harness.cli.run_options import RunOptions, read_jobs, read_ray, read_size
    from attncheck.harness.run.expectation_file import expectation_file
    from attncheck.harness.run.patterns import choose_checks, split_commas
    from attncheck.harness.run.sharding import read_shard

    if no_output and output is not None:
        raise SelectionError(f"--no-output writes no run file, and --output {output} names one; leave out one of them")
    if no_output and resume is not None:
        raise SelectionError(f"--resume {resume} cannot be combined with --no-output; leave out one of them")
    config = read_config(Path.cwd())
    is_by_name = bool(refs or provider)
    default_checks, default_skip = (config.checks, config.skip) if refs or not provider else ((), ())
    folder = config.output or kept_folder()
    options = RunOptions(
        backends=refs or (() if provider else config.backends),
        providers=tuple(provider or ()),
        suites=split_commas(suite or config.suites),
        settings=tuple(settings or config.settings),
        cases=split_commas(case or ()),
        keywords=keywords or "",
        checks=choose_checks(check or default_checks),
        skip=choose_checks(skip or (() if check else default_skip)),
        functions=tuple(function or ()),
        shard=read_shard(shard),
        rounds=rounds,
        time_limit=time_limit,
        warm_cache=warm_cache,
        kernels=kernels,
        device=device or config.device,
        case_timeout=config.case_timeout if case_timeout is None else case_timeout,
        backend_timeout=config.backend_timeout if backend_timeout is None else backend_timeout,
        memory_limit=read_size("--memory-limit", memory_limit, config.memory_limit),
        device_memory_limit=read_size("--device-memory-limit", device_memory_limit, config.device_memory_limit),
        pass_env=read_patterns(pass_env or config.pass_env),
        seed=(config.seed or 0) if seed is None else seed,
        output=output,
        resume=resume,
        folder=None if no_output else folder,
        keep=config.keep,
        maxfail=1 if exitfirst else maxfail,
        expect=expectation_file(expect) if expect else config.expect,
        strict_expect=strict_expect,
        dump=dump,
        in_process=in_process,
        jobs=read_jobs(jobs),
        ray=read_ray(ray_address, ray_resources or (), ray_runtime_env, is_used=is_ray),
        show_output=show_output,
        warm=not no_warm,
        cache=config.cache and not no_cache,
        verbose=verbose,
        color=color is not ColorChoice.NEVER,
        notes=(config.note,) if config.note else (),
        command=tuple(context.obj or ()),
    )
    if last_failed:
        options = only_failed(options, newest_run(folder))
    if in_process:
        context.with_resource(only_passed(options.pass_env))
    if watch:
        from attncheck.harness.cli.watch import watch_run

        return watch_run(options, spare, color=use_color(color))

    def print_result(finished: "FinishedRun") -> None:
        with printing_to_stdout(finished.path):
            _print_report(finished, quiet=quiet, verbose=verbose, color=use_color(color))
            for info in finished.header.backends:
                _print_not_passed(info.ref, environment, options.pass_env)
            if durations is not None:
                _print_durations(finished.records, durations or None)
            where = "no run file (--no-output)" if finished.path is None else f"run file: {finished.path}"
            typer.echo(f"{time.monotonic() - began:.1f} s, {where}")

    finished = execute_run(options, _print_opening if not quiet else _print_nothing, print_result, spare)
    if finished.ended_by is not None:
        raise finished.ended_by
    return _exit_code(finished, by_name=is_by_name)


def _print_opening(header: "RunHeader") -> None:
    from attncheck.reports.terminal import run as terminal

    with printing_to_stdout():
        typer.echo(terminal.opening(header, width=terminal_width()))


def _print_nothing(header: "RunHeader") -> None:
    """Print nothing, for --quiet."""


def _print_report(finished: "FinishedRun", *, quiet: bool, verbose: bool, color: bool) -> None:
    from attncheck.harness.cli.resuming import resume_command
    from attncheck.reports.terminal import run as terminal

    if not quiet:
        typer.echo()
    errors = [*finished.blind, *finished.unmet]
    text = terminal.render(
        finished.header,
        finished.records,
        errors=errors,
        complete=finished.ended_by is None,
        color=color,
        width=terminal_width(),
        quiet=quiet,
        verbose=verbose and not quiet,
        run_file=finished.path,
    )
    typer.echo(text, color=color)
    for line in finished.unseen:
        typer.echo(line)
    if finished.ended_by is not None:
        typer.echo(f"{finished.stopped}; the remaining cases were not examined")
        if finished.path is not None and finished.path.suffix == ".jsonl":
            typer.echo(f"resume: {resume_command(finished.header.command, finished.path)}")
    elif finished.stopped:
        typer.echo(f"stopped {finished.stopped}; the remaining cases were not examined")


def _print_not_passed(ref: str, environment: Mapping[str, str], patterns: Sequence[str]) -> None:
    """Print which variables of ``environment`` the file of a backend reads and does not get."""
    from attncheck.reports.analysis.places import file_of

    if not (file := file_of(ref)):
        return
    absent = environment.keys() - passed_environment(environment, patterns).keys()
    if names := ",".join(sorted(variables_read(Path(file)) & absent)):
        typer.echo(f"read by {file} and not passed to it: {names}; add --pass-env {names}")


def _print_durations(records: "Sequence[Record]", count: int | None) -> None:
    slowest = sorted(records, key=lambda record: record.duration_s, reverse=True)[:count]
    typer.echo(f"slowest {len(slowest)} of {len(records)} checks of cases")
    for record in slowest:
        typer.echo(f"  {record.duration_s:8.2f} s  {record.backend}  {record.case}  {record.check}")


def _exit_code(finished: "FinishedRun", *, by_name: bool) -> int:
    """Return exit code 0, 1 or 3; ``by_name``: whether the command line names a backend or provider.

    Raises:
        SelectionError: a case could not be examined, or a named backend or the whole run had no case examined.
    """
    from attncheck.harness.run.outcomes import OURSELVES
    from attncheck.reports.run_file.records import FALLEN_SHORT

    records = finished.records
    ours = [record for record in records if record.outcome == "errored" and record.stage == OURSELVES]
    if ours:
        print_stderr(f"attncheck itself failed at {ours[0].case}: {ours[0].error_type}: {ours[0].message}")
        return 3
    if finished.unmet or any(record.outcome in FALLEN_SHORT for record in records):
        return 1
    if finished.blind:
        raise SelectionError("some cases are too weak to detect the feature they test; fix them (see the errors above)")
    if not finished.header.shard:  # other shards may have cases to examine
        _refuse_empty_run(records, finished.header, by_name=by_name)
    return 0


def _refuse_empty_run(records: "Sequence[Record]", header: "RunHeader", *, by_name: bool) -> None:
    """Raise SelectionError if the run, or with ``by_name`` one of its backends or providers, has no case examined.

    Single backends of a family such as ``vllm:*`` may have none.

    A case that was refused as declared (``refusals``) counts as examined only if no other check was requested.
    """
    from attncheck.reports.analysis import phrases
    from attncheck.reports.analysis.summary import summarise

    only_refusals = header.checks == ("refusals",)
    summary = summarise([record for record in records if only_refusals or record.check != "refusals"])
    of_family = {each.name for each in header.surveyed}
    for backend in header.backends if by_name else ():
        if backend.name in of_family:
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
    if not summary.total.examined:
        raise SelectionError("nothing was examined; the table lists the reasons")
