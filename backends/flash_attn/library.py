"""The installed flash-attn: whether it is there, in a version whose sources were read, and its functions.

Must not know: layers, steps.
"""

import importlib
import importlib.metadata
from typing import Any

READ = "2.8"
"""The series of versions whose signatures and kernels these modules are written against (2.8.3)."""


def version() -> str:
    """The installed version; empty: there is none.

    Asked of the distribution, since flash-attn 4 puts modules of its own into a package of the same name.
    """
    try:
        return importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return ""


def missing_reasons() -> list[str]:
    """Why the library cannot be called here; empty: nothing speaks against it. Does not import it."""
    found = version()
    if not found:
        return ["flash-attn is not installed"]
    if found.split(".")[:2] != READ.split("."):
        return [f"flash-attn {found}: written against {READ}"]
    return []


def import_reasons() -> list[str]:
    """Why the installed library does not import (built for another torch, a missing part of CUDA); empty: it does."""
    try:
        functions()
    except ImportError as error:
        return [f"flash-attn cannot be imported: {error}"]
    return []


def functions() -> Any:
    """The module that holds ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``."""
    return importlib.import_module("flash_attn")
