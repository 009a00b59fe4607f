"""``attncheck audit``: declared and measured features of all backends of a library."""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli import process_arguments as processes
from attncheck.harness.cli import run_arguments as arguments
from attncheck.harness.cli.interruption import interruptible
from attncheck.harness.cli.output import print_stderr, refuse_input, write_output


class AuditFormat(StrEnum):
    """Output format of an audit."""

    markdown = "markdown"
    json = "json"


def audit(
    context: typer.Context,
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="The library, such as vllm.")],
    run_files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Run files of FAMILY:*, that of the page first. Default: run now."),
    ] = None,
    suite: arguments.Suites = None,
    settings: arguments.Settings = None,
    case: arguments.Cases = None,
    check: arguments.Checks = None,
    device: arguments.Device = None,
    within: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time limit of a new run, shared by its backends; 0: none. Default: 600."),
    ] = None,
    jobs: processes.Jobs = None,
    run_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE|DIR", help="Where to write the run file of a new run. Default: as `attncheck run`."),
    ] = None,
    form: Annotated[AuditFormat, typer.Option("--format", help="Markdown, or the same content as JSON.")] = (
        AuditFormat.markdown
    ),
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
) -> int:
    """Write an audit of all backends of a library.

    It compares declared and measured CUDA-graph levels and features. Without RUN, the backends that can run here are
    examined first, as with `attncheck run --backend 'FAMILY:*'`, but several at once on a GPU. After Ctrl-C, the page
    has what was measured before. The tables show failures of backends; the exit code is 0 even so.
    """
    from attncheck.harness.cli.run_execution import execute_run
    from attncheck.harness.cli.run_files import kept_folder
    from attncheck.harness.cli.run_options import RunOptions, read_jobs
    from attncheck.harness.run.patterns import choose_checks, split_commas
    from attncheck.harness.workers.time_limits import read_limit
    from attncheck.reports.audit import page
    from attncheck.reports.run_file.store import read_run

    given = {"--suite": suite, "--set": settings, "--case": case, "--check": check, "--device": device and [device]}
    for name, value in {**given, "--within": within, "--jobs": jobs, "--run-file": run_file}.items():
        if value and run_files:
            raise QuestionError(f"{name} applies to a new run, and {run_files[0]} is one; leave out one of them")
    ended_by = None
    if not run_files:
        context.with_resource(interruptible())
        words = [word for name, values in given.items() for value in values or () for word in (name, value)]
        limit_s = read_limit("--within", 600.0 if within is None else within) or 0.0
        options = RunOptions(
            backends=(f"{family}:*",),
            suites=split_commas(suite or ()),
            settings=tuple(settings or ()),
            cases=split_commas(case or ()),
            checks=choose_checks(check or ()),
            device=device,
            jobs=read_jobs(jobs),
            deadline=time.monotonic() + limit_s,
            output=run_file,
            folder=kept_folder(),
            command=("attncheck", "run", "--backend", f"{family}:*", *words),
        )
        finished = execute_run(options, lambda _header: None)
        ended_by = finished.ended_by
        if finished.path is None:
            raise ended_by or RuntimeError("the run has a folder, and wrote no file")
        print_stderr(f"run file: {finished.path}")
        run_files = [finished.path]
    runs = [read_run(path) for path in run_files]
    for run in runs:
        names = [*(each.name for each in run.header.surveyed), *(each.name for each in run.header.backends)]
        if not any(name.startswith(f"{family}:") for name in names):
            raise QuestionError(
                f"{run.path} has no backend of {family!r}; write one with `attncheck run --backend '{family}:*'`"
            )
    refuse_input(output, run_files)
    write_output(page.render(*runs) if form is AuditFormat.markdown else page.document(*runs), output)
    if ended_by is not None:
        raise ended_by
    return 0
