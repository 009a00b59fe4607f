"""``attncheck audit``: declared and measured features of all backends of a library."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli import run_arguments as arguments
from attncheck.harness.cli.output import print_stderr, refuse_input, write_output


class AuditFormat(StrEnum):
    """Output format of an audit."""

    markdown = "markdown"
    json = "json"


def audit(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="The library, such as vllm.")],
    run_file: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run file of FAMILY:*. Default: run them now.")
    ] = None,
    suite: arguments.Suites = None,
    settings: arguments.Settings = None,
    case: arguments.Cases = None,
    check: arguments.Checks = None,
    device: arguments.Device = None,
    form: Annotated[AuditFormat, typer.Option("--format", help="Markdown, or the same content as JSON.")] = (
        AuditFormat.markdown
    ),
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
) -> int:
    """Write an audit of all backends of a library.

    It compares declared and measured CUDA-graph levels and features. Without RUN, the backends that can run here are
    examined first, as with `attncheck run --backend 'FAMILY:*'`. The tables show failures of backends; the exit code is
    0 even so.
    """
    from attncheck.reports.audit import page
    from attncheck.reports.run_file.store import read_run

    examining = {"--suite": suite, "--set": settings, "--case": case, "--check": check, "--device": device}
    options = [name for name, value in examining.items() if value]
    if run_file is not None and options:
        raise QuestionError(f"{options[0]} applies to a new run, and {run_file} is one; leave out one of them")
    path = run_file or _examined(family, suite or [], settings or [], case or [], check or [], device)
    run = read_run(path)
    names = [*(each.name for each in run.header.surveyed), *(each.name for each in run.header.backends)]
    if not any(name.startswith(f"{family}:") for name in names):
        raise QuestionError(
            f"{path} has no backend of {family!r}; write one with `attncheck run --backend '{family}:*'`"
        )
    refuse_input(output, [path])
    write_output(page.render(run) if form is AuditFormat.markdown else page.document(run), output)
    return 0


def _examined(
    family: str, suites: list[str], settings: list[str], cases: list[str], checks: list[str], device: str | None
) -> Path:
    from attncheck.harness.cli.run_execution import execute_run
    from attncheck.harness.cli.run_files import kept_folder
    from attncheck.harness.cli.run_options import RunOptions
    from attncheck.harness.run.patterns import choose_checks, split_commas

    backend = f"{family}:*"
    given = {"--backend": [backend], "--suite": suites, "--set": settings, "--case": cases, "--check": checks}
    given["--device"] = [device] if device else []
    options = RunOptions(
        backends=(backend,),
        suites=split_commas(suites),
        settings=tuple(settings),
        cases=split_commas(cases),
        checks=choose_checks(checks),
        device=device,
        folder=kept_folder(),
        command=(
            "attncheck",
            "run",
            *(word for name, values in given.items() for value in values for word in (name, value)),
        ),
    )
    finished = execute_run(options, lambda _header: None)
    if finished.ended_by is not None:
        raise finished.ended_by
    if finished.path is None:
        raise RuntimeError("the run has a folder, and wrote no file")
    print_stderr(f"run file: {finished.path}")
    return finished.path
