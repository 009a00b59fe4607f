"""Whether the pinned xformers can run here, the reasons if not, and its version string in records.

xformers is imported only on a GPU, where the version includes the state of its compiled extension.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import attncheck
from attncheck.backends import interpreter
from attncheck.backends.base import machine

PINNED = "0.0.35"
"""The only version whose private names and operator behaviour are known; see ``constraints.txt``."""

LOWEST_CAPABILITY = (8, 0)
"""Minimum compute capability for which the library tries its split-K operator."""


def unavailable_reasons(device: str) -> list[str]:
    """Return why xformers' split-K operator cannot run on ``device``, such as ``"cuda:1"``; an empty list if it can."""
    reasons = interpreter.unavailable_reasons(device)
    installed = machine.installed_version("xformers")
    if installed is None:
        return [*reasons, "xformers is not installed"]
    if machine.public(installed) != PINNED:
        return [*reasons, f"xformers {installed} is installed, and private names of {PINNED} are relied on"]
    return [*reasons, *machine.gpu_reasons(device, LOWEST_CAPABILITY)]


def version(operator: str = "triton split-K") -> str:
    """Return the versions under test: the library's kernel for decodes, and attncheck's for other rows.

    On a GPU the text also states whether the library's compiled extension is missing. Its operators then refuse GPU
    tensors; the one named here is still allowed, since it does not use the extension.
    """
    missing = ", its compiled extension not loaded" if torch.cuda.is_available() and not _has_extension() else ""
    xformers, triton = (machine.installed_version(name) or "of no version" for name in ("xformers", "triton"))
    theirs = f"xformers {xformers} (decode: {operator}{missing})"
    ours = f"attncheck {attncheck.__version__} (other rows)"
    return interpreter.marked(f"{theirs}, {ours}, triton {triton}")


def _has_extension() -> bool:
    """Return whether the library's compiled extension, built for one torch and one CUDA, can be loaded here."""
    if machine.installed_version("xformers") is None:
        return False
    with quiet_import():
        from xformers._cpp_lib import _built_with_cuda
    return bool(_built_with_cuda)


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silence the library's logger inside the context, around the first import of xformers.

    What it then logs about its compiled extension is part of the version.
    """
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
