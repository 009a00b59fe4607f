"""Float8 tables: against torch's conversions where these can be trusted, and against numbers worked out by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from attncheck.harness.problem.storage import (
    alike,
    nearest_code,
    numbers_of,
    rounding_interval,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def f64(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_ties_go_to_even_and_what_is_beyond_saturates():
    x = f64(1.0625, 1.1875, -1.0625, 2.0**-10, 3 * 2.0**-10, 464.0, 1e9, float("-inf"))
    assert numbers_of(nearest_code(x, E4M3), E4M3).tolist() == [1.0, 1.25, -1.0, 0.0, 2.0**-8, 448.0, 448.0, -448.0]
    assert nearest_code(f64(float("nan")), E4M3).item() == 0x7F


@given(st.floats(-440.0, 440.0, width=32))
def test_rounding_is_torchs_within_the_range(x):
    for dtype in (E4M3, E5M2):
        expected = torch.tensor([x], dtype=torch.float32).to(dtype)
        assert numbers_of(nearest_code(f64(x), dtype), dtype).item() == expected.double().item()


def test_the_values_of_codes():
    codes = nearest_code(f64(0.0, 2.0**-9, 1.0, -1.0, 448.0, -448.0, float("nan")), E4M3)
    low, high = rounding_interval(codes, E4M3)
    assert low[:6].tolist() == [-(2.0**-10), 2.0**-10, 0.96875, -1.0625, 432.0, -torch.inf]
    assert high[:6].tolist() == [2.0**-10, 3 * 2.0**-10, 1.0625, -0.96875, torch.inf, -432.0]
    assert bool(torch.isnan(torch.stack([low[6], high[6]])).all())


@given(st.integers(0, 255), st.floats(0.0, 1.0))
def test_whatever_rounds_to_a_code_lies_in_its_interval(code, share):
    for dtype in (E4M3, E5M2):
        codes = torch.tensor([code], dtype=torch.uint8)
        low, high = rounding_interval(codes, dtype)
        if not bool(torch.isfinite(low + high)):
            continue
        inside = low + (high - low) * (0.01 + 0.98 * share)
        assert torch.equal(alike(nearest_code(inside, dtype), dtype), alike(codes, dtype))


def test_all_nans_are_alike_and_both_zeros():
    assert alike(torch.tensor([0x7F, 0xFF, 0x80, 0x00, 0x81], dtype=torch.uint8), E4M3).tolist() == [
        127,
        127,
        0,
        0,
        129,
    ]
    assert alike(torch.tensor([0x7D, 0xFE, 0x7C], dtype=torch.uint8), E5M2).tolist() == [127, 127, 0x7C]
