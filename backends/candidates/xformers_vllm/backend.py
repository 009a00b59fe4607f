"""The declarations of ``xformers_vllm``: what vLLM's selection assumes of its xformers backend.

The head sizes, dtypes, page sizes and the graph level NEVER come from vLLM's class. For everything else vLLM has only
the constructor: a feature that the constructor accepts counts as supported, as for every vLLM class that attncheck
examines. So windows, soft caps and FP8 caches are declared; :mod:`attncheck.backends.candidates.xformers` shows which
of these can be supported. One thing differs from vLLM: the decode call names the operator, because the library's own
dispatch finds none on a CPU and rarely one on a GPU. ``xformers_vllm:auto`` does not name it. Imports neither xformers
nor Triton.
"""

from typing import TYPE_CHECKING

import torch

from attncheck.backends import interpreter
from attncheck.backends.candidates.xformers.backend import library_reasons, library_version
from attncheck.backends.contract import MultipleOf
from attncheck.backends.interpreter import InterpretedBackend
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.xformers_vllm.builder import (
        XFormersAttentionMetadata,
        XFormersAttentionMetadataBuilder,
    )
    from attncheck.backends.candidates.xformers_vllm.impl import XFormersAttentionImpl, XFormersAutoImpl


class XFormersAttentionBackend(InterpretedBackend):
    """Backend whose pages have tokens before heads, with keys and values in two halves of the cache."""

    accept_output_buffer = True
    features = frozenset({"sliding_window", "logits_soft_cap", "fp8_kv"})
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")

    @classmethod
    def from_argument(cls, argument: str) -> "type[XFormersAttentionBackend]":
        """Return, for ``auto``, the backend that leaves the operator to the library; otherwise raise ``ValueError``."""
        if argument != "auto":
            raise ValueError(f"{argument!r}: only 'auto' can follow, for the operator that the library finds itself")
        return XFormersAutoBackend

    get_name = staticmethod(lambda: "XFORMERS_VLLM_V1")

    @staticmethod
    def get_impl_cls() -> type["XFormersAttentionImpl"]:
        from attncheck.backends.candidates.xformers_vllm.impl import XFormersAttentionImpl

        return XFormersAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type["XFormersAttentionMetadata"]:
        from attncheck.backends.candidates.xformers_vllm.builder import XFormersAttentionMetadata

        return XFormersAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type["XFormersAttentionMetadataBuilder"]:
        from attncheck.backends.candidates.xformers_vllm.builder import XFormersAttentionMetadataBuilder

        return XFormersAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Return the cache shape; raise ValueError for a page size that is no multiple of 16."""
        if block_size % 16 != 0:
            raise ValueError(f"XFORMERS_VLLM_V1: block_size {block_size} is no multiple of 16")
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Return False."""
        return False

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the 29 sizes that vLLM lists; for most of them the library has no paged operator."""
        return list(range(32, 257, 8))

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Raise ``ValueError`` for a size that is not listed."""
        supported = cls.get_supported_head_sizes()
        if head_size not in supported:
            name = cls.__name__.removesuffix("Backend")
            raise ValueError(
                f"head size {head_size} is not supported by {name}; supported: {supported}. "
                "The FlexAttention backend takes any head size"
            )

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Return the page sizes that get_kv_cache_shape accepts."""
        return [MultipleOf(16)]

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *library_reasons(device)]

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Add a reason for bfloat16, since the interpreter multiplies it wrongly in the operator of every layer."""
        reasons = super().unavailable_case_reasons(device, layer, cache, batch)
        has_gap = interpreter.is_interpreted() and layer.dtype == "bfloat16"
        return [interpreter.BFLOAT16_GAP, *reasons] if has_gap else reasons

    @classmethod
    def version(cls) -> str:
        return library_version()


class XFormersAutoBackend(XFormersAttentionBackend):
    """The same backend with vLLM's own decode call, which names no operator."""

    @staticmethod
    def get_impl_cls() -> type["XFormersAutoImpl"]:
        from attncheck.backends.candidates.xformers_vllm.impl import XFormersAutoImpl

        return XFormersAutoImpl

    @classmethod
    def version(cls) -> str:
        return library_version("automatic dispatch")
