"""The impl of candidate ``xformers``: the library's operator or attncheck's kernel for each request of a step.

Imports xformers and Triton, and so is imported lazily.
"""

from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.candidates.xformers.backend import XFormersBackend
from attncheck.backends.candidates.xformers.operator import operator_for, paged_decode
from attncheck.backends.contract import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata
from attncheck.backends.paged import PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata

UNIFIED = "attncheck's unified_attention"
"""Name in records of the kernel for all other rows."""


@dataclass
class XFormersMetadata(PagedMetadata):
    """Metadata of one step; the first ``num_decodes`` requests have one row each, rows ``[0, num_decodes)``."""

    num_decodes: int = 0


class XFormersBuilder(PagedBuilder):
    """Builder that counts decodes by the lengths on the host; the kernels read lengths on the device.

    A graph of single tokens holds the operator. Any other graph holds only attncheck's kernel, also for decodes in a
    replay, because a graph would freeze their number.
    """

    backend = XFormersBackend
    metadata_cls = XFormersMetadata
    cudagraph_support = AttentionCGSupport.ALWAYS
    reorder_batch_threshold = 1

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> XFormersMetadata:
        """Build the metadata; raise ValueError for a length beyond its table row, where the operator would read."""
        step = XFormersMetadata(**vars(super().build(common_prefix_len, common_attn_metadata, fast_build)))
        capacity = common_attn_metadata.block_table_tensor.shape[1] * self.kv_cache_spec.block_size
        longest = max(step.seq_lens, default=0)
        if longest > capacity:
            raise ValueError(
                f"{self.backend.get_name()}: seq_len {longest} exceeds the {capacity} slots of a table row"
            )
        step.num_decodes = sum(1 for _ in takewhile(lambda query_len: query_len == 1, step.query_lens))
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> XFormersMetadata:
        """Build the metadata for a capture; a mixed graph counts no decodes."""
        step = self.build(0, common_attn_metadata)
        # Dummy requests of a mixed graph may have one row each. Only the maximum query length distinguishes the graphs.
        if common_attn_metadata.max_query_len > 1:
            step.num_decodes = 0
        return step


class XFormersImpl(PagedImpl):
    """One layer."""

    backend = XFormersBackend
    metadata_cls = XFormersMetadata

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)

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
    ) -> None:
        if caches is None:
            raise RuntimeError(
                f"{self.backend.get_name()}: a layer of attn_type {self.attn_type} has no cache to attend to"
            )
        common, n = metadata.common, self._num_decodes(metadata)
        lens, table, starts = common.seq_lens, common.block_table_tensor, common.query_start_loc
        if n:
            lse = None if output_lse is None else output_lse[:n]
            paged_decode(query[:n], *caches, table[:n], lens[:n], self.scale, output[:n], lse)
            self.chosen_kernels.add(operator_for(caches[0].shape[1]).NAME)
        if n < metadata.num_rows:
            key_cache, value_cache = caches
            unified_attention(
                query[n:],
                key_cache,
                value_cache,
                output[n:],
                block_table=table[n:],
                seq_lens=lens[n:],
                query_start_loc=starts[n:] - n if n else starts,
                max_query_len=common.max_query_len,
                params=self.params(metadata),
                output_lse=None if output_lse is None else output_lse[n:],
            )
            self.chosen_kernels.add(UNIFIED)

    def _wrong_cache(self, kv_cache: Tensor, dtype: torch.dtype) -> list[str]:
        """Return what is wrong with the cache, also if it is not one run of tokens, before anything is written."""
        if wrong := super()._wrong_cache(kv_cache, dtype):
            return wrong
        strides = kv_cache.stride()
        is_run = kv_cache.shape[1] == 1 or strides[1] == kv_cache.shape[2] * strides[2]
        return [] if is_run else [f"kv_cache has strides {strides}: its tokens are not one run"]

    def _num_decodes(self, metadata: PagedMetadata) -> int:
        """Return the number of leading requests for the operator, which supports neither window nor soft cap."""
        is_plain = self.sliding_window[0] < 0 and self.logits_soft_cap is None
        return metadata.num_decodes if is_plain and isinstance(metadata, XFormersMetadata) else 0
