"""Memory and processors that the control groups of this process, such as a container's, allow. Imports no torch.

A group of version 2 has its limits in one folder. Version 1 has a tree of folders per controller. The limits of a group
also apply to the groups in it, so every folder up to the root counts.
"""

from collections.abc import Iterator
from pathlib import Path

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
