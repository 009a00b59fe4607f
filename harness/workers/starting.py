"""The start of a worker, by a new interpreter or a fork of this process. Imports neither torch nor pydantic."""

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

_START = """\
import sys
sys.path[:] = sys.argv.pop().split(chr(10))
from attncheck.harness.workers.worker import main
main(sys.argv[1:])
"""
_ROOM = 2**20
"""Capacity in bytes of a worker's pipes, the most that Linux gives to unprivileged processes."""


class ChildProcess(Protocol):
    """A child of this process. ``returncode``: negative for a signal; None if it is not known to have ended."""

    pid: int
    returncode: int | None


@dataclass
class _Copy:
    pid: int
    returncode: int | None = None


@dataclass(frozen=True)
class StartedWorker:
    """A worker, and this end of its pipes: ``writing`` requests, ``reading`` answers, ``printed`` output."""

    process: ChildProcess
    writing: int
    reading: int
    printed: int


def start_worker(environment: Mapping[str, str]) -> StartedWorker:
    """Start a worker in a session of its own. Raises OSError if that fails, leaving no descriptor open."""

    def start(to_read: int, to_write: int, to_print: int, _ours: tuple[int, ...]) -> ChildProcess:
        words = (to_read, to_write, os.getpid(), "\n".join(map(str, sys.path)))
        return subprocess.Popen(  # noqa: S603 (this very interpreter, and words of ours)
            [sys.executable, "-P", "-u", "-c", _START, *map(str, words)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=to_print,
            stderr=to_print,
            pass_fds=(to_read, to_write),
            start_new_session=True,
        )

    return _with_pipes(start)


def fork_worker(serve: Callable[[int, int, int], None]) -> StartedWorker:
    """Fork this process; the copy calls ``serve`` with descriptors for requests and answers, and this process's id.

    Raises:
        OSError: no further process can be started.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()  # else the copy inherits the unwritten output in its buffers, too
    run = os.getpid()

    def start(to_read: int, to_write: int, to_print: int, ours: tuple[int, ...]) -> ChildProcess:
        if pid := os.fork():
            return _Copy(pid)
        status = 1
        try:
            os.setsid()
            for each in ours:
                os.close(each)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (1, 2):
                os.dup2(to_print, number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            serve(to_read, to_write, run)
            status = 0
        finally:
            os._exit(status)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which the copy does not use
        return _with_pipes(start)


def _with_pipes(start: Callable[[int, int, int, tuple[int, ...]], ChildProcess]) -> StartedWorker:
    """Return the worker that ``start`` starts with its ends of three pipes (read, write, print) and with ours.

    If that fails, no descriptor is left open.
    """
    with contextlib.ExitStack() as started:
        theirs_to_read, writing = _pipe(started)
        reading, theirs_to_write = _pipe(started)
        printed, theirs_to_print = _pipe(started)
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # room for what one end writes before the other one reads it
            for ours in (writing, reading, printed):
                with suppress(OSError):
                    fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _ROOM)
        process = start(theirs_to_read, theirs_to_write, theirs_to_print, (writing, reading, printed))
        started.pop_all()
    for theirs in (theirs_to_read, theirs_to_write, theirs_to_print):
        os.close(theirs)
    return StartedWorker(process, writing, reading, printed)


def _pipe(started: contextlib.ExitStack) -> tuple[int, int]:
    """Return the reading and the writing end of a pipe, which are closed if the process cannot be started."""
    ends = os.pipe()
    for end in ends:
        started.callback(os.close, end)
    return ends


StartWorker = Callable[[Mapping[str, str]], StartedWorker]
"""Starts a worker with this environment."""


class Starter:
    """Starts workers in a thread that outlives them: the main thread, or one of its own.

    The kernel kills a worker when the thread that started it ends.
    """

    def __init__(self, start: StartWorker) -> None:
        self._start = start
        self._thread = ThreadPoolExecutor(1, "starts workers")

    def __call__(self, environment: Mapping[str, str]) -> StartedWorker:
        """Start a worker with this environment."""
        if threading.current_thread() is threading.main_thread():
            return self._start(environment)
        return self._thread.submit(self._start, environment).result()
