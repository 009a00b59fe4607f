"""A worker process: what the run sends to it and receives, and its end. Imports neither torch nor pydantic."""

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
from typing import TYPE_CHECKING, Any, Self, TypeVar

from attncheck.errors import InternalError, QuestionError
from attncheck.harness.host import MARK, oom_kills, remove_folders
from attncheck.harness.workers.limits import Limit, passed_environment
from attncheck.harness.workers.printed import KEPT, PrintedOutput, Show, native_stack, print_stacks
from attncheck.harness.workers.process_tree import (
    end_group,
    end_marked,
    end_strays,
    exit_words,
    state_words,
    strays_of,
)
from attncheck.harness.workers.starting import StartWorker, start_worker

if TYPE_CHECKING:
    from attncheck.harness.run.outcomes import ProcessEnd
    from attncheck.harness.workers.protocol import HarnessFailure
    from attncheck.harness.workers.schedule import BackendQuestion

# The process leads a session of its own: Ctrl-C does not reach it, and its children can be ended with it. Its end is
# detected from the process itself as well as from its pipe, since a copy that the backend made may hold the pipe open.

_LOOK_EVERY_MS = 200
"""Milliseconds between checks of a silent process."""
_LONGEST_PAUSE_S = 1.0
"""Seconds between two looks at a clock that may count: several times what a busy machine needs."""

_GRACE_S = 5.0
"""Seconds that a process may take to end after a request to end, or after it closed its pipe."""

MOST_EARLIER = 64
"""Maximum number of questions that are remembered."""

_INTRUDED = "stopped, since it wrote into attncheck's own pipe"
_LONGEST_ANSWER = 2**24
"""Maximum bytes of one answer; a longer one does not come from the worker."""


class ProcessEndedError(InternalError):
    """A backend's process ended while an answer was due."""

    def __init__(self, end: "ProcessEnd") -> None:
        self.end = end
        super().__init__(end.cause)


class WorkerError(InternalError):
    """attncheck itself failed in the process of a backend; exit code 3, as for a failure in the run's own process."""

    def __init__(self, ref: str, fault: "HarnessFailure") -> None:
        self.fault = fault
        super().__init__(f"{fault.error} (in the process of {ref})")
        self.add_note(fault.traceback)


class StoppedError(InternalError):
    """The run was stopped, so that no further process is started."""


class RefusedError(QuestionError):
    """A process refused a call. ``raised``: type of the exception that the backend raised as it was loaded, or ""."""

    def __init__(self, reason: str, raised: str = "") -> None:
        self.raised = raised
        super().__init__(reason)


Result = TypeVar("Result")


class AwakeClock:
    """Counts the seconds in which this process looked at it again and again.

    Of a longer pause only the first second counts: the processes were stopped together, or the machine slept.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read, self._seconds, self._latest = read, 0.0, read()

    def now(self) -> float:
        """Return the seconds so far."""
        read = self._read()
        self._seconds += min(read - self._latest, _LONGEST_PAUSE_S)
        self._latest = read
        return self._seconds


class WorkerProcess:
    """A process that serves calls; see ``protocol.py`` and ``worker.py``.

    ``inherited``: the variables it gets from this process's environment, by ``pass_env`` of :func:`passed_environment`.
    ``environment``: additional variables, also an attribute. ``show``: gets what the process prints. ``start``: starts
    it. ``ref``: of its backend, set by its owner. ``examined``: the latest questions to it. It must be
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
        self._finishing_since: float | None = None
        self._strays: dict[int, str] = {}
        self._received = bytearray()
        self._clock = AwakeClock()
        self._waiting_since: float | None = None
        self._is_closed = False
        self._reaping = threading.Lock()
        self._peak_bytes = 0
        self._ended_for = ""
        self._oom_kills = oom_kills()
        self._end: ProcessEndedError | None = None
        self.examined: deque[BackendQuestion] = deque(maxlen=MOST_EARLIER)
        self._method: Callable[..., Any] | None = None
        self._mark = secrets.token_hex(16)
        self._token = secrets.token_hex(8).encode()
        started = start({**self.inherited, **self.environment, MARK: self._mark})
        self._process = started.process
        self._writing = started.writing
        self._reading = started.reading
        self.printed = PrintedOutput(started.printed, "", show)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def send(self, method: Callable[..., Any], *arguments: Any) -> None:
        """Call a method of the server in the process; :meth:`receive` returns its events and its result.

        If the process has ended, :meth:`receive` reports it.
        """
        from attncheck.harness.workers.protocol import signature_of, write_call

        if signature_of(method).is_answered:
            self._method = method
        rest = memoryview(write_call(self._token, method, arguments))
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._writing, rest) :]

    def call(self, limit: "Limit | None", method: Callable[..., Result], *arguments: Any) -> Result:
        """Return the result of a call that sends no events; raises like :meth:`receive`."""
        self.send(method, *arguments)
        result: Result = self.receive(limit)
        return result

    def receive(self, limit: "Limit | None" = None) -> Any:
        """Wait for the next event of the latest call, or its result, and return it.

        A process that exceeds ``limit``, counted from the first call without an answer, is killed with its children.

        Raises:
            RefusedError: the call was wrong.
            WorkerError: attncheck itself failed in the process.
            ProcessEndedError: the process ended, closed its pipe, or was killed, and no answer is left. Later calls
                raise it again.
        """
        try:
            while (answer := self._answer(limit)) is None:
                self._poll.poll(_LOOK_EVERY_MS)
        except ProcessEndedError as ended:
            self._end = ended
            raise
        return answer

    def _answer(self, limit: "Limit | None") -> Any:
        """Return the next answer, or None if there is none yet."""
        from attncheck.harness.workers.protocol import EVENT, RESULT, HarnessFailure, read_answer

        if self._end is not None:
            raise self._end
        is_late = self._is_late(limit)
        while b"\n" not in self._received:
            if len(self._received) > _LONGEST_ANSWER:
                raise self.intruded()
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
        if self._method is None:
            raise self.intruded()
        try:
            kind, value = read_answer(self._token, self._method, bytes(line))
        except ValueError:
            raise self.intruded() from None
        if kind in (EVENT, RESULT):
            return value
        if isinstance(value, HarnessFailure):
            raise WorkerError(self.ref, value)
        raise RefusedError(value.reason, value.raised)

    def intruded(self) -> ProcessEndedError:
        """Kill the process, since something else than attncheck wrote into its pipe; return how it ended."""
        self._kill()
        self._end = self._ended(_INTRUDED)
        return self._end

    def output(self, case: str | None = None, limit: int = KEPT) -> str:
        """Return the end of what was printed since ``case`` (None: the latest) began; see :class:`PrintedOutput`."""
        return self.printed.of(case, limit)

    def finish(self) -> None:
        """Close the pipe for requests, so that the process ends by itself; it is closed later."""
        if self._finishing_since is None:
            self._finishing_since = time.monotonic()
            self._strays = strays_of(self._process.pid)
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
        has_ended = end_group(self._process.pid, self._wait, politely=politely)
        end_strays(self._strays)
        end_marked(self._mark)
        remove_folders(self._mark)
        return has_ended

    def _is_late(self, limit: "Limit | None") -> bool:
        """Return whether the process exceeds ``limit``; the first call starts the clock."""
        now = self._clock.now()
        if self._waiting_since is None:
            self._waiting_since = now
        return limit is not None and now - self._waiting_since > limit.seconds

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
        deadline, pause = time.monotonic() + limit_s, 0.001
        while not self.has_ended:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True

    def _cause(self) -> str:
        if not self._wait(_GRACE_S):
            self._kill()
            return "stopped, since it closed attncheck's own pipe"
        code = self._process.returncode or 0
        if code == -signal.SIGKILL and self._ended_for:
            return self._ended_for
        return exit_words(code, self._peak_bytes, self._oom_kills)
