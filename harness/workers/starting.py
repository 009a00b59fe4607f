"""The start of a worker, by a new interpreter or by a fork. Imports neither torch nor pydantic."""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

from attncheck.harness.host import MARK
from attncheck.harness.workers.process_tree import adopting_orphans
from attncheck.harness.workers.sharing import CLIENT_VARIABLES

_START = """\
import sys
sys.path[:] = sys.argv.pop().split(chr(10))
from attncheck.harness.workers.worker import main
main(sys.argv[1:])
"""
_START_SERVER = _START.replace("workers.worker", "workers.fork_server")
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
        return _started(_START, (to_read, to_write), environment, to_print)

    return _with_pipes(start)


def _started(
    code: str, descriptors: tuple[int, ...], environment: Mapping[str, str], to_print: int
) -> "subprocess.Popen[bytes]":
    """Return a new interpreter that runs ``code``. Its words are ``descriptors``, this process's id, and its path."""
    words = (*descriptors, os.getpid(), "\n".join(map(str, sys.path)))
    return subprocess.Popen(  # noqa: S603 (this very interpreter, and words of ours)
        [sys.executable, "-P", "-u", "-c", code, *map(str, words)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=to_print,
        stderr=to_print,
        pass_fds=descriptors,
        start_new_session=True,
    )


# Importing torch takes longer than all else that a worker does before its backend. So one process imports it, and each
# worker is a fork of a fork of it. The process between ends at once, so that the run becomes the worker's parent.
# Some backends import more that takes seconds. Their workers are forks of another such process, which is itself a fork
# of the first one and has imported that, too. So no other backend runs in a process that has these modules.

READ_LATE = (MARK, *CLIENT_VARIABLES)
"""Environment variables that only a device's driver reads, or attncheck itself, so that a fork may change them."""

MODULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "triton_unified": ("triton",),
        "triton_mla": ("triton",),
        "vllm": ("vllm.v1.attention.backends.registry", "vllm.model_executor.layers.attention"),
    }
)
"""Modules that take seconds to import, by the built-in name whose backends all import them when they are loaded."""

_IMPORTING_S = 120.0
"""Seconds that a process to fork from may take for its imports, before workers are started without it."""

_FORKING_S = 5.0
"""Seconds that it may take for each worker after the first one."""


class ForkServer:
    """Starts workers as forks of a process that has imported torch, or if that is impossible, by new interpreters.

    A worker is a new interpreter if another variable than :data:`READ_LATE` differs from ``environment``, or after the
    process to fork from has ended, has a second thread, or uses a device. The kernel kills that process when the thread
    that began it ends. Linux only. Must be closed.
    """

    _one_at_a_time = threading.Lock()  # only one fork may make this process adopt orphans

    def __init__(
        self, environment: Mapping[str, str], origin: "ForkServer | None" = None, modules: tuple[str, ...] = ()
    ) -> None:
        """``environment``: variables of the process to fork from.

        ``origin``: forks that process, and each worker that cannot be forked from it; None for new interpreters.
        ``modules``: what the process imports beside torch.
        """
        self.environment = environment
        self.imports: str = "{}" if origin is None else origin.imports
        """What the process imports before a fork: ``Imports`` of ``worker.py``, as JSON."""
        self._origin, self._modules = origin, modules
        self._with_modules: dict[tuple[str, ...], ForkServer] = {}
        self._requests: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._has_forked = False
        self._is_over = sys.platform != "linux"

    def of(self, ref: str) -> "ForkServer":
        """Return what starts workers for the backend ``ref``; it is closed with this one."""
        modules = modules_of(ref)
        if not modules:
            return self
        # In one step, since several threads start workers.
        return self._with_modules.setdefault(modules, ForkServer(self.environment, self, modules))

    def begin(self) -> None:
        """Start the process to fork from, if there is none. Raises OSError if that fails."""
        if self._process is not None or self._is_over:
            return
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as failed, theirs:
            failed.enter_context(requests)
            if self._origin is None:
                environment = {**self.environment, MARK: secrets.token_hex(16)}
                self._process = _started(_START_SERVER, (theirs.fileno(),), environment, subprocess.DEVNULL)
            else:
                self._origin.begin()
                self._process = self._origin._fork([theirs.fileno()], modules=self._modules)
            failed.pop_all()
        self._requests = requests

    def __call__(self, environment: Mapping[str, str]) -> StartedWorker:
        """Start a worker with this environment. Raises OSError if that fails, leaving no descriptor open."""
        with self._one_at_a_time:
            if not self._is_over and _fixed(environment) == _fixed(self.environment):
                try:
                    self.begin()
                    return _with_pipes(partial(self._fork_worker, environment))
                except BaseException as error:  # such as KeyboardInterrupt, while a worker is forked
                    self.close()
                    if not isinstance(error, OSError):
                        raise
        return (self._origin or start_worker)(environment)

    def close(self) -> None:
        """End the process to fork from; its forks stay. May be called repeatedly."""
        self._is_over = True
        for each in self._with_modules.values():
            each.close()
        process, self._process = self._process, None
        if process is not None and self._requests is not None:
            self._requests.close()
            with suppress(OSError):  # it has ended with other orphans
                os.kill(process.pid, signal.SIGKILL)
                process.returncode = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])

    def _fork_worker(
        self, environment: Mapping[str, str], to_read: int, to_write: int, to_print: int, _ours: tuple[int, ...]
    ) -> ChildProcess:
        late = {name: environment.get(name) for name in READ_LATE}
        return self._fork([to_read, to_write, to_print], environment=late)

    def _fork(self, descriptors: list[int], **words: object) -> ChildProcess:
        """Return a fork of a fork that has ``descriptors``. Raises OSError if there is none.

        ``words``: the environment of a worker, or the modules of another process to fork from.
        The fork has the only other end of ``answers``, so that its end without an answer is noticed.
        """
        if self._requests is None or self._is_over:
            raise ChildProcessError("the process to fork from has ended")
        request = {"path": list(map(str, sys.path)), "imports": self.imports, **words}
        answers, theirs = socket.socketpair()
        with answers, theirs, adopting_orphans():
            answers.settimeout(_FORKING_S if self._has_forked else _IMPORTING_S)
            socket.send_fds(self._requests, [json.dumps(request).encode()], [*descriptors, theirs.fileno()])
            theirs.close()
            pid = answers.recv(64)
        if not pid:
            raise ChildProcessError("nothing was forked")
        self._has_forked = True
        return _Copy(int(pid))


def modules_of(ref: str) -> tuple[str, ...]:
    """Return what all backends of the kind of ``ref`` import, if it takes seconds, and ``ref`` names no file."""
    name, _, argument = ref.partition(":")
    return MODULES.get(name, ()) if not argument or argument.isidentifier() else ()


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in READ_LATE}


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

    The kernel kills a worker when the thread that started it ends, and so the process that a :class:`ForkServer` forks
    from.
    """

    def __init__(self, start: StartWorker) -> None:
        self._start = start
        self._thread = ThreadPoolExecutor(1, "starts workers")

    def __call__(self, environment: Mapping[str, str], ref: str = "") -> StartedWorker:
        """Start a worker with this environment, for the backend ``ref``."""
        start = self._start.of(ref) if isinstance(self._start, ForkServer) else self._start
        if threading.current_thread() is threading.main_thread():
            return start(environment)
        return self._thread.submit(start, environment).result()
