"""The command line: registers the commands, and turns every result and exception into an exit code.

0: all as expected. 1: a backend failed. 2: the arguments or input files were invalid. 3: attncheck itself failed or
cannot write. 130, 143, 129: interrupted by SIGINT, SIGTERM, SIGHUP. Loads neither torch nor pydantic until a command
runs.
"""

import errno
import functools
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ParamSpec

import typer
from typer.core import TyperCommand, TyperGroup

from attncheck.errors import BackendUnavailableError, QuestionError, WriteError, shorten
from attncheck.harness.cli.common import (
    Color,
    ColorChoice,
    drop_stdout,
    interruptible,
    print_stderr,
    signal_of,
)
from attncheck.harness.cli.options import Given, with_options
from attncheck.harness.run.options import options_in, split_commas

# Errors of the option parser in one line, in the style of all other errors. The parser's own message names neither the
# given value nor, for pydantic types, what is allowed.

_INVALID = re.compile(r"Invalid value for '?(?P<name>[^':]+)'?: (?P<reason>.*)", re.DOTALL)


HELP = "Usage: "
"""Prefix of the help text that a command without arguments prints instead of an error."""


_TIME, _RAY = "attncheck time", "--executor ray:FILE, whose keys are address, resources and runtime_env"

_MEANT: Mapping[str, str] = MappingProxyType(
    {
        "command 'test'": "`attncheck run`",
        "command 'bench'": f"`{_TIME}`",
        "command 'diff'": "`attncheck compare`",
        "command 'badge'": "`attncheck site`, or `attncheck report --verify FILE --format badge`",
        "command 'verify'": "`attncheck report --verify FILE`",
        "command 'init'": "`attncheck new backend`",
        "command 'recommend'": "`attncheck report --needs NEED,...`",
        "command 'audit'": "`attncheck run 'vllm:*' --within 600`, then `attncheck report --format audit`",
        "command 'expect'": "`attncheck report --format expect`",
        "command 'schema'": "`attncheck list schema`",
        "command 'explain'": "`attncheck report`, which gives the likely cause of each failure",
        "command 'help'": "`attncheck --help`",
        "command 'version'": "`attncheck --version`",
        "option: --timeout": "--case-timeout for one check of a case, --backend-timeout for a whole backend",
        "option: --rounds": f"`{_TIME} --rounds`",
        "option: --time-limit": f"`{_TIME} --time-limit`",
        "option: --warm-cache": f"`{_TIME} --warm-cache`",
        "option: --kernels": f"`{_TIME} --kernels`",
        "option: --no-warm": "--jobs 1, with which no other process compiles kernels",
        "option: --function": "--case, which with --provider selects functions, too",
        "option: --exitfirst": "-x, or --maxfail 1",
        "option: --watch": "watchfiles of PyPI: `watchfiles --filter python 'attncheck run ./mine.py' .`",
        "option: --ray-address": _RAY,
        "option: --ray-resources": _RAY,
        "option: --ray-runtime-env": _RAY,
    }
)
"""What to write for a former command or option, or one that users expect; the parser's message begins with no such."""


def usage_error_in_words(error: Any) -> str:
    """Return the error message for a parser error, without ``error:``; return the help text if the error has that."""
    message = str(error.format_message()).rstrip(".")
    if message.startswith(HELP):
        return message
    if match := _INVALID.fullmatch(message):
        message = f"{match['name']}: {_reason(error) or match['reason']}"
    else:
        message = message[:1].lower() + message[1:]
    for name, meant in _MEANT.items():
        if re.match(rf"no such {name}(?![\w-])", message):
            message = f"no such {name}; use {meant}"
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


# Exit codes of results and exceptions.

OK, WRONG_QUESTION, OWN_FAULT = 0, 2, 3
_SIGNALLED = 128
"""Added to a signal's number to form the exit code of an interrupted command, as shells do."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of the disk or terminal that attncheck writes to, which are not faults of attncheck."""

_NO_THREAD = "can't start new thread"
"""Python's message if the system starts no further thread."""

SHOW_TRACEBACK = "ATTNCHECK_TRACEBACK"
"""Environment variable; set it to 1 for the traceback of a failure of attncheck itself."""

P = ParamSpec("P")

_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""The base class of typer's errors for an invalid command line; typer exports no name for it."""


def with_exit_code(command: Callable[P, int]) -> Callable[P, None]:
    """Wrap ``command`` so that it exits with its exit code and no exception escapes."""

    @functools.wraps(command)
    def answered(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 (foreign code may even call sys.exit)
            code = exit_code_of(error)
        raise typer.Exit(code)

    return answered


def exit_code_of(error: BaseException) -> int:
    """Print to stderr what ended a command, and return its exit code."""
    if isinstance(error, WriteError):
        print_stderr(f"error: {error}")
        return OWN_FAULT
    if isinstance(error, QuestionError | BackendUnavailableError):
        for line in str(error).splitlines():  # a file may have several mistakes
            print_stderr(f"error: {line}")
        return WRONG_QUESTION
    if isinstance(error, KeyboardInterrupt):
        return _interrupted(error)
    if isinstance(error, BrokenPipeError):
        # The reader closed the pipe, as in `attncheck list | head`.
        drop_stdout()
        return OK
    # Only writing sets `characters_written`: stdout does not block, and its reader is slower than this process.
    if isinstance(error, OSError) and (error.errno in _NO_ROOM or hasattr(error, "characters_written")):
        print_stderr(f"error: {error.filename or 'stdout'} cannot be written: {error.strerror}")
        drop_stdout()
        return OWN_FAULT
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        print_stderr(f"error: {shorten(str(error.filename))}: this name is too long for the file system")
        return WRONG_QUESTION
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EAGAIN or str(error) == _NO_THREAD:
        print_stderr("error: no further process or thread can be started; raise `ulimit -u`, or the container's limit")
        return OWN_FAULT
    if number == errno.EMFILE:
        print_stderr("error: no further file can be opened; raise `ulimit -n`")
        return OWN_FAULT
    if os.environ.get(SHOW_TRACEBACK):
        traceback.print_exception(error)
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
    from attncheck.reports.run_file.store import read_run, write_run

    merged = merge_runs([read_run(path) for path in runs])
    write_run(output, merged.header, merged.records, merged.errors)
    typer.echo(f"{plural(len(merged.records), 'record')} of {plural(len(runs), 'run')}, run file: {output}")
    return 0


def _version(wanted: bool) -> None:
    if wanted:
        import attncheck

        typer.echo(f"attncheck {attncheck.__version__}")
        raise typer.Exit


@with_options(*options_in("run"))
def run(context: typer.Context, given: Given, *, color: Color = ColorChoice.AUTO) -> int:
    """Examine backends or providers, and print the results.

    Without options, every built-in backend runs on the GPU, or on the CPU without one, in about a minute. The suite is
    smoke. Backends with interpreted kernels run a few cases of the suite interpreted, and backends for latent caches
    alone run the latent cases. `--case '*'` selects all cases. [tool.attncheck] of pyproject.toml sets defaults of
    options. Each backend runs in its own processes, so a crash costs one case. The run file holds every record;
    `attncheck report` shows it. Lists are separated by commas, or their option is repeated.
    """
    return _run(context, given, color)


@with_options(*options_in("time"))
def time_backends(context: typer.Context, given: Given, *, color: Color = ColorChoice.AUTO) -> int:
    """Measure the times of backends, and print them.

    This is `attncheck run --check timing`. The check runs in rounds; each round is a fresh process that runs alone. A
    backend whose output is wrong gets no time. `attncheck compare` compares the run files of two such runs.
    """
    return _run(context, given | {"checks": ["timing"]}, color)


def _run(context: typer.Context, given: Given, color: ColorChoice) -> int:
    began, server = time.monotonic(), None
    if "in_process" not in given:  # in process, Python cannot interrupt a kernel
        context.with_resource(interruptible())
        if given.get("ray", "local") == "local" and ("backends" in given or "providers" not in given):
            from attncheck.harness.workers.limits import passed_environment
            from attncheck.harness.workers.starting import ForkServer

            # Start it before other imports: loading torch takes longest, and it does so meanwhile.
            server = ForkServer(passed_environment(os.environ, split_commas(given.get("pass_env", ()))))
            context.with_resource(closing(server)).begin()
    from attncheck.harness.cli.run import run_command

    return run_command(context, given, server, began=began, color=color)


@dataclass(frozen=True)
class _Place:
    """Where a command is: a function of a module in this folder. ``summary``: the first line of its docstring."""

    module: str
    function: str
    summary: str
    hidden: bool = False


_PLACES: Mapping[str, _Place] = MappingProxyType(
    {
        "run": _Place("app", "run", "Examine backends or providers, and print the results."),
        "time": _Place("app", "time_backends", "Measure the times of backends, and print them."),
        "fuzz": _Place("fuzz", "fuzz", "Examine a backend with random cases; reduce each failure."),
        "shrink": _Place("fuzz", "shrink", "Reduce a failure of a run to a small case."),
        "show": _Place("show", "show", "Show a case: layer, cache, requests, masks and checks."),
        "list": _Place("show", "list_names", "List names, changes of vLLM's contract, or a JSON schema."),
        "doctor": _Place("doctor", "doctor", "Print versions, devices, and which backends can run."),
        "report": _Place("reports", "report", "Print a report of each run file; by default, of the newest kept run."),
        "compare": _Place("reports", "compare", "Compare two runs: times and changed outcomes."),
        "merge": _Place("app", "merge", "Merge the run files of shards into one."),
        "site": _Place("reports", "site", "Write a static site of the results of many runs."),
        "engine": _Place("engine", "engine", "Judge every attention row of a serving engine."),
        "record": _Place("doctor", "record", "Record the batches of a vLLM server as a case file."),
        "new": _Place("show", "new_backend", "Write the first files of a backend."),
        "warm": _Place("doctor", "warm", "Compile the kernels of a run in advance.", hidden=True),
        "mutants": _Place("mutants", "mutants", "Show which checks detect which mutants.", hidden=True),
    }
)


class CommandInGroups(TyperCommand):
    """A command whose help lists its options by group."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for each in self.get_params(ctx):
            described: Any = each
            record = described.get_help_record(ctx)
            if record is not None:
                name = "Arguments" if each.param_type_name == "argument" else described.rich_help_panel or "Options"
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


class _Commands(Mapping[str, Any]):
    """The commands by name; the module of a command is imported when it is used, since all together load slowly."""

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)

    def __getitem__(self, name: str) -> Any:
        place = _PLACES[name]
        module = import_module(f"attncheck.harness.cli.{place.module}")
        command = with_exit_code(getattr(module, place.function))
        built = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        if name == "new":
            built.callback(help=place.summary, no_args_is_help=True)(lambda: None)
            built.command("backend", cls=CommandInGroups)(command)
        else:
            built.command(name, cls=CommandInGroups, hidden=place.hidden)(command)
        return typer.main.get_command(built)


class CommandGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def list_commands(self, _context: Any) -> list[str]:
        """Return the names of the commands."""
        return list(self.commands)

    def format_commands(self, _context: Any, formatter: Any) -> None:
        """Write each command with its summary."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, place.summary) for name, place in _PLACES.items() if not place.hidden])


app = typer.Typer(
    name="attncheck",
    cls=CommandGroup,
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
