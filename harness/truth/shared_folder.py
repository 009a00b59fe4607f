"""Files of bytes that processes of one user share: each whole, checked, and the least recently used deleted first.

A file is read only if it belongs to the user of this process, has the size that is asked for, and its checksum fits its
name and content. It is written under another name first, and so appears whole.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from stat import S_ISDIR, S_ISREG

MOST_BYTES = 512 * 2**20
"""What all files together may take."""

LONGEST_FILE = 64 * 2**20
"""Bytes of the largest content: a longer one is not written."""

_CHECKSUM_BYTES = 32
_FRESH_S = 3600.0
"""Seconds for which a use of a file is not noted again."""

_NO_CACHE = "ATTNCHECK_NO_CACHE"
"""The environment variable that does what ``--no-cache`` does, if it has any value."""


def user_cache() -> Path:
    """Return attncheck's folder in the user's cache, by the XDG base directory specification."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # the user has no home
        cache = Path(tempfile.gettempdir())
    return cache / "attncheck"


def truths_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of truths, whether it exists yet or not; None where the environment asks for none."""
    return None if environment.get(_NO_CACHE) else user_cache() / "truths"


@dataclass(frozen=True)
class SharedFolder:
    """A folder of entries by key. No method raises OSError: an entry that cannot be read or written is not there."""

    path: Path

    def fault(self) -> str | None:
        """Return why the folder is not used; None: it is used, or will be made."""
        try:
            state = self.path.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"cannot be looked at: {error.strerror}"
        if not S_ISDIR(state.st_mode):
            return "is not a folder"
        if state.st_uid != os.geteuid():
            return f"belongs to the user {state.st_uid}, and attncheck runs as {os.geteuid()}"
        if state.st_mode & 0o022:
            return "other users may write in it; chmod go-w makes it usable"
        return None

    def lacks_room(self) -> str | None:
        """Return why no file can be written; None: files of the largest size can."""
        place = next(place for place in (self.path, *self.path.parents) if place.is_dir())
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{place} is read-only"
        free = shutil.disk_usage(place).free
        return None if free >= LONGEST_FILE else f"the disk has {free / 2**20:.0f} MiB left"

    def read(self, key: str, num_bytes: int) -> bytearray | None:
        """Return the ``num_bytes`` stored under ``key``; None where there is no such entry, or it is damaged."""
        try:
            descriptor = os.open(self.path / key, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 (Path.open takes no descriptor)
                state = os.fstat(descriptor)
                is_ours = S_ISREG(state.st_mode) and state.st_uid == os.geteuid()
                if not is_ours or state.st_size != _CHECKSUM_BYTES + num_bytes:
                    return None
                checksum, content = file.read(_CHECKSUM_BYTES), bytearray(num_bytes)
                if file.readinto(content) != num_bytes or checksum != _checksum(key, content):
                    return None
                if time.time() - state.st_mtime > _FRESH_S:
                    with suppress(OSError):
                        os.utime(descriptor)
                return content
        except OSError:
            return None

    def write(self, key: str, content: bytes) -> bool:
        """Store ``content`` under ``key``, whole or not at all; return whether more can be stored."""
        if len(content) > LONGEST_FILE:
            return True
        part = self.path / f"{key}.{os.getpid()}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                part.write_bytes(_checksum(key, content) + content)
                part.replace(self.path / key)
            except OSError:
                part.unlink(missing_ok=True)
                raise
        except OSError:
            return False
        return True

    def sizes(self) -> dict[Path, int]:
        """Return the bytes of each file, the least recently used first."""
        found: list[tuple[float, int, Path]] = []
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(OSError):  # another process has deleted it
                    state = entry.stat(follow_symlinks=False)
                    found.append((state.st_mtime, state.st_size, Path(entry.path)))
        return {path: size for _, size, path in sorted(found)}

    def trim(self, most_bytes: int = MOST_BYTES) -> None:
        """Delete the least recently used files if all take more than ``most_bytes``; an eighth is then free."""
        sizes = self.sizes()
        total = sum(sizes.values())
        if total <= most_bytes:
            return
        for path, size in sizes.items():
            with suppress(OSError):
                path.unlink()
                total -= size
            if total <= most_bytes * 7 // 8:
                return


def _checksum(key: str, content: bytes | bytearray) -> bytes:
    digest = sha256(key.encode())
    digest.update(content)
    return digest.digest()
