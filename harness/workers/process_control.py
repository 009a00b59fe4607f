"""Start a worker, end it with all its children, and find out what it was doing. Imports neither torch nor pydantic."""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from attncheck.harness.problem.control_group import oom_kills
from attncheck.harness.problem.host_memory import free_host_bytes

_START = """\
import sys
sys.path[:] = sys.argv.pop().split(chr(10))
from attncheck.harness.workers.worker import main
main(sys.argv[1:])
"""
_ROOM = 2**20
"""Capacity in bytes of the pipes for answers and output, the most that Linux gives to unprivileged processes."""

STACK_SIGNAL = signal.SIGUSR2
"""Signal at which a worker prints the Python stacks of its threads, even while C code holds the GIL."""

MARK = "ATTNCHECK_WORKER"
"""Environment variable whose value marks a worker and all its descendants."""

_STACK = "(most recent call first):"
_STACK_S = 2.0
"""Seconds that a worker may take to print its stacks."""
_NATIVE_STACK_S = 20.0
_TERM_S, _KILL_S = 1.0, 10.0
"""Seconds that a process may take to end after SIGTERM, and after SIGKILL."""


class ChildProcess(Protocol):
    """A child of this process. ``returncode``: negative for a signal; None if it is not known to have ended."""

    pid: int
    returncode: int | None


@dataclass
class _Copy:
    """A fork of this process."""

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
        if hasattr(fcntl, "F_SETPIPE_SZ"):  # room for what it writes before the run reads it
            for ours in (reading, printed):
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


def print_stacks(pid: int, printed: Callable[[], str]) -> None:
    """Make the worker ``pid`` print its Python stacks, and wait until ``printed()`` contains them.

    A worker that is stopped, or whose backend has replaced the signal handler, prints none.
    """
    before = printed()
    with suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline, latest = time.monotonic() + _STACK_S, before
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = printed()
        if now.count(_STACK) > before.count(_STACK) and now == latest:
            return
        latest = now


def native_stack(pid: int) -> str:
    """Return the stacks of Python and C frames from py-spy, or "" if it is not installed or has no permission."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (program := shutil.which("py-spy", path=path)) is None:
        return ""
    for words in (["--native"], []):  # py-spy cannot read C frames on every platform
        with suppress(OSError, subprocess.TimeoutExpired):
            dumped = subprocess.run(  # noqa: S603 (a program of the user's own environment, and words of ours)
                [program, "dump", *words, "--pid", str(pid)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_NATIVE_STACK_S,
                check=False,
            )
            if dumped.returncode == 0:
                _, thread, stacks = dumped.stdout.partition("\nThread ")
                return f"Thread {stacks}" if thread else dumped.stdout
    return ""


def state_words(pid: int) -> str:
    """Return what keeps the process ``pid`` from running, by its state in /proc, or "" if it runs or sleeps."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][0]
    except (OSError, IndexError):
        return ""
    return {"T": "a signal has stopped the process", "D": "the process waits in the kernel"}.get(state, "")


def exit_words(code: int, peak_bytes: int, oom_kills_before: int | None) -> str:
    """Return how a process ended: its exit code or signal, with memory figures for SIGKILL.

    ``code``: negative for a signal. ``oom_kills_before``: OOM kills of the control group when the process started.
    """
    if code >= 0:
        return f"exited with code {code}"
    if -code != signal.SIGKILL:
        known = {each.value: each.name for each in signal.Signals}
        return f"killed by {known.get(-code, f'signal {-code}')}"
    now, free = oom_kills(), free_host_bytes()
    is_counted = oom_kills_before is not None and now is not None and now > oom_kills_before
    figures = [f"peak memory of the process {peak_bytes / 2**30:.1f} GiB"]
    figures += [] if free is None else [f"free memory {free / 2**30:.1f} GiB"]
    counted = ", as the kernel counts" if is_counted else "?"
    return f"killed by SIGKILL; out of memory{counted} ({', '.join(figures)})"


def end_group(pid: int, wait: Callable[[float], bool], *, politely: bool = False) -> bool:
    """Kill the process group ``pid``; return False if it does not end, for instance because a driver holds it.

    ``wait``: waits up to the given seconds for the process, and returns whether it has ended. ``politely``: send
    SIGTERM first.
    """
    for number, seconds in ((signal.SIGTERM, _TERM_S), (signal.SIGKILL, _KILL_S)):
        if number == signal.SIGTERM and not politely:
            continue
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
        if wait(seconds) and number == signal.SIGTERM:
            with suppress(ProcessLookupError, PermissionError):  # its children may ignore SIGTERM
                os.killpg(pid, signal.SIGKILL)
            return True
    return wait(0)


def end_marked(mark: str) -> None:
    """Kill all processes whose environment has ``mark``, including daemons that left the session.

    Works on Linux only.
    """
    wanted, own = f"{MARK}={mark}".encode(), os.getpid()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(place.name) != own and wanted in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
