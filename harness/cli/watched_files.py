"""Finds the files that ``attncheck run --watch`` watches, and detects changes. Loads no torch and no backend."""

import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from attncheck.backends.registry import BUILTIN, entry_points

_LIBRARIES = ("triton", "xformers", "flash_attn", "flashinfer")
_IMPORT = re.compile(rf"^\s*(?:import|from)\s+({'|'.join(_LIBRARIES)})\b", re.MULTILINE)
_INTERPRETED = "TRITON_INTERPRET"
"""A file that contains this variable may set it, which has no effect once triton is imported."""

_MOST_FOLDERS = 200
"""Maximum watched folders of one package; those nearest its top come first."""

State = dict[Path, tuple[int, int]]
"""For each file, its modification time in nanoseconds and its size in bytes."""


class WatchedFiles:
    """The Python files in the folder or package of each backend, and other files by name.

    ``refs``: references of backends. ``others``: case files, and the expectation file.
    """

    def __init__(self, refs: Iterable[str], others: Iterable[Path] = ()) -> None:
        self.named = tuple(dict.fromkeys(file for ref in refs if (file := file_of(ref)) is not None))
        self._others = tuple(others)
        self._folders = tuple(dict.fromkeys(folder for file in self.named for folder in _folders_of(file)))
        self._accepted = self.state()

    def state(self) -> State:
        """Return the state of all existing files."""
        found: State = {}
        for path in (*self._sources(), *self.named, *self._others):
            try:
                status = path.stat()
            except OSError:  # an editor may be replacing the file
                continue
            found[path] = (status.st_mtime_ns, status.st_size)
        return found

    def changed(self) -> tuple[Path, ...]:
        """Return the files that were added, removed or changed since :meth:`accept`."""
        now = self.state()
        return tuple(path for path in {**self._accepted, **now} if self._accepted.get(path) != now.get(path))

    def accept(self) -> None:
        """Take the current state as unchanged."""
        self._accepted = self.state()

    def libraries(self) -> tuple[str, ...]:
        """Return the kernel libraries that the watched sources import.

        Triton is left out if a source contains TRITON_INTERPRET, which must be set before triton is imported.
        """
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in self.state() if path.suffix == ".py"]
        found = {name for text in texts for name in _IMPORT.findall(text)}
        if any(_INTERPRETED in text for text in texts):
            found.discard("triton")
        return tuple(name for name in _LIBRARIES if name in found)

    def _sources(self) -> Iterator[Path]:
        for folder in self._folders:
            try:
                with os.scandir(folder) as entries:
                    names = [entry.name for entry in entries if entry.name.endswith(".py")]
            except OSError:
                continue
            yield from (folder / name for name in names)


def file_of(ref: str) -> Path | None:
    """Return the file of a backend without importing it, or None if that needs an import."""
    name, _, argument = ref.partition(":")
    if name == "vllm" and argument:
        return file_of(argument)
    place = ref if ref.endswith(".py") else ref.rpartition(":")[0] or ref
    if place.endswith(".py"):
        return Path(place)
    if name in BUILTIN:
        place = BUILTIN[name].partition(":")[0]
    elif (point := entry_points().get(name)) is not None:
        place = point.module
    return _module_file(place.split("."))


def _module_file(parts: Sequence[str]) -> Path | None:
    try:
        spec = importlib.util.find_spec(parts[0])
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin)
    if len(parts) > 1:
        path = path.parent.joinpath(*parts[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path if path.is_file() else None


def _folders_of(file: Path) -> list[Path]:
    """Return the folder of ``file``, and if it belongs to a package also the folders below."""
    found = [file.parent]
    if not (file.parent / "__init__.py").is_file():
        return found
    for each in found:  # the loop appends to found
        if len(found) >= _MOST_FOLDERS:
            break
        try:
            inner = sorted(path for path in each.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
        except OSError:
            continue
        found += inner
    return found[:_MOST_FOLDERS]
