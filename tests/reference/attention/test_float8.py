"""Float8 codes and what their scales do to attention."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from attncheck.reference import AttentionParams, dequantize_fp8, quantize_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PARAMS = AttentionParams(
    4, 2, 8, logits_soft_cap=3.0, alibi_slopes=(0.5, 0.06, 0.25, 0.125), sinks=(1.0, 0.5, -1.0, 2.0)
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


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_write_then_read_is_within_half_a_step(dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4000, generator=generator, dtype=torch.float64)
    scale = 0.037
    back = dequantize_fp8(quantize_fp8(x, scale, dtype), scale)
    exponent_bits, bias, _ = FORMATS[dtype]
    step = torch.exp2(torch.log2((x / scale).abs()).floor().clamp(min=1 - bias) - (7 - exponent_bits)) * scale
    assert ((back - x).abs() <= step / 2 * (1 + 1e-5)).all()


def test_scale_divides_in_float32_and_broadcasts():
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64)
    scale = torch.tensor([0.1, 0.7])
    codes = quantize_fp8(x, scale)
    want = (x.float() / scale).to(E4M3)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(dequantize_fp8(codes, scale, dtype=torch.float32), want.float() * scale)


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


@pytest.fixture
def batch(make_batch):
    """A batch whose caches are codes of either format, and whose queries are codes too."""
    plain = make_batch((3, 1, 6), (13, 22, 6), PARAMS)
    return replace(
        plain,
        query=plain.query.to(E4M3),
        key_cache=(plain.key_cache * 4).to(E4M3),
        value_cache=(plain.value_cache * 64).to(E5M2),
    )


def dequantised(batch, q_scale, k_scale, v_scale):
    return replace(
        batch,
        query=batch.query.double() * q_scale,
        key_cache=batch.key_cache.double() * k_scale,
        value_cache=batch.value_cache.double() * v_scale,
    )


def test_equals_attention_over_the_values(batch, same_state):
    scales = {"q_scale": 1.3, "k_scale": 0.21, "v_scale": 0.017}
    same_state(batch.attend(PARAMS, **scales), dequantised(batch, 1.3, 0.21, 0.017).attend(PARAMS), tolerance=0)
    for shape in ((), (1,), (1, 1, 1)):  # one element, in any number of dimensions
        tensors = {name: torch.full(shape, scale, dtype=torch.float64) for name, scale in scales.items()}
        same_state(batch.attend(PARAMS, **tensors), batch.attend(PARAMS, **scales), tolerance=0)


def test_scales_per_head(batch, same_state):
    q, k, v = (torch.tensor(x, dtype=torch.float64) for x in ((0.5, 3.0, 1.1, 0.3), (0.2, 0.9), (0.01, 0.07)))
    want = dequantised(batch, q[:, None], k[:, None], v[:, None]).attend(PARAMS)
    same_state(batch.attend(PARAMS, q_scale=q, k_scale=k, v_scale=v), want)
    tensor_only = batch.attend(PARAMS, q_scale=0.5, k_scale=0.2, v_scale=0.01)
    swapped = batch.attend(PARAMS, q_scale=q, k_scale=k.flip(0), v_scale=v)
    assert (tensor_only[0] - want[0]).abs().max() > 0.01
    assert (swapped[0] - want[0]).abs().max() > 0.01


def test_scales_per_token_and_head(batch, same_state):
    generator = torch.Generator().manual_seed(6)
    shape = batch.key_cache.shape[:3]
    k, v = (torch.rand(shape, generator=generator, dtype=torch.float64) * 0.3 + 0.01 for _ in range(2))
    unowned = batch.key_cache.double().isnan().any(dim=-1)
    k[unowned], v[unowned] = math.nan, math.nan
    want = dequantised(batch, 1.0, k[..., None], v[..., None]).attend(PARAMS)
    same_state(batch.attend(PARAMS, k_scale=k, v_scale=v), want)


def test_scales_act_on_float8_only(make_batch, same_state):
    plain = make_batch((3, 1), (13, 6), PARAMS)
    for dtype in (torch.bfloat16, torch.float64):
        batch = replace(
            plain,
            query=plain.query.to(dtype),
            key_cache=plain.key_cache.to(dtype),
            value_cache=plain.value_cache.to(dtype),
        )
        same_state(
            batch.attend(PARAMS, q_scale=2.5, k_scale=0.3, v_scale=torch.tensor([-9.0, 0.0])),
            batch.attend(PARAMS),
            tolerance=0,
        )


def test_doubling_a_scale(batch, same_state):
    plain = AttentionParams(4, 2, 8, scale=0.4)
    scales = {"q_scale": 0.7, "k_scale": 0.3, "v_scale": 0.02}
    out, lse = batch.attend(plain, **scales)
    same_state(batch.attend(plain, **{**scales, "v_scale": 0.04}), (2 * out, lse), tolerance=0)
    for name in ("q_scale", "k_scale"):
        doubled = batch.attend(plain, **{**scales, name: 2 * scales[name]})
        same_state(doubled, batch.attend(replace(plain, scale=0.8), **scales))


def test_codes_no_request_owns_are_without_effect(batch, same_state):
    want = batch.attend(PARAMS, k_scale=0.3)
    unowned = batch.key_cache.double().isnan()
    assert unowned.any()
    codes = batch.key_cache.view(torch.uint8).clone()
    codes[unowned] = 0xFF
    same_state(replace(batch, key_cache=codes.view(E4M3)).attend(PARAMS, k_scale=0.3), want, tolerance=0)
