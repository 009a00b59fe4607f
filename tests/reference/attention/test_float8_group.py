"""Codes with a scale for every group, and codes made of an output."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import AttentionParams, dequantize_fp8, quantize_fp8, quantize_fp8_group

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {E4M3: 448.0, E5M2: 57344.0}
LEAST_NORMAL = {E4M3: 2.0**-6, E5M2: 2.0**-14}
dtypes = st.sampled_from((E4M3, E5M2))
many = settings(max_examples=40, deadline=None)


def draw(*shape, seed=0, gain=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * gain


def back(codes, scales):
    return dequantize_fp8(codes, scales.repeat_interleave(codes.shape[1] // scales.shape[1], dim=1))


def same_codes(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@many
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99), dtypes)
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


@many
@given(st.integers(1, 9), st.integers(0, 99), st.floats(1e-6, 1e6), dtypes)
def test_the_largest_gets_the_largest_code_and_the_rest_half_a_step(group, seed, gain, dtype):
    x = draw(3, 2 * group, seed=seed, gain=gain)
    codes, scales = quantize_fp8_group(x, group, dtype=dtype)
    assert (codes.float().view(3, 2, group).abs().amax(-1) == LIMITS[dtype]).all()
    quotient = (x.double() / scales.double().repeat_interleave(group, dim=1)).abs()
    mantissa_bits = 3 if dtype == E4M3 else 2
    step = torch.exp2(quotient.clamp(min=LEAST_NORMAL[dtype]).log2().floor() - mantissa_bits)
    error = (codes.double().abs() - quotient).abs()
    assert (error <= step / 2 * (1 + 1e-4)).all()


@many
@given(st.integers(0, 99), st.integers(-20, 20), dtypes)
def test_powers_of_two_move_into_the_scale(seed, exponent, dtype):
    x = draw(2, 12, seed=seed)
    codes, scales = quantize_fp8_group(x, 4, dtype=dtype)
    scaled, wider = quantize_fp8_group(x * 2.0**exponent, 4, dtype=dtype)
    assert same_codes(scaled, codes)
    assert torch.equal(wider, scales * 2.0**exponent)
    again, same = quantize_fp8_group(back(codes, scales), 4, dtype=dtype)
    assert torch.allclose(back(again, same), back(codes, scales), rtol=1e-6, atol=0)


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


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"x": torch.zeros(4, 2, 2)}, "x.shape"),
        ({"x": torch.zeros(4, 4, dtype=torch.int32)}, "x.dtype"),
        ({"x": torch.zeros(4, 4).to(E4M3)}, "x.dtype"),
        ({"group": 3}, "group"),
        ({"group": 0}, "group"),
        ({"group": 2.0}, "group"),
        ({"dtype": torch.float16}, "dtype"),
    ],
)
def test_refusals(change, argument):
    sound = {"x": torch.zeros(4, 4), "group": 2}
    quantize_fp8_group(**sound)
    with pytest.raises(ReferenceArgumentError) as refusal:
        quantize_fp8_group(**{**sound, **change})
    assert refusal.value.argument == argument


@pytest.fixture(scope="module")
def output(make_batch):
    """Attention's output, with values enough; rows of no request are zero."""
    layer = AttentionParams(4, 2, 8)
    out, _ = make_batch((20, 9), (37, 9), layer).attend(layer)
    return out


@many
@given(scale=st.floats(1e-3, 10), dtype=dtypes)
def test_a_doubled_output_scale_halves_the_codes(output, scale, dtype):
    """Wherever neither saturates nor becomes subnormal; a code is judged by its value."""
    scale = float(torch.tensor(scale))
    codes, halves = (quantize_fp8(output, s, dtype).float() for s in (scale, 2 * scale))
    normal = (codes.abs() < LIMITS[dtype]) & (halves.abs() > LEAST_NORMAL[dtype])
    assert torch.equal(halves[normal], codes[normal] / 2)
    assert not codes[-2:].any()


@many
@given(scale=st.floats(1e-3, 10), width=st.sampled_from((torch.bfloat16, torch.float16)), dtype=dtypes)
def test_quantised_after_the_fact_is_within_a_step_of_fused(output, scale, width, dtype):
    """A fused kernel quantises what it has summed, another one what it has stored in 16 bits."""
    fused = quantize_fp8(output, scale, dtype).view(torch.uint8).int()
    after = quantize_fp8(output.to(width), scale, dtype).view(torch.uint8).int()
    assert ((fused - after).abs() <= 1).all()


def test_the_scale_divides(output):
    scale = output.abs().max().item() / 300
    codes = quantize_fp8(output, scale).float()
    assert codes.abs().max() == pytest.approx(300, rel=0.07)
    assert torch.allclose(dequantize_fp8(quantize_fp8(output, scale), scale), output, rtol=1 / 15, atol=scale / 400)
