"""Memory limits of a backend's process, and how the process enforces them itself.

The run also watches the process (``memory_watch.py``). Importing this module imports neither torch nor pydantic.
"""

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attncheck.harness.problem.host_memory import free_host_bytes, is_refused_memory, own_memory

if TYPE_CHECKING:
    from attncheck.reports.run_file.records import Record

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


def size_in_words(size: int) -> str:
    """Return ``size`` bytes as text such as ``4.13 GiB`` or ``600 MiB``."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{round(size / unit, 2):g} {name}"


def keep_within(limits: MemoryLimits, device: str) -> None:
    """Make allocations far beyond ``limits`` fail in this process, which examines on ``device``.

    On a CPU, the system refuses memory an eighth above the host limit. CUDA reserves far more host memory than it uses,
    so on a GPU only torch refuses memory, above the device limit.
    """
    if device != "cpu":
        if limits.device is not None:
            import torch

            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(limits.device / total, 1.0), torch.device(device).index)
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
