"""A folder of files shared by the processes of one user; each file is written whole and checked when it is read.

A file is read only if the user of this process owns it, it has the expected size, and its checksum matches its name and
content. It is written under a temporary name first, so that it appears whole. The least recently used are deleted
first.
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
from stat import S_IMODE, S_ISDIR, S_ISREG

MOST_BYTES = 512 * 2**20
"""Maximum total size of all files."""

LONGEST_FILE = 64 * 2**20
"""Maximum bytes of one entry's content; longer content is not written."""

_CHECKSUM_BYTES = 32
_FRESH_S = 3600.0
"""Seconds during which another use of a file does not update its modification time."""

_NO_CACHE = "ATTNCHECK_NO_CACHE"
"""Environment variable that acts like ``--no-cache`` if it is not empty."""


def user_cache() -> Path:
    """Return attncheck's folder in the user's cache, by the XDG base directory specification."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # the user has no home
        cache = Path(tempfile.gettempdir())
    return cache / "attncheck"


def truths_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of truths, which may not exist yet, or None if the environment disables it."""
    return None if environment.get(_NO_CACHE) else user_cache() / "truths"


@dataclass(frozen=True)
class SharedFolder:
    """A folder of entries by key. An entry that cannot be read counts as missing; no method raises OSError for it."""

    path: Path

    def fault(self) -> str | None:
        """Return why the folder is not used, or None if it is used or will be made."""
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

    def make(self) -> None:
        """Create the folder for this user alone; if it exists and is the user's own, no other may write in it any more.

        Raises:
            OSError: it cannot be created.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        state = self.path.lstat()
        if S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and state.st_mode & 0o022:
            self.path.chmod(S_IMODE(state.st_mode) & ~0o022)

    def lacks_room(self) -> str | None:
        """Return why no file can be written, or None if files of the largest size can."""
        place = next(place for place in (self.path, *self.path.parents) if place.is_dir())
        if not os.access(place, os.W_OK | os.X_OK):
            return f"{place} is read-only"
        free = shutil.disk_usage(place).free
        return None if free >= LONGEST_FILE else f"the disk has {free / 2**20:.0f} MiB left"

    def read(self, key: str, num_bytes: int) -> bytearray | None:
        """Return the ``num_bytes`` stored under ``key``, or None if there is no such entry, or it is damaged."""
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
        """Store ``content`` under ``key``, whole or not at all; return whether more can be stored.

        Content longer than ``LONGEST_FILE`` is not stored.
        """
        if len(content) > LONGEST_FILE:
            return True
        part = self.path / f"{key}.{os.getpid()}"
        try:
            self.make()
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
        """Return the size in bytes of each file, the least recently used first."""
        found: list[tuple[float, int, Path]] = []
        with suppress(OSError), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(OSError):  # another process has deleted it
                    state = entry.stat(follow_symlinks=False)
                    found.append((state.st_mtime, state.st_size, Path(entry.path)))
        return {path: size for _, size, path in sorted(found)}

    def trim(self, most_bytes: int = MOST_BYTES) -> None:
        """Delete the least recently used files if all together exceed ``most_bytes``, until an eighth of it is free."""
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
