"""Faults of decode context parallelism, added to a layer that merges as vLLM's FlashAttention does."""

import math
import os
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionLayer, get_current_vllm_config, get_dcp_group
from attncheck.backends.mutants.plain import (
    Base,
    PlainBackend,
    PlainImpl,
    State,
    _read,
    _scales,
    merge_attn_states,
    reshape_and_cache,
)
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference import get_dcp_local_seq_lens


class RanksImpl(PlainImpl):
    """One layer on a rank: the context is spread over the ranks, and the new rows attend to themselves.

    Outputs have the dtype of the query, also between the steps of the merge.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.interleave = get_current_vllm_config().parallel_config.cp_kv_cache_interleave_size

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
        if self.dcp_world_size == 1 or caches is None or key is None or value is None:
            super().attend(layer, query, key, value, caches, metadata, output, output_lse)
            return
        rows = metadata.num_rows
        context = self.of_context(layer, query[:rows], caches, metadata)
        new = self.of_new_rows(query[:rows], key[:rows], value[:rows], metadata)
        output[:rows] = merge_attn_states(*context, *new)[0].to(output.dtype)

    def local_lens(self, context_lens: Tensor) -> Tensor:
        """Return how many keys of each request's context this rank holds."""
        size, rank = self.dcp_world_size, self.dcp_rank
        return get_dcp_local_seq_lens(context_lens, size, rank, self.interleave)

    def of_context(
        self, layer: AttentionLayer, query: Tensor, caches: tuple[Tensor, Tensor], metadata: PagedMetadata
    ) -> State:
        """Return the state of this rank's heads over the context: each rank computes all heads over its keys."""
        common, starts = metadata.common, metadata.query_start_loc
        gathered = get_dcp_group().all_gather(query.contiguous(), dim=1)
        lens = self.local_lens(common.seq_lens - common.query_start_loc.diff())
        out = query.new_zeros(*gathered.shape[:2], self.head_size_v)
        lse = torch.full(gathered.shape[:2], -torch.inf, device=query.device)
        for request, local_len in enumerate(lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            places = torch.arange(local_len, device=query.device)
            if len(places) and rows.start < rows.stop:
                row = common.block_table_tensor[request]
                keys, values = (_read(*each, row, places) for each in zip(caches, _scales(layer), strict=True))
                scores = torch.einsum("qhd,kd->hqk", gathered[rows].float(), keys[:, 0]) * self.scale
                out[rows], lse[rows] = self.over_one_head(scores, values)
        return self.merged_over_ranks(out, lse)

    def over_one_head(self, scores: Tensor, values: Tensor) -> State:
        """Return the state of ``scores [H, rows, keys]`` over the values of the only KV head."""
        out = torch.einsum("hqk,kd->qhd", scores.softmax(-1), values[:, 0])
        return out, scores.logsumexp(-1).T

    def merged_over_ranks(self, out: Tensor, lse: Tensor) -> State:
        """Return the state of this rank's heads over the keys of all ranks."""
        total = self.total(get_dcp_group().all_gather(lse[None], dim=0))
        weight = self.weight(lse, total)
        weighted = (out * weight[..., None]).to(out.dtype)
        out = get_dcp_group().reduce_scatter(weighted, dim=1)
        return out, total.chunk(self.dcp_world_size, dim=1)[self.dcp_rank]

    def total(self, lses: Tensor) -> Tensor:
        """Return the LSE over all ranks of ``lses [ranks, rows, H]``."""
        return lses.logsumexp(0)

    def weight(self, lse: Tensor, total: Tensor) -> Tensor:
        """Return the share of this rank; 0 for a rank without keys."""
        return torch.where(lse.isinf(), 0.0, (lse - total).exp())

    def of_new_rows(self, query: Tensor, key: Tensor, value: Tensor, metadata: PagedMetadata) -> State:
        """Return the state of this rank's heads over the new keys."""
        starts = metadata.query_start_loc
        out = query.new_zeros(*query.shape[:2], self.head_size_v)
        lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
        for request in range(len(starts) - 1):
            rows = slice(starts[request], starts[request + 1])
            count = rows.stop - rows.start
            if count:
                scores = torch.einsum("qhd,kd->hqk", query[rows].float(), key[rows, 0].float()) * self.scale
                if metadata.common.causal:
                    scores = scores.masked_fill(torch.ones(count, count, device=query.device).triu(1) > 0, -torch.inf)
                out[rows], lse[rows] = self.over_one_head(scores, value[rows].float())
        return out, lse


class RanksBackend(Base):
    """A right backend on ranks. Each class below adds one fault to it."""

    features = PlainBackend.features | {"dcp"}
    Impl = RanksImpl


class InterleaveIgnored(RanksBackend):
    """Counts the keys of a rank as if the ranks took turns at single keys."""

    class Impl(RanksImpl):
        def local_lens(self, context_lens):
            return get_dcp_local_seq_lens(context_lens, self.dcp_world_size, self.dcp_rank, 1)


class LensOfNextRank(RanksBackend):
    """Counts the keys of the next rank."""

    class Impl(RanksImpl):
        def local_lens(self, context_lens):
            rank = (self.dcp_rank + 1) % self.dcp_world_size
            return get_dcp_local_seq_lens(context_lens, self.dcp_world_size, rank, self.interleave)


class LocalLensRoundedUp(RanksBackend):
    """Takes an equal share of the keys for each rank, rounded up."""

    class Impl(RanksImpl):
        def local_lens(self, context_lens):
            return (context_lens + self.dcp_world_size - 1) // self.dcp_world_size


class MergedInBase2(RanksBackend):
    """Merges natural LSEs with powers of 2."""

    class Impl(RanksImpl):
        def total(self, lses):
            return (lses * math.log(2)).logsumexp(0) / math.log(2)

        def weight(self, lse, total):
            return torch.where(lse.isinf(), 0.0, (lse - total).exp2())


class EmptyRankIsNaN(RanksBackend):
    """The output of a rank that holds no key of a request is 0 / 0, which a weight of 0 does not hide."""

    class Impl(RanksImpl):
        def merged_over_ranks(self, out, lse):
            return super().merged_over_ranks(out.masked_fill(lse.isinf()[..., None], torch.nan), lse)


class SummedWithoutWeights(RanksBackend):
    """Adds the outputs of the ranks without the weights of their LSEs."""

    class Impl(RanksImpl):
        def weight(self, lse, total):
            return torch.ones_like(lse)


class NotMerged(RanksBackend):
    """Each rank returns the attention to its own keys, without a collective for the outputs."""

    class Impl(RanksImpl):
        def merged_over_ranks(self, out, lse):
            heads = slice(self.dcp_rank * self.num_heads, (self.dcp_rank + 1) * self.num_heads)
            return out[:, heads], lse[:, heads]


class HeadsOfFirstRank(RanksBackend):
    """Every rank takes the heads of the first one."""

    class Impl(RanksImpl):
        def merged_over_ranks(self, out, lse):
            total = self.total(get_dcp_group().all_gather(lse[None], dim=0))
            out = get_dcp_group().all_reduce(out * self.weight(lse, total)[..., None])
            return out[:, : self.num_heads], total[:, : self.num_heads]


class WritesKeysOfOthers(RanksBackend):
    """Writes the keys of other ranks too, to slots counted from -1."""

    class Impl(RanksImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            slots = slot_mapping % (key_cache.shape[0] * key_cache.shape[1])
            k_scale, v_scale = _scales(layer)
            reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)


class OneRankSkipsTheContext(RanksBackend):
    """Only a rank that holds keys of the context calls the group."""

    class Impl(RanksImpl):
        def of_context(self, layer, query, caches, metadata):
            common = metadata.common
            if not bool(self.local_lens(common.seq_lens - common.query_start_loc.diff()).any()):
                empty = torch.full(query.shape[:2], -torch.inf)
                return torch.zeros(*query.shape[:2], self.head_size_v), empty
            return super().of_context(layer, query, caches, metadata)


class OneRankDies(RanksBackend):
    """The last rank ends its process."""

    class Impl(RanksImpl):
        def of_context(self, layer, query, caches, metadata):
            if self.dcp_rank == self.dcp_world_size - 1:
                os.abort()
            return super().of_context(layer, query, caches, metadata)
