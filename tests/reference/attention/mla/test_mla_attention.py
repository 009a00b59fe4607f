"""Latent attention against loops over rows, heads and keys; dtypes, strides, roundings, codes.

Whatever a request does not own is NaN (or, in the block table, nonsense), in every test.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attncheck.reference import (
    AttentionParams,
    MLAParams,
    Precision,
    dequantize_fp8,
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_latent_attention,
    paged_attention,
)

LAYER = MLAParams(3, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=2)
UNABSORBED = (mla_attention_naive, mla_attention_absorbed)
FORMS = {
    "naive": mla_attention_naive,
    "absorbed": mla_attention_absorbed,
    "chunked": partial(mla_attention_chunked, workspace=5),
}
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


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


def make_latent(
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


def latent_dense(
    batch: LatentBatch, params: MLAParams, kv_range: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
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


@st.composite
def questions(draw):
    """Layers of any sizes; one to four requests, with rows before the first key and without rows too."""
    nope, rope = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    layer = MLAParams(
        draw(st.integers(1, 4)),
        kv_lora_rank=draw(st.integers(1, 7)),
        qk_nope_head_dim=nope or int(not rope),
        qk_rope_head_dim=rope,
        v_head_dim=draw(st.integers(1, 5)),
        scale=draw(st.none() | st.floats(-2, 2)),
        causal=draw(st.booleans()),
    )
    count = draw(st.integers(1, 4))
    lens = [draw(st.lists(st.integers(0, top), min_size=count, max_size=count)) for top in (5, 13)]
    return make_latent(*lens, layer, block_size=draw(st.integers(1, 5)), seed=draw(st.integers(0, 99))), layer


tiles = st.fixed_dictionaries({"q_tile": st.integers(1, 6), "kv_tile": st.integers(1, 9)})
low, length = st.integers(0, 13), st.integers(0, 9) | st.just(10**9)
ranges = st.none() | st.tuples(low, length).map(lambda span: (span[0], sum(span)))


@settings(max_examples=40)
@given(question=questions(), span=ranges, workspace=st.integers(1, 15), data=st.data())
def test_every_form_agrees_with_the_loops(question, span, workspace, data, same_state):
    batch, layer = question
    for form in UNABSORBED:
        same_state(batch.attend(form, layer, kv_range=span, **data.draw(tiles)), latent_dense(batch, layer, span))
    chunked = batch.attend(mla_attention_chunked, layer, workspace=workspace, **data.draw(tiles))
    same_state(chunked, latent_dense(batch, layer))


@settings(max_examples=25)
@given(question=questions(), data=st.data())
def test_the_latent_kernel_is_paged_attention(question, data, same_state):
    """One KV head of L + E, the values a prefix of the keys, the scale of the unabsorbed form."""
    batch, layer = question
    latent, rope = layer.kv_lora_rank, layer.qk_rope_head_dim
    width = layer.qk_nope_head_dim + rope
    paged = AttentionParams(
        layer.num_heads,
        1,
        latent + rope,
        latent,
        scale=width**-0.5 if layer.scale is None else layer.scale,
        causal=layer.causal,
    )
    query = torch.cat([torch.einsum("thp,lhp->thl", batch.q_nope, batch.w_uk), batch.q_pe], dim=-1)
    keys = batch.kv_cache[:, :, None]
    tables = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    want = paged_attention(query, keys, keys[..., :latent], *tables, paged)
    state = batch.attend_latent(mla_latent_attention, layer, **data.draw(tiles))
    same_state(state, want)
    out = torch.einsum("thl,lhv->thv", state[0], batch.w_uv)
    same_state((out, state[1]), batch.attend(mla_attention_absorbed, layer))


@settings(max_examples=25)
@given(question=questions(), k_scale=st.floats(0.01, 3))
def test_float8_rows_have_one_scale(question, k_scale, same_state):
    """Keys and values are the codes times one scale; doubling codes' scale is exact; other caches ignore it."""
    batch, layer = question
    codes = (batch.kv_cache * 8).to(E4M3)
    coded, values = replace(batch, kv_cache=codes), replace(batch, kv_cache=dequantize_fp8(codes, k_scale))
    for form in UNABSORBED:
        want = values.attend(form, layer)
        same_state(coded.attend(form, layer, k_scale=k_scale), want, tolerance=0)
        same_state(coded.attend(form, layer, k_scale=torch.tensor([k_scale], dtype=torch.float64)), want, tolerance=0)
        twice = replace(batch, kv_cache=values.kv_cache * 2)
        same_state(coded.attend(form, layer, k_scale=2 * k_scale), twice.attend(form, layer), tolerance=0)
        same_state(values.attend(form, layer, k_scale=k_scale), want, tolerance=0)
    latent = coded.attend_latent(mla_latent_attention, layer, k_scale=k_scale)
    same_state(latent, values.attend_latent(mla_latent_attention, layer), tolerance=0)


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def test_any_dtypes_and_strides(form, same_state):
    batch = make_latent((3, 1), (9, 6), LAYER)
    fused = torch.cat([batch.q_nope, batch.q_pe], dim=-1).to(BF16)
    wide = torch.full((2, *batch.kv_cache.shape[:2], 13), math.nan, dtype=torch.float16)
    wide[1, ..., 2:12] = batch.kv_cache
    views = replace(
        batch,
        q_nope=fused[..., :5],
        q_pe=fused[..., 5:],
        kv_cache=wide[1, ..., 2:12],
        w_uk=batch.w_uk.float().permute(2, 1, 0).contiguous().permute(2, 1, 0),
        block_table=batch.block_table.int(),
        query_start_loc=batch.query_start_loc.int(),
        tokens=tuple(rows.half().double() for rows in batch.tokens),
    )
    want = replace(views, q_nope=views.q_nope.double(), q_pe=views.q_pe.double(), w_uk=views.w_uk.double())
    state = views.attend(form, LAYER)
    assert state[0].dtype == state[1].dtype == torch.float64
    same_state(state, latent_dense(want, LAYER))


def test_nothing_is_modified(form):
    batch = make_latent((3, 1), (9, 6), LAYER)
    before = {name: getattr(batch, name).clone() for name in ("q_nope", "q_pe", "kv_cache", "w_uk", "w_uv")}
    batch.attend(form, LAYER)
    for name, tensor in before.items():
        assert torch.equal(getattr(batch, name).nan_to_num(7.0), tensor.nan_to_num(7.0))


def test_a_kernel_rounds_what_it_keeps():
    """One token, whose softmax is 1: the value is rounded once projected, and the output is that value."""
    layer = MLAParams(1, kv_lora_rank=2, qk_nope_head_dim=1, qk_rope_head_dim=1, v_head_dim=1)
    cache, ones = torch.tensor([[[1.0, 2.0**-9, 3.0]]]), torch.ones(1, 1, 1)
    weights = (torch.ones(2, 1, 1), torch.ones(2, 1, 1))
    place = (torch.tensor([[0]]), torch.tensor([1]), torch.tensor([0, 1]))
    for form in (mla_attention_naive, mla_attention_absorbed):
        exact, lse = form(ones, ones, cache, *weights, *place, layer)
        assert exact.item() == 1 + 2.0**-9
        assert math.isclose(lse.item(), (1 + 2.0**-9 + 3) / math.sqrt(2))
        rounded, lowered = form(ones, ones, cache, *weights, *place, layer, precision=Precision.kernel(BF16))
        assert rounded.dtype == torch.float32
        assert rounded.item() == 1.0
        want = 4 / math.sqrt(2) if form is mla_attention_naive else lse.item()  # the latent query, 1 and 1, is exact
        assert math.isclose(lowered.item(), want, rel_tol=1e-6)


def test_projected_values_are_rounded():
    """Of three of equal weight, two are lifted from 1 + 2.5/512 to 1 + 4/512: the mean crosses 1 + 2/512."""
    layer = MLAParams(1, kv_lora_rank=1, qk_nope_head_dim=0, qk_rope_head_dim=1, v_head_dim=1)
    cache = torch.tensor([[[1 + 2.5 / 512, 0.0], [1 + 2.5 / 512, 0.0], [1.0, 0.0]]])
    weights = (torch.zeros(1, 1, 0), torch.ones(1, 1, 1))
    place = (torch.tensor([[0]]), torch.tensor([3]), torch.tensor([0, 1]))
    query = (torch.zeros(1, 1, 0), torch.zeros(1, 1, 1))
    out, _ = mla_attention_naive(*query, cache, *weights, *place, layer, precision=Precision.kernel(BF16))
    assert out.item() == 1 + 4 / 512
    out, _ = mla_attention_absorbed(*query, cache, *weights, *place, layer, precision=Precision.kernel(BF16))
    assert out.item() == 1.0


def test_the_latent_query_is_rounded():
    layer = MLAParams(1, kv_lora_rank=1, qk_nope_head_dim=2, qk_rope_head_dim=0, v_head_dim=1, scale=1.0)
    q_nope, nothing = torch.tensor([[[1.0, 2.0**-9]]]), torch.zeros(1, 1, 0)
    weights = (torch.ones(1, 1, 2), torch.ones(1, 1, 1))
    place = (torch.tensor([[0]]), torch.tensor([1]), torch.tensor([0, 1]))
    _, lse = mla_attention_absorbed(
        q_nope, nothing, torch.ones(1, 1, 1), *weights, *place, layer, precision=Precision.kernel(BF16)
    )
    assert lse.item() == 1.0
    _, lse = mla_attention_absorbed(q_nope, nothing, torch.ones(1, 1, 1), *weights, *place, layer)
    assert lse.item() == 1 + 2.0**-9
