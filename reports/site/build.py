"""Build the site from run files, in several processes."""

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from attncheck.errors import QuestionError
from attncheck.reports.analysis.measured import MeasuredRun, measured_run
from attncheck.reports.html import render_runs
from attncheck.reports.html.page import require_extra
from attncheck.reports.run_file.store import read_run
from attncheck.reports.site.pages import Site, site_files
from attncheck.reports.speeds.speed import forward_times

MARK = "data/written.txt"
"""The file that marks a folder as a site. Its text changes whenever the site is written."""

FOLDERS = ("backends", "devices", "runs", "badges")
"""Folders whose files depend on the runs."""

_FEW = 8
"""Up to this many runs are read in this process, since others take longer to start."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def names_of(files: Iterable[Path]) -> dict[Path, str]:
    """Return a name for each run file: its path from the folder that all of them share."""
    paths = list(files)
    if not paths:
        return {}
    shared = Path(os.path.commonpath([path.resolve().parent for path in paths]))
    return {path: path.resolve().relative_to(shared).as_posix() for path in paths}


def read_runs(names: dict[Path, str], processes: int) -> tuple[list[MeasuredRun], dict[str, str]]:
    """Read the run files; return the runs, and why others cannot be read, by name."""
    runs: list[MeasuredRun] = []
    unread: dict[str, str] = {}
    known: dict[tuple[object, ...], Mapping[str, tuple[str, str]]] = {}
    found = _each(_read, list(names.items()), processes)
    for name, each in zip(names.values(), found, strict=True):
        if isinstance(each, str):
            unread[name] = each
        else:
            # Runs of the same suites share the descriptions of their cases, a quarter of what a run needs of memory.
            described = known.setdefault(tuple(each.described.items()), each.described)
            runs.append(replace(each, described=described))
    return runs, unread


def _each(function: Callable[[_Item], _Result], items: list[_Item], processes: int) -> Iterator[_Result]:
    """Yield the result of each item, in their order."""
    if len(items) <= _FEW:
        yield from map(function, items)
        return
    # Records have no cycles: without the garbage collector, reading takes a fifth less time.
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=gc.disable) as pool:
        yield from pool.map(function, items, chunksize=4)


def _read(item: tuple[Path, str]) -> MeasuredRun | str:
    path, name = item
    try:
        run = read_run(path)
    except QuestionError as error:
        return str(error)
    return measured_run(run, name, forward_times(run))


def _page(path: str) -> str:
    return render_runs([read_run(Path(path))])


def write_site(
    runs: Iterable[MeasuredRun],
    unread: dict[str, str],
    output: Path,
    *,
    reloads: bool = False,
    pages: MutableMapping[str, str] | None = None,
    processes: int = 2,
) -> Site:
    """Write the site into ``output``, and delete its earlier pages there.

    ``pages``: the HTML reports of runs, by key. Missing ones are made and added.

    Raises:
        MissingExtraError: jinja2 is not installed, or what the HTML report needs.
    """
    require_extra()  # an error in a process of the pool would not come back as itself
    newest_first = sorted(runs, key=lambda run: (run.started, run.key), reverse=True)
    site = Site(tuple(newest_first), unread, reloads)
    pages = {} if pages is None else pages
    missing = [run for run in newest_first if run.key in site.sources and run.key not in pages]
    made = _each(_page, [run.path for run in missing], processes)
    pages.update((run.key, text) for run, text in zip(missing, made, strict=True))
    texts = dict(site_files(site)) | {f"runs/{key}.html": pages[key] for key in site.sources}
    for name, text in texts.items():
        _write(output / name, text)
    for folder in FOLDERS:
        for path in (output / folder).glob("*"):
            if path.relative_to(output).as_posix() not in texts:
                path.unlink()
    _write(output / MARK, f"{time.time_ns()}\n")
    return site


def _write(path: Path, text: str) -> None:
    """Write the text; a file whose text is unchanged keeps its time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def refuse_foreign(output: Path) -> None:
    """Raise QuestionError if ``output`` is no folder, or has files and is not an earlier site."""
    if output.exists() and not output.is_dir():
        raise QuestionError(f"--output {output} is a file; name a folder")
    if output.exists() and any(output.iterdir()) and not (output / MARK).exists():
        raise QuestionError(f"--output {output} has other files; name a new folder, or one that has an earlier site")
