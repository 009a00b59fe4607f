"""Batches to compute on, and what must come out: a dense formulation that shares nothing with the tiled one.

Whatever a request does not own is NaN (or, in the block table, nonsense), in every test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.reference import AttentionParams, paged_attention

NONSENSE = (-7, 10**6)


@dataclass(frozen=True)
class PagedBatch:
    """Ragged queries over a paged cache; ``keys[r]``, ``values[r]`` are the same tokens in order, unpaged."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def attend(self, params: AttentionParams, **options: Any) -> tuple[Tensor, Tensor]:
        tables = (self.block_table, self.seq_lens, self.query_start_loc)
        return paged_attention(self.query, self.key_cache, self.value_cache, *tables, params, **options)

    def rows(self, request: int) -> slice:
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))

    def only(self, requests: Sequence[int]) -> "PagedBatch":
        """The given requests, in the given order, over the same cache."""
        parts = [self.query[self.rows(r)] for r in requests]
        starts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
        chosen = torch.tensor(list(requests))
        return replace(
            self,
            query=torch.cat(parts),
            block_table=self.block_table[chosen],
            seq_lens=self.seq_lens[chosen],
            query_start_loc=starts,
            keys=tuple(self.keys[r] for r in requests),
            values=tuple(self.values[r] for r in requests),
        )


def page_out(
    keys: Sequence[Tensor], values: Sequence[Tensor], block_size: int, seed: int = 0, spare: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """(key_cache, value_cache, block_table) that hold the given tokens at random places, NaN everywhere else."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-len(k) // block_size) for k in keys]
    num_blocks = sum(pages) + spare
    free = torch.randperm(num_blocks, generator=generator).tolist()
    caches = [k.new_full((num_blocks, block_size, *k.shape[1:]), torch.nan) for k in (keys[0], values[0])]
    table = torch.tensor(NONSENSE, dtype=torch.int32).repeat(len(keys), (max(pages) + 2) // 2 + 1)
    for r, tokens in enumerate(zip(keys, values, strict=True)):
        for page in range(pages[r]):
            table[r, page] = block = free.pop()
            for cache, rows in zip(caches, tokens, strict=True):
                part = rows[page * block_size : (page + 1) * block_size]
                cache[block, : len(part)] = part
    return caches[0], caches[1], table


def _make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    params: AttentionParams,
    *,
    block_size: int = 4,
    seed: int = 0,
    gain: float = 1.0,
    dtype: torch.dtype = torch.float64,
    unowned_rows: int = 2,
) -> PagedBatch:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    starts = torch.tensor([0, *query_lens]).cumsum(0)
    query = draw(int(starts[-1]) + unowned_rows, params.num_heads, params.head_size) * gain
    if unowned_rows:
        query[-unowned_rows:] = torch.nan
    keys = tuple(draw(n, params.num_kv_heads, params.head_size) for n in seq_lens)
    values = tuple(draw(n, params.num_kv_heads, params.value_head_size) for n in seq_lens)
    caches = page_out(keys, values, block_size, seed)
    return PagedBatch(query, *caches, torch.tensor(seq_lens, dtype=torch.int32), starts, keys, values)


def seen_keys(params: AttentionParams, q: int, num_keys: int) -> set[int]:
    """The keys a row at position ``q`` sees, by striking out; nothing here is shared with ``visible``."""
    seen = set(range(num_keys))
    if params.causal:
        seen -= set(range(max(q + 1, 0), num_keys))
    left, right = params.window
    if left >= 0:
        seen = {j for j in seen if j >= q or len(range(j, q)) <= left}
    if right >= 0:
        seen = {j for j in seen if j <= q or len(range(q, j)) <= right}
    if params.attn_chunk_size is not None:
        size = params.attn_chunk_size
        own = next(c for c in range(-num_keys - 1000, num_keys + 1000) if c * size <= q < (c + 1) * size)
        seen &= {j for c in range(own - params.attn_chunk_lookback, own + 1) for j in range(c * size, (c + 1) * size)}
    return seen


def _dense(
    batch: PagedBatch,
    params: AttentionParams,
    *,
    include_sinks: bool = True,
    kv_range: tuple[int, int] | None = None,
    tree_mask: Tensor | None = None,
    sees: Callable[[int, int, int], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Whole score matrices in float64, K and V repeated a head, every element of the mask computed by itself.

    ``sees(request, q, j)`` replaces the layer's own rule.
    """
    size = params.head_size if params.head_size_v is None else params.head_size_v
    out = torch.zeros(len(batch.query), params.num_heads, size, dtype=torch.float64)
    lse = torch.full((len(batch.query), params.num_heads), -math.inf, dtype=torch.float64)
    for r, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        query = batch.query[batch.rows(r)].double()
        offset = len(keys) - len(query)
        group = params.num_heads // params.num_kv_heads
        k, v = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("ihd,jhd->hij", query, k)
        scores = scores * (1 / math.sqrt(params.head_size) if params.scale is None else params.scale)
        if params.logits_soft_cap:
            scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
        for i in range(len(query)):
            seen = seen_keys(params, offset + i, len(keys))
            if sees is not None:
                seen = {j for j in range(len(keys)) if sees(r, offset + i, j)}
            if kv_range is not None:
                seen = {j for j in seen if kv_range[0] <= j < kv_range[1]}
            if tree_mask is not None:
                seen -= {offset + node for node in range(len(query)) if not tree_mask[i, node]}
            for j in range(len(keys)) if params.alibi_slopes is not None else ():
                back = offset + i - j
                steps = (-math.sqrt(back) if back >= 0 else 0.0) if params.alibi_sqrt else -back
                scores[:, i, j] += torch.tensor([s * steps for s in params.alibi_slopes], dtype=torch.float64)
            scores[:, i, [j for j in range(len(keys)) if j not in seen]] = -math.inf
        if params.sinks is not None and include_sinks:
            sinks = torch.tensor(params.sinks, dtype=torch.float64)[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, sinks], dim=2)
            v = torch.cat([v, torch.zeros_like(v[:1] if len(v) else v.new_zeros(1, *v.shape[1:]))])
        if scores.shape[2] == 0:
            continue
        weights = torch.softmax(scores, dim=2).nan_to_num(0.0)
        out[batch.rows(r)] = torch.einsum("hij,jhd->ihd", weights, v)
        lse[batch.rows(r)] = torch.logsumexp(scores, dim=2).T
    return out, lse


def assert_state(state: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float = 1e-12) -> None:
    """Output and lse agree to ``tolerance``, relative to the greatest value of the row (lse: or 1)."""
    (out, lse), (want_out, want_lse) = state, expected
    assert out.shape == want_out.shape
    assert lse.shape == want_lse.shape
    assert not out.isnan().any()
    room = want_out.abs().amax(dim=-1, keepdim=True).clamp(min=1.0)
    assert ((out - want_out).abs() <= tolerance * room).all(), (out - want_out).abs().max()
    assert torch.equal(lse == -math.inf, want_lse == -math.inf)
    finite = want_lse != -math.inf
    error = (lse[finite] - want_lse[finite]).abs()
    assert (error <= tolerance * want_lse[finite].abs().clamp(min=1.0)).all(), error.max()


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., PagedBatch]:
    """``(query_lens, seq_lens, params, ...) -> PagedBatch``, random, with two rows of no request behind."""
    return _make_batch


@pytest.fixture(scope="session")
def dense() -> Callable[..., tuple[Tensor, Tensor]]:
    """``(batch, params) -> (out, lse)`` by the dense formulation."""
    return _dense


@pytest.fixture(scope="session")
def seen() -> Callable[[AttentionParams, int, int], set[int]]:
    """``(params, q, num_keys) -> the keys the row at q sees``."""
    return seen_keys


@pytest.fixture(scope="session")
def same_state() -> Callable[..., None]:
    """``(state, expected, tolerance)``: asserts that two ``(out, lse)`` agree."""
    return assert_state
