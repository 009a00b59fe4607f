"""Watch the memory of a run's processes, and kill one that uses too much. Importing it does not import torch.

The memory of a backend's process is the resident memory of its session; pages shared within a session count once. If
the host runs short, the largest session is killed before the kernel swaps or kills something else. Only Linux provides
these figures; elsewhere nothing is watched.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from attncheck.harness.problem.host_memory import free_host_bytes
from attncheck.harness.workers.memory_limits import size_in_words

_FASTEST = 4 * 2**30
"""Maximum bytes of new memory that a process is expected to fill per second."""

_SHORTEST_S, _LONGEST_S = 0.05, 0.2
"""Seconds between two measurements."""

_REST = 4
"""Minimum pause after a measurement, as a multiple of its duration: measuring many copies of a process takes long."""

_LEAST_TO_BLAME = 2**30
"""Bytes below which a process is not killed when the host runs short."""

_PROC = Path("/proc")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Watched(Protocol):
    """A process that leads a session."""

    @property
    def identity(self) -> int:
        """Its process id, which is also its session id."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""

    def end_for(self, cause: str) -> None:
        """Kill it and its children, and record ``cause``."""


class MemoryWatch:
    """Watches processes in a thread of its own, as long as one of them is alive.

    ``limit``: bytes that each may use, including its children; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        free = free_host_bytes()
        self._limit, self._reserve = limit, 0 if free is None else reserve_of(free)
        self._watched: list[Watched] = []
        self._dying: set[int] = set()
        self._lock = threading.Lock()
        self._is_running = False

    def add(self, process: Watched) -> None:
        """Watch ``process`` from now on, until it has ended."""
        with self._lock:
            self._watched.append(process)
            if self._is_running or not (_PROC / "self/statm").exists():
                return
            self._is_running = True
        threading.Thread(target=self._follow, name="memory watch", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()  # never set
        began = time.monotonic()
        while (seconds := self._look()) is not None:
            pause.wait(max(seconds, _REST * (time.monotonic() - began)))
            began = time.monotonic()

    def _look(self) -> float | None:
        """Kill what uses too much memory; return the seconds until the next measurement, or None to stop watching."""
        with self._lock:
            self._watched = [process for process in self._watched if not process.has_ended]
            self._is_running = bool(self._watched)
            watched = {process.identity: process for process in self._watched}
        if not watched:
            return None
        free = free_host_bytes()
        is_short = free is not None and free < self._reserve
        try:
            held = held_bytes({*watched, *self._dying}, 0 if is_short else self._limit)
        except OSError:  # temporarily out of file descriptors
            return _LONGEST_S
        self._dying = {session for session in self._dying if held[session]}
        alive = {session: held[session] for session in watched.keys() - self._dying}
        # The memory of a killed process is released only after a while.
        room = None if free is None or self._dying else free - self._reserve
        for session, cause in causes(alive, self._limit, room, free or 0).items():
            self._dying.add(session)
            watched[session].end_for(cause)
        return seconds_to_wait(alive.values(), self._limit, room)


def reserve_of(free: int) -> int:
    """Return the bytes that a run leaves to the host, which has ``free`` bytes when its processes start."""
    return min(max(2**30, free // 20), free // 4)


def causes(held: Mapping[int, int], limit: int | None, room: int | None, free: int) -> dict[int, str]:
    """Return the sessions to kill, each with its cause. ``held``: bytes by session.

    ``room``: by how much ``free``, the host's free memory, exceeds the reserve; None to ignore it.
    """
    if limit is not None and (over := {session: size for session, size in held.items() if size > limit}):
        words = f"out of memory (limit {size_in_words(limit)}, it took "
        return {session: f"{words}{size_in_words(size)})" for session, size in over.items()}
    if room is None or room >= 0 or not held:
        return {}
    largest = max(held, key=lambda session: held[session])
    if held[largest] < _LEAST_TO_BLAME:
        return {}
    took = size_in_words(held[largest])
    return {largest: f"out of memory (the host had {size_in_words(free)} left; the process took {took})"}


def seconds_to_wait(held: Collection[int], limit: int | None, room: int | None) -> float:
    """Return the seconds within which no process can fill the rest of its limit or of the host."""
    rooms = [] if room is None else [room]
    rooms += [] if limit is None else [limit - size for size in held]
    return min(max(min(rooms, default=math.inf) / _FASTEST, _SHORTEST_S), _LONGEST_S)


def held_bytes(sessions: Collection[int], enough: int | None) -> dict[int, int]:
    """Return the memory that the processes of each session use.

    Shared pages are counted once only if the sum would exceed ``enough`` otherwise, because that takes long to measure.
    """
    members: dict[int, list[int]] = {session: [] for session in sessions}
    with os.scandir(_PROC) as entries:
        processes = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            members.get(os.getsid(process), []).append(process)
    return {session: _held(found, enough) for session, found in members.items()}


def _held(processes: Collection[int], enough: int | None) -> int:
    resident = sum(map(_resident_bytes, processes))
    if len(processes) < 2 or enough is None or resident <= enough:
        return resident
    return sum(map(_proportional_bytes, processes))


def _resident_bytes(process: int) -> int:
    """Return the resident memory of ``process``; 0 if it has ended."""
    try:
        return int((_PROC / str(process) / "statm").read_text(encoding="ascii").split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _proportional_bytes(process: int) -> int:
    """Return the proportional set size of ``process``, or its resident memory if the kernel does not provide it."""
    try:
        lines = (_PROC / str(process) / "smaps_rollup").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _resident_bytes(process)
