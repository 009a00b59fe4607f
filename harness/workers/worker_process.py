"""A run's handle on the process of one backend: starts it, talks with it, and tells how it ended.

The process is a session of its own: no Ctrl-C reaches it, and what it starts can be ended with it. That it ended is
told by the process itself, and not only by its pipe, which a copy it made may still hold.
"""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Self

from pydantic import ValidationError

from attncheck.errors import InternalError
from attncheck.harness.workers.protocol import Answer, Request, format_message, parse_answer

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
_SHOWN = 20_000
"""Bytes told of what a process printed."""
_LONGEST = 2**27
"""Bytes it may print while it is at one case; then they are forgotten, and it may begin again."""

_ROOM = 2**20
"""Bytes of answers that wait to be read; Linux gives no more to everybody."""

_LONGEST_ANSWER = 2**24
"""Bytes of one answer. A longer one does not come from the worker."""


class ProcessEndedError(InternalError):
    """A backend's process ended while an answer was due. ``cause`` in words, ``output``: the end of what it printed."""

    def __init__(self, cause: str, output: str) -> None:
        self.cause, self.output = cause, output
        super().__init__(cause)


class WorkerProcess:
    """The process of the backend ``ref``, started with ``environment`` on top of this process's.

    To be closed, whatever happens; a context manager closes it by itself.
    """

    def __init__(self, ref: str, environment: Mapping[str, str]) -> None:
        self.ref = ref
        self._finishing_since: float | None = None
        self._received = bytearray()
        with contextlib.ExitStack() as started:
            self._printed = started.enter_context(tempfile.TemporaryFile())
            # Cut while the process has it open: what follows must not be written where the old end was.
            fcntl.fcntl(self._printed, fcntl.F_SETFL, fcntl.fcntl(self._printed, fcntl.F_GETFL) | os.O_APPEND)
            theirs_to_read, self._writing = _pipe(started)
            self._reading, theirs_to_write = _pipe(started)
            if hasattr(fcntl, "F_SETPIPE_SZ"):  # as much as it may have to say before it is listened to
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, _ROOM)
            path = "\n".join(map(str, sys.path))
            self._process = subprocess.Popen(  # noqa: S603 (this very interpreter, and words of ours)
                [sys.executable, "-P", "-u", "-c", _START, str(theirs_to_read), str(theirs_to_write), ref, path],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=(theirs_to_read, theirs_to_write),
                start_new_session=True,
            )
            started.pop_all()
        os.close(theirs_to_read)
        os.close(theirs_to_write)
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def send(self, request: Request) -> None:
        """Send one request. That nobody is there to read it any more is told by :meth:`receive`."""
        rest = memoryview(format_message(request))
        with contextlib.suppress(BrokenPipeError):
            while rest:
                rest = rest[os.write(self._writing, rest) :]

    def receive(self, limit_s: float | None = None) -> Answer:
        """The next answer; a process that sends none within ``limit_s`` is killed with all it started.

        Raises:
            ProcessEndedError: there is none, since the process ended, or closed its pipe, or was killed.
        """
        began = time.monotonic()
        while True:
            line, newline, rest = self._received.partition(b"\n")
            if newline:
                self._received = rest
                try:
                    return parse_answer(bytes(line))
                except ValidationError:
                    raise self._intruded() from None
            if len(line) > _LONGEST_ANSWER:
                raise self._intruded()
            is_over = self.has_ended  # before the pipe is looked at: nothing comes behind it
            if self._poll.poll(0 if is_over else _LOOK_EVERY_MS):
                chunk = os.read(self._reading, 2**16)
                self._received += chunk
                is_over = not chunk
            elif os.fstat(self._printed.fileno()).st_size > _LONGEST:
                self.forget_output()  # before the disk is full
            if is_over:
                raise ProcessEndedError(self._cause(), self.output())
            if limit_s is not None and time.monotonic() - began > limit_s and b"\n" not in self._received:
                self._kill()
                raise ProcessEndedError(f"no answer within {limit_s:g} s", self.output())

    def output(self) -> str:
        """The end of what was printed, from the beginning of a line on."""
        size = os.fstat(self._printed.fileno()).st_size
        text = os.pread(self._printed.fileno(), _SHOWN, max(size - _SHOWN, 0)).decode("utf-8", "replace")
        return text.partition("\n")[2] or text if size > _SHOWN else text

    def forget_output(self) -> None:
        """Forget what was printed so far."""
        os.ftruncate(self._printed.fileno(), 0)

    def finish(self) -> None:
        """Tell the process that nothing more will be asked; it ends by itself, and is closed later."""
        if self._finishing_since is None:
            self._finishing_since = time.monotonic()
            os.close(self._writing)

    def close(self, *, at_once: bool = False) -> None:
        """End the process with all it started; one that is finishing gets a moment for it. May be repeated."""
        if self._printed.closed:
            return
        if self._finishing_since is not None and not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(self._finishing_since + _GRACE_S - time.monotonic(), 0))
        self._kill()
        self.finish()
        os.close(self._reading)
        self._printed.close()

    def kill(self) -> None:
        """End the process with all it started. Another thread that waits in :meth:`receive` then learns of it."""
        if not self.has_ended:
            self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _intruded(self) -> ProcessEndedError:
        self._kill()
        return ProcessEndedError("stopped, since it wrote into attncheck's own pipe", self.output())

    def _cause(self) -> str:
        """In words, how the process ended."""
        try:
            code = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return "stopped, since it closed attncheck's own pipe"
        if code >= 0:
            return f"left with exit code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"


def _pipe(started: contextlib.ExitStack) -> tuple[int, int]:
    """Reading and writing end, closed again if the process cannot be started."""
    ends = os.pipe()
    for end in ends:
        started.callback(os.close, end)
    return ends
