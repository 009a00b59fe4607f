"""Batches over a latent cache, and what must come out of them by loops over rows, heads and keys.

Whatever a request does not own is NaN (or, in the block table, nonsense), in every test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.reference import MLAParams


@dataclass(frozen=True)
class LatentBatch:
    """Ragged queries over a paged latent cache; ``tokens[r]`` are the request's cache rows in order, unpaged."""

    q_nope: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    w_uk: Tensor
    w_uv: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    tokens: tuple[Tensor, ...]

    def attend(self, function: Callable[..., Any], params: MLAParams, **options: Any) -> tuple[Tensor, Tensor]:
        tables = (self.block_table, self.seq_lens, self.query_start_loc)
        return function(self.q_nope, self.q_pe, self.kv_cache, self.w_uk, self.w_uv, *tables, params, **options)

    def attend_latent(self, function: Callable[..., Any], params: MLAParams, **options: Any) -> tuple[Tensor, Tensor]:
        """The decode kernel on queries projected here."""
        q_latent = torch.einsum("thp,lhp->thl", self.q_nope, self.w_uk)
        tables = (self.block_table, self.seq_lens, self.query_start_loc)
        return function(q_latent, self.q_pe, self.kv_cache, *tables, params, **options)

    def rows(self, request: int) -> slice:
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))


def page_out(tokens: Sequence[Tensor], block_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """(kv_cache, block_table) that hold the given rows at random places, NaN and nonsense everywhere else."""
    pages = [-(-len(rows) // block_size) for rows in tokens]
    blocks = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    cache = tokens[0].new_full((len(blocks), block_size, tokens[0].shape[1]), torch.nan)
    table = torch.full((len(tokens), max(pages) + 1), 10**6)
    for r, rows in enumerate(tokens):
        for page in range(pages[r]):
            table[r, page] = block = blocks.pop()
            part = rows[page * block_size : (page + 1) * block_size]
            cache[block, : len(part)] = part
    return cache, table


def _make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    params: MLAParams,
    *,
    block_size: int = 4,
    seed: int = 0,
    unowned_rows: int = 2,
) -> LatentBatch:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, latent = params.num_heads, params.kv_lora_rank
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    queries = [
        draw(int(starts[-1]) + unowned_rows, heads, n) for n in (params.qk_nope_head_dim, params.qk_rope_head_dim)
    ]
    for query in queries:
        query[int(starts[-1]) :] = torch.nan
    weights = [draw(latent, heads, size) / math.sqrt(latent) for size in (params.qk_nope_head_dim, params.v_head_dim)]
    tokens = tuple(draw(n, latent + params.qk_rope_head_dim) for n in seq_lens)
    cache, table = page_out(tokens, block_size, seed)
    return LatentBatch(*queries, cache, *weights, table, torch.tensor(seq_lens), starts, tokens)


def _dense(batch: LatentBatch, params: MLAParams, kv_range: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    heads, latent = params.num_heads, params.kv_lora_rank
    width = params.qk_nope_head_dim + params.qk_rope_head_dim
    scale = 1 / math.sqrt(width) if params.scale is None else params.scale
    out = torch.zeros(len(batch.q_nope), heads, params.v_head_dim, dtype=torch.float64)
    lse = torch.full((len(batch.q_nope), heads), -math.inf, dtype=torch.float64)
    for r, tokens in enumerate(batch.tokens):
        rows = range(len(batch.q_nope))[batch.rows(r)]
        for i, row in enumerate(rows):
            position = len(tokens) - len(rows) + i
            seen = [j for j in range(len(tokens)) if not params.causal or j <= position]
            if kv_range is not None:
                seen = [j for j in seen if kv_range[0] <= j < kv_range[1]]
            for h in range(heads):
                scores, values = [], []
                for j in seen:
                    c, k_pe = tokens[j, :latent], tokens[j, latent:]
                    key = torch.cat([c @ batch.w_uk[:, h], k_pe])
                    query = torch.cat([batch.q_nope[row, h], batch.q_pe[row, h]])
                    scores.append(scale * float(query @ key))
                    values.append(c @ batch.w_uv[:, h])
                if seen:
                    top = max(scores)
                    weights = [math.exp(score - top) for score in scores]
                    lse[row, h] = top + math.log(sum(weights))
                    out[row, h] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return out, lse


@pytest.fixture(scope="session")
def make_latent() -> Callable[..., LatentBatch]:
    """``(query_lens, seq_lens, params, ...) -> LatentBatch``, random, with two rows of no request behind."""
    return _make_batch


@pytest.fixture(scope="session")
def latent_dense() -> Callable[..., tuple[Tensor, Tensor]]:
    """``(batch, params, kv_range=None) -> (out, lse)`` by loops."""
    return _dense


@pytest.fixture(scope="session")
def repage_latent() -> Callable[..., LatentBatch]:
    """``(batch, block_size, seed) -> LatentBatch`` with the same tokens in other places."""

    def move(batch: LatentBatch, block_size: int, seed: int) -> LatentBatch:
        cache, table = page_out(batch.tokens, block_size, seed)
        return replace(batch, kv_cache=cache, block_table=table)

    return move
