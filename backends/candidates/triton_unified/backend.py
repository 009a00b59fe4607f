"""attncheck's own unified paged attention in Triton as a candidate. Imports no Triton before a layer runs.

The kernel reads lengths, tables and starts from the model runner's tensors. Nothing is precomputed for it from lengths,
so a captured graph is right for every batch that fits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_unified.tiling import SplitScratch, allocate_scratch
from attncheck.backends.contract import (
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    Conventions,
)
from attncheck.backends.interpreter import TritonBackend, is_interpreted
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

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
    conventions = Conventions(padded_rows="untouched", cache_strides="any", sync_free_build=True)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    supported_attn_types = tuple(AttentionType)

    get_name = staticmethod(lambda: "TRITON_UNIFIED")

    get_impl_cls = staticmethod(lambda: UnifiedImpl)

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

    def own_fields(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        return {"scratch": self._scratch}


class UnifiedImpl(PagedImpl):
    """One layer."""

    backend = UnifiedBackend
    metadata_cls = UnifiedMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for size in (self.head_size, self.head_size_v):
            self.backend.validate_head_size(size)

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache

        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, **scales)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
        output_scale: Tensor | None = None,
    ) -> None:
        from attncheck.backends.candidates.triton_unified.attention import ragged_attention, unified_attention

        common = metadata.common
        rows = slice(0, common.num_actual_tokens)
        given: dict[str, Any] = {
            "query_start_loc": common.query_start_loc,
            "max_query_len": common.max_query_len,
            "params": self.params(metadata),
            "alibi_slopes": self.slopes_on(query.device),
            "sinks": self.sinks,
            "output_lse": None if output_lse is None else output_lse[rows],
            "output_scale": output_scale,
        }
        if caches is not None:
            unified_attention(
                query[rows],
                *caches,
                output[rows],
                block_table=common.block_table_tensor,
                seq_lens=common.seq_lens,
                k_scale=layer._k_scale,
                v_scale=layer._v_scale,
                tree=metadata.tree,
                scratch=metadata.scratch if isinstance(metadata, UnifiedMetadata) else None,
                **given,
            )
        elif key is not None and value is not None:
            ragged_attention(query[rows], key, value, output[rows], **given)
        else:
            raise RuntimeError("neither a cache nor keys and values to attend to")

    def attend_quantised(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
        output_scale: Tensor,
    ) -> None:
        """Attend; the kernel itself stores the codes, only for rows of requests."""
        self.attend(layer, query, key, value, caches, metadata, output, output_lse, output_scale)
