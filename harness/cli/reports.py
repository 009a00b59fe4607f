"""The commands that read run files: ``report``, ``compare``, ``audit``, ``site``, ``recommend`` and ``expect``."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from attncheck.errors import QuestionError, shorten
from attncheck.harness.cli import options as arguments
from attncheck.harness.cli import options as processes
from attncheck.harness.cli.common import (
    Color,
    ColorChoice,
    interruptible,
    print_stderr,
    refuse_input,
    terminal_width,
    use_color,
    write_output,
)
from attncheck.reports.document.blocks import SectionName
from attncheck.reports.formats import FORMATS
from attncheck.reports.terminal.columns import Style

if TYPE_CHECKING:
    from attncheck.reports.analysis.measured import MeasuredRun

# `attncheck report`: renders run files in a format for people or tools. Recomputes nothing, and loads no torch.

if TYPE_CHECKING:  # type checkers do not support enums with computed members
    RunFormat = str
    SectionChoice = SectionName
else:
    RunFormat = StrEnum("RunFormat", {name: name for name in FORMATS})
    SectionChoice = StrEnum("SectionChoice", {name: name for name in get_args(SectionName)})


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run files written by `attncheck run`.")],
    form: Annotated[
        RunFormat,
        typer.Option("--format", help=f"{'; '.join(form.about_runs for form in FORMATS.values())}."),
    ] = "terminal",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
    section: Annotated[
        list[SectionChoice] | None,
        typer.Option(
            metavar="NAME",
            help="Print only this section, in full, as terminal, markdown or github. May be repeated. "
            f"Sections: {', '.join(get_args(SectionName))}.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the report for a terminal in full.")] = False,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Print a report of each run file.

    HTML compares the first run with each of the others.
    """
    from attncheck.reports.run_file.store import read_run

    chosen = FORMATS[form]
    if chosen.advice and len(runs) > 1:
        raise QuestionError(f"--format {form} takes one run, and {len(runs)} are given; {chosen.advice}")
    if section and chosen.render_sections is None:
        able = ", ".join(name for name, each in FORMATS.items() if each.render_sections)
        raise QuestionError(f"--section cannot be combined with --format {form}; formats with sections are {able}")
    read = [read_run(path) for path in runs]
    refuse_input(output, runs)
    style = Style(terminal_width(), output is None and use_color(color), verbose)
    if section and chosen.render_sections is not None:
        rendered = chosen.render_sections(read, [*dict.fromkeys(section)], style)
    else:
        rendered = chosen.render_runs(read, style)
    write_output(rendered.text, output, is_summary=chosen.is_step_summary)
    typer.echo(rendered.log, nl=False)
    return 0


# `attncheck compare`: differences between two runs. Reads run files, recomputes nothing, and loads no torch.

_RENDERERS = {name: form.render_comparison for name, form in FORMATS.items() if form.render_comparison is not None}
_ABOUT = [FORMATS[name].about_comparison for name in _RENDERERS]

if TYPE_CHECKING:  # type checkers do not support enums with computed members
    ComparisonFormat = str
else:
    ComparisonFormat = StrEnum("ComparisonFormat", {name: name for name in _RENDERERS})


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The run file to compare with.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run file to check for regressions.")],
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'PATTERN: N%'",
            help="Fail only for slowdowns of N % or more in cases that match PATTERN: a suite, a shell pattern of "
            "suite/id, or nothing for all. PATTERN@PART applies to one part: forward, build, decode or prefill. May be "
            "repeated; the last match counts. Default: fail for every reported slowdown.",
        ),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=NEW",
            help="Compare backend OLD of BASE with backend NEW of NEW. BASE and NEW may be one file. May be repeated.",
        ),
    ] = None,
    min_effect: Annotated[
        float,
        typer.Option(metavar="N", min=0, max=100, help="The smallest difference to report, in percent of the time."),
    ] = 1.0,
    allow_missing: Annotated[
        bool,
        typer.Option(
            "--allow-missing",
            help="Accept that NEW lacks cases, checks or backends of BASE, or that a run is incomplete.",
        ),
    ] = False,
    form: Annotated[
        ComparisonFormat,
        typer.Option("--format", help=f"{', '.join(_ABOUT[:-1])}, or {_ABOUT[-1]}."),
    ] = "terminal",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Compare two runs: times and changed outcomes.

    A time is slower, faster or the same. Exit code 1: an outcome is worse, a time is slower, or NEW lacks a check that
    BASE has. Times are compared by the rounds of `attncheck run --check timing --rounds N`: at least 5 in each run,
    usually 10. Two backends of one run show smaller differences than two runs, because their processes alternate:
    `attncheck compare RUN RUN --match OLD=NEW`.
    """
    from attncheck.reports.comparison.compare import ComparisonTerms, compare_runs
    from attncheck.reports.comparison.thresholds import parse_thresholds
    from attncheck.reports.run_file.store import read_run

    effect = min_effect / 100
    thresholds = parse_thresholds(fail_on or (), least=effect)
    terms = ComparisonTerms(effect=effect, thresholds=thresholds, allow_missing=allow_missing)
    backends = _pairs(match or ())
    compared = compare_runs(read_run(base), read_run(new), backends=backends, terms=terms)
    rendered = _RENDERERS[form](compared, Style(terminal_width(), output is None and use_color(color)))
    refuse_input(output, (base, new))
    write_output(rendered.text, output, is_summary=FORMATS[form].is_step_summary)
    typer.echo(rendered.log, nl=False)
    return 1 if compared.fails else 0


def _pairs(texts: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Return the pairs of backends that ``--match`` gives, as OLD to NEW.

    Raises:
        QuestionError: a text is not of the form OLD=NEW, or names a backend twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        one, equals, other = text.partition("=")
        if not (one and equals and other):
            raise QuestionError(f"--match {shorten(text)} is not understood; write OLD=NEW, names of two backends")
        if one in found or other in found.values():
            raise QuestionError(f"--match {shorten(text)}: a backend is matched once; {one} or {other} is already")
        found[one] = other
    return found


# `attncheck audit`: declared and measured features of all backends of a library.


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
    from attncheck.harness.cli.run import execute_run
    from attncheck.harness.cli.run_files import kept_folder
    from attncheck.harness.run.options import RunOptions, read_jobs, split_commas
    from attncheck.harness.run.selection import choose_checks
    from attncheck.harness.workers.limits import read_limit
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
            jobs=read_jobs("--jobs", jobs or "auto"),
            deadline=time.monotonic() + limit_s,
            output=run_file,
            folder=kept_folder(),
            command=("attncheck", "run", "--backend", f"{family}:*", *words),
        )
        finished = execute_run(options)
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


# `attncheck site`: writes a static site from run files, and serves it on this machine. Loads no torch.

_PORT = 8008
_EVERY_S = 1.0
"""Seconds between two looks at the run files."""


RunFiles = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RUN...", help="Run files written by `attncheck run`.", show_default=False),
]
Folders = Annotated[
    list[Path] | None, typer.Option("--runs", metavar="DIR", help="Every run file in this folder. May be repeated.")
]
Skipped = Annotated[
    str, typer.Option("--skip", metavar="NAME,...", help="Leave out the run files in folders of these names.")
]
"""Arguments of the commands that read many runs."""


def site(
    context: typer.Context,
    runs: RunFiles = None,
    folders: Folders = None,
    skipped: Skipped = "",
    output: Annotated[Path, typer.Option(metavar="DIR", help="Write the site into this folder.")] = Path("site"),
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes that read run files.")] = 2,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the site on this machine, and write it again when a run changes.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of --serve; 0: any that is free.")] = _PORT,
) -> int:
    """Write a static site of the results of many runs.

    The site opens from its folder or from any web server, and loads nothing from elsewhere. Files that cannot be read
    are listed on its page of runs. Exit code 0: the site is written; 2: no run file can be read.
    """
    from attncheck.reports.site.build import refuse_foreign

    def found() -> list[Path]:
        return chosen_files(runs, folders, skipped, is_none_allowed=serve)

    found()
    refuse_foreign(output)
    sources = _Sources(found, output, jobs)
    if serve:
        context.with_resource(interruptible())
        return _serve(sources, output, port)
    sources.read()
    if not sources.has_runs:
        raise QuestionError("no run file can be read; the site is not written")
    sources.write(reloads=False)
    return 0


def chosen_files(
    runs: Sequence[Path] | None, folders: Sequence[Path] | None, skipped: str, *, is_none_allowed: bool = False
) -> list[Path]:
    """Return the run files that were named, and those in the folders.

    Raises:
        QuestionError: a folder is none, or there is no run file, unless the folders may get some later.
    """
    from attncheck.reports.site.build import run_files

    for folder in folders or ():
        if not folder.is_dir():
            raise QuestionError(f"--runs {folder} is not a folder; name a folder, or give run files as arguments")
    names = {name.strip() for name in skipped.split(",")}
    paths = [*(runs or ()), *(path for folder in folders or () for path in run_files(folder))]
    found = list({path.resolve(): path for path in paths if names.isdisjoint(path.parent.parts)}.values())
    if not found and not (is_none_allowed and folders):
        raise QuestionError("there is no run file; give RUN or --runs DIR")
    return found


class _Sources:
    """The run files of a site. Only those that are new or changed are read again."""

    def __init__(self, found: Callable[[], list[Path]], output: Path, jobs: int) -> None:
        self._found = found
        self._output = output
        self._jobs = jobs
        self._states: dict[Path, tuple[int, int]] = {}
        self._names: dict[Path, str] = {}
        self._runs: dict[str, MeasuredRun] = {}
        self._unread: dict[str, str] = {}
        self._pages: dict[str, str] = {}

    @property
    def has_runs(self) -> bool:
        """Whether any run file could be read."""
        return bool(self._runs)

    def read(self) -> bool:
        """Read what is new or changed, and return whether the site must be written again."""
        from attncheck.reports.site.build import names_of, read_runs

        states = {path: _state(path) for path in self._found()}
        if states == self._states:
            return False
        names = names_of(list(states))
        if any(self._names.get(path, name) != name for path, name in names.items()):
            self._states = {}  # names depend on the folder that all files share
        changed = {path: name for path, name in names.items() if states[path] != self._states.get(path)}
        runs, unread = read_runs(changed, self._jobs)
        for name, reason in unread.items():
            print_stderr(f"warning: {reason}" if name in reason else f"warning: {name}: {reason}")
        kept = set(names.values()).difference(changed.values())
        self._runs = {name: self._runs[name] for name in kept & set(self._runs)} | {run.name: run for run in runs}
        self._unread = {name: self._unread[name] for name in kept & set(self._unread)} | unread
        for run in runs:
            self._pages.pop(run.key, None)
        self._states, self._names = states, names
        return True

    def write(self, *, reloads: bool) -> None:
        """Write the site."""
        from attncheck.reports.analysis.phrases import plural
        from attncheck.reports.site.build import write_site

        runs = self._runs.values()
        site = write_site(runs, self._unread, self._output, reloads=reloads, pages=self._pages, processes=self._jobs)
        counts = (len(site.runs), "run"), (len(site.by_backend), "backend"), (len(site.by_device), "device")
        typer.echo(f"{self._output / 'index.html'}: {', '.join(plural(*count) for count in counts)}")


def _serve(sources: _Sources, output: Path, port: int) -> int:
    sources.read()
    sources.write(reloads=True)
    handler = partial(_QuietHandler, directory=str(output))
    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise QuestionError(f"--port {port} cannot be used: {error.strerror}; give another, or 0 for any") from error
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        typer.echo(f"http://127.0.0.1:{server.server_port}/ (end with Ctrl-C)")
        while True:
            time.sleep(_EVERY_S)
            if sources.read():
                sources.write(reloads=True)


def _state(path: Path) -> tuple[int, int]:
    """Return the time and size of a file; zeros if there is none."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


class _QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a log line for each."""

    def log_message(self, *_args: object) -> None:
        """Print nothing."""


# `attncheck recommend`: which backends were measured as correct for a combination of needs. Loads no torch.


class AnswerFormat(StrEnum):
    """Output format of the answer."""

    terminal = "terminal"
    json = "json"


def recommend(
    runs: RunFiles = None,
    *,
    needs: Annotated[
        list[str],
        typer.Option(metavar="NEED,...", help="Needs of a model, such as sinks,fp8_kv,block_size=32,dtype=bfloat16."),
    ],
    folders: Folders = None,
    skipped: Skipped = "",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Answer for the devices with this in their name alone.")
    ] = None,
    form: Annotated[
        AnswerFormat, typer.Option("--format", help="Text, or JSON with times in nanoseconds.")
    ] = AnswerFormat.terminal,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Print the backends that are right for all needs, by device.

    Exit code 0: at least one is right in cases that need all of them; 1: none is.
    """
    from attncheck.reports.analysis.measured import measured_run, subjects
    from attncheck.reports.analysis.recommendation import checked_needs, known_needs
    from attncheck.reports.analysis.recommendation import recommend as judged
    from attncheck.reports.run_file.store import read_run
    from attncheck.reports.speeds.speed import forward_times
    from attncheck.reports.terminal import recommendation as terminal
    from attncheck.reports.terminal.columns import Style

    read = [read_run(path) for path in chosen_files(runs, folders, skipped)]
    measured = subjects(measured_run(run, run.path, forward_times(run)) for run in read)
    wanted = checked_needs(",".join(needs), known_needs(measured))
    if not wanted:
        raise QuestionError("--needs names nothing; give features and forms, such as sinks,block_size=16")
    devices = terminal.by_device(measured)
    chosen = {name: own for name, own in devices.items() if device is None or device.lower() in name.lower()}
    if not chosen:
        raise QuestionError(f"--device {device}: nothing was measured on it; measured are: {', '.join(devices)}")
    answers = {name: judged(wanted, own) for name, own in chosen.items()}
    if form == AnswerFormat.json:
        document = {"needs": wanted, "devices": [terminal.as_json(*answer) for answer in answers.items()]}
        typer.echo(json.dumps(document, indent=2))
    else:
        style = Style(terminal_width(), use_color(color))
        texts = [terminal.render_recommendation(name, wanted, found, style) for name, found in answers.items()]
        typer.echo("\n\n".join(texts))
    is_right = any(each.standing == "right" for found in answers.values() for each in found)
    return 0 if is_right else 1


# `attncheck expect`: writes the expectation file under which a run would have passed. Loads no torch.


def expect(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run file written by `attncheck run`.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
) -> int:
    """Write the failures of a run as expected failures.

    The file is for `attncheck run --expect FILE`, and has one entry for each finding. A comment above each entry
    describes the failure. Replace the reasons with your own; `until` and `issue` are optional.
    """
    from attncheck.harness.run.expectations import expectations_text
    from attncheck.reports.run_file.store import read_run

    found = read_run(run)
    refuse_input(output, [run])
    write_output(expectations_text(found), output)
    return 0
