"""The reference as a candidate: float64 inside, rounded once at the end.

It is examined like every other candidate, so that the harness is tested against its own reference. It is slow and has
no other use. The formulas belong in :mod:`attncheck.reference`, not here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from attncheck.backends.base.coded_rows import INT8
from attncheck.backends.contract import (
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    Conventions,
    get_current_vllm_config,
    get_dcp_group,
)
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.attention.cache import copy_blocks, reshape_and_cache, swap_blocks
from attncheck.reference.attention.indexer import sparse_attn_indexer
from attncheck.reference.attention.online_softmax import merge_attn_states
from attncheck.reference.attention.paged import dcp_rank_attention, paged_attention
from attncheck.reference.attention.params import AttentionParams
from attncheck.reference.attention.short_convolution import causal_conv1d
from attncheck.reference.attention.varlen import varlen_attention
from attncheck.reference.step_spec import KVCacheDType

_ENDLESS = 2**62
"""A position beyond every key."""


class ReferenceBackend(PagedBackend):
    """Backend with all features of the reference: any head size, any block size, both layouts, every modifier.

    CUDA graphs are not supported: the reference reads lengths on the host, request by request, and refuses undefined
    cases.
    """

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
            "fp8_query",
            "output_quant",
            "short_keys",
            "tree",
            "cascade",
            "merge_nan",
            "mm_prefix",
            "rswa",
            "fp8_index",
            "dcp",
            "sparse",
        }
    )
    conventions = Conventions(padded_rows="untouched", cache_strides="any", any_topk_indices=True)
    supported_kv_cache_dtypes = get_args(KVCacheDType)
    registered_kv_cache_dtype = (INT8, torch.int8)
    supported_attn_types = tuple(AttentionType)

    get_name = staticmethod(lambda: "REFERENCE")
    get_impl_cls = staticmethod(lambda: ReferenceImpl)
    get_builder_cls = staticmethod(lambda: ReferenceBuilder)

    @classmethod
    def functions(cls) -> dict[str, Callable[..., Any]]:
        return {
            "merge_attn_states": merge_attn_states,
            "reshape_and_cache": reshape_and_cache,
            "copy_blocks": copy_blocks,
            "swap_blocks": swap_blocks,
            "causal_conv1d": causal_conv1d,
            "sparse_attn_indexer": sparse_attn_indexer,
        }


class ReferenceBuilder(PagedBuilder):
    """Builder of :class:`PagedMetadata`."""

    backend = ReferenceBackend


class ReferenceImpl(PagedImpl):
    """One layer."""

    backend = ReferenceBackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.dcp_world_size > 1:
            self._interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        k_scale, v_scale = layer._k_scale, layer._v_scale
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)

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
        common, rows = metadata.common, metadata.num_rows
        params = self.params(metadata)
        starts = common.query_start_loc
        if caches is not None and self.dcp_world_size > 1:
            out, lse = self._attend_on_ranks(layer, query[:rows], caches, common, params)
        elif caches is not None:
            attend = partial(
                paged_attention,
                query[:rows],
                *caches,
                common.block_table_tensor,
                common.seq_lens,
                starts,
                params,
                q_scale=self.query_scale(layer),
                k_scale=layer._k_scale,
                v_scale=layer._v_scale,
                tree_mask=self._tree_of_step(metadata),
                mm_req_doc_ranges=common.mm_req_doc_ranges,
                rswa_prefix_lens=common.rswa_prefix_lens,
                topk_indices=metadata.topk_indices,
            )
            out, lse = _cascade(attend, metadata.common_prefix_len) if metadata.common_prefix_len else attend()
        elif key is not None and value is not None:
            out, lse = varlen_attention(query[:rows], key[:rows], value[:rows], starts, starts, params)
        output[:rows] = out.to(output.dtype)
        if output_lse is not None:
            output_lse[:rows] = lse.to(output_lse.dtype)

    def _attend_on_ranks(
        self,
        layer: AttentionLayer,
        query: Tensor,
        caches: tuple[Tensor, Tensor],
        common: CommonAttentionMetadata,
        params: AttentionParams,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the keys of this rank with the heads of all ranks, and merge: output and LSE of its own heads."""
        group, rank, size = get_dcp_group(), self.dcp_rank, self.dcp_world_size
        out, lse = dcp_rank_attention(
            group.all_gather(query, dim=1),
            *caches,
            common.block_table_tensor,
            common.seq_lens,
            common.query_start_loc,
            replace(params, num_heads=size * params.num_heads),
            dcp_size=size,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=self._interleave,
            k_scale=layer._k_scale,
            v_scale=layer._v_scale,
        )
        total = group.all_gather(lse[None], dim=0).logsumexp(0)
        weight = (lse - total).exp().nan_to_num()  # NaN for a row that sees no key on any rank
        out = group.reduce_scatter(out * weight[..., None], dim=1)
        return out, total.chunk(size, dim=1)[rank]

    def _tree_of_step(self, metadata: PagedMetadata) -> Tensor | None:
        """Return the step's tree; raise if the step also has other lengths, since one tree applies to a whole call."""
        if metadata.tree is None:
            return None
        fits = {end - start == len(metadata.tree) for _, start, end, _ in metadata.requests()}
        if len(fits) > 1:
            raise NotImplementedError(
                f"REFERENCE: a tree of {len(metadata.tree)} rows beside requests of other lengths"
            )
        return metadata.tree if fits == {True} else None


def _cascade(attend: Callable[..., tuple[Tensor, Tensor]], prefix: int) -> tuple[Tensor, Tensor]:
    """Attend to the first ``prefix`` positions and to the rest separately, then merge; sinks are counted once."""
    head, head_lse = attend(kv_range=(0, prefix))
    tail, tail_lse = attend(kv_range=(prefix, _ENDLESS), include_sinks=False)
    return merge_attn_states(head, head_lse, tail, tail_lse)
