"""Free memory of the host, the container and this process. Imports no torch."""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from attncheck.harness.problem.control_group import free_group_bytes


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
