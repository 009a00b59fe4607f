"""Control the process of one backend from the run: start it, exchange messages, and find out how it ended.

Importing this module imports neither torch nor pydantic, so that a process can be started before anything else. The
process leads a session of its own: Ctrl-C does not reach it, and its children can be ended with it. Its end is detected
from the process itself as well as from its pipe, since a copy that the backend made may hold the pipe open.
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
"""Milliseconds between checks of a silent process."""
_GRACE_S = 5.0
"""Seconds that a process may take to end after a request to end, or after it closed its pipe."""

MOST_EARLIER = 64
"""Maximum number of requests about cases that are remembered."""

_INTRUDED = "stopped, since it wrote into attncheck's own pipe"
_LONGEST_ANSWER = 2**24
"""Maximum bytes of one answer; a longer one does not come from the worker."""


class ProcessEndedError(InternalError):
    """A backend's process ended while an answer was due."""

    def __init__(self, end: "ProcessEnd") -> None:
        self.end = end
        super().__init__(end.cause)


class WorkerProcess:
    """A process that imports torch, and then waits for the backend to load; see ``protocol.py``.

    ``inherited``: the variables it gets from this process's environment, by ``pass_env`` of :func:`passed_environment`.
    ``environment``: additional variables, also an attribute. ``show``: gets what the process prints. ``start``: starts
    it. ``ref``: of its backend; "" before :meth:`load`. ``examined``: its latest requests about cases. It must be
    closed; a context manager does so.
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
        """Return the descriptor of the pipe that answers come from."""
        return self._reading

    @property
    def identity(self) -> int:
        """The id of the process, and of its session."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        with self._reaping:
            if self._process.returncode is None:
                identity, status, usage = os.wait4(self._process.pid, os.WNOHANG)
                if identity:
                    self._process.returncode = os.waitstatus_to_exitcode(status)
                    self._peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            return self._process.returncode is not None

    def prepare(self, request: "Prepare") -> None:
        """Make the process import what it will need. It sends no answer; only the first call has an effect."""
        if not self._is_prepared:
            self._is_prepared = True
            self.send(request)

    def load(self, ref: str) -> None:
        """Make the process load the backend ``ref``. It sends no answer."""
        from attncheck.harness.workers.protocol import Load

        self.ref = self.printed.label = ref
        self.send(Load(ref=ref))

    def send(self, request: "Request") -> None:
        """Send one request. If the process has ended, :meth:`receive` reports it."""
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
        """Return the next answer, or None if there is none yet.

        A process that exceeds ``limit``, counted from the first call without an answer, is killed with its children.

        Raises:
            ProcessEndedError: the process ended, closed its pipe, or was killed, and no answer is left. Later calls
                raise it again.
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
            is_over = self.has_ended  # before the pipe is polled, so that no later answer can be missed
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
        """Return the end of what was printed since ``case`` (None: the latest) began; see :class:`PrintedOutput`."""
        return self.printed.of(case, limit)

    def finish(self) -> None:
        """Close the pipe for requests, so that the process ends by itself; it is closed later."""
        if self._finishing_since is None:
            self._finishing_since = time.monotonic()
            os.close(self._writing)

    def close(self, *, at_once: bool = False) -> None:
        """End the process with its children; a finishing one gets a moment to end. May be called repeatedly."""
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
        """End the process with its children. :meth:`receive` in another thread then raises."""
        if not self.has_ended:
            self._kill()

    def end_for(self, cause: str) -> None:
        """Kill the process with its children, without waiting; :meth:`receive` then raises with ``cause``."""
        with self._reaping:
            if self._process.returncode is None:
                self._ended_for = cause
                end_group(self._process.pid, lambda _: False)

    def _kill(self, *, politely: bool = False) -> bool:
        """End the process with its children; return False if it cannot be ended."""
        has_ended = end_group(self._process.pid, self._wait, politely=politely)
        end_marked(self._mark)
        return has_ended

    def _is_late(self, limit: "Limit | None") -> bool:
        """Return whether the process exceeds ``limit``; the first call starts the clock."""
        if self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return limit is not None and time.monotonic() - self._waiting_since > limit.seconds

    def _timed_out(self, limit: "Limit") -> ProcessEndedError:
        """Kill the process that exceeded ``limit``; return how it ended, with what it was doing."""
        state = state_words(self._process.pid)
        print_stacks(self._process.pid, self.output)
        stack = native_stack(self._process.pid)
        words = [f"not finished within the time limit; {limit}", *([state] if state else [])]
        words += [] if self._kill(politely=True) else [f"process {self._process.pid} could not be killed, and is left"]
        return self._ended("; ".join(words), stack, limit.seconds)

    def _ended(self, cause: str, stack: str = "", limit_s: float | None = None) -> ProcessEndedError:
        from attncheck.harness.run.outcomes import ProcessEnd

        return ProcessEndedError(ProcessEnd(cause, self.output(), stack, limit_s))

    def _wait(self, limit_s: float = math.inf) -> bool:
        """Wait until the process has ended, for at most ``limit_s`` seconds; return whether it has."""
        deadline, pause = time.monotonic() + limit_s, 0.001
        while not self.has_ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def _cause(self) -> str:
        """Return in words how the process ended."""
        if not self._wait(_GRACE_S):
            self._kill()
            return "stopped, since it closed attncheck's own pipe"
        code = self._process.returncode or 0
        if code == -signal.SIGKILL and self._ended_for:
            return self._ended_for
        return exit_words(code, self._peak_bytes, self._oom_kills)


def wait_for_answers(processes: Iterable[WorkerProcess]) -> None:
    """Wait until one of ``processes`` has sent something, but at most ``_LOOK_EVERY_MS``."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    poll.poll(_LOOK_EVERY_MS)
