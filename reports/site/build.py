"""Build the site from run files, in several processes."""

import gc
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from attncheck.errors import QuestionError
from attncheck.reports.site.digest import digest_of
from attncheck.reports.site.model import SiteRun
from attncheck.reports.site.pages import FOLDERS, Site, SiteFile, site_files, write_file

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")
"""The ends of the names of run files."""

MARK = "data/written.txt"
"""The file that marks a folder as a site. Its text changes whenever the site is written."""

_FEW = 8
"""Up to this many runs are read in this process, since others take longer to start."""


def run_files(folder: Path) -> list[Path]:
    """Return the run files in ``folder`` and the folders in it, by name."""
    return sorted(path for path in folder.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())


def names_of(files: Iterable[Path]) -> dict[Path, str]:
    """Return a name for each run file: its path from the folder that all of them share."""
    paths = list(files)
    if not paths:
        return {}
    shared = Path(os.path.commonpath([path.resolve().parent for path in paths]))
    return {path: path.resolve().relative_to(shared).as_posix() for path in paths}


def read_runs(names: dict[Path, str], processes: int) -> tuple[list[SiteRun], dict[str, str]]:
    """Read the run files; return the runs, and why others cannot be read, by name."""
    if len(names) <= _FEW:
        found = [_read(item) for item in names.items()]
    else:
        # Records have no cycles: without the garbage collector, reading takes a fifth less time.
        with ProcessPoolExecutor(processes, get_context("spawn"), initializer=gc.disable) as pool:
            found = list(pool.map(_read, names.items(), chunksize=4))
    runs = [each for each in found if isinstance(each, SiteRun)]
    unread = {name: each for name, each in zip(names.values(), found, strict=True) if isinstance(each, str)}
    return runs, unread


def _read(item: tuple[Path, str]) -> SiteRun | str:
    path, name = item
    try:
        return digest_of(path, name)
    except QuestionError as error:
        return str(error)


def write_site(runs: Iterable[SiteRun], unread: dict[str, str], output: Path, *, reloads: bool = False) -> Site:
    """Write the site into ``output``, and delete its earlier pages and chunks there.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    newest_first = sorted(runs, key=lambda run: (run.started, run.key), reverse=True)
    site = Site(tuple(newest_first), unread, reloads)
    written = {output / MARK}
    for file in site_files(site):
        write_file(file, output)
        written.add(output / file.path)
    for folder in FOLDERS:
        for path in (output / folder).glob("*"):
            if path not in written:
                path.unlink()
    write_file(SiteFile(MARK, f"{time.time_ns()}\n"), output)
    return site


def refuse_foreign(output: Path) -> None:
    """Raise QuestionError if ``output`` is no folder, or has files and is not an earlier site."""
    if output.exists() and not output.is_dir():
        raise QuestionError(f"--output {output} is a file; name a folder")
    if output.exists() and any(output.iterdir()) and not (output / MARK).exists():
        raise QuestionError(f"--output {output} has other files; name a new folder, or one that has an earlier site")
