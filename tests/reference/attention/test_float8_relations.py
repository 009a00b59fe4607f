"""What a scale may and may not change, for any layer, scale and format."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.reference import AttentionParams, dequantize_fp8, quantize_fp8, reshape_and_cache

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = AttentionParams(4, 2, 3, head_size_v=2)
MODIFIED = replace(
    PLAIN, window=(5, 0), logits_soft_cap=2.0, alibi_slopes=(0.5, 0.06, 0.25, 0.125), sinks=(1.0, 0.5, -1.0, 2.0)
)
BITS = {E4M3: (3, -6), E5M2: (2, -14)}

many = settings(max_examples=30, deadline=None)
layers = st.sampled_from((PLAIN, replace(PLAIN, causal=False, scale=0.7), MODIFIED))
formats = st.sampled_from((E4M3, E5M2))
scales = st.floats(1e-3, 1e3)
per_head = st.lists(st.floats(0.01, 4), min_size=2, max_size=2).map(lambda x: torch.tensor(x, dtype=torch.float64))


@pytest.fixture(scope="module")
def plain(make_batch):
    """Values of about one in float64, NaN where nothing is owned."""
    return make_batch((3, 1, 6), (13, 9, 6), PLAIN)


def coded(batch, k_dtype, v_dtype):
    return replace(batch, key_cache=batch.key_cache.to(k_dtype), value_cache=batch.value_cache.to(v_dtype))


def values(batch, k_scale, v_scale, q_scale=None):
    k_scale, v_scale = (s[:, None] if isinstance(s, torch.Tensor) else s for s in (k_scale, v_scale))
    return replace(
        batch,
        query=batch.query if q_scale is None else dequantize_fp8(batch.query, q_scale),
        key_cache=dequantize_fp8(batch.key_cache, k_scale),
        value_cache=dequantize_fp8(batch.value_cache, v_scale),
    )


@many
@given(layer=layers, k_dtype=formats, v_dtype=formats, k=scales | per_head, v=scales | per_head)
def test_codes_are_their_values(plain, same_state, layer, k_dtype, v_dtype, k, v):
    batch = coded(plain, k_dtype, v_dtype)
    same_state(batch.attend(layer, k_scale=k, v_scale=v), values(batch, k, v).attend(layer), tolerance=0)


@many
@given(layer=layers, dtype=formats, q=scales)
def test_a_query_of_codes_is_its_values(plain, same_state, layer, dtype, q):
    batch = replace(coded(plain, dtype, dtype), query=plain.query.to(dtype))
    want = values(batch, 0.5, 2.0, q).attend(layer)
    same_state(batch.attend(layer, q_scale=q, k_scale=0.5, v_scale=2.0), want, tolerance=0)
    same_state(values(batch, 0.5, 2.0, q).attend(layer, q_scale=9.0), want, tolerance=0)


@many
@given(layer=layers, dtype=formats, k=scales, v=scales)
def test_a_doubled_scale_is_a_doubled_value(plain, same_state, layer, dtype, k, v):
    batch = coded(plain, dtype, dtype)
    doubled = replace(
        batch,
        key_cache=dequantize_fp8(batch.key_cache, k) * 2,
        value_cache=dequantize_fp8(batch.value_cache, v) * 2,
    )
    same_state(batch.attend(layer, k_scale=2 * k, v_scale=2 * v), doubled.attend(layer), tolerance=0)


@many
@given(layer=layers, dtype=formats, k=st.floats(1e-3, 2), v=scales)
def test_what_a_doubled_scale_does(plain, same_state, layer, dtype, k, v):
    """Of V: the output doubled, the lse as it was. Of K: as if the layer's own scale were doubled (no cap, no bias)."""
    batch = coded(plain, dtype, dtype)
    out, lse = batch.attend(layer, k_scale=k, v_scale=v)
    same_state(batch.attend(layer, k_scale=k, v_scale=2 * v), (2 * out, lse), tolerance=0)
    bare = replace(layer, logits_soft_cap=None, alibi_slopes=None, scale=layer.softmax_scale)
    steeper = replace(bare, scale=2 * bare.softmax_scale)
    same_state(batch.attend(bare, k_scale=2 * k, v_scale=v), batch.attend(steeper, k_scale=k, v_scale=v))


@many
@given(layer=layers, dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float64)), k=scales, v=scales)
def test_scales_mean_nothing_to_other_caches(plain, same_state, layer, dtype, k, v):
    batch = coded(plain, dtype, dtype)
    same_state(batch.attend(layer, k_scale=k, v_scale=v, q_scale=k), batch.attend(layer), tolerance=0)


@many
@given(dtype=formats, scale=scales, seed=st.integers(0, 99), share=st.floats(0, 1))
def test_a_written_value_is_read_back_within_half_a_step(dtype, scale, seed, share):
    """Through the cache, for anything up to the largest code times the scale."""
    limit = torch.finfo(dtype).max * scale
    x = (
        (torch.rand(7, 2, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 - 1)
        * limit
        * share
    )
    caches = [torch.zeros(2, 4, 2, 3).to(dtype) for _ in "kv"]
    reshape_and_cache(x, -x, *caches, torch.arange(7), k_scale=scale, v_scale=scale)
    mantissa_bits, least_exponent = BITS[dtype]
    step = torch.exp2((x / scale).abs().log2().floor().clamp(min=least_exponent) - mantissa_bits) * scale
    for cache, want in zip(caches, (x, -x), strict=True):
        read = dequantize_fp8(cache, scale).view(8, 2, 3)[:7]
        assert ((read - want).abs() <= step / 2 * (1 + 1e-5)).all()


@many
@given(dtype=formats, scale=scales)
def test_codes_over_a_power_of_two_are_moved_exactly(dtype, scale):
    """``quantize(2 x, 2 s)`` is ``quantize(x, s)``: the pair ``(codes, 2 s)`` means twice the values."""
    x = torch.randn(200, generator=torch.Generator().manual_seed(1)) * scale * 30
    codes, same = quantize_fp8(x, scale, dtype), quantize_fp8(2 * x, 2 * scale, dtype)
    assert torch.equal(codes.view(torch.uint8), same.view(torch.uint8))
    assert torch.equal(dequantize_fp8(codes, 2 * scale), 2 * dequantize_fp8(codes, scale))
