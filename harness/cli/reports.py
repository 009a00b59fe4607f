"""The commands that read run files: ``report``, ``compare`` and ``site``; and the reports that ``run`` writes."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args
from urllib.parse import urlsplit

import typer

from attncheck.errors import AttncheckError, QuestionError, UnknownNameError, shorten
from attncheck.harness.cli.common import (
    Color,
    ColorChoice,
    interruptible,
    make_folder,
    print_stderr,
    refuse_input,
    step_summary,
    terminal_width,
    use_color,
    write_output,
)
from attncheck.reports.document.blocks import SectionName
from attncheck.reports.formats import FORMATS, RenderedReport, ReportFormat
from attncheck.reports.terminal.columns import Style

if TYPE_CHECKING:
    from attncheck.reports.analysis.measured import MeasuredRun
    from attncheck.reports.run_file.store import Run

# Arguments of the commands that read run files.

KEPT_RUNS = "last: the newest run that `attncheck run` kept; last~1: the one before it; a number N: the N-th newest"
"""Words for a run beside the path of its file, for the help of commands."""

RunWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN...", help=f"Run files, or {KEPT_RUNS}.", show_default=False),
]
Folders = Annotated[
    list[Path] | None, typer.Option("--runs", metavar="DIR", help="Every run file in this folder. May be repeated.")
]
Skipped = Annotated[
    str, typer.Option("--skip", metavar="NAME,...", help="Leave out the run files in folders of these names.")
]
OutputFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")]


def chosen_files(
    runs: Sequence[str] | None,
    folders: Sequence[Path] | None,
    skipped: str,
    *,
    default: Sequence[str] = (),
    is_none_allowed: bool = False,
) -> list[Path]:
    """Return the run files that were named, and others in the folders; if neither are given, those of ``default``.

    Raises:
        QuestionError: a folder is none, a kept run is not there, or there is no run file, unless ``is_none_allowed``
            and the folders may get some later.
    """
    from attncheck.harness.cli.run_files import run_path
    from attncheck.reports.run_file.store import run_files

    for folder in folders or ():
        if not folder.is_dir():
            raise QuestionError(f"--runs {folder} is not a folder; name a folder, or give run files as arguments")
    named = [run_path(word) for word in runs or (() if folders else default)]
    known = {path.resolve() for path in named}
    inside = {path.resolve(): path for folder in folders or () for path in run_files(folder)}
    paths = [*named, *(path for place, path in inside.items() if place not in known)]
    names = {name.strip() for name in skipped.split(",")}
    found = [path for path in paths if names.isdisjoint(path.parent.parts)]
    if not found and not (is_none_allowed and folders):
        raise QuestionError("there is no run file; give RUN or --runs DIR")
    return found


# `attncheck report`: renders run files in a format for people or tools. Recomputes nothing, and loads no torch.


def _expectations(runs: "Sequence[Run]", _style: Style) -> RenderedReport:
    from attncheck.harness.run.expectations import expectations_text

    return RenderedReport(expectations_text(runs[0]))


RUN_FORMATS: Mapping[str, ReportFormat] = {
    **FORMATS,
    "expect": ReportFormat(
        "a file for `attncheck run --expect`, with an entry for each finding, whose reason is to be replaced",
        _expectations,
        advice="an expectation file belongs to one run",
    ),
}
"""All formats of runs. That of expectations is written by the code that reads them, which reports cannot import."""

STATEMENT_FORMATS: Mapping[str, str] = {
    "statement": "a statement of conformance to --profile, as JSON",
    "badge": "an SVG badge of the statement that --verify names",
}
"""The formats of statements. They need more than a run, so `attncheck run --report` does not write them."""

_ABOUT_RUNS = {**{name: form.about_runs for name, form in RUN_FORMATS.items()}, **STATEMENT_FORMATS}

if TYPE_CHECKING:  # type checkers do not support enums with computed members
    RunFormat = str
    SectionChoice = SectionName
else:
    RunFormat = StrEnum("RunFormat", {name: name for name in _ABOUT_RUNS})
    SectionChoice = StrEnum("SectionChoice", {name: name for name in get_args(SectionName)})


def report(
    runs: RunWords = None,
    form: Annotated[
        RunFormat,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"{'; '.join(f'{name}: {about}' for name, about in _ABOUT_RUNS.items())}.",
        ),
    ] = "terminal",
    output: OutputFile = None,
    section: Annotated[
        list[SectionChoice] | None,
        typer.Option(
            metavar="NAME",
            help="Print only this section, in full, as terminal, markdown or github. May be repeated. "
            f"Sections: {', '.join(get_args(SectionName))}.",
        ),
    ] = None,
    needs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NEED,...",
            help="Print instead, for each device, which backends are right for all of these needs of a model, such as "
            "sinks,fp8_kv,block_size=32,dtype=bfloat16. As terminal or json.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --needs: only devices with this in their name.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --format statement: what to conform to; see `attncheck list profiles`."
        ),
    ] = None,
    expect: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --format statement: entries with `id` and `until` are waivers."),
    ] = None,
    verify: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Check this statement instead. As terminal, markdown or badge."),
    ] = None,
    again: Annotated[
        int, typer.Option("--rerun", metavar="N", min=0, help="With --verify: make N checks again, drawn at random.")
    ] = 0,
    backend: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --rerun: the backend, unless the statement names a registered one."),
    ] = None,
    folders: Folders = None,
    skipped: Skipped = "",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print the report for a terminal in full.")] = False,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Print a report of each run file; by default, of the newest kept run.

    HTML compares the first run with each of the others. Exit code 0; with --needs, 1 if no backend is right in cases
    that need all of them; with --format statement or --verify, 1 if the backend does not conform or the statement does
    not hold.
    """
    from attncheck.reports.run_file.store import read_run

    style = Style(terminal_width(), output is None and use_color(color), verbose)
    is_stated, is_other = form == "statement", bool(runs or folders or section or needs)
    for is_wrong, message in (
        (is_stated and profile is None, "--format statement needs --profile NAME; see `attncheck list profiles`"),
        (form == "badge" and verify is None, "--format badge is drawn from a statement; give --verify FILE"),
        (not is_stated and (profile or expect), "--profile and --expect belong to --format statement"),
        (is_stated and verify, "--format statement makes a statement, and --verify reads one; leave out either"),
        (verify and is_other, "--verify reads the statement alone; leave out RUN, --runs, --section and --needs"),
        (again and verify is None, "--rerun repeats checks of a statement; give --verify FILE"),
        (backend and not again, "--backend belongs to --rerun"),
    ):
        if is_wrong:
            raise QuestionError(message)
    paths = [verify] if verify is not None else chosen_files(runs, folders, skipped, default=["last"])
    if is_stated or verify is not None:
        from attncheck.harness.cli.statements import stated, verified

        if len(paths) > 1:
            raise QuestionError(f"a statement is about one run, and {len(paths)} are given")
        refuse_input(output, paths)
        if verify is not None:
            text, holds = verified(verify, again, backend, form, style)
        else:
            text, holds = stated(paths[0], profile or "", expect)
        write_output(text, output)
        return 0 if holds else 1
    chosen = RUN_FORMATS[form]
    if chosen.advice and len(paths) > 1:
        raise QuestionError(f"--format {form} takes one run, and {len(paths)} are given; {chosen.advice}")
    if section and needs:
        raise QuestionError("--needs prints an answer without sections; leave out --section")
    if section and chosen.render_sections is None:
        able = ", ".join(name for name, each in RUN_FORMATS.items() if each.render_sections)
        raise QuestionError(f"--section cannot be combined with --format {form}; formats with sections are {able}")
    if device is not None and not needs:
        raise QuestionError(f"--device {device} chooses among the answers of --needs; give --needs, or leave it out")
    if chosen.is_page and output is None and sys.stdout.isatty():
        raise QuestionError(f"--format {form} is not for a terminal; give --output FILE")
    read = [read_run(path) for path in paths]
    refuse_input(output, paths)
    is_right = True
    if needs:
        rendered, is_right = _answers(read, needs, device, form, style)
    elif section and chosen.render_sections is not None:
        rendered = chosen.render_sections(read, [*dict.fromkeys(section)], style)
    else:
        rendered = chosen.render_runs(read, style)
    write_output(rendered.text, output, step_summary() if chosen.is_step_summary else None)
    typer.echo(rendered.log, nl=False)
    return 0 if is_right else 1


def _answers(
    runs: "Sequence[Run]", needs: Sequence[str], device: str | None, form: str, style: Style
) -> tuple[RenderedReport, bool]:
    """Return for each device which backends are right for the needs, and whether there is one.

    Raises:
        QuestionError: the format has no answers, nothing was measured on such a device, or a need is unknown.
    """
    from attncheck.reports.analysis.measured import measured_run, subjects
    from attncheck.reports.analysis.recommendation import checked_needs, known_needs, recommend
    from attncheck.reports.speeds.speed import forward_times
    from attncheck.reports.terminal import recommendation as terminal

    if form not in ("terminal", "json"):
        raise QuestionError(f"--needs cannot be combined with --format {form}; give terminal or json")
    measured = subjects(measured_run(run, run.path, forward_times(run)) for run in runs)
    wanted = checked_needs(",".join(needs), known_needs(measured))
    if not wanted:
        raise QuestionError("--needs names nothing; give features and forms, such as sinks,block_size=16")
    devices = terminal.by_device(measured)
    chosen = {name: own for name, own in devices.items() if device is None or device.lower() in name.lower()}
    if not chosen:
        raise QuestionError(f"--device {device}: nothing was measured on it; measured are: {', '.join(devices)}")
    answers = {name: recommend(wanted, own) for name, own in chosen.items()}
    if form == "json":
        document = {"needs": wanted, "devices": [terminal.as_json(*answer) for answer in answers.items()]}
        text = json.dumps(document, indent=2)
    else:
        text = "\n\n".join(terminal.render_recommendation(name, wanted, own, style) for name, own in answers.items())
    is_right = any(each.standing == "right" for found in answers.values() for each in found)
    return RenderedReport(f"{text}\n"), is_right


# `attncheck run --report`: reports of a run, written at its end.


@dataclass(frozen=True)
class WantedReport:
    """A report to write at the end of a run: to the file ``output``, else to the ``summary`` of a GitHub step."""

    form: str
    output: Path | None
    summary: Path | None


def read_reports(texts: Iterable[str]) -> tuple[WantedReport, ...]:
    """Return the reports that ``--report`` gives, such as ``html=report.html,junit=junit.xml,github``.

    Raises:
        UnknownNameError: there is no such format.
        QuestionError: a format has no file.
    """
    found = []
    for text in (part for each in texts for part in each.split(",") if part):
        form, _, file = text.partition("=")
        if form not in RUN_FORMATS:
            raise UnknownNameError("report format", form, list(RUN_FORMATS))
        if not file and not RUN_FORMATS[form].is_step_summary:
            raise QuestionError(f"--report {text} names no file; give {form}=FILE")
        found.append(WantedReport(form, Path(file) if file else None, step_summary()))
    return tuple(found)


def write_reports(wanted: Iterable[WantedReport], run: "Run") -> None:
    """Write the reports of a run, also of one that was interrupted; create their folders.

    Raises:
        AttncheckError: a report could not be written; the others are.
    """
    failed: AttncheckError | None = None
    for each in wanted:
        try:
            refuse_input(each.output, [Path(run.path)])
            if each.output is not None:
                make_folder(each.output.parent, f"--report {each.form}={each.output}")
            rendered = RUN_FORMATS[each.form].render_runs([run], Style(terminal_width()))
            write_output(rendered.text, each.output, each.summary)
            typer.echo(rendered.log, nl=False)
        except AttncheckError as error:
            failed = failed or error
    if failed is not None:
        raise failed


# `attncheck compare`: differences between two runs. Reads run files, recomputes nothing, and loads no torch.

_RENDERERS = {name: form.render_comparison for name, form in FORMATS.items() if form.render_comparison is not None}
_ABOUT = [FORMATS[name].about_comparison for name in _RENDERERS]

if TYPE_CHECKING:  # type checkers do not support enums with computed members
    ComparisonFormat = str
else:
    ComparisonFormat = StrEnum("ComparisonFormat", {name: name for name in _RENDERERS})


def compare(
    base: Annotated[str, typer.Argument(metavar="BASE", help=f"The run file to compare with, or {KEPT_RUNS}.")],
    new: Annotated[
        str, typer.Argument(metavar="[NEW]", help="The run to check for regressions, written alike.")
    ] = "last",
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
    output: OutputFile = None,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Compare two runs: times and changed outcomes.

    A time is slower, faster or the same. Exit code 1: an outcome is worse, a time is slower, or NEW lacks a check that
    BASE has. Times are compared by the rounds of `attncheck run --check timing --rounds N`: at least 5 in each run,
    usually 10. Two backends of one run show smaller differences than two runs, because their processes alternate:
    `attncheck compare RUN RUN --match OLD=NEW`.
    """
    from attncheck.harness.cli.run_files import run_path
    from attncheck.reports.comparison.compare import ComparisonTerms, compare_runs
    from attncheck.reports.comparison.thresholds import parse_thresholds
    from attncheck.reports.run_file.store import read_run

    effect = min_effect / 100
    thresholds = parse_thresholds(fail_on or (), least=effect)
    terms = ComparisonTerms(effect=effect, thresholds=thresholds, allow_missing=allow_missing)
    backends = _pairs(match or ())
    paths = [run_path(base), run_path(new)]
    compared = compare_runs(*map(read_run, paths), backends=backends, terms=terms)
    rendered = _RENDERERS[form](compared, Style(terminal_width(), output is None and use_color(color)))
    refuse_input(output, paths)
    write_output(rendered.text, output, step_summary() if FORMATS[form].is_step_summary else None)
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


# `attncheck site`: writes a static site from run files, and serves it on this machine. Loads no torch.

_PORT = 8008
_EVERY_S = 1.0
"""Seconds between two looks at the run files."""


def site(
    context: typer.Context,
    runs: RunWords = None,
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
    handler = partial(_SiteHandler, directory=str(output))
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


class _SiteHandler(SimpleHTTPRequestHandler):
    """Serves the files of a site to its own pages alone.

    A foreign page may reach this server by a name that it resolves to this machine, but then ``Host`` has that name.
    """

    def send_head(self) -> Any:
        """Send the head of an answer, and return the file to send, or None."""
        own = ("127.0.0.1", "localhost")  # at any port: the browser's may be forwarded to this server's
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        is_foreign = origin is not None and urlsplit(origin).hostname not in own
        if host.partition(":")[0] not in own or is_foreign:
            self.send_error(HTTPStatus.FORBIDDEN, "only the pages of this site are answered")
            return None
        return super().send_head()

    def list_directory(self, _path: Any) -> None:
        """Send an error: the files of a folder are not listed."""
        self.send_error(HTTPStatus.NOT_FOUND)

    def log_message(self, *_args: object) -> None:
        """Print no line for each file."""
