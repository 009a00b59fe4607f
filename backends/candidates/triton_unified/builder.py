"""Metadata of the unified backend: the step's tensors as they are, and scratch that lives as long as the builder.

Nothing is computed for the kernel, which reads lengths, tables and starts where the model runner put them; so whatever
a graph has captured is right for every batch that fits. Must not know: how anything is launched.
"""

from dataclasses import dataclass
from typing import Any

import torch

from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend
from attncheck.backends.candidates.triton_unified.scratch import SplitScratch, allocate_scratch
from attncheck.backends.contract import AttentionCGSupport, CommonAttentionMetadata
from attncheck.backends.interpreter import is_interpreted
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata


@dataclass
class UnifiedMetadata(PagedMetadata):
    """A step. ``scratch``: for results of segments; None: keys are not cut into segments.

    The numbers on the host serve refusals alone.
    """

    scratch: SplitScratch | None = None


class UnifiedBuilder(PagedBuilder):
    """Makes them, without waiting for the device."""

    backend = UnifiedBackend
    metadata_cls = UnifiedMetadata
    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        self._scratch = allocate_scratch(
            num_heads=model.get_num_attention_heads(vllm_config.parallel_config),
            num_kv_heads=kv_cache_spec.num_kv_heads,
            head_size_v=kv_cache_spec.head_size_v or kv_cache_spec.head_size,
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
