"""What ``xformers_vllm`` declares: what vLLM's selection would believe of its xformers backend.

Of vLLM's class: the head sizes, dtypes and page sizes that it lists, a graph level of NEVER. Of its constructor, which
is all that vLLM has for the rest: what it takes without a word counts as supported, as of every class of vLLM's that
attncheck examines. So windows, soft caps and FP8 caches are declared, and :mod:`attncheck.backends.candidates.xformers`
shows what of it can be kept. One thing is not vLLM's: the operator is named in the decode call, because the library by
itself finds none on a CPU and seldom one on a GPU. ``xformers_vllm:auto`` leaves it out. Imports neither xformers nor
Triton.
"""

from typing import TYPE_CHECKING

import torch

from attncheck.backends import interpreter
from attncheck.backends.candidates.triton_unified.triton_backend import InterpretedBackend
from attncheck.backends.candidates.xformers import availability
from attncheck.backends.contract import MultipleOf
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.xformers_vllm.builder import XFormersAttentionMetadataBuilder
    from attncheck.backends.candidates.xformers_vllm.impl import XFormersAttentionImpl, XFormersAutoImpl
    from attncheck.backends.candidates.xformers_vllm.metadata import XFormersAttentionMetadata


class XFormersAttentionBackend(InterpretedBackend):
    """Tokens before heads, keys and values in two halves."""

    accept_output_buffer = True
    features = frozenset({"sliding_window", "logits_soft_cap", "fp8_kv"})
    supported_kv_cache_dtypes = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")

    @classmethod
    def from_argument(cls, argument: str) -> "type[XFormersAttentionBackend]":
        """``auto``: the operator is left to the library; ``ValueError`` for anything else."""
        if argument != "auto":
            raise ValueError(f"{argument!r}: only 'auto' can follow, for the operator that the library finds itself")
        return XFormersAutoBackend

    @staticmethod
    def get_name() -> str:
        return "XFORMERS_VLLM_V1"

    @staticmethod
    def get_impl_cls() -> type["XFormersAttentionImpl"]:
        from attncheck.backends.candidates.xformers_vllm.impl import XFormersAttentionImpl

        return XFormersAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type["XFormersAttentionMetadata"]:
        from attncheck.backends.candidates.xformers_vllm.metadata import XFormersAttentionMetadata

        return XFormersAttentionMetadata

    @staticmethod
    def get_builder_cls() -> type["XFormersAttentionMetadataBuilder"]:
        from attncheck.backends.candidates.xformers_vllm.builder import XFormersAttentionMetadataBuilder

        return XFormersAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """Raises ValueError for pages that are no multiple of 16."""
        if block_size % 16 != 0:
            raise ValueError(f"XFORMERS_VLLM_V1: block_size {block_size} is no multiple of 16")
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Never."""
        return False

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """What vLLM lists: 29 sizes, most of which no operator of the library serves over pages."""
        return list(range(32, 257, 8))

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """``ValueError`` for a size that is not listed."""
        supported = cls.get_supported_head_sizes()
        if head_size not in supported:
            name = cls.__name__.removesuffix("Backend")
            raise ValueError(
                f"head size {head_size} is not supported by {name}; supported: {supported}. "
                "The FlexAttention backend takes any head size"
            )

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Those that get_kv_cache_shape takes."""
        return [MultipleOf(16)]

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *availability.unavailable_reasons(device)]

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """The operator's products of bfloat16 are the interpreter's fault, whatever the layer."""
        reasons = super().unavailable_case_reasons(device, layer, cache, batch)
        has_gap = interpreter.is_interpreted() and layer.dtype == "bfloat16"
        return [interpreter.BFLOAT16_GAP, *reasons] if has_gap else reasons

    @classmethod
    def version(cls) -> str:
        return availability.version()


class XFormersAutoBackend(XFormersAttentionBackend):
    """The same with vLLM's own decode call, which names no operator."""

    @staticmethod
    def get_impl_cls() -> type["XFormersAutoImpl"]:
        from attncheck.backends.candidates.xformers_vllm.impl import XFormersAutoImpl

        return XFormersAutoImpl

    @classmethod
    def version(cls) -> str:
        return availability.version("automatic dispatch")
