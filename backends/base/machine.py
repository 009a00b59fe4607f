"""What a library's kernels need of a machine: an installed version, a working import, a recent NVIDIA GPU.

The ``*_reasons`` functions return reasons against it, an empty list if there are none.
"""

import importlib
import importlib.metadata

import torch


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, with a local build's mark (``+cu128``), or None."""
    # The distribution is queried because that imports nothing, and because two distributions may share one package.
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def public(version: str) -> str:
    """Return ``version`` without the mark of a local build."""
    return version.partition("+")[0]


def import_reasons(module: str) -> list[str]:
    """Return why ``module`` cannot be imported (as when built for another torch); an empty list if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (whatever its import raises is why it cannot be used)
        return [f"{module} cannot be imported: {type(error).__name__}: {error}"]
    return []


def gpu_reasons(device: str, lowest_capability: tuple[int, int]) -> list[str]:
    """Return why CUDA kernels for ``lowest_capability`` and above cannot run on ``device`` (``"cuda"``, ``"cuda:1"``).

    The list is empty if they can, and for devices that are not GPUs.
    """
    if torch.device(device).type != "cuda":
        return []
    if not torch.cuda.is_available():
        return [f"device {device}: torch finds no GPU"]
    if torch.version.hip is not None:
        return [f"device {device}: a GPU of AMD's, and the kernels are known on NVIDIA's only"]
    capability = torch.cuda.get_device_capability(device)
    if capability >= lowest_capability:
        return []
    found, lowest = (".".join(map(str, pair)) for pair in (capability, lowest_capability))
    return [f"device {device}: compute capability {found}, and the kernels need {lowest}"]
