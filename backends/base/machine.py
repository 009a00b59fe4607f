"""What a library's kernels need of a machine: an installed version, a library that imports, an NVIDIA GPU new enough.

Every answer is a list of reasons against it, empty where there are none.
"""

import importlib
import importlib.metadata

import torch


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, with the mark of a local build (``+cu128``); None: there is none.

    Asked of the distribution, which imports nothing, and since two of them may share one package.
    """
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def public(version: str) -> str:
    """``version`` without the mark of a local build."""
    return version.partition("+")[0]


def import_reasons(module: str) -> list[str]:
    """Why an installed ``module`` does not import (built for another torch, a part of CUDA missing); empty: it does."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 (whatever its import raises is why it cannot be used)
        return [f"{module} cannot be imported: {type(error).__name__}: {error}"]
    return []


def gpu_reasons(device: str, lowest_capability: tuple[int, int]) -> list[str]:
    """Why CUDA kernels for ``lowest_capability`` and above cannot run on ``device`` (``"cuda"``, ``"cuda:1"``).

    Empty for devices that are no GPU, of which nothing is said.
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
