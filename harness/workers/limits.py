"""Limits of a worker: time, host memory, and the environment that it gets."""

import ast
import contextlib
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from attncheck.errors import SelectionError
from attncheck.harness.device import KINDS, accelerator_of
from attncheck.harness.host import free_host_bytes, is_refused_memory, own_memory
from attncheck.harness.run.options import RunOptions, size_in_words
from attncheck.reports.run_file.causes import BACKEND_TIME

if TYPE_CHECKING:
    from attncheck.cases.model import Case
    from attncheck.reports.run_file.records import Record

FLOOR_S = 300.0
"""Seconds that each stage gets by default. They include compiling a kernel, which takes minutes with autotuning."""

REFERENCE_FACTOR = 10.0
"""Multiple of the reference's own time that each stage gets in addition."""

LEAST_LOADING_S = 60.0
"""Minimum seconds for loading, which includes importing torch, perhaps from a slow disk."""

PREPARATION = "the preparation of the case"
_PREPARED_BYTES_PER_S = 1e7
"""Bytes of a case (inputs and truth) that the slowest machine prepares per second."""

_TIMED_PARTS = 40
"""Maximum number of samplings of one check ``timing``."""


_SET = "--case-timeout changes it"


@dataclass(frozen=True)
class Limit:
    """``seconds`` without an answer, or ``math.inf``. ``words``: how the limit was computed."""

    seconds: float = math.inf
    words: str = ""

    def __str__(self) -> str:
        return f"the limit was {self.seconds:.4g} s{self.words and f' ({self.words})'}"


@dataclass(frozen=True)
class TimeLimits:
    """Time limits of a run; ``math.inf`` is no limit.

    ``case_s``: seconds without an answer to a question about a case; None to scale with the reference's own time.
    ``backend_s``: seconds that the processes of one backend may be at work together. ``sampling_s``: seconds for which
    the check ``timing`` samples one part of a step. ``deadline``: the ``time.monotonic()`` until which ``backends``,
    ``jobs`` of them at once, share the time; None if they do not.
    """

    case_s: float | None = None
    backend_s: float = math.inf
    sampling_s: float = 0.0
    deadline: float | None = None
    backends: int = 1
    jobs: int = 1

    @property
    def of_loading(self) -> Limit:
        """The limit for a process to start, import a backend and describe it."""
        return Limit(FLOOR_S, _SET) if self.case_s is None else self._given(LEAST_LOADING_S)

    @property
    def of_description(self) -> Limit:
        """The limit for a backend to be imported and described: no more than its processes may be at work together."""
        loading = self.of_loading
        return loading if self.backend_s >= loading.seconds else Limit(self.backend_s, self._backend_words)

    @property
    def of_function(self) -> Limit:
        """The limit for all questions about one function of a provider."""
        return Limit(FLOOR_S, _SET) if self.case_s is None else self._given()

    def of_stage(self, stage: str, case: "Case", reference_s: float = 0.0) -> Limit:
        """Return the limit of a stage of ``case``. ``reference_s``: seconds that the reference took for the case."""
        if self.case_s is not None:
            return self._given()
        from attncheck.harness.problem.sizes import needed_bytes
        from attncheck.reports.run_file.timings import TIMING

        if stage == PREPARATION:
            return Limit(FLOOR_S + needed_bytes(case) / _PREPARED_BYTES_PER_S, _SET)
        words = f"{FLOOR_S:g} s, and {REFERENCE_FACTOR:g} times the {reference_s:.3g} s that the reference took"
        limit_s = FLOOR_S + REFERENCE_FACTOR * reference_s
        if stage == f"check {TIMING}":
            limit_s += _TIMED_PARTS * self.sampling_s
            words += f", and {_TIMED_PARTS * self.sampling_s:g} s for samples"
        return Limit(limit_s, f"{words}; {_SET}")

    def shared(self, within_s: float, backends: int, jobs: int) -> "TimeLimits":
        """Return limits with which ``backends``, ``jobs`` at once, end within ``within_s`` seconds from now.

        Each has an equal part, and goes on if the rest suffices for those that wait. A tenth is left for starts.
        """
        end_s = 0.9 * max(within_s, 0.0)
        turns = max(math.ceil(backends / jobs), 1)
        return replace(self, backend_s=end_s / turns, deadline=time.monotonic() + end_s, backends=backends, jobs=jobs)

    def of_backend(self, spent_s: float, begun: int) -> Limit:
        """Return what is left to a backend that was at work for ``spent_s``, if ``begun`` backends were at work yet."""
        own_s = self.backend_s - spent_s
        if self.deadline is None:
            return Limit(own_s, self._backend_words)
        turns = math.ceil((self.backends - begun) / self.jobs)
        rest_s = self.deadline - time.monotonic()
        return Limit(min(max(own_s, rest_s - turns * self.backend_s), rest_s), self._backend_words)

    @property
    def _backend_words(self) -> str:
        return f"{BACKEND_TIME} by " + ("--within" if self.deadline else f"--backend-timeout {self.backend_s:g}")

    def _given(self, least_s: float = 0.0) -> Limit:
        given_s = self.case_s or 0.0
        least = f"; the least for loading is {least_s:g} s" if least_s > given_s else ""
        return Limit(max(given_s, least_s), f"--case-timeout {given_s:g}{least}")


def read_limit(option: str, seconds: float | None) -> float | None:
    """Return the limit that an option gives; 0 becomes ``math.inf``, None stays None.

    Raises:
        SelectionError: it is negative or NaN.
    """
    if seconds is None:
        return None
    if not seconds >= 0:
        raise SelectionError(f"{option} {seconds:g}: give seconds, or 0 for no limit")
    return seconds or math.inf


_PROCESS_BYTES = 2**30
"""Host memory that a process with a CUDA build of torch may use before its first case; estimated."""

_LEAST_ROOM = 2
"""Processes that run at once on the smallest host: one at work, and the next one."""


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that a backend's process and its children may use on the host, and on a GPU; None for no limit."""

    host: int | None = None
    device: int | None = None


def room_on_host() -> int:
    """Return how many backend processes may exist at once; half the free memory of the host is reserved for cases."""
    free = free_host_bytes()
    return sys.maxsize if free is None else max(free // (2 * _PROCESS_BYTES), _LEAST_ROOM)


def keep_within(limits: MemoryLimits, device: str) -> None:
    """Make allocations far beyond ``limits`` fail in this process, which examines on ``device``.

    On a CPU, the system refuses memory an eighth above the host limit. CUDA reserves far more host memory than it uses,
    so on a GPU only torch refuses memory, above the device limit.
    """
    accelerator = accelerator_of(device)
    if accelerator is not None:
        if limits.device is not None:
            accelerator.limit_memory(limits.device)
    elif limits.host is not None and sys.platform == "linux":
        held = own_memory()
        bound = held.data + max(limits.host - held.resident, 0) + limits.host // 8
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        if most == resource.RLIM_INFINITY or bound < most:
            resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def with_limit_named(record: "Record", limits: MemoryLimits) -> "Record":
    """Return ``record``, with the limit added to its message if an allocation was refused."""
    if record.outcome != "errored" or not is_refused_memory(record.error_type, record.message):
        return record
    is_of_device = record.error_type == "OutOfMemoryError"  # torch's
    option, limit = ("--device-memory-limit", limits.device) if is_of_device else ("--memory-limit", limits.host)
    if limit is None:
        return record
    return record.model_copy(update={"message": f"{record.message} ({option}: {size_in_words(limit)})"})


@dataclass(frozen=True)
class WorkerSettings:
    """``pass_env``: patterns of environment variables that a process gets in addition to the default ones."""

    limits: TimeLimits = field(default_factory=TimeLimits)
    memory: MemoryLimits = field(default_factory=MemoryLimits)
    pass_env: tuple[str, ...] = ()


def worker_settings(options: RunOptions) -> WorkerSettings:
    """Return the settings for starting the processes of the backends of a run."""
    backend_s = read_limit("--backend-timeout", options.backend_timeout)
    return WorkerSettings(
        TimeLimits(read_limit("--case-timeout", options.case_timeout), math.inf if backend_s is None else backend_s),
        MemoryLimits(options.memory_limit, options.device_memory_limit),
        options.pass_env,
    )


# The memory of a backend's process is that of its session, and of all that it started elsewhere; pages that processes
# share count once. If the host runs short, the largest session is killed before the kernel swaps or kills something
# else. Only Linux provides these figures; elsewhere nothing is watched.

_FASTEST = 4 * 2**30
"""Maximum bytes of new memory that a process is expected to fill per second."""

_SHORTEST_S, _LONGEST_S = 0.05, 0.2
"""Seconds between two measurements."""

_REST = 4
"""Minimum pause after a measurement, as a multiple of its duration: measuring many copies of a process takes long."""

_LEAST_TO_BLAME = 2**30
"""Bytes below which a process is not killed when the host runs short."""

_PROC = Path("/proc")


class Watched(Protocol):
    """A process that leads a session."""

    @property
    def identity(self) -> int:
        """Its process id, which is also its session id."""

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""

    def end_for(self, cause: str) -> None:
        """Kill it and its children, and record ``cause``."""


class MemoryWatch:
    """Watches processes in a thread of its own, as long as one of them is alive.

    ``limit``: bytes that each may use, including its children; None for no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        free = free_host_bytes()
        self._limit = limit
        self._reserve = 0 if free is None else reserve_of(free)
        self._watched: list[Watched] = []
        self._dying: set[int] = set()
        self._lock = threading.Lock()
        self._is_running = False

    def add(self, process: Watched) -> None:
        """Watch ``process`` from now on, until it has ended."""
        with self._lock:
            self._watched.append(process)
            if self._is_running or not (_PROC / "self/statm").exists():
                return
            self._is_running = True
        threading.Thread(target=self._follow, name="memory watch", daemon=True).start()

    def _follow(self) -> None:
        pause = threading.Event()  # never set
        began = time.monotonic()
        while (seconds := self._look()) is not None:
            pause.wait(max(seconds, _REST * (time.monotonic() - began)))
            began = time.monotonic()

    def _look(self) -> float | None:
        """Kill what uses too much memory; return the seconds until the next measurement, or None to stop watching."""
        with self._lock:
            self._watched = [process for process in self._watched if not process.has_ended]
            self._is_running = bool(self._watched)
            watched = {process.identity: process for process in self._watched}
        if not watched:
            return None
        free = free_host_bytes()
        is_short = free is not None and free < self._reserve
        try:
            held = held_bytes({*watched, *self._dying}, 0 if is_short else self._limit)
        except OSError:  # temporarily out of file descriptors
            return _LONGEST_S
        self._dying = {session for session in self._dying if held[session]}
        alive = {session: held[session] for session in watched.keys() - self._dying}
        # The memory of a killed process is released only after a while.
        room = None if free is None or self._dying else free - self._reserve
        for session, cause in causes(alive, self._limit, room, free or 0).items():
            self._dying.add(session)
            watched[session].end_for(cause)
        return seconds_to_wait(alive.values(), self._limit, room)


def reserve_of(free: int) -> int:
    """Return the bytes that a run leaves to the host, which has ``free`` bytes when its processes start."""
    return min(max(2**30, free // 20), free // 4)


def causes(held: Mapping[int, int], limit: int | None, room: int | None, free: int) -> dict[int, str]:
    """Return the sessions to kill, each with its cause. ``held``: bytes by session.

    ``room``: by how much ``free``, the host's free memory, exceeds the reserve; None to ignore it.
    """
    if limit is not None and (over := {session: size for session, size in held.items() if size > limit}):
        words = f"out of memory (limit {size_in_words(limit)}, it took "
        return {session: f"{words}{size_in_words(size)})" for session, size in over.items()}
    if room is None or room >= 0 or not held:
        return {}
    largest = max(held, key=lambda session: held[session])
    if held[largest] < _LEAST_TO_BLAME:
        return {}
    took = size_in_words(held[largest])
    return {largest: f"out of memory (the host had {size_in_words(free)} left; the process took {took})"}


def seconds_to_wait(held: Collection[int], limit: int | None, room: int | None) -> float:
    """Return the seconds within which no process can fill the rest of its limit or of the host."""
    rooms = [] if room is None else [room]
    rooms += [] if limit is None else [limit - size for size in held]
    return min(max(min(rooms, default=math.inf) / _FASTEST, _SHORTEST_S), _LONGEST_S)


def held_bytes(sessions: Collection[int], enough: int | None) -> dict[int, int]:
    """Return the memory that the processes of each session use, with those that its leader has started elsewhere.

    Shared pages are counted once only if the sum would exceed ``enough`` otherwise, because that takes long to measure.
    """
    members = {session: descendants(session) for session in sessions}
    with os.scandir(_PROC) as entries:
        processes = [int(entry.name) for entry in entries if entry.name.isdecimal()]
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            members.get(os.getsid(process), set()).add(process)
    return {session: _held(found, enough) for session, found in members.items()}


def children(pid: int) -> set[int]:
    """Return the ids of the children of the process ``pid``. Empty if the system is not Linux."""
    found: set[int] = set()
    with contextlib.suppress(OSError), os.scandir(_PROC / f"{pid}/task") as threads:
        for thread in threads:
            with contextlib.suppress(OSError):  # the thread has ended
                found |= {*map(int, Path(thread, "children").read_text(encoding="ascii").split())}
    return found


def descendants(pid: int) -> set[int]:
    """Return the ids of the children of the process ``pid``, and of theirs. Empty if the system is not Linux."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        new = children(waiting.pop()) - found
        found |= new
        waiting += new
    return found


def _held(processes: Collection[int], enough: int | None) -> int:
    unmapped = _unmapped_bytes(processes)
    resident = sum(map(_resident_bytes, processes))
    if len(processes) < 2 or enough is None or resident + unmapped <= enough:
        return resident + unmapped
    return sum(map(_proportional_bytes, processes)) + unmapped


def _unmapped_bytes(processes: Collection[int]) -> int:
    """Return the least memory in files without a disk (memfd, /dev/shm) that the resident memory does not include.

    Each open file counts once. Mapped pages of such files are resident memory, and may be those of other files.
    """
    files: dict[tuple[int, int], int] = {}
    for process in processes:
        with contextlib.suppress(OSError), os.scandir(_PROC / str(process) / "fd") as descriptors:
            for each in descriptors:
                with contextlib.suppress(OSError):  # it has been closed
                    if os.readlink(each).startswith(("/memfd:", "/dev/shm/")):  # noqa: S108, PTH115 (a name only)
                        state = each.stat()
                        files[state.st_dev, state.st_ino] = state.st_blocks * 512
    if not files:
        return 0
    mapped = sum(_figure(process, "status", "RssShmem") for process in processes)
    return max(sum(files.values()) - mapped, 0)


def _resident_bytes(process: int) -> int:
    return _figure(process, "status", "VmRSS")


def _proportional_bytes(process: int) -> int:
    """Return the proportional set size of ``process``, or its resident memory if the kernel does not provide it."""
    return _figure(process, "smaps_rollup", "Pss") or _resident_bytes(process)


def _figure(process: int, file: str, name: str) -> int:
    """Return the bytes that a line of a file in /proc names; 0 if the process has ended, or there is no such line."""
    with contextlib.suppress(OSError):
        lines = (_PROC / str(process) / file).read_text(encoding="utf-8", errors="replace").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    return 0


DEFAULT = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "PWD", "TMPDIR", "TMP", "TEMP", "XDG_*"),
    *("LANG", "LANGUAGE", "LC_*", "TZ", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"),
    *("PYTHON*", "VIRTUAL_ENV", "CONDA_*", "COVERAGE_*", "ATTNCHECK_*"),
    *("LD_*", "MALLOC_*", "*SAN_OPTIONS"),
    *(pattern for kind in KINDS for pattern in kind.variables),
    *("TORCH*", "PYTORCH*", "ATEN_*", "TRITON*", "VLLM_*", "FLASH*", "XFORMERS*", "HF_*"),
    *("OMP_*", "GOMP_*", "KMP_*", "MKL_*", "DNNL_*", "ONEDNN_*", "OPENBLAS*", "NUMBA*"),
    *("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "NVCC_*", "MAX_JOBS", "CCACHE_*"),
)
"""Shell patterns of the variables that every backend gets."""

_LOOKUPS = ("os.environ", "environ", "os.getenv", "getenv")
_SECRET = ("*TOKEN", "*SECRET", "*PASSWORD", "*KEY", "*CREDENTIALS")


def passed_environment(environment: Mapping[str, str], patterns: Iterable[str] = ()) -> dict[str, str]:
    """Return the part of ``environment`` that a backend's process gets.

    These are the variables that match ``patterns``, and those that match :data:`DEFAULT` and are not named like
    secrets.
    """
    given = tuple(patterns)
    return {
        name: value
        for name, value in environment.items()
        if _matches(name, given) or (_matches(name, DEFAULT) and not _matches(name.upper(), _SECRET))
    }


@contextmanager
def only_passed(patterns: Iterable[str]) -> Iterator[None]:
    """Keep only the variables that a backend's process gets in this process, until the context ends."""
    every = dict(os.environ)
    passed = passed_environment(every, patterns)
    for name in every.keys() - passed.keys():
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update({name: value for name, value in every.items() if name not in passed})


def variables_read(file: Path) -> set[str]:
    """Return the variables that a Python file, or a module beside it that it imports, looks up by a literal name."""
    found: set[str] = set()
    files = [file]
    for path in files:  # it grows by the modules that are imported
        try:
            nodes = ast.walk(ast.parse(path.read_bytes()))
        except (OSError, SyntaxError, ValueError):  # no such file, or its import reports the error
            continue
        modules: list[str] = []
        for node in nodes:
            match node:
                case (
                    ast.Subscript(value=owner, slice=ast.Constant(str(name)), ctx=ast.Load())
                    | ast.Call(func=ast.Attribute(value=owner, attr="get" | "pop"), args=[ast.Constant(str(name)), *_])
                    | ast.Call(func=owner, args=[ast.Constant(str(name)), *_])
                    | ast.Compare(left=ast.Constant(str(name)), comparators=[owner])
                ) if ast.unparse(owner) in _LOOKUPS:
                    found.add(name)
                case ast.Import(names=names):
                    modules += [alias.name for alias in names]
                case ast.ImportFrom(module=str(name)):
                    modules.append(name)
        beside = {path.with_name(f"{module.partition('.')[0]}.py") for module in modules}
        files += sorted(beside - {*files})
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
