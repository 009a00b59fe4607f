"""What a worker prints: its output by case, and its stacks on request. Imports neither torch nor pydantic."""

import codecs
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# The process writes into a pipe that a thread empties, so that no file is needed and the process never blocks. The
# worker marks in the stream where a case begins, since it may be some cases ahead of the run that reads. Output of a
# case beyond 64 MiB is read, since a full pipe would stop the backend, but not shown.

KEPT = 20_000
"""Bytes kept of the latest case, and of what is printed before the first one."""
KEPT_OF_EARLIER = 4096
"""Bytes kept of each case before the latest."""

SHOWN = 2**26
"""Bytes shown of each case."""

_READ = 2**20
"""Bytes per read; the capacity of the pipe."""

_LONGEST_LINE = 2**16
"""Characters after which a line is shown before it ends."""

_DROPPED = f"[{SHOWN // 2**20} MiB of this case are shown; the rest is dropped]\n"
_MARK, _END = b"\0attncheck begins ", b"\0\n"
_LONGEST_MARK = 4096  # PIPE_BUF: writes up to this size are atomic

Show = Callable[[str, str], None]
"""``(label, text)``: shows whole lines that a process printed."""


def mark_of(case: str) -> bytes:
    """Return what a worker writes into its output at the start of the case with this key."""
    return _MARK + case.encode() + _END


class PrintedOutput:
    """Reads the pipe ``reading`` until it is closed, and keeps the end of each case's output.

    ``label``: name of the process, passed to ``show`` with every complete line. Must be closed.
    """

    def __init__(self, reading: int, label: str, show: Show | None = None) -> None:
        self.label = label
        self._reading, self._show = reading, show
        self._lock = threading.Lock()
        self._kept: dict[str, bytearray] = {"": bytearray()}
        self._printed: dict[str, int] = {"": 0}
        self._case = ""
        self._left = SHOWN
        self._pending = b""
        self._line = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        os.set_blocking(reading, False)
        self._stopping, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._follow, name=f"output of {label}", daemon=True)
        self._thread.start()

    def of(self, case: str | None = None, limit: int = KEPT) -> str:
        """Return the last ``limit`` bytes printed since ``case`` began, starting at the beginning of a line.

        None means the latest case. Output that precedes an answer already received is included.
        """
        self._read()
        with self._lock:
            key = self._case if case is None else case
            end = bytes(self._kept.get(key, b"")[-limit:])
            printed = self._printed.get(key, 0)
        if printed > len(end):
            end = end.partition(b"\n")[2] or end
        dropped = printed - len(end)
        cut = f"; of a case that prints more than {SHOWN // 2**20} MiB no more is shown" if printed > SHOWN else ""
        note = f"[{dropped} bytes before this are not kept{cut}]\n" if dropped else ""
        return note + end.decode("utf-8", "replace")

    def close(self) -> None:
        """Stop reading, and show the incomplete last line. May be called repeatedly."""
        if self._stop < 0:
            return
        os.close(self._stop)
        self._stop = -1
        self._thread.join()
        self._read()
        self._show_lines("\n" if self._line else "")
        os.close(self._stopping)
        os.close(self._reading)

    def _follow(self) -> None:
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        poll.register(self._stopping, select.POLLIN)
        while True:
            ready = dict(poll.poll())
            if self._stopping in ready or (self._reading in ready and not self._read()):
                return

    def _read(self) -> bool:
        """Read what is in the pipe; return whether more may come."""
        with self._lock:
            for _ in range(2):  # bounded, since the process may print endlessly
                try:
                    chunk = os.read(self._reading, _READ)
                except BlockingIOError:
                    return True
                except OSError:
                    return False
                if not chunk:
                    return False
                self._take(chunk)
        return True

    def _take(self, chunk: bytes) -> None:
        data = self._pending + chunk
        while (begin := data.find(_MARK)) >= 0:
            name, end, rest = data[begin + len(_MARK) :].partition(_END)
            if not end and len(name) < _LONGEST_MARK:
                break
            self._keep(data[:begin])
            if end:
                self._begin(name.decode("utf-8", "replace"))
            data = rest
        held = len(data) - begin if begin >= 0 else _begun(data)
        self._keep(data[: len(data) - held])
        self._pending = data[len(data) - held :]

    def _begin(self, case: str) -> None:
        del self._kept[self._case][:-KEPT_OF_EARLIER]
        self._case = case
        self._kept[case] = bytearray()
        self._printed[case] = 0
        self._left = SHOWN

    def _keep(self, text: bytes) -> None:
        kept = self._kept[self._case]
        self._printed[self._case] += len(text)
        kept += text[-KEPT:]
        del kept[:-KEPT]
        if self._show is None or not self._left:
            return
        self._show_lines(self._decoder.decode(text[: self._left], final=len(text) >= self._left))
        self._left = max(self._left - len(text), 0)
        if not self._left:
            self._show_lines(("\n" if self._line else "") + _DROPPED)

    def _show_lines(self, text: str) -> None:
        lines, _, self._line = (self._line + text).rpartition("\n")
        if len(self._line) > _LONGEST_LINE:
            lines = f"{lines}\n{self._line}" if lines else self._line
            self._line = ""
        if lines and self._show is not None:
            self._show(self.label, lines)


def _begun(data: bytes) -> int:
    """Return how many bytes at the end of ``data`` may be the beginning of a mark."""
    return next((size for size in range(min(len(_MARK) - 1, len(data)), 0, -1) if data.endswith(_MARK[:size])), 0)


def flush_c_streams() -> None:
    """Flush the output buffered by C code in this process."""
    ctypes.CDLL(None).fflush(None)


STACK_SIGNAL = signal.SIGUSR2
"""Signal at which a worker prints the Python stacks of its threads, even while C code holds the GIL."""

_STACK = "(most recent call first):"
_STACK_S = 2.0
"""Seconds that a worker may take to print its stacks."""
_NATIVE_STACK_S = 20.0


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
