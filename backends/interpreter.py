"""Triton kernels without a GPU: how they are interpreted, what that takes, and how a verdict found so is marked.

``TRITON_INTERPRET=1`` makes Triton run the source of a kernel with numpy, program by program, instead of compiling it.
A verdict found this way bears :data:`MARK`; it is about the source, not about what a compiler makes of it: programs run
one after another, products of float32 are exact, and nothing is said of speed.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType

import torch

from attncheck.backends.base.machine import installed_version

ENVIRONMENT: Mapping[str, str] = MappingProxyType({"TRITON_INTERPRET": "1"})
"""What must stand before Python starts: Triton reads it when a kernel is decorated, its own library included."""

MARK = "interpreted"
"""Part of the version of a backend whose kernels are interpreted, and so of the key of every record."""

SUITE = "interpreted"
"""The built-in suite whose cases are small enough for interpreted kernels."""

BFLOAT16_GAP = "dtype bfloat16: Triton's interpreter multiplies the bits of bfloat16 as if they were integers"
"""Why layers of bfloat16 are not asked of interpreted kernels that do not work around it (triton 3.6 and 3.7)."""

_TRUE = ("1", "true", "yes", "on", "y")


def is_interpreted() -> bool:
    """Whether Triton was told to interpret kernels, in the words it understands."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


def required_environment(device: str) -> dict[str, str]:
    """What a backend of Triton kernels requires on ``device``: on a CPU, that they are interpreted."""
    return dict(ENVIRONMENT) if torch.device(device).type == "cpu" else {}


def default_suite(device: str) -> str:
    """The suite that a backend of Triton kernels is asked on ``device`` where the user names none."""
    return SUITE if torch.device(device).type == "cpu" or is_interpreted() else "smoke"


def marked(version: str) -> str:
    """``version`` (empty: none is known), marked where kernels are interpreted."""
    return ", ".join(part for part in (version, MARK) if part) if is_interpreted() else version


def untimely_reasons() -> list[str]:
    """Why kernels are not interpreted although they should be: Triton had been imported before it was told to."""
    standard = sys.modules.get("triton.language.standard")
    if standard is None or not is_interpreted() or type(standard.cdiv).__name__ == "InterpretedFunction":
        return []
    return ["Triton was imported before TRITON_INTERPRET=1 was set: set it before Python starts"]


def unavailable_reasons(device: str) -> list[str]:
    """Why Triton kernels cannot be launched on ``device`` here; empty: they can. Does not import Triton."""
    if importlib.util.find_spec("triton") is None:
        return ["Triton is not installed"]
    if not is_interpreted():
        if torch.device(device).type == "cpu":
            return ["on a CPU Triton kernels are interpreted: set TRITON_INTERPRET=1 before Python starts"]
        return []
    numpy, triton = installed_version("numpy"), installed_version("triton")
    if numpy and triton and _release(numpy) >= (2, 4) and _release(triton) <= (3, 6):
        # A loop bound that is loaded from memory is an array of one element, which numpy no longer takes for a number.
        return [f"numpy {numpy}: the interpreter of triton {triton} needs numpy below 2.4"]
    return []


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
