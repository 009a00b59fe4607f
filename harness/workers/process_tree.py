"""The processes below a worker, and how a worker ends. Imports neither torch nor pydantic."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from attncheck.harness.host import MARK, free_host_bytes, oom_kills
from attncheck.harness.workers.limits import children, descendants

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37  # of linux/prctl.h

_TERM_S, _KILL_S = 1.0, 10.0
"""Seconds that a process may take to end after SIGTERM, and after SIGKILL."""


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
    if politely:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGTERM)
        wait(_TERM_S)
    strays = strays_of(pid)  # before it ends: then they have another parent
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    end_strays(strays)
    return wait(_KILL_S)


def strays_of(pid: int) -> dict[int, str]:
    """Return the descendants of the process ``pid`` outside of its group, each with the time of its start."""
    found: dict[int, str] = {}
    for each in descendants(pid):
        with suppress(OSError):  # it has ended
            if os.getpgid(each) != pid:
                found[each] = _start_of(each)
    return found


def end_strays(strays: Mapping[int, str]) -> None:
    """Kill the processes of :func:`strays_of`. One that has ended meanwhile may have left its id to another."""
    for pid, began in strays.items():
        with suppress(OSError):
            if _start_of(pid) == began:
                os.kill(pid, signal.SIGKILL)


def _start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()[19]


@contextmanager
def ending_orphans() -> Iterator[None]:
    """Become the parent of each descendant whose parent ends, and kill those of other sessions at the end.

    One that does not end, for instance because a driver holds it, is left. For a process that itself starts no process
    in another session meanwhile. Linux only.
    """
    if sys.platform != "linux":
        yield
        return
    began = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    with adopting_orphans():
        try:
            yield
        finally:
            deadline = time.monotonic() + _KILL_S
            while _kill_orphans(int(began)) and time.monotonic() < deadline:
                time.sleep(0.001)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Be the parent of each descendant whose parent ends in this context. Linux only."""
    before = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(is_on=bool(before.value))


def _kill_orphans(began: int) -> bool:
    """Kill the children of other sessions that started since ``began``, in clock ticks; return whether there were any.

    The end of one makes orphans of its own children, which the next call finds.
    """
    is_found = False
    for pid in children(os.getpid()):
        with suppress(OSError):  # it has ended, or belongs to another user
            if os.getsid(pid) != os.getsid(0) and int(_start_of(pid)) >= began:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
                is_found = True
    return is_found


def adopt_orphans(*, is_on: bool = True) -> None:
    """Make this process the parent of each descendant whose own parent ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)


def end_marked(mark: str) -> None:
    """Kill all processes whose environment has ``mark``, including daemons that left the session.

    Works on Linux only.
    """
    wanted = f"{MARK}={mark}".encode()
    own = os.getpid()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(place.name) != own and wanted in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
