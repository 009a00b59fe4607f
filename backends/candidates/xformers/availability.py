"""Whether the pinned xformers can run here, and why not; what its version is called in records.

Nothing of xformers is imported but on a GPU, where the version tells of its compiled extension.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from attncheck.backends import interpreter
from attncheck.backends.base import machine

PINNED = "0.0.35"
"""The one version whose private names and whose operator's habits are known; see ``constraints.txt``."""

LOWEST_CAPABILITY = (8, 0)
"""The library tries its split-K operator on nothing older."""


def unavailable_reasons(device: str) -> list[str]:
    """Why xformers' split-K operator cannot run on ``device`` (``"cpu"``, ``"cuda:1"``) here; empty: it can."""
    reasons = interpreter.unavailable_reasons(device)
    installed = machine.installed_version("xformers")
    if installed is None:
        return [*reasons, "xformers is not installed"]
    if machine.public(installed) != PINNED:
        return [*reasons, f"xformers {installed} is installed, and private names of {PINNED} are relied on"]
    return [*reasons, *machine.gpu_reasons(device, LOWEST_CAPABILITY)]


def version(operator: str = "triton split-K") -> str:
    """What is examined, kernel by kernel: the library's, which attends to decodes, and attncheck's for other rows.

    On a GPU also whether the library's compiled extension is missing: its operators then refuse a GPU's tensors, and
    the one named here is let through, since it needs none of it.
    """
    missing = ", its compiled extension not loaded" if torch.cuda.is_available() and not _has_extension() else ""
    xformers, attncheck, triton = (
        machine.installed_version(name) or "of no version" for name in ("xformers", "attncheck", "triton")
    )
    theirs, ours = f"xformers {xformers} (decode: {operator}{missing})", f"attncheck {attncheck} (other rows)"
    return interpreter.marked(f"{theirs}, {ours}, triton {triton}")


def _has_extension() -> bool:
    """Whether what the library compiled for one torch and one CUDA could be loaded by those that are here."""
    if machine.installed_version("xformers") is None:
        return False
    with quiet_import():
        from xformers._cpp_lib import _built_with_cuda
    return bool(_built_with_cuda)


@contextmanager
def quiet_import() -> Iterator[None]:
    """Around the first import of xformers: what it logs then, about its compiled extension, the version tells.

    Only the library's own logger is turned down, and only inside.
    """
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
