"""The command line: names the commands, and turns whatever happens into one of its exit codes.

0 all as expected, 1 a backend fell short, 2 the question was wrong, 3 attncheck itself failed, 130 interrupted.
Loads neither torch nor pydantic: a command does, when it runs.
"""

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ParamSpec

import typer

from attncheck.errors import BackendUnavailableError, QuestionError
from attncheck.harness.cli import compare, doctor, expect, list_names, new, report, run, warm

OK, FELL_SHORT, WRONG_QUESTION, OWN_FAULT, INTERRUPTED = 0, 1, 2, 3, 130

SHOW_TRACEBACK = "ATTNCHECK_TRACEBACK"
"""Set this environment variable to 1 to see where attncheck itself failed."""

P = ParamSpec("P")


def with_exit_code(command: Callable[P, int]) -> Callable[P, None]:
    """Run a command and leave with its exit code; nothing it raises gets any further."""

    @functools.wraps(command)
    def answered(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(exit_code(lambda: command(*args, **kwargs)))

    return answered


def exit_code(work: Callable[[], int]) -> int:
    """The exit code of ``work``: its own, or that of what it raised, told in one line on stderr."""
    try:
        return work()
    except (QuestionError, BackendUnavailableError) as error:
        typer.echo(f"error: {error}", err=True)
        return WRONG_QUESTION
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left, as `attncheck list | head` does. What could be said was said.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for the interpreter's last flush)
        return OK
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code may even call sys.exit)
        if os.environ.get(SHOW_TRACEBACK):
            traceback.print_exc()
        typer.echo(f"attncheck itself failed: {type(error).__name__}: {error}", err=True)
        if not os.environ.get(SHOW_TRACEBACK):
            typer.echo(f"set {SHOW_TRACEBACK}=1 to see where; please report it with that output", err=True)
        return OWN_FAULT


class SchemaSubject(StrEnum):
    """What a schema describes: a case file, or a line of a run file."""

    CASES = "cases"
    RUN = "run"


def schema(
    of: Annotated[
        SchemaSubject, typer.Option("--of", help="cases: of a case file; run: of a line of a run file.")
    ] = SchemaSubject.CASES,
) -> int:
    """Print the JSON schema of case files, or of run files."""
    if of is SchemaSubject.RUN:
        from attncheck.reports.run_file.schema import run_file_schema as described
    else:
        from attncheck.cases.schema import json_schema as described

    typer.echo(json.dumps(described(), indent=2))
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        import attncheck

        typer.echo(f"attncheck {attncheck.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="attncheck",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def attncheck_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Examine attention backends: YAML-written cases, a float64 truth, a verdict for each backend.

    Exit codes: 0 all as expected, 1 a backend fell short, 2 the question was wrong, 3 attncheck itself failed.
    """


app.command("run")(with_exit_code(run.run))
app.command("warm")(with_exit_code(warm.warm))
app.command("list")(with_exit_code(list_names.list_names))
app.command("doctor")(with_exit_code(doctor.doctor))
app.command("report")(with_exit_code(report.report))
app.command("compare")(with_exit_code(compare.compare))
app.command("expect")(with_exit_code(expect.expect))
app.command("schema")(with_exit_code(schema))

new_app = typer.Typer(help="Write files to begin with.", no_args_is_help=True, rich_markup_mode=None)
new_app.command("backend")(with_exit_code(new.new_backend))
app.add_typer(new_app, name="new")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of ``arguments`` (default: the process's own) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(words, prog_name="attncheck", obj=("attncheck", *words))
    except SystemExit as left:  # how typer ends, always
        return left.code if isinstance(left.code, int) else OK
    return OK
