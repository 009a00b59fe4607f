"""Write run files as JSON lines that survive a killed process, and read them with strict checks.

The first line is the header, followed by one record a line and the footer with the counts. Every line is flushed when
it is written, and the file is synced to disk at most once a second. A file without a footer was cut off; it can be
read, and :attr:`Run.complete` is False. An inconsistent file (a duplicate record, a record that does not match the
header, wrong counts) is an error with its line number.

The suffix of a file states its compression. Only ``.gz`` can be written, since a gzip file that was cut off can be read
up to the cut.
"""

import fcntl
import gzip
import lzma
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib import import_module
from io import BufferedReader, TextIOWrapper
from operator import attrgetter
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError
from pydantic_core import from_json

from attncheck.errors import RunFileError, WriteError, shorten, unwritable
from attncheck.reports.run_file.header import FORMAT, RunHeader
from attncheck.reports.run_file.records import (
    EXAMINED,
    OUTCOMES,
    Outcome,
    Record,
    RecordKey,
    RunFooter,
    format_line,
    parse_line,
)
from attncheck.reports.run_file.timings import TIMING

LONGEST_LINE = 2**27
"""Maximum bytes of a line; the header of a run of 100,000 cases has half as many."""

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")
"""The ends of the names of run files."""

MAX_BYTES = 2**32
"""Maximum bytes of a decompressed run file; enough for a few million records."""

_CHUNK = 2**20
_LEVEL = 6
"""gzip's level; 9 takes twice as long and saves one per cent."""


def read_lines(path: str) -> Iterator[bytes]:
    """Yield the lines of a run file with their ends, decompressed if its name ends in ``.gz``, ``.xz`` or ``.zst``.

    Memory holds at most one line, whatever the size of the decompressed file.

    Raises:
        RunFileError: the file cannot be read, is not compressed as its name states, needs a package that is not
            installed, or exceeds :data:`LONGEST_LINE` or :data:`MAX_BYTES`.
    """
    parts: list[bytes] = []  # of a line that has not ended yet
    length = total = 0
    for chunk in _chunks(path):
        total += len(chunk)
        begun, *others = chunk.split(b"\n")
        parts.append(begun)
        length += len(begun)
        if others:
            yield b"".join(parts) + b"\n"
            yield from (each + b"\n" for each in others[:-1])
            parts, length = [others[-1]], len(others[-1])
        if length > LONGEST_LINE:
            raise RunFileError(path, f"has a line of more than {LONGEST_LINE} bytes; no record is so long")
        if total > MAX_BYTES:
            raise RunFileError(path, f"holds more than {MAX_BYTES} bytes; divide the run by --shard")
    if length:
        yield b"".join(parts)


def _chunks(path: str) -> Iterator[bytes]:
    """Yield the decompressed content in pieces of at most :data:`_CHUNK` bytes."""
    ending = Path(path).suffix
    try:
        with _OPEN.get(ending, _open_plain)(path) as file:
            while chunk := file.read1(_CHUNK):
                yield chunk
    except ImportError as error:
        raise RunFileError(
            path, "needs a reader of zstd: pip install backports.zstd, or unpack it by zstd -d"
        ) from error
    except Exception as error:  # each library raises its own type
        if isinstance(error, EOFError) and ending == ".gz":  # the run was cut off; everything before was yielded
            return
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        if ending in _OPEN and getattr(error, "errno", None) is None:
            reason = f"is not compressed as its name states, by {ending[1:]}: {error}"
        raise RunFileError(path, reason) from error


def open_new(path: Path) -> TextIOWrapper:
    """Open a new run file for writing, compressed if its name ends in ``.gz``.

    Flushed lines stay readable if the process is killed.

    Raises:
        OSError: the file exists, or cannot be written.
        RunFileError: the name has the suffix of a compression that cannot be written line by line.
    """
    ending = path.suffix
    if ending == ".gz":
        return TextIOWrapper(gzip.open(path, "xb", compresslevel=_LEVEL), encoding="utf-8", newline="\n")
    if ending in _OPEN:
        raise RunFileError(
            str(path),
            f"a cut-off {ending} file could not be read; name it .jsonl or .jsonl.gz, or compress it afterwards",
        )
    return path.open("x", encoding="utf-8", newline="\n")


def open_to_append(path: Path, earlier: "Run") -> TextIOWrapper:
    """Open a plain run file for appending, after removing what follows the last record of ``earlier``.

    Raises:
        OSError: the file cannot be written.
        RunFileError: another process writes the file, or has written it since ``earlier`` was read.
    """
    file = path.open("r+", encoding="utf-8", newline="\n")
    _lock(file, path, earlier.size)
    file.truncate(earlier.end)
    file.seek(earlier.end)
    return file


def _lock(file: TextIOWrapper, path: Path, size: int | None = None) -> None:
    """Lock a run file until it is closed.

    ``size``: bytes that the file had when it was read; None for a new file.

    Raises:
        RunFileError: another process has locked it, or has written it since. The file is closed.
    """
    reason = ""
    if not _takes_lock(file.fileno()):
        reason = "another run writes this file; wait until it has ended"
    elif size not in (None, os.fstat(file.fileno()).st_size):
        reason = "another run has written it in the meantime"
    if reason:
        file.close()
        raise RunFileError(str(path), reason)


def is_written_now(path: Path) -> bool:
    """Return whether a process writes the run file; False if it cannot be opened, or its file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _takes_lock(descriptor)
    finally:
        os.close(descriptor)


def _takes_lock(descriptor: int) -> bool:
    """Lock a file until it is closed; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        pass
    return True


def _open_plain(path: str) -> BufferedReader:
    return Path(path).open("rb")


def _open_zstd(path: str) -> Any:
    try:
        module = import_module("compression.zstd")  # part of Python 3.14
    except ImportError:
        module = import_module("backports.zstd")
    return module.open(path)


_OPEN: Mapping[str, Callable[[str], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zstd}


SYNC_EVERY_S = 1.0
_BEGINNING = b'{"kind"'


def now() -> str:
    """Return the current time as in run files: ISO 8601, to the second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def count_outcomes(records: Iterable[Record]) -> dict[Outcome, int]:
    """Return the number of records of each outcome; outcomes without a record are left out."""
    counts = Counter(record.outcome for record in records)
    return {outcome: counts[outcome] for outcome in OUTCOMES if counts[outcome]}


def refuse_existing(path: Path) -> None:
    """Raise RunFileError if ``path`` exists."""
    if path.exists():
        raise RunFileError(str(path), "exists already; runs are never overwritten, name another file")


class RunWriter:
    """A context manager that writes one run; it writes the footer on exit, unless there is an exception.

    Raises:
        RunFileError: on entry, if ``path`` exists (runs are never overwritten), has the suffix of a compression that
            cannot be written line by line (``.gz`` can), or is written by another process.
        QuestionError: on entry, if ``path`` cannot be created for a reason other than the disk, such as an invalid
        folder. WriteError: on entry or later, if the disk is full or read-only. Lines written before stay readable.
        ValueError: from :meth:`add`, for a record whose key was written before.
    """

    def __init__(self, path: Path, header: RunHeader, earlier: "Run | None" = None) -> None:
        """``earlier``: the records of this run that the file at ``path`` has already, if it was cut off."""
        self.path = path
        self.header = header
        self._earlier = earlier
        self._keys: set[int] = set()
        """64-bit hashes; among a million records, two collide with a probability of 1 in 30 million."""
        self._counts: Counter[Outcome] = Counter()
        self._errors: list[str] = []
        self._file: TextIOWrapper | None = None
        self._synced = monotonic()
        self._written = 0

    def __enter__(self) -> Self:
        if self._earlier is None:
            refuse_existing(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._earlier is None:
                self._file = open_new(self.path)
                _lock(self._file, self.path)
            else:
                self._file = open_to_append(self.path, self._earlier)
        except OSError as error:
            raise unwritable(str(self.path), error) from error
        if self._file.tell() == 0:  # new, or cut off within its header
            self._begin()
        if self._earlier is not None:
            self._keys.update(hash(record.key) for record in self._earlier.records)
            self._counts.update(record.outcome for record in self._earlier.records)
            self._written = 1 + len(self._earlier.records)
        return self

    def _begin(self) -> None:
        """Write the header; remove the file if that fails."""
        try:
            self._write(self.header)
        except WriteError as error:
            self.path.unlink()
            raise WriteError(error.name, error.cause) from error

    def add(self, record: Record) -> None:
        """Write one record; it is in the file when this returns."""
        key = hash(record.key)
        if key in self._keys:
            raise ValueError(f"a run holds each record once, and this one came twice: {record.key}")
        self._keys.add(key)
        self._counts[record.outcome] += 1
        self._write(record)

    def fail(self, error: str) -> None:
        """Add an error to the footer that fails the run, such as an expectation that matched nothing."""
        self._errors.append(error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        if kind is None:
            counts = {outcome: self._counts[outcome] for outcome in OUTCOMES if self._counts[outcome]}
            self._write(RunFooter(finished=now(), counts=counts, errors=tuple(self._errors)))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as failure:
            if kind is None:
                raise self._unwritten(failure) from failure
        finally:
            self._file = None

    def _write(self, line: RunHeader | Record | RunFooter) -> None:
        if self._file is None:
            raise ValueError(f"{self.path} is not open: use the writer in a with statement")
        try:
            self._file.write(format_line(line) + "\n")
            self._file.flush()
            if monotonic() - self._synced >= SYNC_EVERY_S:
                os.fsync(self._file.fileno())
                self._synced = monotonic()
        except OSError as error:
            raise self._unwritten(error) from error
        self._written += 1

    def _unwritten(self, error: OSError) -> WriteError:
        """Return the error of a failed write, with the number of records that can be read."""
        safe = max(self._written - 1, 0)  # the header does not count
        return WriteError(
            str(self.path),
            error,
            safe=f"its first {safe} records can be read, as by `attncheck report`",
        )


def write_run(path: Path, header: RunHeader, records: Iterable[Record], errors: Iterable[str]) -> None:
    """Write a whole run file.

    Raises:
        RunFileError, QuestionError, WriteError: as :class:`RunWriter`.
    """
    with RunWriter(path, header) as writer:
        for record in records:
            writer.add(record)
        for error in errors:
            writer.fail(error)


@dataclass(frozen=True)
class Run:
    """One run file as read. ``footer``: None if the run was cut off; ``cut_line``: it was cut off within a line.

    ``size``: bytes read, decompressed. ``end``: the byte after the last whole line before the footer.
    """

    path: str
    header: RunHeader
    records: tuple[Record, ...]
    footer: RunFooter | None = None
    cut_line: bool = False
    size: int = 0
    end: int = 0

    @property
    def complete(self) -> bool:
        """Whether the run finished, and each of its cases has all records that the header announces."""
        return self.footer is not None and not self.lacking

    @cached_property
    def lacking(self) -> tuple[str, ...]:
        """The ``suite/id`` of each case that lacks records and is named by no error of the run."""
        header, counts = self.header, Counter((record.suite, record.case_id) for record in self.records)
        rounds = Counter(
            (record.suite, record.case_id)
            for record in self.records
            if record.check == TIMING and record.round == 0 and record.outcome in EXAMINED
        )
        found = []
        for case in header.cases:
            key = (case.suite, case.id)
            due = len(case.checks) * len(case.backends or header.backends) + rounds[key] * (header.rounds - 1)
            is_here = not header.shard or case.shard in (0, header.shard_number)
            if is_here and counts[key] < due:
                found.append("/".join(key))
        return tuple(name for name in found if not any(_has_name(error, name) for error in self.errors))

    @property
    def errors(self) -> tuple[str, ...]:
        """The errors that fail the run, besides its records."""
        return self.footer.errors if self.footer else ()


def read_run(path: Path | str) -> Run:
    """Read and verify a run file; one whose name ends in ``.gz``, ``.xz`` or ``.zst`` is decompressed first.

    Raises:
        RunFileError: with the line number, if a line is at fault. The file cannot be read, is empty, has no header or
            another format. A line is not a record, or follows the footer. A record is a duplicate, or does not match
            the header. The footer's counts differ from those of the records.
    """
    path = str(path)
    lines = read_lines(path)
    first = next(lines, b"")
    if not first.strip():
        raise RunFileError(path, "is empty; a run begins with its header")
    header = _read_header(path, first)
    announced = _announced(header)
    announced_by, known = attrgetter(*announced, "round"), set[tuple[object, ...]]()
    shards = {(case.suite, case.id): case.shard for case in header.cases} if header.shard else {}
    records: dict[RecordKey, Record] = {}
    footer: RunFooter | None = None
    number = 1
    size = end = len(first)
    for number, text in enumerate(lines, start=2):
        size += len(text)
        if footer is not None:
            raise RunFileError(path, "nothing may follow the footer", line=number)
        if not text.endswith(b"\n") and not _is_json(text):
            return Run(path, header, tuple(records.values()), cut_line=True, size=size, end=end)
        line = _parse(path, number, text)
        if isinstance(line, RunHeader):
            raise RunFileError(path, "a second header; one file holds one run", line=number)
        if isinstance(line, RunFooter):
            footer = line
            continue
        if records.setdefault(line.key, line) is not line:
            raise RunFileError(path, f"this record is there twice: {line.key}", line=number)
        if (values := announced_by(line)) not in known:
            if reason := _stranger(announced, header.rounds, line):
                raise RunFileError(path, reason, line=number)
            known.add(values)
        if shards.get((line.suite, line.case_id), 0) not in (0, header.shard_number):
            raise RunFileError(path, f"{line.case} is no case of shard {header.shard}", line=number)
        if text.endswith(b"\n"):
            end = size
    if footer is not None:
        _compare_counts(path, number, footer.counts, count_outcomes(records.values()))
    return Run(path, header, tuple(records.values()), footer, size=size, end=end)


def _has_name(error: str, name: str) -> bool:
    """Return whether ``error`` has ``name``, a ``suite/id``, but not as a part of a longer name."""
    return re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w\[-]|\.\w)", error) is not None


def lacking_in_words(run: Run) -> str:
    """Return how many cases of ``run`` lack records, with the name of one; there must be one."""
    count, of_all = len(run.lacking), len(run.header.cases)
    return f"{count} of {of_all} cases lack records, such as {run.lacking[0]}"


def run_files(folder: Path) -> list[Path]:
    """Return the run files in ``folder`` and the folders in it, by name."""
    return sorted(path for path in folder.rglob("*") if path.name.endswith(SUFFIXES) and path.is_file())


def lacks_header(path: Path) -> bool:
    """Return whether a plain run file is empty or was cut off within its header; False if it cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return b"\n" not in content and _BEGINNING.startswith(content[: len(_BEGINNING)])


def _is_json(text: bytes) -> bool:
    try:
        from_json(text)
    except ValueError:
        return False
    return True


def _read_header(path: str, text: bytes) -> RunHeader:
    """Parse the first line. The format is checked before the keys, so that the error names another version."""
    try:
        data = from_json(text)
    except ValueError as error:
        raise RunFileError(path, f"is not a run file: its first line is not JSON ({error})", line=1) from error
    if not isinstance(data, dict) or data.get("kind") != "header":
        raise RunFileError(path, "is not a run file: its first line lacks kind 'header'", line=1)
    if data.get("format") != FORMAT:
        found = shorten(data.get("format"))
        raise RunFileError(path, f"has format {found}; this attncheck reads format {FORMAT}", line=1)
    header = _parse(path, 1, text)
    if not isinstance(header, RunHeader):  # cannot happen, since its kind is "header"
        raise RunFileError(path, "is not a run file: its first line lacks kind 'header'", line=1)
    return header


def _parse(path: str, number: int, text: bytes) -> RunHeader | Record | RunFooter:
    try:
        return parse_line(text)
    except ValidationError as error:
        raise RunFileError(path, _explain(error), line=number) from error


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return f"not a line of JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    if first["type"] == "extra_forbidden":
        return f"unknown key {first['loc'][-1]!r}; was it written by a newer attncheck?"
    if first["type"] == "union_tag_invalid":
        context = error.errors(include_url=False)[0]["ctx"]
        name = context["discriminator"].strip("'")
        return f"{name} {shorten(context['tag'])} is unknown (known: {context['expected_tags']})"
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}" if place else first["msg"]


def _announced(header: RunHeader) -> dict[str, Collection[object]]:
    """Return, by field, the values that records of a run may have."""
    return {
        "suite": {suite.name: suite for suite in header.suites},
        "backend": {backend.name: backend for backend in header.backends},
        "check": dict.fromkeys(header.checks),
        "seed": (header.seed,),
        "environment": (header.environment.digest,),
        "attncheck_version": (header.environment.attncheck,),
    }


def _stranger(announced: Mapping[str, Collection[object]], rounds: int, record: Record) -> str | None:
    """Return why a record does not match the header, or None."""
    for name, known in announced.items():
        value = getattr(record, name)
        if value not in known:
            return f"{name} {value!r} is not in the header (which has {', '.join(map(repr, known)) or 'none'})"
    if not 0 <= record.round < rounds:
        return f"round {record.round} is none of the header's, which counts {rounds} from 0"
    return None


def _compare_counts(path: str, line: int, stated: Mapping[Outcome, int], counted: Mapping[Outcome, int]) -> None:
    for outcome in OUTCOMES:
        if stated.get(outcome, 0) != counted.get(outcome, 0):
            reason = f"the footer counts {stated.get(outcome, 0)} {outcome}, the file holds {counted.get(outcome, 0)}"
            raise RunFileError(path, reason, line=line)
