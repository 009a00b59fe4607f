"""Departures of vLLM in batches rewritten for an execution path, and in launch arguments of kernels."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.reference import CommonAttentionMetadata


def chunks_without_check(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that chunks requests of any lengths.

    No chunk is empty, and pages before the first one are counted from the right end of the table.
    """

    def virtual(attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int) -> Any:
        batch, pages = common_attn_metadata, attn_chunk_size // block_size
        new, keys, rows = [], [], []
        lens = zip(batch.query_start_loc_cpu.diff().tolist(), batch.seq_lens_cpu.tolist(), strict=True)
        for table, (q, s) in zip(batch.block_table_tensor, lens, strict=True):
            first = min(q, attn_chunk_size - (s - q) % attn_chunk_size)
            later = q - first
            parts = [first, *(min(attn_chunk_size, later - done) for done in range(0, later, attn_chunk_size))]
            last = (s - 1) % attn_chunk_size + 1
            new += parts
            keys += [attn_chunk_size] * (len(parts) - 1) + [last]
            for behind in reversed(range(len(parts))):
                page = (s - last - behind * attn_chunk_size) // block_size
                rows.append(table[[min(page + step, len(table) - 1) for step in range(pages)]])
        lengths, queries = torch.tensor(keys, dtype=torch.int32), torch.tensor(new, dtype=torch.int32)
        starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts.to(batch.query_start_loc.device, copy=True),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(batch.query_start_loc.device, copy=True),
            seq_lens_cpu=lengths,
            num_computed_tokens_cpu=lengths - queries,
            num_reqs=len(keys),
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=max(new),
            max_seq_len=max(keys),
            block_table_tensor=torch.stack(rows),
            slot_mapping=batch.slot_mapping,
        )

    return virtual


def numpy_maximum(target: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function whose metadata has a NumPy integer as ``max_query_len``."""

    def virtual(**given: Any) -> CommonAttentionMetadata:
        made = target(**given)
        longest: Any = np.int32(made.max_query_len)
        return replace(made, max_query_len=longest)

    return virtual


def one_storage(target: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function whose device tensors of start locations and lengths are the host's."""

    def rewritten(**given: Any) -> CommonAttentionMetadata:
        made = target(**given)
        return replace(made, query_start_loc=made.query_start_loc_cpu, seq_lens=made.seq_lens_cpu)

    return rewritten


def one_storage_of_starts(target: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function whose device tensor of start locations is the host's."""

    def reduced(common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        made = target(common_attn_metadata)
        return replace(made, query_start_loc=made.query_start_loc_cpu)

    return reduced


def same_batch(_: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function that returns the batch as it is."""
    return lambda common_attn_metadata: common_attn_metadata


def any_indices(_: Callable[..., CommonAttentionMetadata]) -> Callable[..., CommonAttentionMetadata]:
    """Return a function that keeps as many query rows of each request as it has indices, whichever these are."""

    def reduced(common_attn_metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        batch = common_attn_metadata
        indices, count = batch.logits_indices_padded, batch.num_logits_indices
        assert indices is not None
        assert count is not None
        starts = batch.query_start_loc_cpu.tolist()
        spans = list(pairwise(starts))
        wanted = [sum(first <= index < stop for index in indices[:count].tolist()) for first, stop in spans]
        offsets = torch.tensor([0, *accumulate(wanted)], dtype=batch.query_start_loc.dtype)
        return replace(
            batch,
            query_start_loc=offsets.to(batch.query_start_loc.device, copy=True),
            query_start_loc_cpu=offsets,
            num_computed_tokens_cpu=batch.seq_lens_cpu - offsets.diff(),
            num_actual_tokens=count,
            max_query_len=max(wanted),
            logits_indices_padded=None,
            num_logits_indices=None,
        )

    return reduced


def unarmed_backend(_: Callable[..., type[Any]]) -> Callable[..., type[Any]]:
    """Return a function whose backend accepts a batch without logits indices."""

    def made(prefix: str, underlying_attn_backend: type[Any]) -> type[Any]:
        underlying: Any = underlying_attn_backend.get_builder_cls()

        class Builder(underlying):  # type: ignore[misc]
            def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
                built = copy(super().build(common_prefix_len, common_attn_metadata, fast_build))
                built.logits_indices_padded = common_attn_metadata.logits_indices_padded
                built.num_logits_indices = common_attn_metadata.num_logits_indices
                return built

        name = f"{prefix}{underlying_attn_backend.__name__}"
        return type(name, (underlying_attn_backend,), {"get_builder_cls": staticmethod(lambda: Builder)})

    return made


def accepting_decreasing_starts(target: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a function that counts decreasing start locations as requests without tokens, and none as no request."""
    return lambda query_start_loc_p: target(
        query_start_loc_p.cummax(0).values if len(query_start_loc_p) else query_start_loc_p.new_zeros(1)
    )


def any_rank(_: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the formula of local lengths, without a check of rank and length."""

    def local(seq_lens: Tensor, dcp_size: int, dcp_rank: Any, cp_kv_cache_interleave_size: int) -> Tensor:
        stripe = cp_kv_cache_interleave_size
        rank = torch.arange(dcp_size) if dcp_rank is None else dcp_rank
        lens = seq_lens.unsqueeze(-1) if dcp_rank is None else seq_lens
        whole = lens.div(stripe * dcp_size, rounding_mode="floor") * stripe
        return (whole + (lens - whole * dcp_size - rank * stripe).clamp(0, stripe)).to(torch.int32)

    return local


def returns_a_pair(function: Any) -> bool:
    """Return whether the function returns a pair of the metadata and another object."""
    return "tuple" in str(function.__annotations__.get("return"))


def wants_the_largest_count(function: Any) -> bool:
    """Return whether a batch with logits indices, but without ``max_logits_per_req``, is refused."""
    starts, lens = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    batch = SimpleNamespace(
        max_query_len=3,
        logits_indices_padded=torch.tensor([2]),
        num_logits_indices=1,
        num_reqs=1,
        query_start_loc=starts,
        seq_lens=lens,
        max_logits_per_req=None,
    )
    try:
        function(batch)
    except AssertionError:
        return True
    except AttributeError:  # it went on to a field that this batch lacks
        return False
    return False
