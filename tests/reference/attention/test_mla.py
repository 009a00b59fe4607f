"""Latent attention against dense attention over projected heads; dtypes, strides, roundings, codes; its cache.

Whatever a request does not own is NaN (or, in the block table, nonsense), in every test.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import dense, page_out, same_state
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
    mla_write_cache,
    quantize_fp8,
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

    def attend(self, function, params, **options):
        """No argument is modified, in any test."""
        arguments = list(vars(self).values())[:8]
        versions = [x._version for x in arguments]
        state = function(*arguments, params, **options)
        assert [x._version for x in arguments] == versions
        return state

    def attend_latent(self, params, **options):
        """The decode kernel on queries projected here."""
        q_latent = torch.einsum("thp,lhp->thl", self.q_nope, self.w_uk)
        tables = (self.block_table, self.seq_lens, self.query_start_loc)
        return mla_latent_attention(q_latent, self.q_pe, self.kv_cache, *tables, params, **options)

    def rows(self, request):
        return slice(int(self.query_start_loc[request]), int(self.query_start_loc[request + 1]))


def make_latent(query_lens, seq_lens, params, *, block_size=4, seed=0):
    """Random, with two rows of no request behind."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads, latent = params.num_heads, params.kv_lora_rank
    nope, rope, value = params.qk_nope_head_dim, params.qk_rope_head_dim, params.v_head_dim
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    queries = [draw(int(starts[-1]) + 2, heads, size) for size in (nope, rope)]
    for query in queries:
        query[-2:] = torch.nan
    weights = [draw(latent, heads, size) / math.sqrt(latent) for size in (nope, value)]
    tokens = tuple(draw(n, latent + rope) for n in seq_lens)
    pages = [rows[:, None] for rows in tokens]
    cache, _, table = page_out(pages, pages, block_size, seed)
    return LatentBatch(*queries, cache[:, :, 0], *weights, table, torch.tensor(seq_lens), starts, tokens)


def latent_dense(batch, params, kv_range=None):
    """Keys and values of each head are projected, then it is dense attention."""
    latent, rope = params.kv_lora_rank, params.qk_rope_head_dim
    keys, values = [], []
    for rows in batch.tokens:
        nope = torch.einsum("jl,lhp->jhp", rows[:, :latent], batch.w_uk)
        shared = rows[:, None, latent:].expand(-1, params.num_heads, rope)
        keys.append(torch.cat([nope, shared], dim=-1))
        values.append(torch.einsum("jl,lhv->jhv", rows[:, :latent], batch.w_uv))
    query = torch.cat([batch.q_nope, batch.q_pe], dim=-1)
    unpaged = SimpleNamespace(query=query, keys=keys, values=values, rows=batch.rows)
    width = params.qk_nope_head_dim + rope
    heads = AttentionParams(
        params.num_heads, params.num_heads, width, params.v_head_dim, scale=params.scale, causal=params.causal
    )
    return dense(unpaged, heads, kv_range=kv_range)


@st.composite
def questions(draw):
    """A layer of any sizes, and what makes a batch: requests with rows before the first key, and without rows too."""
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
    return layer, lens, {"block_size": draw(st.integers(1, 5)), "seed": draw(st.integers(0, 99))}


tiles = st.fixed_dictionaries({"q_tile": st.integers(1, 6), "kv_tile": st.integers(1, 9)})
low, length = st.integers(0, 13), st.integers(0, 9) | st.just(10**9)
ranges = st.none() | st.tuples(low, length).map(lambda span: (span[0], sum(span)))


@settings(max_examples=40)
@given(question=questions(), span=ranges, workspace=st.integers(1, 15), data=st.data())
def test_every_form_is_dense_attention(question, span, workspace, data):
    layer, lens, pages = question
    batch = make_latent(*lens, layer, **pages)
    want = latent_dense(batch, layer, span)
    for form in UNABSORBED:
        same_state(batch.attend(form, layer, kv_range=span, **data.draw(tiles)), want)
    out, lse = batch.attend_latent(layer, kv_range=span, **data.draw(tiles))
    same_state((torch.einsum("thl,lhv->thv", out, batch.w_uv), lse), want)
    chunked = batch.attend(mla_attention_chunked, layer, workspace=workspace, **data.draw(tiles))
    same_state(chunked, latent_dense(batch, layer))


@settings(max_examples=15)
@given(question=questions(), k_scale=st.floats(0.01, 3))
def test_float8_rows_have_one_scale(question, k_scale):
    """Keys and values are the codes times one scale, a number or a tensor of one element; other caches ignore it."""
    layer, lens, pages = question
    batch = make_latent(*lens, layer, **pages)
    codes = (batch.kv_cache * 8).to(E4M3)
    coded, values = replace(batch, kv_cache=codes), replace(batch, kv_cache=dequantize_fp8(codes, k_scale))
    for form in UNABSORBED:
        want = values.attend(form, layer)
        same_state(coded.attend(form, layer, k_scale=k_scale), want, tolerance=0)
        one = torch.full((1, 1), k_scale, dtype=torch.float64)
        same_state(coded.attend(form, layer, k_scale=one), want, tolerance=0)
        same_state(values.attend(form, layer, k_scale=k_scale), want, tolerance=0)
    latent = coded.attend_latent(layer, k_scale=k_scale)
    same_state(latent, values.attend_latent(layer), tolerance=0)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_any_dtypes_and_strides(form):
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


def rows(count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def pool(dtype, width=5, pattern=0x2B):
    """A cache with a byte pattern in every slot, in a wider allocation that must not be touched either."""
    element = torch.empty(0, dtype=dtype).element_size()
    return torch.full((6, 4, (width + 2) * element), pattern, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, E4M3, torch.float8_e5m2], ids=str)
def test_exactly_the_named_slots_hold_exactly_the_rows(dtype):
    allocation = pool(dtype)
    cache = allocation[..., 1:6]
    c, k_pe, slots = rows(6, 3), rows(7, 2, seed=1), [9, -1, 0, 23, -5]
    want = allocation.clone()
    for t, slot in enumerate(slots):
        if slot >= 0:
            row = torch.cat([c[t], k_pe[t]])
            row = quantize_fp8(row, 0.3, dtype) if dtype in (E4M3, torch.float8_e5m2) else row.to(dtype)
            want[slot // 4, slot % 4, 1:6] = row
    mla_write_cache(c, k_pe, cache, torch.tensor(slots), k_scale=0.3)
    assert torch.equal(allocation.view(torch.uint8), want.view(torch.uint8))


def test_a_tensor_scale_and_no_rope():
    for scale in (torch.tensor(0.3), torch.tensor([0.3])):
        cache = torch.zeros(2, 4, 3).to(E4M3)
        mla_write_cache(rows(1, 3), torch.zeros(1, 0), cache, torch.tensor([5]), k_scale=scale)
        want = quantize_fp8(rows(1, 3), 0.3)
        assert torch.equal(cache[1, 1].view(torch.uint8), want[0].view(torch.uint8))
