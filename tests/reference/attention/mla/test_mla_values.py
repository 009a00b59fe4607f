"""Latent attention against loops over rows, heads and keys; dtypes, strides, roundings."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from attncheck.reference import (
    MLAParams,
    Precision,
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_latent_attention,
)

LAYER = MLAParams(3, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=2)
BATCHES = {
    "decode": ((1, 1, 1), (13, 4, 1)),
    "extend": ((3, 6, 0, 2), (11, 8, 9, 5)),
    "prefill": ((7, 1, 4), (7, 1, 4)),
    "rows before the first key": ((5, 3), (2, 0)),
}
FORMS = {
    "naive": mla_attention_naive,
    "absorbed": mla_attention_absorbed,
    "chunked": partial(mla_attention_chunked, workspace=3),
    "naive, small tiles": partial(mla_attention_naive, q_tile=2, kv_tile=3),
    "absorbed, small tiles": partial(mla_attention_absorbed, q_tile=2, kv_tile=3),
    "chunked, small tiles": partial(mla_attention_chunked, workspace=5, q_tile=2, kv_tile=3),
}
BF16 = torch.bfloat16


@pytest.fixture(params=BATCHES)
def batch(request, make_latent):
    return make_latent(*BATCHES[request.param], LAYER)


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.mark.parametrize(
    "layer", [LAYER, replace(LAYER, scale=0.9), replace(LAYER, causal=False)], ids=["default", "scale", "non-causal"]
)
def test_agrees_with_the_loops(batch, form, layer, latent_dense, same_state):
    same_state(batch.attend(form, layer), latent_dense(batch, layer))


def test_keys_of_a_range(make_latent, latent_dense, same_state):
    batch = make_latent(*BATCHES["extend"], LAYER)
    for span in ((0, 4), (3, 9), (8, 10**6), (5, 5)):
        want = latent_dense(batch, LAYER, span)
        for form in (mla_attention_naive, mla_attention_absorbed):
            same_state(batch.attend(form, LAYER, kv_range=span, kv_tile=2), want)


def test_the_latent_kernel_returns_weighted_latents(make_latent, same_state):
    """Its output by hand: one row, two tokens, one head, weights 1/4 and 3/4."""
    layer = MLAParams(1, kv_lora_rank=2, qk_nope_head_dim=2, qk_rope_head_dim=1, v_head_dim=1, scale=1.0)
    cache = torch.tensor([[[1.0, 10.0, 0.0], [2.0, 20.0, math.log(3)]]], dtype=torch.float64)
    out, lse = mla_latent_attention(
        torch.zeros(1, 1, 2),
        torch.ones(1, 1, 1),
        cache,
        torch.tensor([[0]]),
        torch.tensor([2]),
        torch.tensor([0, 1]),
        layer,
    )
    same_state((out, lse), (torch.tensor([[[1.75, 17.5]]]).double(), torch.tensor([[math.log(4)]]).double()), 1e-7)


def test_which_weight_is_which():
    """A key's up-projection changes scores only, a value's the output only; k_pe is behind c."""
    layer = MLAParams(1, kv_lora_rank=1, qk_nope_head_dim=1, qk_rope_head_dim=1, v_head_dim=1, scale=1.0)
    cache = torch.tensor([[[2.0, 0.5], [3.0, 0.25]]], dtype=torch.float64)
    place = (torch.tensor([[0]]), torch.tensor([2]), torch.tensor([0, 1]))
    w_uk, w_uv = torch.tensor([[[7.0]]]).double(), torch.tensor([[[100.0]]]).double()
    q_nope, q_pe = torch.tensor([[[0.125]]]).double(), torch.tensor([[[4.0]]]).double()
    scores = [0.125 * 7 * 2 + 4 * 0.5, 0.125 * 7 * 3 + 4 * 0.25]
    share = 1 / (1 + math.exp(scores[1] - scores[0]))
    for form in (mla_attention_naive, mla_attention_absorbed):
        out, lse = form(q_nope, q_pe, cache, w_uk, w_uv, *place, layer)
        assert math.isclose(out.item(), 200 * share + 300 * (1 - share))
        assert math.isclose(lse.item(), math.log(math.exp(scores[0]) + math.exp(scores[1])))


def test_any_dtypes_and_strides(form, make_latent, latent_dense, same_state):
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


def test_nothing_is_modified(form, make_latent):
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


def test_a_kernels_error_is_that_of_its_dtype(form, make_latent):
    batch = make_latent((3, 6), (11, 8), LAYER)
    low = replace(
        batch, **{name: getattr(batch, name).to(BF16) for name in ("q_nope", "q_pe", "kv_cache", "w_uk", "w_uv")}
    )
    truth, _ = low.attend(form, LAYER)
    out, _ = low.attend(form, LAYER, precision=Precision.kernel(BF16))
    assert torch.equal(out, out.to(BF16).float())
    error = (out - truth).norm() / truth.norm()
    assert 1e-4 < error < 2e-2
