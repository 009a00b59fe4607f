"""attncheck's own unified paged attention in Triton as a candidate: its declarations and metadata. Imports no Triton.

The kernel reads lengths, tables and starts from the model runner's tensors. No values are precomputed for it, so a
captured graph is right for every batch that fits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attncheck.backends.candidates.triton_unified.tiling import SplitScratch, allocate_scratch
from attncheck.backends.candidates.triton_unified.triton_backend import TritonBackend
from attncheck.backends.contract import AttentionCGSupport, AttentionType, CommonAttentionMetadata, Conventions
from attncheck.backends.interpreter import is_interpreted
from attncheck.backends.paged import PagedBackend
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.triton_unified.impl import UnifiedImpl

LARGEST_HEAD_SIZE = 256
"""Maximum head size: a tile of keys and one of values must fit the memory of a multiprocessor."""


class UnifiedBackend(TritonBackend, PagedBackend):
    """Backend with one launch for any batch; any block size, both layouts, head sizes up to 256."""

    packing = "split_second"
    features = frozenset(
        {
            "sliding_window",
            "logits_soft_cap",
            "alibi",
            "alibi_non_causal",
            "sinks",
            "non_causal",
            "head_size_v",
            "lse",
            "local",
            "kv_sharing",
            "fp8_kv",
            "fp8_per_head",
            "output_quant",
            "short_keys",
            "tree",
            "merge_nan",
        }
    )
    conventions = Conventions(padded_rows="untouched", sync_free_build=True)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)

    get_name = staticmethod(lambda: "TRITON_UNIFIED")

    @staticmethod
    def get_impl_cls() -> type["UnifiedImpl"]:
        from attncheck.backends.candidates.triton_unified.impl import UnifiedImpl

        return UnifiedImpl

    get_builder_cls = staticmethod(lambda: UnifiedBuilder)

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        if not 1 <= head_size <= LARGEST_HEAD_SIZE:
            raise ValueError(f"{cls.get_name()}: {_head_size_reason('head_size', head_size)}")

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        sizes = {"head_size": layer.head_size, "head_size_v": layer.value_head_size}
        if layer.mla is not None or layer.value_head_size == layer.head_size:
            del sizes["head_size_v"]
        too_large = [_head_size_reason(name, size) for name, size in sizes.items() if size > LARGEST_HEAD_SIZE]
        return super().unsupported_reasons(layer, cache, batch) + too_large

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
        from attncheck.backends.candidates.triton_unified.merging import merge_attn_states

        return {"reshape_and_cache": reshape_and_cache, "merge_attn_states": merge_attn_states}


def _head_size_reason(name: str, size: int) -> str:
    return f"{name} {size}: supported are sizes up to {LARGEST_HEAD_SIZE}"


@dataclass
class UnifiedMetadata(PagedMetadata):
    """Metadata of one step. ``scratch``: memory for results of segments, or None if keys are not split.

    The lengths on the host are used only for refusals.
    """

    scratch: SplitScratch | None = None


class UnifiedBuilder(PagedBuilder):
    """Builder of :class:`UnifiedMetadata` that never waits for the device."""

    backend = UnifiedBackend
    metadata_cls = UnifiedMetadata
    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        self._scratch = allocate_scratch(
            num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
            num_kv_heads=kv_cache_spec.num_kv_heads,
            head_size_v=kv_cache_spec.head_size_v,
            max_rows=vllm_config.scheduler_config.max_num_batched_tokens,
            device=torch.device(device),
            interpreted=is_interpreted(),
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> UnifiedMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not isinstance(metadata, UnifiedMetadata):
            raise TypeError(f"metadata_cls is {type(metadata).__qualname__}, no UnifiedMetadata")
        metadata.scratch = self._scratch
        return metadata
