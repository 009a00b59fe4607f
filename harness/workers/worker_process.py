"""A run's handle on the process of one backend: starts it, talks with it, and tells how it ended.

Importing this module loads neither torch nor pydantic, so that a process can be started first of all.

The process is a session of its own: no Ctrl-C reaches it, and what it starts can be ended with it. That it ended is
told by the process itself, and not only by its pipe, which a copy it made may still hold.
"""

import contextlib
import fcntl
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self

from attncheck.errors import InternalError
from attncheck.harness.problem.host_memory import free_host_bytes, oom_kills
from attncheck.harness.workers.passed_environment import passed_environment
from attncheck.harness.workers.printed_output import KEPT, PrintedOutput, Show

if TYPE_CHECKING:
    from attncheck.harness.workers.protocol import Answer, Prepare, Request

_START = """\
import sys
sys.path[:] = sys.argv.pop().split(chr(10))
from attncheck.harness.workers.worker import main
main(sys.argv[1:])
"""
_LOOK_EVERY_MS = 200
"""How often a silent process is looked after."""
_GRACE_S = 5.0
"""How long a process may take to end that was asked to, or has closed its pipe."""

_ROOM = 2**20
"""Bytes of answers, and of output, that wait to be read; Linux gives no more to everybody."""

_LONGEST_ANSWER = 2**24
"""Bytes of one answer. A longer one does not come from the worker."""


class ProcessEndedError(InternalError):
    """A backend's process ended while an answer was due. ``cause`` in words, ``output``: the end of what it printed."""

    def __init__(self, cause: str, output: str) -> None:
        self.cause, self.output = cause, output
        super().__init__(cause)


class WorkerProcess:
    """A process that loads torch, and then waits for the backend to load; see ``protocol.py``.

    ``inherited``: what it gets of this process's environment, by ``pass_env`` of :func:`passed_environment`.
    ``environment``: on top of that, also as an attribute. ``show`` is given what the process prints. ``ref``:
    of its backend, empty before :meth:`load`. To be closed, whatever happens; a context manager closes it by itself.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, show: Show | None = None, pass_env: Iterable[str] = ()
    ) -> None:
        self.ref = ""
        self.inherited = passed_environment(os.environ, pass_env)
        self.environment = dict(environment or {})
        self._is_prepared = False
        self._finishing_since: float | None = None
        self._received = bytearray()
        self._waiting_since: float | None = None
        self._is_closed = False
        self._reaping = threading.Lock()
        self._peak_bytes = 0
        self._oom_kills = oom_kills()
        with contextlib.ExitStack() as started:
            theirs_to_read, self._writing = _pipe(started)
            self._reading, theirs_to_write = _pipe(started)
            printed, theirs_to_print = _pipe(started)
            if hasattr(fcntl, "F_SETPIPE_SZ"):  # as much as it may have to say before it is listened to
                for ours in (self._reading, printed):
                    with contextlib.suppress(OSError):
                        fcntl.fcntl(ours, fcntl.F_SETPIPE_SZ, _ROOM)
            words = (theirs_to_read, theirs_to_write, os.getpid(), "\n".join(map(str, sys.path)))
            self._process = subprocess.Popen(  # noqa: S603 (this very interpreter, and words of ours)
                [sys.executable, "-P", "-u", "-c", _START, *map(str, words)],
                env=self.inherited | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=theirs_to_print,
                stderr=theirs_to_print,
                pass_fds=(theirs_to_read, theirs_to_write),
                start_new_session=True,
            )
            started.pop_all()
        for theirs in (theirs_to_read, theirs_to_write, theirs_to_print):
            os.close(theirs)
        self.printed = PrintedOutput(printed, "", show)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The pipe that answers come from."""
        return self._reading

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        with self._reaping:
            if self._process.returncode is None:
                identity, status, usage = os.wait4(self._process.pid, os.WNOHANG)
                if identity:
                    self._process.returncode = os.waitstatus_to_exitcode(status)
                    self._peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return self._process.returncode is not None

    def prepare(self, request: "Prepare") -> None:
        """Let the process import what it will need; the first request counts. It answers nothing."""
        if not self._is_prepared:
            self._is_prepared = True
            self.send(request)

    def load(self, ref: str) -> None:
        """Let the process load the backend ``ref``; it answers nothing."""
        from attncheck.harness.workers.protocol import Load

        self.ref = self.printed.label = ref
        self.send(Load(ref=ref))

    def send(self, request: "Request") -> None:
        """Send one request. That nobody is there to read it any more is told by :meth:`receive`."""
        from attncheck.harness.workers.protocol import format_message

        rest = memoryview(format_message(request))
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._writing, rest) :]

    def receive(self, limit_s: float | None = None) -> "Answer":
        """Wait for the next answer, and return it; see :meth:`answer`."""
        while (answer := self.answer(limit_s)) is None:
            wait_for_answers([self])
        return answer

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`receive` returns or raises at once, or almost at once."""
        return b"\n" in self._received or self.has_ended or bool(self._poll.poll(0))

    def answer(self, limit_s: float | None = None) -> "Answer | None":
        """Return the next answer; None: there is none yet.

        A process that sends none for ``limit_s`` seconds, from the first call in vain, is killed with all it started.

        Raises:
            ProcessEndedError: there will be none, since the process ended, or closed its pipe, or was killed.
        """
        from pydantic import ValidationError

        from attncheck.harness.workers.protocol import parse_answer

        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST_ANSWER:
                raise self._intruded()
            is_over = self.has_ended  # before the pipe is looked at: nothing comes behind it
            has_more = bool(self._poll.poll(0))
            if has_more:
                chunk = os.read(self._reading, 2**16)
                self._received += chunk
                is_over = not chunk
            if is_over:
                raise ProcessEndedError(self._cause(), self.output())
            is_late = limit_s is not None and time.monotonic() - self._waiting_since > limit_s
            if is_late and b"\n" not in self._received:
                self._kill()
                raise ProcessEndedError(f"no answer within {limit_s:g} s", self.output())
            if not has_more:
                return None
        line, _, self._received = self._received.partition(b"\n")
        self._waiting_since = None
        try:
            return parse_answer(bytes(line))
        except ValidationError:
            raise self._intruded() from None

    def output(self, case: str | None = None, limit: int = KEPT) -> str:
        """Return the end of what was printed since ``case`` began, or the latest case; see :class:`PrintedOutput`."""
        return self.printed.of(case, limit)

    def finish(self) -> None:
        """Tell the process that nothing more will be asked; it ends by itself, and is closed later."""
        if self._finishing_since is None:
            self._finishing_since = time.monotonic()
            os.close(self._writing)

    def close(self, *, at_once: bool = False) -> None:
        """End the process with all it started; one that is finishing gets a moment for it. May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._finishing_since is not None and not at_once:
            self._wait(self._finishing_since + _GRACE_S - time.monotonic())
        self._kill()
        self.finish()
        os.close(self._reading)
        self.printed.close()

    def kill(self) -> None:
        """End the process with all it started. Another thread that waits in :meth:`receive` then learns of it."""
        if not self.has_ended:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._wait()

    def _wait(self, limit_s: float = math.inf) -> bool:
        """Wait until the process has ended, for ``limit_s`` at most; return whether it has."""
        deadline, pause = time.monotonic() + limit_s, 0.001
        while not self.has_ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def _intruded(self) -> ProcessEndedError:
        self._kill()
        return ProcessEndedError("stopped, since it wrote into attncheck's own pipe", self.output())

    def _cause(self) -> str:
        """In words, how the process ended."""
        if not self._wait(_GRACE_S):
            self._kill()
            return "stopped, since it closed attncheck's own pipe"
        code = self._process.returncode
        if code >= 0:
            return f"left with exit code {code}"
        if -code == signal.SIGKILL:
            return f"killed by SIGKILL; {self._memory()}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def _memory(self) -> str:
        """In words, whether the kernel killed the process for want of memory."""
        before, now, free = self._oom_kills, oom_kills(), free_host_bytes()
        is_counted = before is not None and now is not None and now > before
        figures = [f"peak memory of the process {self._peak_bytes / 2**30:.1f} GiB"]
        figures += [] if free is None else [f"free memory {free / 2**30:.1f} GiB"]
        return f"out of memory{', as the kernel counts' if is_counted else '?'} ({', '.join(figures)})"


def wait_for_answers(processes: Iterable[WorkerProcess]) -> None:
    """Wait until one of ``processes`` has sent something, but no longer than until it is time to look after them."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    poll.poll(_LOOK_EVERY_MS)


def _pipe(started: contextlib.ExitStack) -> tuple[int, int]:
    """Reading and writing end, closed again if the process cannot be started."""
    ends = os.pipe()
    for end in ends:
        started.callback(os.close, end)
    return ends
