"""A worker process: its start, what it prints, and its end. Imports neither torch nor pydantic."""

import codecs
import contextlib
import ctypes
import fcntl
import math
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from attncheck.errors import InternalError, QuestionError
from attncheck.harness.host import free_host_bytes, oom_kills
from attncheck.harness.workers.limits import Limit, children, descendants, passed_environment

if TYPE_CHECKING:
    from attncheck.harness.run.outcomes import ProcessEnd
    from attncheck.harness.workers.protocol import HarnessFailure
    from attncheck.harness.workers.schedule import BackendQuestion

_START = """\
import sys
sys.path[:] = sys.argv.pop().split(chr(10))
from attncheck.harness.workers.worker import main
main(sys.argv[1:])
"""
_ROOM = 2**20
"""Capacity in bytes of a worker's pipes, the most that Linux gives to unprivileged processes."""

STACK_SIGNAL = signal.SIGUSR2
"""Signal at which a worker prints the Python stacks of its threads, even while C code holds the GIL."""

MARK = "ATTNCHECK_WORKER"
"""Environment variable whose value marks a worker and all its descendants."""

_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h

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
    adopt_orphans()
    try:
        yield
    finally:
        deadline = time.monotonic() + _KILL_S
        while _kill_orphans(int(began)) and time.monotonic() < deadline:
            time.sleep(0.001)
        adopt_orphans(is_on=False)


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


# The process leads a session of its own: Ctrl-C does not reach it, and its children can be ended with it. Its end is
# detected from the process itself as well as from its pipe, since a copy that the backend made may hold the pipe open.

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
