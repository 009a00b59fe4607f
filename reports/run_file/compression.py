"""Run files in compressed form, told by how their names end: read all of them, written as ``.gz`` alone.

Runs are written line by line, and a file that was cut off must be readable up to there. Of gzip it is: each line is
flushed, and a cut file is read as far as it goes.
"""

import gzip
import lzma
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

from attncheck.errors import RunFileError

_ZSTD_MODULES = ("compression.zstd", "backports.zstd", "zstandard")
"""Which can decompress ``.zst``: the first is a part of Python 3.14."""

_GZIP_WINDOW = zlib.MAX_WBITS | 16
_LEVEL = 6
"""Of gzip: 9 takes twice as long for a hundredth."""


def read_bytes(path: str) -> bytes:
    """Return the content of a run file, decompressed where its name ends in ``.gz``, ``.xz`` or ``.zst``.

    Raises:
        RunFileError: the file cannot be read, is not compressed as its name says, or needs a package that is not
            installed.
    """
    ending = Path(path).suffix
    try:
        content = Path(path).read_bytes()
        return _DECOMPRESS[ending](content) if ending in _DECOMPRESS else content
    except OSError as error:
        raise RunFileError(path, f"cannot be read: {error.strerror or error}") from error
    except ImportError as error:
        raise RunFileError(
            path, "needs a reader of zstd: pip install backports.zstd, or unpack it by zstd -d"
        ) from error
    except Exception as error:  # each library has an error of its own
        raise RunFileError(path, f"is not what its name says, compressed by {ending[1:]}: {error}") from error


def open_new(path: Path) -> TextIOWrapper:
    """Open a new run file to be written, compressed where its name ends in ``.gz``.

    What is flushed can be read, whatever comes after.

    Raises:
        OSError: it exists already, or cannot be written.
        RunFileError: its name is that of a form that cannot be written line by line.
    """
    ending = path.suffix
    if ending == ".gz":
        return TextIOWrapper(gzip.open(path, "xb", compresslevel=_LEVEL), encoding="utf-8", newline="\n")
    if ending in _DECOMPRESS:
        raise RunFileError(
            str(path),
            f"a cut-off {ending} file could not be read; name it .jsonl or .jsonl.gz, or compress it afterwards",
        )
    return path.open("x", encoding="utf-8", newline="\n")


def open_to_append(path: Path) -> TextIOWrapper:
    """Open a plain run file at its end; what a cut-off run left of its last line is removed.

    Raises:
        OSError: it cannot be written.
    """
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(end)
    return path.open("a", encoding="utf-8", newline="\n")


def _from_gzip(content: bytes) -> bytes:
    """Decompress as far as it goes: a run that was cut off has no end of the stream."""
    parts = []
    while content:
        stream = zlib.decompressobj(_GZIP_WINDOW)
        parts.append(stream.decompress(content))
        content = stream.unused_data
    return b"".join(parts)


def _from_zstd(content: bytes) -> bytes:
    module = _zstd()
    if module.__name__ == "zstandard":
        with module.ZstdDecompressor().stream_reader(content, read_across_frames=True) as stream:
            whole: bytes = stream.read()
    else:
        whole = module.decompress(content)
    return whole


def _zstd() -> ModuleType:
    """Return the first module of :data:`_ZSTD_MODULES` that is installed; raises ImportError where none is."""
    for name in _ZSTD_MODULES[:-1]:
        try:
            return import_module(name)
        except ImportError:
            continue
    return import_module(_ZSTD_MODULES[-1])


_DECOMPRESS: Mapping[str, Callable[[bytes], bytes]] = {".gz": _from_gzip, ".xz": lzma.decompress, ".zst": _from_zstd}
