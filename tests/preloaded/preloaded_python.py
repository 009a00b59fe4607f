"""Python processes with torch already imported, each forked from one server process in milliseconds.

A forked process differs from a fresh one only in the imports of ``LIBRARIES``, none of which is a module of attncheck.
It has its own descriptors, environment, folder, path, arguments and session, and is a child of the process that starts
it. Programs that need a fresh interpreter get one: see :meth:`Program.of`.
"""

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

LIBRARIES = ("torch", "numpy.random", "pydantic.types", "yaml", "typer", "pytest", "rich.progress", "tabulate")

_AT_START = ("PYTHON", "LC_", "LANG", "OMP_", "MKL_", "KMP_", "TORCH_", "COV_", "COVERAGE_")
"""Prefixes of variables that an interpreter or a library reads at its start. ``PYTHONPATH`` is handled here, and only
attncheck's scripts read ``PYTHON``."""
_OPTIONS = ("-P", "-u")
_PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
_PR_GET_CHILD_SUBREAPER = 37
MOST_BYTES = 2**20
_LONGEST = 2**17 - 2
"""Maximum bytes of the name and value of a variable on Linux, without ``=`` and the final zero byte."""
_SERVER = """\
import sys
sys.path.insert(0, sys.argv[1])
from preloaded_python import end, serve
sys.path.pop(0)
try:
    exec(*serve(int(sys.argv[2])))
except BaseException as error:
    end(error)
end()
"""
"""Program of the server; executed at top level, a program has only ``<string>`` as its caller, as with ``-c``."""
_real_fork_exec = subprocess._fork_exec


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that a process reads at its start."""
    names = (name for name in environment if name.startswith(_AT_START) and name not in ("PYTHON", "PYTHONPATH"))
    return {name: environment[name] for name in names}


@dataclass(frozen=True)
class Program:
    """The program of a forked process: ``words`` after the interpreter's name, in ``folder``.

    ``descriptors``: the numbers that the received descriptors get. ``leads``: whether the process starts a session.
    """

    options: list[str]
    words: list[str]
    folder: str
    environment: dict[str, str]
    descriptors: list[int]
    leads: bool

    @classmethod
    def of(cls, words: Sequence[str], known: Mapping[str, str], **fields: Any) -> Self | None:
        """Return the program of ``words``, or None if it needs a fresh interpreter.

        That is so if it has interpreter options other than ``-P`` and ``-u``, or is not ``-c``, ``-m`` or a ``.py``
        file. It is also so if its environment differs from ``known`` in variables read at the start, or if a text may
        be too long for the system.
        """
        rest = list(words)
        options = []
        while rest and rest[0] in _OPTIONS:
            options.append(rest.pop(0))
        if rest and rest[0][:2] in ("-c", "-m"):
            rest[:1] = [rest[0][:2], *filter(None, [rest[0][2:]])]
        elif not (rest and rest[0].endswith(".py")):
            return None
        environment = fields["environment"]
        is_short = all(len(text) < _LONGEST // 4 for text in (*words, *environment.values()))
        return cls(options, rest, **fields) if is_short and read_at_start(environment) == known else None

    def prepare(self, received: Sequence[int], path: Sequence[str]) -> None:
        """Give this process the state of a fresh one for the program, with ``path`` as the folders of its libraries.

        ``received``: its descriptors.
        """
        _place(received, self.descriptors)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        self._open_streams()
        kind, *rest = self.words
        sys.argv[:] = {"-c": ["-c", *rest[1:]], "-m": rest}.get(kind, self.words)
        first = {"-c": "", "-m": self.folder}.get(kind, str(Path(kind).resolve().parent))
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = [*([] if "-P" in self.options else [first]), *filter(None, added), *path]
        importlib.invalidate_caches()

    def code(self) -> tuple[types.CodeType, dict[str, Any]]:
        """Return the code to execute and its globals, after importing ``sitecustomize`` as an interpreter does."""
        sys.modules.pop("sitecustomize", None)
        with suppress(ImportError):
            importlib.import_module("sitecustomize")
        kind, *rest = self.words
        if kind == "-c":
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            return compile(rest[0], "<string>", "exec"), module.__dict__
        run = (
            "run_module(name, run_name='__main__', alter_sys=True)"
            if kind == "-m"
            else "run_path(name, None, '__main__')"
        )
        name = rest[0] if kind == "-m" else kind
        return compile(f"from runpy import *; {run}", "<string>", "exec"), {"name": name}

    def _open_streams(self) -> None:
        encoding = sys.stdout.encoding  # that of the server, whose locale is the same
        is_unbuffered = "-u" in self.options or bool(os.environ.get("PYTHONUNBUFFERED"))
        sys.stdin = sys.__stdin__ = open(0, encoding=encoding, closefd=False)  # noqa: SIM115
        for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
            binary = open(number, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
            stream = io.TextIOWrapper(binary, encoding, errors, None, number == 2, is_unbuffered)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


class Preloaded:
    """A server process that forks programs; ``known``: the variables it read at its start."""

    def __init__(
        self, requests: socket.socket, known: Mapping[str, str], process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._requests, self._known, self._process = requests, known, process
        self._one_at_a_time = threading.Lock()

    @classmethod
    def start(cls) -> Self:
        """Start a fresh server that imports the libraries, in its own session; it ends with this process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", _SERVER, str(Path(__file__).parent), str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        return cls(ours, read_at_start(os.environ), process)

    def close(self) -> None:
        """End the server; running programs continue."""
        self._requests.close()
        if self._process is not None:
            self._process.kill()  # a copy of this process may keep the socket open, so the server would not end
            self._process.wait()

    def install(self) -> None:
        """Make ``subprocess`` start every process here that needs no fresh interpreter."""
        subprocess._fork_exec = self.fork_exec

    @staticmethod
    def uninstall() -> None:
        subprocess._fork_exec = _real_fork_exec

    def fork_exec(self, *arguments: Any) -> int:
        """Start a process with the arguments of ``subprocess._fork_exec``, and return its id."""
        args, _, _, pass_fds, cwd, env, stdin, _, _, stdout, _, stderr, _, failed, _, leads, *rest = arguments
        words = [os.fsdecode(word) for word in args]
        environment = dict(os.environ) if env is None else dict(os.fsdecode(each).split("=", 1) for each in env)
        given = {number: number for number in pass_fds if number != failed}
        given |= {number: number if own == -1 else own for number, own in enumerate((stdin, stdout, stderr))}
        process = None
        is_short = all(len(name) + len(value) < _LONGEST for name, value in environment.items())
        if words[0] == sys.executable and is_short and rest[-2] is None:  # no preexec_fn
            folder = os.fsdecode(cwd or str(Path.cwd()))
            process = self.fork(words[1:], given, folder=folder, environment=environment, leads=bool(leads))
        return _real_fork_exec(*arguments) if process is None else process

    def fork(self, words: Sequence[str], given: Mapping[int, int], **fields: Any) -> int | None:
        """Return the id of a new child that runs ``words``, or None if these need a fresh interpreter.

        ``given``: its descriptors, by their numbers in the child. ``fields``: of :class:`Program`.
        """
        program = Program.of(words, self._known, descriptors=list(given), **fields)
        return None if program is None else self._fork(program, list(given.values()))

    def _fork(self, program: Program, descriptors: list[int]) -> int:
        prctl, before = ctypes.CDLL(None).prctl, ctypes.c_int()
        with self._one_at_a_time:
            prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
            prctl(_PR_SET_CHILD_SUBREAPER, 1)  # makes this process the parent when the intermediate child exits
            try:
                socket.send_fds(self._requests, [json.dumps(asdict(program)).encode()], descriptors)
                return int(self._requests.recv(64))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, before)


def _place(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Give the descriptors these numbers, and close all others."""
    above = max(*received, *numbers) + 1
    high = [os.dup2(descriptor, above + index) for index, descriptor in enumerate(received)]
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
    kept = sorted(numbers)
    for low, up in zip(kept, [*kept[1:], 2**16], strict=True):
        os.closerange(low + 1, up)


def serve(descriptor: int) -> tuple[types.CodeType, dict[str, Any]]:
    """Fork a process for each request to the socket ``descriptor``; return in each of them the code to execute."""
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # a collection would write to every page, and so copy it
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [each for each in sys.path if each and each not in named]
    while True:
        program, descriptors = _forked(descriptor)
        program.prepare(descriptors, path)
        if program.words[0] == "-c":
            return program.code()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() != 0:  # the copy is the server for processes that this one starts
            theirs.close()
            Preloaded(ours, read_at_start(program.environment)).install()
            return program.code()
        nowhere = os.open(os.devnull, os.O_RDWR)
        ours.detach()
        descriptor = 3
        _place([nowhere, nowhere, nowhere, theirs.detach()], [0, 1, 2, descriptor])


def _forked(descriptor: int) -> tuple[Program, list[int]]:
    """Fork a process for each request, and return in each of them."""
    requests = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 64)
        if not message:
            os._exit(0)
        pid_reader, pid_writer = os.pipe()
        go_reader, go_writer = os.pipe()
        between = os.fork()
        if between == 0:
            process = os.fork()
            if process == 0:
                requests.detach()
                os.close(go_writer)
                program = Program(**json.loads(message))
                if program.leads:
                    os.setsid()  # before its parent can send a signal to its group
                os.write(pid_writer, str(os.getpid()).encode())
                os.read(go_reader, 1)  # until the intermediate process has exited and the subreaper is the parent
                return program, descriptors
            os._exit(0)
        os.waitpid(between, 0)
        requests.send(os.read(pid_reader, 64))
        for number in (pid_reader, pid_writer, go_reader, go_writer, *descriptors):
            os.close(number)


def end(error: BaseException | None = None) -> NoReturn:
    """End this process as the interpreter does, but free no memory, since that would copy every page."""
    code: Any = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            print(code, file=sys.stderr)  # noqa: T201
            code = 1
    elif error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)
