"""Base classes of candidates with Triton kernels: where the kernels run, and how versions mark that."""

import torch

from attncheck.backends import interpreter
from attncheck.backends.base import machine
from attncheck.backends.contract import AttentionBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

_BFLOAT16_CAPABILITY = (8, 0)
"""Minimum compute capability for which Triton compiles bfloat16."""


class InterpretedBackend(AttentionBackend):
    """Backend whose kernels are interpreted without a GPU; list it as the first base, since it extends the next one."""

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        answered = super().unavailable_case_reasons(device, layer, cache, batch)
        return [*answered, *interpreter.untimely_reasons()]

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        return interpreter.required_environment(device)

    @classmethod
    def default_suite(cls, device: str) -> str:
        return interpreter.default_suite(device)


class TritonBackend(InterpretedBackend):
    """Interpreted backend whose kernels are all attncheck's own."""

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return super().unavailable_reasons(device) + interpreter.unavailable_reasons(device)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unavailable_case_reasons(device, layer, cache, batch)
        has_bfloat16 = "bfloat16" in (layer.dtype, cache.kv_cache_dtype)
        if has_bfloat16 and torch.device(device).type == "cuda" and not interpreter.is_interpreted():
            found = torch.cuda.get_device_capability(device)
            if found < _BFLOAT16_CAPABILITY:
                reasons.append(f"bfloat16 on compute capability {found[0]}.{found[1]}: Triton needs 8.0")
        return reasons

    @classmethod
    def version(cls) -> str:
        triton = machine.installed_version("triton")
        return super().version() if triton is None else interpreter.marked(f"{super().version()}, triton {triton}")
