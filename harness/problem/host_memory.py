"""How much memory the host has left. Loads no torch."""

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
