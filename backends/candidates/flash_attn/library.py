"""The installed flash-attn: whether it is there, in a version whose sources were read, and its functions.

Must not know: layers, steps.
"""

import importlib
from typing import Any

from attncheck.backends.base import machine

READ = "2.8"
"""The series of versions whose signatures and kernels these modules are written against (2.8.3)."""


def version() -> str:
    """The installed version; empty: there is none. flash-attn 4 has another distribution, and the same package."""
    return machine.installed_version("flash-attn") or ""


def missing_reasons() -> list[str]:
    """Why the library cannot be called here; empty: nothing speaks against it. Does not import it."""
    found = version()
    if not found:
        return ["flash-attn is not installed"]
    if found.split(".")[:2] != READ.split("."):
        return [f"flash-attn {found}: written against {READ}"]
    return []


def import_reasons() -> list[str]:
    """Why the installed library does not import; empty: it does."""
    return machine.import_reasons("flash_attn")


def functions() -> Any:
    """The module that holds ``flash_attn_varlen_func`` and ``flash_attn_with_kvcache``."""
    return importlib.import_module("flash_attn")
