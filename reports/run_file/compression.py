"""Compressed run files, recognised by their suffix: all forms can be read, only ``.gz`` can be written.

Runs are written line by line, and a file that was cut off must be readable up to there. gzip allows that: each line is
flushed, and a cut file is read to its end.
"""

import gzip
import lzma
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from types import ModuleType
from typing import Any

from attncheck.errors import RunFileError

_ZSTD_MODULES = ("compression.zstd", "backports.zstd", "zstandard")
"""Modules that decompress ``.zst``; the first is part of Python 3.14."""

LONGEST_LINE = 2**27
"""Maximum bytes of a line; the header of a run of 100,000 cases has half as many."""

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


def open_to_append(path: Path) -> TextIOWrapper:
    """Open a plain run file for appending, after removing an incomplete last line of a cut-off run.

    Raises:
        OSError: the file cannot be written.
    """
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(end)
    return path.open("a", encoding="utf-8", newline="\n")


def _open_plain(path: str) -> BufferedReader:
    return Path(path).open("rb")


def _open_zstd(path: str) -> Any:
    module = _zstd()
    if module.__name__ == "zstandard":
        return BufferedReader(module.ZstdDecompressor().stream_reader(Path(path).open("rb"), read_across_frames=True))
    return module.open(path)


def _zstd() -> ModuleType:
    """Return the first installed module of :data:`_ZSTD_MODULES`; raise ImportError if there is none."""
    for name in _ZSTD_MODULES[:-1]:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(_ZSTD_MODULES[-1])


_OPEN: Mapping[str, Callable[[str], Any]] = {".gz": gzip.open, ".xz": lzma.open, ".zst": _open_zstd}
