"""A run's handle on the process of one backend: starts it, talks with it, and tells how it ended.

Importing this module loads neither torch nor pydantic, so that a process can be started first of all.

The process is a session of its own: no Ctrl-C reaches it, and what it starts can be ended with it. That it ended is
told by the process itself, and not only by its pipe, which a copy it made may still hold.
"""

import contextlib
import math
import os
import secrets
import select
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Self

from attncheck.errors import InternalError
from attncheck.harness.problem.control_group import oom_kills
from attncheck.harness.workers.passed_environment import passed_environment
from attncheck.harness.workers.printed_output import KEPT, PrintedOutput, Show
from attncheck.harness.workers.process_control import (
    MARK,
    StartedWorker,
    end_group,
    end_marked,
    exit_words,
    native_stack,
    print_stacks,
    start_worker,
    state_words,
)

if TYPE_CHECKING:
    from attncheck.harness.run.outcomes import ProcessEnd
    from attncheck.harness.workers.protocol import Answer, Examine, Prepare, Request
    from attncheck.harness.workers.time_limits import Limit

StartWorker = Callable[[Mapping[str, str]], StartedWorker]
"""Starts a worker with this environment."""

_LOOK_EVERY_MS = 200
"""How often a silent process is looked after."""
_GRACE_S = 5.0
"""How long a process may take to end that was asked to, or has closed its pipe."""

MOST_EARLIER = 64
"""Requests about cases that are remembered."""

_INTRUDED = "stopped, since it wrote into attncheck's own pipe"
_LONGEST_ANSWER = 2**24
"""Bytes of one answer. A longer one does not come from the worker."""


class ProcessEndedError(InternalError):
    """A backend's process ended while an answer was due."""

    def __init__(self, end: "ProcessEnd") -> None:
        self.end = end
        super().__init__(end.cause)


class WorkerProcess:
    """A process that loads torch, and then waits for the backend to load; see ``protocol.py``.

    ``inherited``: what it gets of this process's environment, by ``pass_env`` of :func:`passed_environment`.
    ``environment``: on top of that, also as an attribute. ``show`` is given what the process prints. ``start`` starts
    it. ``ref``: of its backend, empty before :meth:`load`. ``examined``: its latest requests about cases. To be closed,
    whatever happens; a context manager closes it by itself.
    """

    def __init__(
        self,
        environment: Mapping[str, str] | None = None,
        show: Show | None = None,
        pass_env: Iterable[str] = (),
        start: StartWorker = start_worker,
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
        self._ended_for = ""
        self._oom_kills = oom_kills()
        self._end: ProcessEndedError | None = None
        self.examined: deque[Examine] = deque(maxlen=MOST_EARLIER)
        self._mark = secrets.token_hex(16)
        started = start({**self.inherited, **self.environment, MARK: self._mark})
        self._process, self._writing, self._reading = started.process, started.writing, started.reading
        self.printed = PrintedOutput(started.printed, "", show)
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
    def identity(self) -> int:
        """The number of the process, and of its session."""
        return self._process.pid

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

        if request.kind == "examine":
            self.examined.append(request)
        rest = memoryview(format_message(request))
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._writing, rest) :]

    def receive(self, limit: "Limit | None" = None) -> "Answer":
        """Wait for the next answer, and return it; see :meth:`answer`."""
        while (answer := self.answer(limit)) is None:
            wait_for_answers([self])
        return answer

    def is_ready(self, limit: "Limit | None" = None) -> bool:
        """Return whether :meth:`receive` returns or raises at once, or almost at once; see :meth:`answer`."""
        is_there = b"\n" in self._received or self.has_ended or bool(self._poll.poll(0))
        return is_there or self._is_late(limit)

    def answer(self, limit: "Limit | None" = None) -> "Answer | None":
        """Return the next answer; None: there is none yet.

        A process that exceeds ``limit``, from the first call in vain, is killed with all it started.

        Raises:
            ProcessEndedError: there will be none, since the process ended, or closed its pipe, or was killed. Every
                later call raises the same.
        """
        try:
            return self._answer(limit)
        except ProcessEndedError as ended:
            self._end = ended
            raise

    def _answer(self, limit: "Limit | None") -> "Answer | None":
        from pydantic import ValidationError

        from attncheck.harness.workers.protocol import parse_answer

        if self._end is not None:
            raise self._end
        is_late = self._is_late(limit)
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST_ANSWER:
                self._kill()
                raise self._ended(_INTRUDED)
            is_over = self.has_ended  # before the pipe is looked at: nothing comes behind it
            has_more = bool(self._poll.poll(0))
            if has_more:
                chunk = os.read(self._reading, 2**16)
                self._received += chunk
                is_over = not chunk
            if is_over:
                raise self._ended(self._cause())
            if limit is not None and is_late and b"\n" not in self._received:
                raise self._timed_out(limit)
            if not has_more:
                return None
        line, _, self._received = self._received.partition(b"\n")
        self._waiting_since = None
        try:
            return parse_answer(bytes(line))
        except ValidationError:
            self._kill()
            raise self._ended(_INTRUDED) from None

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

    def end_for(self, cause: str) -> None:
        """Kill the process with all it started, and have :meth:`receive` raise with ``cause``. It waits for nothing."""
        with self._reaping:
            if self._process.returncode is None:
                self._ended_for = cause
                end_group(self._process.pid, lambda _: False)

    def _kill(self, *, politely: bool = False) -> bool:
        """End the process with all it started; return False if it cannot be ended."""
        has_ended = end_group(self._process.pid, self._wait, politely=politely)
        end_marked(self._mark)
        return has_ended

    def _is_late(self, limit: "Limit | None") -> bool:
        """Return whether the process exceeds ``limit``; the first call begins the count."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return limit is not None and time.monotonic() - self._waiting_since > limit.seconds

    def _timed_out(self, limit: "Limit") -> ProcessEndedError:
        """Return how the process ended that exceeded ``limit``: what it was doing, and that it was killed."""
        state = state_words(self._process.pid)
        print_stacks(self._process.pid, self.output)
        stack = native_stack(self._process.pid)
        words = [f"no answer in time; {limit}", *([state] if state else [])]
        words += [] if self._kill(politely=True) else [f"process {self._process.pid} could not be killed, and is left"]
        return self._ended("; ".join(words), stack, limit.seconds)

    def _ended(self, cause: str, stack: str = "", limit_s: float | None = None) -> ProcessEndedError:
        from attncheck.harness.run.outcomes import ProcessEnd

        return ProcessEndedError(ProcessEnd(cause, self.output(), stack, limit_s))

    def _wait(self, limit_s: float = math.inf) -> bool:
        """Wait until the process has ended, for ``limit_s`` at most; return whether it has."""
        deadline, pause = time.monotonic() + limit_s, 0.001
        while not self.has_ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def _cause(self) -> str:
        """In words, how the process ended."""
        if not self._wait(_GRACE_S):
            self._kill()
            return "stopped, since it closed attncheck's own pipe"
        code = self._process.returncode or 0
        if code == -signal.SIGKILL and self._ended_for:
            return self._ended_for
        return exit_words(code, self._peak_bytes, self._oom_kills)


def wait_for_answers(processes: Iterable[WorkerProcess]) -> None:
    """Wait until one of ``processes`` has sent something, but no longer than until it is time to look after them."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    poll.poll(_LOOK_EVERY_MS)
