"""Run files of commands: where they lie, and which one is resumed or repeated."""

import contextlib
import hashlib
import itertools
import os
import re
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISREG, S_IWOTH

from attncheck.cases.keys import split_variant
from attncheck.errors import RunFileError, SelectionError, WriteError
from attncheck.harness.cli.common import print_stderr
from attncheck.harness.cli.options import read_config
from attncheck.harness.run.options import RunOptions
from attncheck.harness.truth.shared_folder import SharedFolder, user_cache
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.merging import question_differences
from attncheck.reports.run_file.records import (
    ENGINE_CHECKS,
    EXAMINED,
    FALLEN_SHORT,
    UTILITIES,
    Record,
    RunFooter,
    format_line,
    parse_line,
)
from attncheck.reports.run_file.store import Run, RunWriter, is_written_now, lacks_header, read_run
from attncheck.reports.run_file.timings import TIMING

# Kept run files: named by time, in a folder that keeps the newest ones.
#
# The folder is `results` in the current folder if it exists, else a folder of the user's cache for the current folder.

RESULTS = Path("results")

_NEWEST, _READ_S = 4, 0.05
"""Number of runs read for the costs of checks, and the time limit for reading them in seconds."""

_NAME = re.compile(r"\d{8}-\d{6}-\d+(-\d+)?\.jsonl")
"""Names of run files that attncheck chose: date, time, process, and a number if needed. No other file is deleted."""

_ROOM = 2**16
"""Bytes of records that must fit on the disk when a run begins."""

_KEPT = re.compile(r"last(~(?P<before>\d+))?|(?P<number>[1-9]\d*)")
"""A word for a kept run."""


class NoWriter:
    """Writes nothing."""

    path = None

    def add(self, record: Record) -> None:
        """Discard the record."""

    def fail(self, error: str) -> None:
        """Discard the error."""


def kept_folder() -> Path:
    """Return the folder for runs of the current folder: ``results`` if it exists, else one in the user's cache."""
    if RESULTS.is_dir():
        return RESULTS
    here = Path.cwd()
    digest = hashlib.sha256(os.fsencode(here)).hexdigest()[:8]
    return user_cache() / "runs" / f"{here.name or 'root'}-{digest}"


def kept_runs(folder: Path) -> list[Path]:
    """Return the run files in ``folder`` that have names chosen by attncheck, oldest first.

    Empty if the folder cannot be read.
    """
    try:
        found = list(folder.iterdir())
    except OSError:
        return []
    return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_age)


def _age(path: Path) -> tuple[str, str, int, int]:
    """Return the sort key of a run file by age: date, time, process, number within the second."""
    date, seconds, process, *number = path.stem.split("-")
    return date, seconds, int(process), int(number[0]) if number else 1


def drop_old_runs(folder: Path, keep: int, written: Path) -> None:
    """Delete all but the newest ``keep`` run files of :func:`kept_runs`; errors are ignored.

    ``written``: the run that has just ended; it stays, as do runs that other processes write: a long run is older than
    short ones beside it. In the user's cache, the runs of all folders count together, and folders that become empty are
    deleted.
    """
    is_cache = _is_cached(folder)
    with contextlib.suppress(OSError):
        folders = folder.parent.iterdir() if is_cache else [folder]
        runs = sorted((path for each in folders for path in kept_runs(each)), key=_age)
        for path in runs[:-keep]:
            if path == written or is_written_now(path):
                continue
            path.unlink(missing_ok=True)
            if is_cache and not any(path.parent.iterdir()):
                path.parent.rmdir()


def measured_costs(folder: Path | None, device_name: str) -> dict[tuple[str, str, str], float]:
    """Return the seconds that checks took on this device in the newest runs of ``folder``; see ``schedule.Costs``.

    Unreadable runs are skipped: the costs only affect how work is divided.
    """
    costs: dict[tuple[str, str, str], float] = {}
    deadline = time.monotonic() + _READ_S
    for path in kept_runs(folder)[: -_NEWEST - 1 : -1] if folder else ():
        if _fault_of_owner(path):
            continue
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
) -> Iterator[RunWriter | NoWriter]:
    """Yield the writer of the run file ``output``, or of a new file in ``folder``; if both are None, write nothing.

    ``earlier``: a run that was cut off; its file is continued. ``output`` may be a folder. If ``folder`` is not
    writable, the run goes to a temporary file, with a note on stderr. On leaving, ``folder`` keeps at most ``keep``
    runs.

    Raises:
        RunFileError: ``output`` exists.
        QuestionError, WriteError: the file cannot be written.
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
        drop_old_runs(folder, keep, writer.path)


def _writer(output: Path | None, folder: Path | None, header: RunHeader) -> RunWriter:
    if output is not None:
        return RunWriter(free_path(output) if output.is_dir() else output, header)
    assert folder is not None
    reason = _fault_of_writing(folder, len(format_line(header)))
    if not reason:
        return RunWriter(free_path(folder), header)
    try:
        path = free_path(Path(tempfile.mkdtemp(prefix="attncheck-")))
    except OSError as error:
        other = "--output FILE names another place, --no-output writes none"
        raise WriteError(f"a run file in {folder}, or in a temporary folder,", error, safe=other) from error
    print_stderr(
        f"note: no run file can be written in {folder}: {reason}; it is {path} instead. "
        "--output FILE names another, --no-output writes none"
    )
    return RunWriter(path, header)


def make_kept_folder(folder: Path) -> None:
    """Create a folder for runs; in one of the user's cache, no other user may write.

    Raises:
        OSError: it cannot be created.
    """
    if _is_cached(folder):
        SharedFolder(folder).make()
    else:
        folder.mkdir(parents=True, exist_ok=True)


def _fault_of_writing(folder: Path, num_bytes: int) -> str:
    """Return why no file of ``num_bytes`` can be written in ``folder``, which is made first; empty if one can."""
    try:
        make_kept_folder(folder)
        if reason := _fault_of_folder(folder):
            return reason
        with tempfile.NamedTemporaryFile(prefix=".attncheck-", dir=folder) as probe:
            probe.write(bytes(num_bytes + _ROOM))  # an empty file fits on a full disk
            probe.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def free_path(folder: Path) -> Path:
    """Return an unused path named by time and process, with a number if the name is taken."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    names = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / f"{name}.jsonl").exists())


def runs_folder() -> Path:
    """Return the folder of runs without ``--output``: ``output`` of pyproject.toml, or :func:`kept_folder`."""
    return Path(read_config(Path.cwd()).given.get("folder") or kept_folder())


def run_path(word: str) -> Path:
    """Return the run file that ``word`` names: a path, or a kept run.

    ``last`` is the newest kept run, ``last~1`` the one before it; a number N is the N-th newest, so 1 is ``last``.

    Raises:
        RunFileError: there is no such kept run.
    """
    match = _KEPT.fullmatch(word)
    if match is None:
        return Path(word)
    number = int(match["number"]) if match["number"] else int(match["before"] or 0) + 1
    return kept_run(runs_folder(), number)


def kept_run(folder: Path, number: int = 1) -> Path:
    """Return the ``number``-th newest run file in ``folder`` that has a name chosen by attncheck.

    Raises:
        RunFileError: there is none.
    """
    runs = kept_runs(folder)
    if not runs:
        fault = _fault_of_folder(folder)
        raise RunFileError(str(folder), fault or "holds no run yet; `attncheck run` without --output writes one")
    if number > len(runs):
        raise RunFileError(str(folder), f"holds {plural(len(runs), 'run')}; the oldest is number {len(runs)}")
    if reason := _fault_of_owner(runs[-number]):
        raise RunFileError(str(runs[-number]), f"{reason}; to read it nevertheless, name the file")
    return runs[-number]


def _is_cached(folder: Path) -> bool:
    return folder.is_relative_to(user_cache())


def _fault_of_folder(folder: Path) -> str | None:
    """Return why runs in ``folder`` of the user's cache may be those of another user, or None."""
    return SharedFolder(folder).fault() if _is_cached(folder) else None


def _fault_of_owner(path: Path) -> str | None:
    """Return why another user may have written the kept run ``path``, which names code to execute; None if not."""
    if reason := _fault_of_folder(path.parent):
        return f"is not read: {path.parent}: {reason}"
    try:
        state = path.lstat()
    except OSError:
        return "is no file"
    if not S_ISREG(state.st_mode):
        return "is no file"
    if state.st_uid != os.geteuid():
        return f"belongs to the user {state.st_uid}, and attncheck runs as {os.geteuid()}"
    return "can be written by every user" if state.st_mode & S_IWOTH else None


def is_kept(path: Path) -> bool:
    """Return whether ``path`` is a run file that attncheck kept for the current folder and this user."""
    own = (each for each in kept_runs(runs_folder()) if not _fault_of_owner(each))
    return path.resolve() in {each.resolve() for each in own}


def report_command(path: Path) -> str:
    """Return the command that reports the run of ``path``, without the path if it is the newest kept run."""
    runs = kept_runs(runs_folder())
    return (
        "attncheck report"
        if runs and runs[-1].resolve() == path.resolve()
        else f"attncheck report {shlex.quote(str(path))}"
    )


# `--resume`: completes a run that was cut off, in the same run file. Loads no torch.

Found = tuple[str, str, str, int]
"""Identity of an examined check: reference of the backend, ``suite/id`` of the case, check, round."""


def read_part(path: Path, header: RunHeader) -> Run:
    """Return the run of ``path`` as the first part of the run of ``header``; it may be complete.

    Raises:
        RunFileError: the file is no run, is compressed, or examines something else than ``header``.
    """
    if path.suffix != ".jsonl":
        raise RunFileError(str(path), "cannot be resumed: its name does not end in .jsonl")
    if lacks_header(path):
        print_stderr(f"note: {path}: its header was cut off; the run starts from the beginning")
        return Run(str(path), header, (), size=path.stat().st_size)
    run = read_run(path)
    if run.footer is None and run.size > run.end:
        if not run.cut_line:  # its last record has no end of line, and is examined again
            run = replace(run, records=run.records[:-1])
        print_stderr(f"note: {path}: the last line was cut off, and is written again")
    if differences := question_differences(run.header, header):
        differing = f"these differ from the run: {', '.join(differences)}"
        raise RunFileError(str(path), f"cannot be resumed: {differing}; restore them, or start a new run")
    return run


def found_in(records: Iterable[Record], rounds: int) -> frozenset[Found]:
    """Return what ``records`` have examined; checks not examined in round 0 count as done in all rounds."""
    found = set()
    for record in records:
        is_final = record.check == TIMING and record.round == 0 and record.outcome not in EXAMINED
        numbers = range(rounds) if is_final else (record.round,)
        found |= {(record.backend_ref, record.case, record.check, number) for number in numbers}
    return frozenset(found)


def resume_command(command: Iterable[str], path: Path) -> str:
    """Return the command that resumes the run of ``command`` with run file ``path``."""
    words = list(command)
    for name in ("--output", "--resume"):
        if name in words:
            index = words.index(name)
            del words[index : index + 2]
    kept = [word for word in words if not word.startswith(("--output=", "--resume="))]
    return shlex.join([*kept, "--resume", str(path)])


# `--last-failed`: restricts a run to what failed in the newest kept run. Loads no torch.


def only_failed(options: RunOptions, path: Path) -> RunOptions:
    """Return ``options`` for the cases, backends, providers and functions that failed in the run of ``path``.

    If ``options`` name backends or suites, only those of them remain. All remaining cases run on all remaining
    backends, with the checks of ``options``; if these name none, with those that failed.

    Raises:
        SelectionError: nothing failed, or nothing that ``options`` name.
        RunFileError: the run cannot be read.
    """
    run = read_run(path)
    # A candidate that was given as a Python object has no name to give on the command line.
    short = [each for each in run.records if each.outcome in FALLEN_SHORT and not each.backend_ref.startswith("<")]
    if any(each.check in ENGINE_CHECKS for each in short):
        raise SelectionError(f"--last-failed: the newest run, {path}, is of an engine; repeat it by `attncheck engine`")
    if not short:
        raise SelectionError(f"--last-failed: everything passed in the newest run, {path}; leave the option out")
    short = [each for each in short if _is_named(each, run.header.suite_ref(each.suite), options)]
    if not short:
        raise SelectionError(f"--last-failed: these backends and suites passed in the newest run, {path}")
    cases = [each for each in short if each.check != UTILITIES]
    functions = [each for each in short if each.check == UTILITIES]
    suites = tuple(dict.fromkeys(run.header.suite_ref(each.suite) for each in cases))
    names = [
        each.case_id for each in functions if any(fnmatchcase(each.case_id, own) for own in options.functions or "*")
    ]
    return replace(
        options,
        backends=tuple(dict.fromkeys(each.backend_ref for each in cases)),
        providers=tuple(dict.fromkeys(each.backend_ref for each in functions)),
        suites=suites or options.suites,
        keys=tuple(dict.fromkeys(each.case for each in cases)),
        checks=options.checks or tuple(dict.fromkeys(each.check for each in short)),
        functions=tuple(names),
    )


def _is_named(record: Record, suite: str, options: RunOptions) -> bool:
    """Return whether ``options`` include the backend and the suite of ``record``; ``suite``: its reference."""
    backends = {record.backend, record.backend_ref}
    suites = {record.suite, suite, split_variant(suite)[0]}
    return not (
        (options.backends and backends.isdisjoint(options.backends))
        or (options.suites and suites.isdisjoint(options.suites))
    )
