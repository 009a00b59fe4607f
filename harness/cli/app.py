"""Turns errors of the option parser into one line, in the style of all other errors.

The parser's own message names neither the given value nor, for pydantic types, what is allowed.
"""

import errno
import functools
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ParamSpec

import typer

from attncheck.errors import BackendUnavailableError, QuestionError, WriteError
from attncheck.harness.cli import doctor, fuzz, mutants, reports, run, show
from attncheck.harness.cli.common import drop_stdout, print_stderr, signal_of

# Turns errors of the option parser into one line, in the style of all other errors.
#
# The parser's own message names neither the given value nor, for pydantic types, what is allowed.

_INVALID = re.compile(r"Invalid value for '?(?P<name>[^':]+)'?: (?P<reason>.*)", re.DOTALL)


HELP = "Usage: "
"""Prefix of the help text that a command without arguments prints instead of an error."""


_MEANT: Mapping[str, str] = MappingProxyType(
    {
        "no such command 'test'": "`attncheck run`",
        "no such command 'bench'": "`attncheck run --check timing`",
        "no such command 'diff'": "`attncheck compare`",
        "no such command 'badge'": "`attncheck site`",
        "no such command 'recommend'": "`attncheck report --needs NEED,...`",
        "no such command 'audit'": "`attncheck run 'vllm:*' --within 600`, then `attncheck report --format audit`",
        "no such command 'expect'": "`attncheck report --format expect`",
        "no such command 'schema'": "`attncheck list schema`",
        "no such command 'version'": "`attncheck --version`",
        "no such option: --timeout": "--case-timeout for one check of a case, --backend-timeout for a whole backend",
    }
)
"""What to write instead of a command or an option that users expect, by the beginning of the message."""


def usage_error_in_words(error: Any) -> str:
    """Return the error message for a parser error, without ``error:``; return the help text if the error has that."""
    message = str(error.format_message()).rstrip(".")
    if message.startswith(HELP):
        return message
    if match := _INVALID.fullmatch(message):
        message = f"{match['name']}: {_reason(error) or match['reason']}"
    else:
        message = message[:1].lower() + message[1:]
    for beginning, meant in _MEANT.items():
        if message.startswith(beginning):
            message = f"{beginning}; use {meant}"
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message}; see `{context.command_path} --help`"


def _reason(error: Any) -> str | None:
    """Return what pydantic found wrong with a value, or None if pydantic did not raise the error."""
    from pydantic import ValidationError

    from attncheck.cases.validation import wanted

    if not isinstance(error.__cause__, ValidationError):
        return None
    details = error.__cause__.errors(include_url=False)[0]
    own = details.get("ctx", {}).get("error")
    return f"must be {wanted(details)} (found {details['input']!r})" if own is None else str(own).rstrip(".")


# The command line: registers the commands, and turns every result and exception into an exit code.
#
# 0: all as expected. 1: a backend failed. 2: the arguments or input files were invalid. 3: attncheck itself failed or
# cannot write. 130, 143, 129: interrupted by SIGINT, SIGTERM, SIGHUP.
#
# Loads neither torch nor pydantic until a command runs.

OK, FELL_SHORT, WRONG_QUESTION, OWN_FAULT = 0, 1, 2, 3
_SIGNALLED = 128
"""Added to a signal's number to form the exit code of an interrupted command, as shells do."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of the disk or terminal that attncheck writes to, which are not faults of attncheck."""

SHOW_TRACEBACK = "ATTNCHECK_TRACEBACK"
"""Environment variable; set it to 1 for the traceback of a failure of attncheck itself."""

P = ParamSpec("P")

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of typer's errors for an invalid command line; typer exports no name for it."""


def with_exit_code(command: Callable[P, int]) -> Callable[P, None]:
    """Wrap ``command`` so that it exits with its exit code and no exception escapes."""

    @functools.wraps(command)
    def answered(*args: P.args, **kwargs: P.kwargs) -> None:
        raise typer.Exit(exit_code(lambda: command(*args, **kwargs)))

    return answered


def exit_code(work: Callable[[], int]) -> int:
    """Return the result of ``work``, or the exit code of the exception it raised, after printing it to stderr."""
    try:
        return work()
    except WriteError as error:
        print_stderr(f"error: {error}")
        return OWN_FAULT
    except (QuestionError, BackendUnavailableError) as error:
        for line in str(error).splitlines():  # a file may have several mistakes
            print_stderr(f"error: {line}")
        return WRONG_QUESTION
    except KeyboardInterrupt as interrupt:
        return _interrupted(interrupt)
    except BrokenPipeError:
        # The reader closed the pipe, as in `attncheck list | head`.
        drop_stdout()
        return OK
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code may even call sys.exit)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            print_stderr(f"error: {error.filename or 'stdout'} cannot be written: {error.strerror}")
            drop_stdout()
            return OWN_FAULT
        if os.environ.get(SHOW_TRACEBACK):
            traceback.print_exc()
        print_stderr(f"attncheck itself failed: {type(error).__name__}: {error}")
        if not os.environ.get(SHOW_TRACEBACK):
            print_stderr(f"set {SHOW_TRACEBACK}=1 to see where; please report it with that output")
        return OWN_FAULT


def _interrupted(interrupt: KeyboardInterrupt) -> int:
    """Print which signal ended the command, and return its exit code."""
    number = signal_of(interrupt)
    print_stderr(f"interrupted by {number.name}")
    return _SIGNALLED + number


def merge(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="The run files of all shards of a run.")],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The run file to write.")],
) -> int:
    """Merge the run files of shards into one.

    The shards are those of `attncheck run --shard I/N`. The result is the same as that of a run without shards;
    `attncheck report FILE` shows it. Exit code 2: a shard is missing or incomplete, the runs differ in options or
    machine, or two of them contradict each other.
    """
    from attncheck.reports.analysis.phrases import plural
    from attncheck.reports.run_file.merging import merge_runs
    from attncheck.reports.run_file.store import RunWriter, read_run

    merged = merge_runs([read_run(path) for path in runs])
    with RunWriter(output, merged.header) as writer:
        for record in merged.records:
            writer.add(record)
        for error in merged.errors:
            writer.fail(error)
    typer.echo(f"{plural(len(merged.records), 'record')} of {plural(len(runs), 'run')}, run file: {output}")
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        import attncheck

        typer.echo(f"attncheck {attncheck.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="attncheck",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def attncheck_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compare attention backends with a float64 reference, on cases written in YAML.

    Exit codes: 0: every result is as expected. 1: a backend failed. 2: invalid arguments or input files. 3: attncheck
    itself failed, or cannot write its output.
    """


app.command("run")(with_exit_code(run.run))
app.command("fuzz")(with_exit_code(fuzz.fuzz))
app.command("shrink")(with_exit_code(fuzz.shrink))
app.command("warm")(with_exit_code(doctor.warm))
app.command("show")(with_exit_code(show.show))
app.command("list")(with_exit_code(show.list_names))
app.command("doctor")(with_exit_code(doctor.doctor))
app.command("report")(with_exit_code(reports.report))
app.command("compare")(with_exit_code(reports.compare))
app.command("merge")(with_exit_code(merge))
app.command("site")(with_exit_code(reports.site))
app.command("record")(with_exit_code(doctor.record))
app.command("mutants")(with_exit_code(mutants.mutants))

new_app = typer.Typer(help="Write the first files of a backend.", no_args_is_help=True, rich_markup_mode=None)
new_app.command("backend")(with_exit_code(show.new_backend))
app.add_typer(new_app, name="new")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command with ``arguments`` (default: ``sys.argv``) and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if _fill_closed_streams():
        print_stderr("error: stdout is closed; send it to a file, or to /dev/null")
        return OWN_FAULT
    _print_any_text()
    try:
        code = app(words, prog_name="attncheck", obj=("attncheck", *words), standalone_mode=False)
    except _UsageError as error:
        message = usage_error_in_words(error)
        print_stderr(message if message.startswith(HELP) else f"error: {message}")
        return WRONG_QUESTION
    except typer.Abort as aborted:  # by a signal, before the command began or after it
        cause = aborted.__cause__
        return _interrupted(cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt())
    except SystemExit as left:  # raised at the end of shell completion
        code = left.code
    return code if isinstance(code, int) else OK


def _fill_closed_streams() -> bool:
    """Open /dev/null for closed standard streams, and return whether stdout was closed.

    Otherwise a later pipe would get one of their file descriptors.
    """
    is_closed = sys.stdout is None
    for name in ("stdin", "stdout", "stderr"):  # in this order: each takes the lowest free number
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w", encoding="utf-8"))
    return is_closed


def _print_any_text() -> None:
    """Make stdout and stderr escape characters that their encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
