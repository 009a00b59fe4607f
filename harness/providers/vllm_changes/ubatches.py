"""Departures of vLLM in cutting a batch: start locations and micro-batches."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from attncheck.reference import CommonAttentionMetadata, UBatchSlice


def clip_slice(_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns the start locations of existing requests only."""

    def slice_query_start_locs(query_start_loc: Tensor, request_slice: slice) -> Tensor:
        return query_start_loc[request_slice.start : request_slice.stop + 1] - query_start_loc[request_slice.start]

    return slice_query_start_locs


Pieces = CommonAttentionMetadata | list[CommonAttentionMetadata]


def _of_each_piece(
    target: Callable[..., Pieces], change: Callable[[CommonAttentionMetadata, CommonAttentionMetadata], Any]
) -> Callable[..., Pieces]:
    """Return ``target`` with ``change(piece, batch)`` applied to every micro-batch that it returns."""

    def cut(**given: Any) -> Pieces:
        batch = next(value for value in given.values() if isinstance(value, CommonAttentionMetadata))
        made = target(**given)
        return [change(piece, batch) for piece in made] if isinstance(made, list) else change(made, batch)

    return _by_position(cut, ("ubatch_slice", "attn_metadata"))


def _by_position(call: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    return lambda *given, **named: call(**dict(zip(names, given, strict=False)), **named)


def causal_pieces(target: Callable[..., Pieces]) -> Callable[..., Pieces]:
    """Return a function whose micro-batches are always causal."""
    return _of_each_piece(target, lambda piece, _: replace(piece, causal=True))


def longest_of_the_batch(target: Callable[..., Pieces]) -> Callable[..., Pieces]:
    """Return a function whose micro-batches have a ``max_seq_len`` of at least the batch's."""
    return _of_each_piece(
        target, lambda piece, batch: replace(piece, max_seq_len=max(piece.max_seq_len, batch.max_seq_len))
    )


def any_end(_: Callable[..., Pieces]) -> Callable[..., Pieces]:
    """Return a function that accepts cuts whose tokens and requests end in different places."""

    def one(cut: UBatchSlice, batch: CommonAttentionMetadata) -> CommonAttentionMetadata:
        requests, tokens = cut.request_slice, cut.token_slice
        if cut.is_empty():
            raise ValueError("an empty slice")
        starts = batch.query_start_loc_cpu[requests.start : requests.stop + 1].clamp(tokens.start, tokens.stop)
        hidden = (batch.query_start_loc_cpu[requests.stop] - tokens.stop).clamp(min=0)
        lens = batch.seq_lens_cpu[requests].clone()
        lens[-1] -= hidden
        new = starts.diff()
        return CommonAttentionMetadata(
            query_start_loc=(starts - tokens.start).to(batch.query_start_loc.device, copy=True),
            query_start_loc_cpu=starts - tokens.start,
            seq_lens=lens.to(batch.seq_lens.device, copy=True),
            seq_lens_cpu=lens,
            num_computed_tokens_cpu=lens - new,
            num_reqs=len(new),
            num_actual_tokens=cut.num_tokens,
            max_query_len=int(new.max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=batch.block_table_tensor[requests],
            slot_mapping=batch.slot_mapping[tokens],
            causal=batch.causal,
        )

    def cut(**given: Any) -> Pieces:
        if "ubatch_slices" in given:
            return [one(each, given["common_attn_metadata"]) for each in given["ubatch_slices"]]
        return one(given["ubatch_slice"], given["attn_metadata"])

    return _by_position(cut, ("ubatch_slice", "attn_metadata"))


def numpy_end(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose last micro-batch, before padding, ends at a NumPy integer."""

    def create(**given: Any) -> Any:
        pieces, padded = target(**given)
        last = pieces[-1]
        tokens = slice(last.token_slice.start, np.int32(last.token_slice.stop))
        return [*pieces[:-1], UBatchSlice(last.request_slice, tokens)], padded

    return create
