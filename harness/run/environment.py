"""Collects the environment of a run: versions, machine and numerical policy. Loads no torch when imported."""

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import attncheck
from attncheck.harness.problem.control_group import group_cores
from attncheck.reports.run_file.header import Environment


def collect_environment(device: str) -> Environment:
    """Return the environment of a run on ``device`` (``cpu``, ``cuda``, ``cuda:1``, ...).

    The TF32 and determinism policies are read, not set. Set them before calling this.
    """
    import numpy as np
    import torch

    cpu = _cpu_name()
    on_cuda = _is_cuda(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device))) if on_cuda else None
    return Environment(
        attncheck=attncheck.__version__,
        python=platform.python_version(),
        torch=str(torch.__version__),
        numpy=np.__version__,
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu,
        cores=usable_cores(),
        device=device,
        device_name=torch.cuda.get_device_name(device) if on_cuda else cpu,
        capability=capability,
        driver=_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_cuda else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        tf32=torch.get_float32_matmul_precision() != "highest",
        git_commit=_git_commit(),
    )


@dataclass(frozen=True)
class GpuModes:
    """Modes of a GPU, as nvidia-smi prints them.

    ``compute``: such as ``Default`` or ``Exclusive_Process``. ``mig``: such as ``Enabled``.
    """

    compute: str
    mig: str

    @property
    def is_shared(self) -> bool:
        """Whether several processes may use the GPU at once."""
        return self.compute == "Default"


def gpu_modes(device: str) -> GpuModes | None:
    """Return the modes of a GPU, or None for a CPU or if nvidia-smi has no answer."""
    if not _is_cuda(device):
        return None
    import torch

    uuid = torch.cuda.get_device_properties(device).uuid
    query = "--query-gpu=compute_mode,mig.mode.current"
    line = _first_line("nvidia-smi", f"--id=GPU-{uuid}", query, "--format=csv,noheader")
    compute, comma, mig = (line or "").partition(", ")
    return GpuModes(compute, mig) if comma else None


def device_memory(device: str) -> int | None:
    """Return a GPU's memory in bytes without creating a CUDA context, or None for a CPU."""
    if not _is_cuda(device):
        return None
    import torch

    return torch.cuda.get_device_properties(device).total_memory


def usable_cores() -> int:
    """Return the number of CPU cores this process may use, at least 1; it respects affinity and container quotas."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = group_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _is_cuda(device: str) -> bool:
    return device.partition(":")[0] == "cuda"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Return the commit of attncheck's checkout, with ``-dirty`` if it has changes; None if attncheck is installed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    return _first_line("git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*")


@cache
def _first_line(*command: str) -> str | None:
    """Return the first line that a command prints, or None if it fails or takes over 10 s. Cached for the process."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)  # noqa: S603 (fixed words)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else None
