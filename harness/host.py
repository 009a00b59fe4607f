"""The host: its memory, its control group, its kernel caches, its processors, and processes. Loads no torch."""

import ctypes
import getpass
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from attncheck.errors import QuestionError

# Memory and processors that the control groups of this process, such as a container's, allow. Imports no torch.
#
# A group of version 2 has its limits in one folder. Version 1 has a tree of folders per controller. The limits of a
# group also apply to the groups in it, so every folder up to the root counts.

_MEMBERSHIP = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def free_group_bytes() -> int | None:
    """Return the free memory within the limits of the control groups; None if none has a limit.

    Cached pages of files count as free, as in the machine's MemAvailable, because the kernel reclaims them.
    """
    found: list[int] = []
    for folder in _folders("memory"):
        limits = [_number(folder, name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
        used = _number(folder, "memory.current") or _number(folder, "memory.usage_in_bytes")
        if used is not None and (given := [limit for limit in limits if limit is not None]):
            stat = _table(folder, "memory.stat")  # in version 1, `total_` includes the groups below
            names = ("inactive_file", "active_file")
            cached = sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in names)
            found.append(max(min(given) - used + cached, 0))
    return min(found, default=None)


def group_cores() -> float | None:
    """Return how many processors the control groups let this process use at once; None if none has a limit."""
    found: list[float] = []
    for folder in _folders("cpu"):
        quota, period = (_words(folder, "cpu.max") or ["max", ""])[:2]
        if quota == "max":
            quota, period = (" ".join(_words(folder, f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal():  # without a limit the quota is -1
            found.append(int(quota) / int(period))
    return min(found, default=None)


def oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for lack of memory; None if unknown."""
    for folder in _folders("memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _table(folder, name).get("oom_kill")) is not None:
                return count
    return None


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of its parents, innermost first.

    In a container, the path may start above the visible root, so the first folders may not exist.
    """
    try:
        lines = _MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _ROOT / controller if controllers else _ROOT
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _words(folder: Path, name: str) -> list[str]:
    """Return the words of a file, or an empty list if it cannot be read."""
    try:
        return (folder / name).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return []


def _number(folder: Path, name: str) -> int | None:
    """Return the number in a file; None for ``max`` or an unreadable file."""
    words = _words(folder, name)
    return int(words[0]) if words and words[0].isdecimal() else None


def _table(folder: Path, name: str) -> dict[str, int]:
    """Return the numbers of a file by their names."""
    words = _words(folder, name)
    return {key: int(value) for key, value in zip(words[::2], words[1::2], strict=False) if value.isdecimal()}


# Free memory of the host, the container and this process. Imports no torch.


def free_host_bytes() -> int | None:
    """Return the memory available without swapping, within the limits of control groups; None if unknown."""
    free = [each for each in (_free_machine_bytes(), free_group_bytes()) if each is not None]
    return min(free, default=None)


_REFUSALS = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc")
"""Messages of libraries whose failed allocation raises no MemoryError."""


@dataclass(frozen=True)
class OwnMemory:
    """Bytes of this process: ``resident``, and ``data``, which RLIMIT_DATA limits."""

    resident: int
    data: int


def own_memory() -> OwnMemory:
    """Return the memory of this process; Linux only."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    resident, data = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmData"))
    return OwnMemory(resident, data)


def free_own_bytes() -> int | None:
    """Return the memory that this process may still allocate under its RLIMIT_DATA; None without such a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":
        return None
    return max(limit - own_memory().data, 0)


def is_refused_memory(error_type: str, message: str) -> bool:
    """Return whether an error of this type and message means a failed allocation, on the host or a GPU."""
    return error_type.endswith("MemoryError") or any(words in message for words in _REFUSALS)


def _free_machine_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pages = os.sysconf_names.get("SC_AVPHYS_PAGES")
        return None if pages is None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Folders in which Triton, Inductor and FlashInfer keep compiled kernels. Imports none of these libraries.


@dataclass(frozen=True)
class CacheContents:
    """Number of files in a cache, their size in bytes, and how many of them are compiled kernels."""

    files: int
    size: int
    kernels: int


@dataclass(frozen=True)
class KernelCache:
    """The cache of one library. Files whose names end in one of ``endings`` are compiled kernels."""

    library: str
    folder: Path
    endings: tuple[str, ...]

    def contents(self) -> CacheContents:
        """Count the files below the folder. A missing folder, or a file deleted during the walk, counts as nothing."""
        sizes: dict[str, int] = {}
        for path, _, names in os.walk(self.folder):
            for name in names:
                file = os.path.join(path, name)  # noqa: PTH118 (thousands of files, between two cases)
                try:
                    sizes[file] = os.stat(file).st_size  # noqa: PTH116 (the same)
                except OSError:
                    continue
        return CacheContents(len(sizes), sum(sizes.values()), sum(file.endswith(self.endings) for file in sizes))


def kernel_caches(environment: Mapping[str, str] = os.environ) -> tuple[KernelCache, ...]:
    """Return the caches that a process with these environment variables uses, whether or not they exist."""
    home = Path.home()
    triton = Path(environment.get("TRITON_HOME") or home) / ".triton" / "cache"
    flashinfer = Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer"
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{_user_name()}"
    return (
        KernelCache("triton", Path(environment.get("TRITON_CACHE_DIR") or triton), (".cubin", ".hsaco")),
        KernelCache(
            "inductor", Path(environment.get("TORCHINDUCTOR_CACHE_DIR") or inductor), (".cubin", ".hsaco", ".so")
        ),
        KernelCache("flashinfer", flashinfer, (".so",)),
    )


def kernel_count() -> int:
    """Return the number of compiled kernels in all caches of this process."""
    return sum(cache.contents().kernels for cache in kernel_caches())


def _user_name() -> str:
    """Return the user's name as Inductor writes it, or ``uid_N``: in a container the user may have no name."""
    try:
        name = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        return f"uid_{os.getuid()}"
    return re.sub(r'[\\/:*?"<>|]', "_", name)


# Processors, the checkout of attncheck, and commands.


def usable_cores() -> int:
    """Return the number of CPU cores this process may use, at least 1; it respects affinity and container quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = group_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_name() -> str:
    """Return the model of the processor, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def git_commit() -> str | None:
    """Return the commit of attncheck's checkout, with ``-dirty`` if it has changes; None if attncheck is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return first_line("git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")


def run_command(command: Sequence[str]) -> str | None:
    """Return what a command prints, or None if it fails or takes over 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 (fixed words)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


@cache
def first_line(*command: str) -> str | None:
    """Return the first line that :func:`run_command` returns, or None. Cached for the process."""
    lines = (run_command(command) or "").splitlines()
    return lines[0].strip() if lines else None


MARK = "ATTNCHECK_WORKER"
"""Environment variable whose value marks a worker and all its descendants."""

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with(parent: int) -> bool:
    """Let the kernel end this process with its parent, as it may be busy for hours. Return whether that is ``parent``.

    A process whose parent is another one must end: ``parent`` was killed before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def folder_prefix(mark: str) -> str:
    """Return how the names of a worker's temporary folders begin, by the value of ``MARK``."""
    return f"attncheck-worker-{mark}-"


def remove_folders(mark: str, older_than_s: float = 0.0) -> None:
    """Remove the temporary folders that a worker has left, for instance because it was killed; ``*``: any worker."""
    with suppress(OSError):  # a host without a writable folder has none
        for folder in Path(tempfile.gettempdir()).glob(f"{folder_prefix(mark)}*"):
            if not older_than_s or folder.stat().st_mtime < time.time() - older_than_s:
                shutil.rmtree(folder, ignore_errors=True)


# Commands that serve with vLLM, and load a plugin of ours.

_PLUGINS = "VLLM_PLUGINS"


def run_with_plugin(command: Sequence[str], variables: Mapping[str, str], plugin: str) -> int:
    """Run a command that starts vLLM to its end, and return its exit code.

    ``variables``: what turns the plugin on, besides the environment of this process. ``plugin``: its name, which is
    added to ``VLLM_PLUGINS`` if that is set: vLLM loads only the plugins listed there. SIGTERM and SIGHUP are
    forwarded. SIGINT is ignored here: Ctrl-C reaches the command from the terminal.

    Raises:
        QuestionError: the command cannot be started.
    """
    environment = os.environ | dict(variables)
    if _PLUGINS in environment:
        environment[_PLUGINS] = ",".join([*filter(None, environment[_PLUGINS].split(",")), plugin])
    try:
        process = subprocess.Popen(command, env=environment)  # noqa: S603 (it is what the user typed)
    except OSError as error:
        raise QuestionError(f"{command[0]}: cannot be run: {error.strerror}") from error
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda each, _frame: None if each == signal.SIGINT else process.send_signal(each))
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
