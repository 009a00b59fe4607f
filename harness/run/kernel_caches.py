"""Folders in which Triton, Inductor and FlashInfer keep compiled kernels. Imports none of these libraries."""

import getpass
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


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
