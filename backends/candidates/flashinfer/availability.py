"""Whether the pinned flashinfer can run here, and why not; what its version is called in records.

The library is imported only on a GPU, once nothing else is in the way. Must not know: layers, tensors.
"""

import importlib.util
import os
import shutil
from pathlib import Path

import torch

from attncheck.backends import interpreter
from attncheck.backends.base import machine

DISTRIBUTION = "flashinfer-python"

PINNED = "0.6.8.post1"
"""The one version whose signatures, checks and kernels were read. It goes with torch 2.11, as vLLM pairs them."""

LOWEST_CAPABILITY = (8, 0)
"""Of the kernels: bfloat16, and copies from global to shared memory that do not pass through registers."""

_COMPILED_KERNELS = "flashinfer_jit_cache"
"""The package of kernels that the library's authors have compiled; with it there is nothing to compile."""


def unavailable_reasons(device: str) -> list[str]:
    """Why flashinfer cannot run on ``device`` (``"cpu"``, ``"cuda:1"``) here; empty: it can."""
    installed = machine.installed_version(DISTRIBUTION)
    reasons = []
    if installed is None:
        reasons.append(f"{DISTRIBUTION} is not installed")
    elif machine.public(installed) != PINNED:
        reasons.append(f"{DISTRIBUTION} {installed} is installed, and what is relied on was read in {PINNED}")
    if torch.device(device).type != "cuda":
        return reasons
    reasons += [*machine.gpu_reasons(device, LOWEST_CAPABILITY), *interpreter.unavailable_reasons(device)]
    if installed is not None and not _can_get_kernels():
        reasons.append(
            f"there is neither nvcc, by which flashinfer compiles its kernels, nor the package {_COMPILED_KERNELS}"
        )
    return reasons or machine.import_reasons("flashinfer")


def version() -> str:
    """What is examined, part by part: who attends, and who writes the cache."""
    theirs, ours = (machine.installed_version(name) or "of no version" for name in (DISTRIBUTION, "attncheck"))
    return interpreter.marked(f"{DISTRIBUTION} {theirs} (fa2), attncheck {ours} (cache writer)")


def _can_get_kernels() -> bool:
    """Whether kernels are there, or can be compiled; nvcc is looked for where the library looks for it."""
    if importlib.util.find_spec(_COMPILED_KERNELS) is not None:
        return True
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is not None:
        return True
    return (Path(home or "/usr/local/cuda") / "bin" / "nvcc").is_file()
