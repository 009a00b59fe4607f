"""Our own latent attention in Triton, as a candidate: what it declares. Must not know: kernels, launches."""

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING

import torch

from attncheck.backends import interpreter
from attncheck.backends.contract import Conventions
from attncheck.backends.latent import LatentBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.triton_mla.builder import TritonLatentBuilder, TritonLatentMetadata
    from attncheck.backends.triton_mla.impl import TritonLatentImpl

LARGEST_RANK, LARGEST_ROTARY = 1024, 128
"""Tiles of queries and keys have to fit the memory of a multiprocessor."""


class TritonLatentBackend(LatentBackend):
    """Latent rows of up to 1024 numbers and 128 rotated ones, any other size; one launch for any batch.

    The workspace of a layer is not used: no context is up-projected.
    """

    conventions = Conventions(padded_rows="untouched", sync_free_build=True)

    @staticmethod
    def get_name() -> str:
        return "TRITON_LATENT"

    @staticmethod
    def get_impl_cls() -> type["TritonLatentImpl"]:
        from attncheck.backends.triton_mla.impl import TritonLatentImpl

        return TritonLatentImpl

    @staticmethod
    def get_builder_cls() -> type["TritonLatentBuilder"]:
        from attncheck.backends.triton_mla.builder import TritonLatentBuilder

        return TritonLatentBuilder

    @staticmethod
    def get_metadata_cls() -> type["TritonLatentMetadata"]:
        from attncheck.backends.triton_mla.builder import TritonLatentMetadata

        return TritonLatentMetadata

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unsupported_reasons(layer, cache, batch)
        if layer.mla is not None:
            reasons += too_large(layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim)
        return reasons

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return super().unavailable_reasons(device) + interpreter.unavailable_reasons(device)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unavailable_case_reasons(device, layer, cache, batch)
        if "bfloat16" in (layer.dtype, cache.kv_cache_dtype) and torch.device(device).type == "cuda":
            capability = torch.cuda.get_device_capability(device)
            if capability < (8, 0) and not interpreter.is_interpreted():
                reasons.append(f"bfloat16 on compute capability {capability[0]}.{capability[1]}: Triton needs 8.0")
        return reasons

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        return interpreter.required_environment(device)

    @classmethod
    def default_suite(cls, device: str) -> str:
        return interpreter.default_suite(device)

    @classmethod
    def version(cls) -> str:
        if importlib.util.find_spec("triton") is None:
            return super().version()
        return interpreter.marked(f"{super().version()}, triton {importlib.metadata.version('triton')}")


def too_large(kv_lora_rank: int, qk_rope_head_dim: int) -> list[str]:
    """What speaks against a cache row of these sizes."""
    sizes = (("kv_lora_rank", kv_lora_rank, LARGEST_RANK), ("qk_rope_head_dim", qk_rope_head_dim, LARGEST_ROTARY))
    return [f"{name} {size}: supported are sizes up to {limit}" for name, size, limit in sizes if size > limit]
