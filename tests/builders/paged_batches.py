"""Layers and batches to compute on, and what must come out: a dense formulation that shares nothing with the tiled one.

Whatever a request does not own is NaN (or, in the block table, nonsense), in every test.
"""

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from attncheck.reference import AttentionParams, paged_attention

NONSENSE = (-7, 10**6)
TILES = st.fixed_dictionaries({"q_tile": st.integers(1, 9), "kv_tile": st.integers(1, 25)})
"""Small tiles, so that their edges fall anywhere."""


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

    def attend(self, params, **options):
        """Paged attention; no argument is modified, in any test."""
        arguments = (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
        )
        versions = [x._version for x in arguments]
        state = paged_attention(*arguments, params, **options)
        assert [x._version for x in arguments] == versions
        return state

    def rows(self, request):
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))

    def places(self):
        """(row, request, position) of every row of a request."""
        return [
            (row, r, len(self.keys[r]) - self.rows(r).stop + row)
            for r in range(len(self.keys))
            for row in range(self.rows(r).start, self.rows(r).stop)
        ]

    def only(self, requests):
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


def page_out(keys, values, block_size, seed=0, spare=3):
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


def make_batch(query_lens, seq_lens, params, *, block_size=4, seed=0, gain=1.0, dtype=torch.float64, unowned_rows=2):
    """Return a random ``PagedBatch``, with rows of no request behind."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    starts = torch.tensor([0, *query_lens]).cumsum(0)
    query = draw(int(starts[-1]) + unowned_rows, params.num_heads, params.head_size) * gain
    if unowned_rows:
        query[-unowned_rows:] = torch.nan
    keys = tuple(draw(n, params.num_kv_heads, params.head_size) for n in seq_lens)
    values = tuple(draw(n, params.num_kv_heads, params.value_head_size) for n in seq_lens)
    caches = page_out(keys, values, block_size, seed)
    return PagedBatch(query, *caches, torch.tensor(seq_lens, dtype=torch.int32), starts, keys, values)


@st.composite
def drawn_layers(draw, **fixed):
    """Layers: GQA, sizes, scale, and every modifier that is not fixed by name."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kv_heads = fixed.pop("num_kv_heads", kv_heads)
    heads = fixed.pop("num_heads", kv_heads * group)
    unbounded = st.just(-1)
    choices = {
        "head_size": st.sampled_from((3, 8, 1)),
        "head_size_v": st.sampled_from((None, 1, 5)),
        "scale": st.none() | st.floats(-2, 2),
        "causal": st.booleans(),
        "window": st.tuples(unbounded | st.integers(0, 9), unbounded | st.integers(0, 9)),
        "logits_soft_cap": st.none() | st.floats(0.25, 20),
        "alibi_slopes": st.none() | st.tuples(*[st.floats(-1, 1)] * heads),
        "alibi_sqrt": st.booleans(),
        "sinks": st.none() | st.tuples(*[st.floats(-3, 3) | st.just(-math.inf)] * heads),
        "attn_chunk_size": st.none() | st.integers(1, 9),
        "attn_chunk_lookback": st.integers(0, 2),
    }
    drawn = {name: draw(choice) for name, choice in choices.items() if name not in fixed}
    return AttentionParams(heads, kv_heads, **drawn, **fixed)


@st.composite
def drawn_batches(
    draw,
    params,
    *,
    context_lens=st.integers(0, 17),  # noqa: B008 (immutable)
    fitting=True,
    shared_pages=st.integers(0, 3),  # noqa: B008 (immutable)
    block_size=None,
):
    """Batches: any residues, empty rows, shuffled tables, shared first pages.

    ``fitting=False`` also draws requests with more rows than keys, and with none.
    """
    pairs = draw(st.lists(st.tuples(st.integers(0, 7), context_lens), min_size=1, max_size=4))
    pairs = [(q, q + c) for q, c in pairs]
    if not fitting:
        pairs = [(q, draw(st.sampled_from((s, s % 6, 0)))) for q, s in pairs]
    batch = make_batch(
        [q for q, _ in pairs],
        [s for _, s in pairs],
        params,
        block_size=block_size or draw(st.integers(1, 7)),
        seed=draw(st.integers(0, 10**6)),
        gain=draw(st.sampled_from((1.0, 4.0))),
        unowned_rows=draw(st.integers(0, 2)),
    )
    return _with_shared_pages(batch, draw(shared_pages))


def _with_shared_pages(batch, pages):
    """The first pages of request 0 are in the tables of all requests that are long enough; theirs become unowned."""
    size = batch.key_cache.shape[1]
    keys, values, table = list(batch.keys), list(batch.values), batch.block_table.clone()
    caches = [batch.key_cache.clone(), batch.value_cache.clone()]
    for r in range(1, len(keys)):
        count = min(pages, len(keys[0]) // size, len(keys[r]) // size)
        for cache in caches:
            cache[table[r, :count].long()] = torch.nan
        table[r, :count] = table[0, :count]
        keys[r] = torch.cat([keys[0][: count * size], keys[r][count * size :]])
        values[r] = torch.cat([values[0][: count * size], values[r][count * size :]])
    return replace(
        batch,
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        keys=tuple(keys),
        values=tuple(values),
    )


def seen_keys(params, q, num_keys):
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
        own = next(c for c in range(-abs(q) - 1, abs(q) + 1) if c * size <= q < (c + 1) * size)
        seen &= {j for c in range(own - params.attn_chunk_lookback, own + 1) for j in range(c * size, (c + 1) * size)}
    return seen


def dense(batch, params, *, include_sinks=True, kv_range=None, tree_mask=None, sees=None):
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
            if params.alibi_slopes is not None:
                back = [offset + i - j for j in range(len(keys))]
                steps = [math.sqrt(max(distance, 0)) for distance in back] if params.alibi_sqrt else back
                scores[:, i] -= torch.tensor(
                    [[s * step for step in steps] for s in params.alibi_slopes], dtype=torch.float64
                )
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


def same_state(state, expected, tolerance=1e-12):
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


def same_bits(state, expected):
    """The same bits, NaNs and signs of zeros included."""
    assert len(state) == len(expected)
    for a, b in zip(state, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.equal(*(x.reshape(-1).contiguous().view(torch.uint8) for x in (a, b)))
