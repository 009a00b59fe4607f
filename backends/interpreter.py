"""Triton kernels without a GPU: when they are interpreted, what that requires, and how such results are marked.

Candidates with Triton kernels derive from :class:`InterpretedBackend` or :class:`TritonBackend`.

With ``TRITON_INTERPRET=1``, Triton runs the source of a kernel with numpy, one program at a time, instead of compiling
it. Such results carry :data:`MARK`. They concern the source, not the compiled code: programs run one after another,
products of float32 are exact, and speed is not measured.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from types import MappingProxyType

import torch

from attncheck.backends.base.machine import installed_version
from attncheck.backends.contract import AttentionBackend
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

ENVIRONMENT: Mapping[str, str] = MappingProxyType({"TRITON_INTERPRET": "1"})
"""Variables that must be set before Python starts:

Triton reads them when a kernel is decorated, also in its own library.
"""

MARK = "interpreted"
"""Part of the version of a backend whose kernels are interpreted, and so of the key of every record."""

SUITE = "interpreted"
"""The built-in suite whose cases are small enough for interpreted kernels."""

BFLOAT16_GAP = "dtype bfloat16: Triton's interpreter multiplies the bits of bfloat16 as if they were integers"
"""Why bfloat16 layers are not run on interpreted kernels without a workaround (triton 3.6 and 3.7)."""

_TRUE = ("1", "true", "yes", "on", "y")


def is_interpreted() -> bool:
    """Return whether ``TRITON_INTERPRET`` is set to one of the values that Triton takes for true."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


def required_environment(device: str) -> dict[str, str]:
    """Return the variables that Triton kernels require on ``device``: on a CPU, those that interpret them."""
    return dict(ENVIRONMENT) if torch.device(device).type == "cpu" else {}


def default_suite(device: str) -> str:
    """Return the suite to run on ``device`` for a backend of Triton kernels if the user names none."""
    return SUITE if torch.device(device).type == "cpu" or is_interpreted() else "smoke"


def marked(version: str) -> str:
    """Return ``version`` ("" if unknown), with :data:`MARK` appended if kernels are interpreted."""
    return ", ".join(part for part in (version, MARK) if part) if is_interpreted() else version


def untimely_reasons() -> list[str]:
    """Return a reason if Triton was imported too early to interpret kernels: before the variable was set."""
    standard = sys.modules.get("triton.language.standard")
    if standard is None or not is_interpreted() or type(standard.cdiv).__name__ == "InterpretedFunction":
        return []
    return ["Triton was imported before TRITON_INTERPRET=1 was set: set it before Python starts"]


def unavailable_reasons(device: str) -> list[str]:
    """Return why Triton kernels cannot be launched on ``device``; an empty list if they can. Triton is not imported."""
    if importlib.util.find_spec("triton") is None:
        return ["Triton is not installed"]
    if not is_interpreted():
        if torch.device(device).type == "cpu":
            return ["on a CPU Triton kernels are interpreted: set TRITON_INTERPRET=1 before Python starts"]
        return []
    numpy, triton = installed_version("numpy"), installed_version("triton")
    if numpy and triton and _release(numpy) >= (2, 4) and _release(triton) <= (3, 6):
        # A loop bound loaded from memory is an array of one element, which newer numpy does not convert to an integer.
        return [f"numpy {numpy}: the interpreter of triton {triton} needs numpy below 2.4"]
    return []


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


_BFLOAT16_CAPABILITY = (8, 0)
"""Minimum compute capability for which Triton compiles bfloat16."""


class InterpretedBackend(AttentionBackend):
    """Backend whose kernels are interpreted without a GPU; list it as the first base, since it extends the next one."""

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        answered = super().unavailable_case_reasons(device, layer, cache, batch)
        return [*answered, *untimely_reasons()]

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        return required_environment(device)

    @classmethod
    def default_suite(cls, device: str) -> str:
        return default_suite(device)


class TritonBackend(InterpretedBackend):
    """Interpreted backend whose kernels are all attncheck's own."""

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return super().unavailable_reasons(device) + unavailable_reasons(device)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unavailable_case_reasons(device, layer, cache, batch)
        has_bfloat16 = "bfloat16" in (layer.dtype, cache.kv_cache_dtype)
        if has_bfloat16 and torch.device(device).type == "cuda" and not is_interpreted():
            found = torch.cuda.get_device_capability(device)
            if found < _BFLOAT16_CAPABILITY:
                reasons.append(f"bfloat16 on compute capability {found[0]}.{found[1]}: Triton needs 8.0")
        return reasons

    @classmethod
    def version(cls) -> str:
        triton = installed_version("triton")
        return super().version() if triton is None else marked(f"{super().version()}, triton {triton}")
