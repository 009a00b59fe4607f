"""Where run files are kept: named by their time in a folder, of which the newest are left.

The folder is ``results`` where the current folder has one, else a folder of the user's cache for the current folder.
"""

import contextlib
import hashlib
import itertools
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from attncheck.errors import RunFileError, unwritable
from attncheck.harness.cli.output import say
from attncheck.harness.truth.shared_folder import user_cache
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record, RunFooter, parse_line
from attncheck.reports.run_file.store import Run, RunWriter

RESULTS = Path("results")

_NEWEST, _READ_S = 4, 0.05
"""Runs that tell what checks cost, and seconds after which no more of them is read."""

_NAME = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?\.jsonl")
"""How attncheck names run files: date, time, process, and a number where that name was taken. No other is deleted."""


class RecordWriter(Protocol):
    """Takes the records of a run. ``path``: its run file; None where none is written."""

    @property
    def path(self) -> Path | None:
        """Where the run is written."""

    def add(self, record: Record) -> None:
        """Write one record."""

    def fail(self, error: str) -> None:
        """Note an error besides the records."""


class NoWriter:
    """Writes nothing."""

    path = None

    def add(self, record: Record) -> None:
        """Drop the record."""

    def fail(self, error: str) -> None:
        """Drop the error."""


def kept_folder() -> Path:
    """Return the folder for the runs of the current folder: ``results`` if it exists, else one of the user's cache."""
    if RESULTS.is_dir():
        return RESULTS
    here = Path.cwd()
    digest = hashlib.sha256(os.fsencode(here)).hexdigest()[:8]
    return user_cache() / "runs" / f"{here.name or 'root'}-{digest}"


def kept_runs(folder: Path) -> list[Path]:
    """Return the run files that attncheck named in ``folder``, the oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_age)


def _age(path: Path) -> tuple[str, str, int, int]:
    """Return what sorts run files by age: date, time, process, and the number of the run within one second."""
    date, seconds, process, *number = path.stem.split("-")
    return date, seconds, int(process), int(number[0]) if number else 1


def drop_old_runs(folder: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` run files that attncheck named in ``folder``; what cannot be deleted stays.

    In the user's cache the runs of all folders count together, and a folder that is left empty is deleted.
    """
    is_cache = folder.is_relative_to(user_cache())
    with contextlib.suppress(OSError):
        folders = folder.parent.iterdir() if is_cache else [folder]
        runs = sorted((path for each in folders for path in kept_runs(each)), key=_age)
        for path in runs[:-keep]:
            path.unlink(missing_ok=True)
            if is_cache and not any(path.parent.iterdir()):
                path.parent.rmdir()


def measured_costs(folder: Path | None, device_name: str) -> dict[tuple[str, str, str], float]:
    """Return the seconds that checks took on this device in the newest runs of ``folder``; see ``schedule.Costs``.

    What cannot be read is left out: nothing but the division of work depends on it.
    """
    costs: dict[tuple[str, str, str], float] = {}
    deadline = time.monotonic() + _READ_S
    for path in kept_runs(folder)[: -_NEWEST - 1 : -1] if folder else ():
        with contextlib.suppress(OSError, ValueError), path.open(encoding="utf-8") as lines:
            for line in lines:
                found = parse_line(line)
                if time.monotonic() > deadline:
                    return costs
                if isinstance(found, RunHeader) and found.environment.device_name != device_name:
                    break
                if not isinstance(found, RunHeader | RunFooter):
                    costs.setdefault((found.backend_ref, found.case_hash, found.check), found.duration_s)
    return costs


@contextlib.contextmanager
def open_run(
    output: Path | None, folder: Path | None, header: RunHeader, keep: int, earlier: Run | None = None
) -> Iterator[RecordWriter]:
    """Yield the writer of the run file ``output``, else of a file in ``folder``; None: nothing is written.

    ``earlier``: a run that was cut off, whose file is written on. ``output`` may be a folder. Where nothing can be
    written in ``folder``, the run file is a temporary one, and stderr says so. On leaving, ``folder`` has at most
    ``keep`` runs.

    Raises:
        RunFileError: ``output`` exists.
        QuestionError, WriteError: it cannot be written.
    """
    if earlier is not None:
        with RunWriter(Path(earlier.path), header, earlier) as continued:
            yield continued
        return
    if output is None and folder is None:
        yield NoWriter()
        return
    with _writer(output, folder, header) as writer:
        yield writer
    if output is None and folder is not None:
        drop_old_runs(folder, keep)


def _writer(output: Path | None, folder: Path | None, header: RunHeader) -> RunWriter:
    """Return an opened writer."""
    if output is not None:
        return RunWriter(_free_path(output) if output.is_dir() else output, header)
    assert folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(prefix=".attncheck-", dir=folder)
        os.close(handle)
        Path(probe).unlink()
    except OSError as error:
        path = _free_path(Path(tempfile.mkdtemp(prefix="attncheck-")))
        say(
            f"note: no run file can be written in {folder}: {error.strerror}; it is {path} instead. "
            "--output FILE names another, --no-output writes none"
        )
        return RunWriter(path, header)
    return RunWriter(_free_path(folder), header)


def _free_path(folder: Path) -> Path:
    """Name a run file by the time and the process, and by a number where several runs begin in one second."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / f"{name}.jsonl").exists())


def newest_run(folder: Path) -> Path:
    """Return the newest run file that attncheck named in ``folder``.

    Raises:
        RunFileError: there is none.
    """
    runs = kept_runs(folder)
    if not runs:
        raise RunFileError(str(folder), "no run is kept there; --last-failed needs one: run once without it")
    return runs[-1]


def make_dump_folder(dump: Path | None) -> None:
    """Make the folder before the run, so that the first failure does not end it."""
    if dump is None:
        return
    try:
        dump.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(f"--dump {dump}", error) from error
