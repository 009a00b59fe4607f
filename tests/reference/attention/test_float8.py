"""Float8 codes, with one scale or a scale for every group, and what their scales do to attention."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import make_batch, same_state

from attncheck.reference import AttentionParams, dequantize_fp8, quantize_fp8, quantize_fp8_group

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = AttentionParams(4, 2, 3, head_size_v=2)
MODIFIED = replace(
    PLAIN, window=(5, 0), logits_soft_cap=2.0, alibi_slopes=(0.5, 0.06, 0.25, 0.125), sinks=(1.0, 0.5, -1.0, 2.0)
)


def every_code(dtype):
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def value_of_code(code, exponent_bits, bias, has_inf):
    """A float8 number read from its bits, by its definition; nothing of torch in it."""
    mantissa_bits = 7 - exponent_bits
    sign, exponent, mantissa = code >> 7, (code >> mantissa_bits) % 2**exponent_bits, code % 2**mantissa_bits
    full = 2**exponent_bits - 1
    if has_inf and exponent == full:
        value = math.nan if mantissa else math.inf
    elif not has_inf and exponent == full and mantissa == 2**mantissa_bits - 1:
        value = math.nan
    elif exponent == 0:
        value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
    else:
        value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return -value if sign else value


FORMATS = {E4M3: (4, 7, False), E5M2: (5, 15, True)}


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_values_are_code_times_scale(dtype):
    values = dequantize_fp8(every_code(dtype), 0.3)
    for code, value in enumerate(values.tolist()):
        want = value_of_code(code, *FORMATS[dtype]) * 0.3
        assert value == want or (math.isnan(value) and math.isnan(want))


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_codes_are_the_nearest_even_ones(dtype):
    """Every number between two neighbours, at the tie and on both sides of it."""
    exact = sorted((value_of_code(c, *FORMATS[dtype]), c) for c in range(128))
    exact = [(v, c) for v, c in exact if math.isfinite(v)]
    for (low, low_code), (high, high_code) in pairwise(exact):
        tie = (low + high) / 2
        even = low_code if low_code % 2 == 0 else high_code
        nudge = (high - low) / 64
        codes = quantize_fp8(torch.tensor([low, tie - nudge, tie, tie + nudge, high]), 1.0, dtype).view(torch.uint8)
        assert codes.tolist() == [low_code, low_code, even, high_code, high_code]
        negative = quantize_fp8(torch.tensor([-tie - nudge, -tie]), 1.0, dtype).view(torch.uint8)
        assert negative.tolist() == [128 + high_code, 128 + even]


@pytest.mark.parametrize(("dtype", "limit"), [(E4M3, 448.0), (E5M2, 57344.0)], ids=str)
def test_saturates_and_keeps_nan(dtype, limit):
    x = torch.tensor([limit, limit * 1.01, limit * 2, 1e30, math.inf, -math.inf, -1e30, math.nan])
    values = quantize_fp8(x * 0.5, 0.5, dtype).double()
    assert values[:-1].tolist() == [limit] * 5 + [-limit] * 2
    assert values[-1].isnan()


def test_scale_divides_and_does_so_in_float32():
    """Beside the ties a reciprocal, or float64, gives the neighbouring code."""
    values = every_code(E4M3)[:126].double()
    ties = ((values[:-1] + values[1:]) / 2 * 0.3).float()
    codes = quantize_fp8(ties, 0.3).view(torch.uint8)
    quotients = ties.numpy() / np.float32(0.3)
    assert codes.tolist() == torch.from_numpy(quotients).to(E4M3).view(torch.uint8).tolist()
    for other in (ties * (1 / torch.tensor(0.3)), ties.double() / 0.3):
        assert other.to(E4M3).view(torch.uint8).tolist() != codes.tolist()


def test_a_python_scale_is_used_exactly():
    assert dequantize_fp8(torch.tensor([3.0]).to(E4M3), 0.1).item() == 3.0 * 0.1
    assert dequantize_fp8(torch.tensor([3.0]).to(E4M3), torch.tensor(0.1)).item() != 3.0 * 0.1


formats = st.sampled_from((E4M3, E5M2))
scales = st.floats(1e-3, 1e3)
per_head = st.lists(st.floats(0.01, 4), min_size=2, max_size=2).map(lambda x: torch.tensor(x, dtype=torch.float64))
layers = st.sampled_from((PLAIN, replace(PLAIN, causal=False, scale=0.7), MODIFIED))


@pytest.fixture(scope="module")
def plain():
    """Values of about one in float64, NaN where nothing is owned."""
    return make_batch((3, 1, 6), (13, 9, 6), PLAIN)


@settings(max_examples=30)
@given(layer=layers, q_dtype=formats, k_dtype=formats, v_dtype=formats, q=scales, k=scales | per_head, v=scales)
def test_codes_are_their_values(plain, layer, q_dtype, k_dtype, v_dtype, q, k, v):
    """One scale for a tensor, as a number or as one element of several dimensions, or one scale per KV head."""
    batch = replace(
        plain,
        query=plain.query.to(q_dtype),
        key_cache=plain.key_cache.to(k_dtype),
        value_cache=plain.value_cache.to(v_dtype),
    )
    values = replace(
        batch,
        query=batch.query.double() * q,
        key_cache=batch.key_cache.double() * (k[:, None] if isinstance(k, torch.Tensor) else k),
        value_cache=batch.value_cache.double() * v,
    )
    want = values.attend(layer)
    same_state(batch.attend(layer, q_scale=q, k_scale=k, v_scale=v), want, tolerance=0)
    for dimensions in (1, 2, 3):
        one = torch.full((1,) * dimensions, v, dtype=torch.float64)
        same_state(batch.attend(layer, q_scale=q, k_scale=k, v_scale=one), want, tolerance=0)
    same_state(values.attend(layer, q_scale=q, k_scale=k, v_scale=v), want, tolerance=0)  # ignored: no codes


def test_scales_per_query_head_and_per_token_and_head(plain):
    generator = torch.Generator().manual_seed(6)
    shape = plain.key_cache.shape[:3]
    k, v = (torch.rand(shape, generator=generator, dtype=torch.float64) * 0.3 + 0.01 for _ in range(2))
    unowned = plain.key_cache.isnan().any(dim=-1)
    k[unowned], v[unowned] = math.nan, math.nan
    q = torch.tensor((0.5, 3.0, 1.1, 0.3), dtype=torch.float64)
    batch = replace(
        plain,
        query=plain.query.to(E4M3),
        key_cache=plain.key_cache.to(E4M3),
        value_cache=plain.value_cache.to(E5M2),
    )
    values = replace(
        batch,
        query=batch.query.double() * q[:, None],
        key_cache=batch.key_cache.double() * k[..., None],
        value_cache=batch.value_cache.double() * v[..., None],
    )
    same_state(batch.attend(MODIFIED, q_scale=q, k_scale=k, v_scale=v), values.attend(MODIFIED))


LIMITS = {E4M3: 448.0, E5M2: 57344.0}


def draw(*shape, seed=0, gain=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * gain


def same_codes(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@settings(max_examples=30)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), formats)
def test_each_group_by_itself(rows, groups, group, seed, dtype):
    x = draw(rows, groups * group, seed=seed, gain=30.0)
    codes, scales = quantize_fp8_group(x, group, dtype=dtype)
    assert (codes.dtype, codes.shape) == (dtype, x.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (rows, groups))
    for t in range(rows):
        for g in range(groups):
            part = x[t, g * group : (g + 1) * group]
            scale = max(abs(value) for value in part.tolist()) / LIMITS[dtype]
            assert math.isclose(scales[t, g].item(), scale, rel_tol=1e-6)
            assert same_codes(codes[t, g * group : (g + 1) * group], quantize_fp8(part, scales[t, g].item(), dtype))


def test_zeros_and_what_is_too_small_have_scale_one():
    x = torch.tensor([[0.0, -0.0, 1e-44, 0.0, 3.0, 0.0]])
    codes, scales = quantize_fp8_group(x, 2)
    assert scales[0, :2].tolist() == [1.0, 1.0]
    assert codes.float()[0].tolist() == [0.0, 0.0, 0.0, 0.0, 448.0, 0.0]


def test_rubbish_stays_in_its_group():
    x = draw(3, 8)
    want, scales = quantize_fp8_group(x, 4)
    x[1, 5] = math.nan
    x[2, 0] = math.inf
    codes, poisoned = quantize_fp8_group(x, 4)
    clean = torch.tensor([[True, True], [True, False], [False, True]])
    assert torch.equal(poisoned[clean], scales[clean])
    assert torch.equal(codes.float()[clean.repeat_interleave(4, 1)], want.float()[clean.repeat_interleave(4, 1)])
    assert not poisoned[~clean].isfinite().any()


def test_any_dtype_and_strides():
    x = draw(8, 5).to(torch.bfloat16)
    codes, scales = quantize_fp8_group(x.T, 4)
    want, same = quantize_fp8_group(x.T.contiguous().double(), 4)
    assert same_codes(codes, want)
    assert torch.equal(scales, same)
    assert quantize_fp8_group(x[:, :0], 4)[1].shape == (8, 0)
