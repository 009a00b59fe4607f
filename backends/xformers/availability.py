"""Whether the pinned xformers can run here, and why not; what its version is called in records.

Nothing of xformers is imported but on a GPU, where the version tells of its compiled extension. Must not know: layers,
tensors.
"""

import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attncheck.backends import interpreter

PINNED = "0.0.35"
"""The one version whose private names and whose operator's habits are known; see ``constraints.txt``."""

LOWEST_CAPABILITY = (8, 0)
"""The library tries its split-K operator on nothing older."""


def installed_version() -> str | None:
    """The installed xformers, without the mark of a local build; None: there is none."""
    try:
        return importlib.metadata.version("xformers").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def unavailable_reasons(device: str) -> list[str]:
    """Why xformers' split-K operator cannot run on ``device`` (``"cpu"``, ``"cuda:1"``) here; empty: it can."""
    reasons = interpreter.unavailable_reasons(device)
    installed = installed_version()
    if installed is None:
        return [*reasons, "xformers is not installed"]
    if installed != PINNED:
        return [*reasons, f"xformers {installed} is installed, and private names of {PINNED} are relied on"]
    return [*reasons, *_unusable_gpu(device)] if torch.device(device).type == "cuda" else reasons


def _unusable_gpu(device: str) -> list[str]:
    if not torch.cuda.is_available():
        return [f"device {device}: torch finds no GPU"]
    if torch.version.hip is not None:
        return [f"device {device}: a GPU of AMD's, of which nothing is known here"]
    capability = torch.cuda.get_device_capability(device)
    if capability < LOWEST_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (LOWEST_CAPABILITY, capability))
        return [f"device {device}: compute capability {found}, and the operator needs {needed}"]
    return []


def version(operator: str = "triton split-K") -> str:
    """What is examined, kernel by kernel: the library's, which attends to decodes, and attncheck's for other rows.

    On a GPU also whether the library's compiled extension is missing: its operators then refuse a GPU's tensors, and
    the one named here is let through, since it needs none of it.
    """
    missing = ", its compiled extension not loaded" if torch.cuda.is_available() and not _has_extension() else ""
    theirs = f"xformers {_version_of('xformers')} (decode: {operator}{missing})"
    ours = f"attncheck {_version_of('attncheck')} (other rows)"
    return interpreter.marked(f"{theirs}, {ours}, triton {_version_of('triton')}")


def _has_extension() -> bool:
    """Whether what the library compiled for one torch and one CUDA could be loaded by those that are here."""
    if installed_version() is None:
        return False
    with quiet_import():
        from xformers._cpp_lib import _built_with_cuda
    return bool(_built_with_cuda)


@contextmanager
def quiet_import() -> Iterator[None]:
    """Around the first import of xformers: what it logs then, about its compiled extension, has been said as a reason.

    Only the library's own logger is turned down, and only inside.
    """
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of no version"
