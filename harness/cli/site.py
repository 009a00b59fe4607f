"""``attncheck site``: writes a static site from run files, and serves it on this machine. Loads no torch."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import QuestionError
from attncheck.harness.cli.interruption import interruptible
from attncheck.harness.cli.output import print_stderr

if TYPE_CHECKING:
    from attncheck.reports.analysis.measured import MeasuredRun

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
