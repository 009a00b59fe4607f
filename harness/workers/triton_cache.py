"""Triton's cache of compiled kernels, where one process compiles a kernel while the others wait for it.

Imports Triton, so import it only where Triton is already loaded.
"""

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from triton import knobs
from triton.runtime.cache import FileCacheManager

_Found = TypeVar("_Found")

LONGEST_WAIT_S = 60.0
"""Seconds after which a process compiles a kernel itself, although another one has begun to."""

_PAUSE_S = 0.02
"""Seconds between two attempts to get a lock."""


def compile_once() -> None:
    """Make this process wait for kernels that other processes compile. A cache manager that the user has set stays.

    Programs that a backend starts are not concerned: the environment would reach them all, and Triton fails where it
    cannot import the class that the environment names.
    """
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = WaitingCacheManager


class WaitingCacheManager(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """The cached files of one kernel. Triton creates an object for each kernel, and drops it once the files are stored.

    A thread that misses a file holds the kernel's lock until it drops the object, or misses a file of another kernel.
    So a failed compilation frees the lock, and no thread waits for a lock while it holds one. The system frees the
    locks of a process that ends. Where a lock cannot be had, the thread compiles without one.
    """

    _latest = threading.local()
    """``free``: frees the lock that this thread acquired last, if it is still held."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of the files of a kernel by name, or None if it is not compiled."""
        find: Callable[[str], dict[str, str] | None] = super().get_group
        if knobs.compilation.always_compile:
            return find(filename)
        return self._find(lambda: find(filename), lambda group: filename in (group or {}))

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, or None if it is missing. Only a compiled launcher is worth a lock."""
        find: Callable[[str], str | None] = super().get_file
        return self._find(lambda: find(filename), bool) if filename.endswith(".so") else find(filename)

    def _find(self, find: Callable[[], _Found], is_complete: Callable[[_Found], bool]) -> _Found:
        """Return what ``find`` returns. If that is incomplete, repeat it with the kernel's lock, and keep the lock."""
        found = find()
        if is_complete(found) or self.lock_path is None:
            return found
        if free := getattr(self._latest, "free", None):
            free()
        descriptor = _locked(self.lock_path)
        if descriptor is None:
            return found
        free = weakref.finalize(self, os.close, descriptor)
        found = find()
        if is_complete(found):
            free()
        else:
            self._latest.free = free
        return found


def _locked(path: str) -> int | None:
    """Return the descriptor of the file, locked; None if that fails, or takes too long."""
    deadline = time.monotonic() + LONGEST_WAIT_S
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return None
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
                continue
        except OSError:  # the file system has no locks
            pass
        else:
            return descriptor
        os.close(descriptor)
        return None
