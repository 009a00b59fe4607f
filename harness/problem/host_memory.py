"""How much memory the host has left, and whether it ran out. Loads no torch."""

import os
from pathlib import Path


def free_host_bytes() -> int | None:
    """Memory the kernel could hand out without swapping; None where it does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        pages = os.sysconf_names.get("SC_AVPHYS_PAGES")
        return None if pages is None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def oom_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for want of memory; None if not known."""
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        group = next(line.removeprefix("0::/") for line in groups if line.startswith("0::/"))  # of version 2
        events = Path("/sys/fs/cgroup", group, "memory.events").read_text(encoding="ascii").split()
        return int(events[events.index("oom_kill") + 1])
    except (OSError, StopIteration, ValueError, IndexError):
        return None
