import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from attncheck.backends.candidates.triton_unified.kernels.shared import (
    E4M3FN,
    E5M2,
    decode_codes,
    encode_codes,
    rounded,
)
from attncheck.backends.interpreter import is_interpreted
from attncheck.reference import quantize_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
BLOCK = 4096

formats = pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))


@triton.jit
def _decode(p_codes, p_out, n, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + at, decode_codes(tl.load(p_codes + at, mask=at < n, other=0), FORMAT), mask=at < n)


@triton.jit
def _encode(p_x, p_out, n, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + at, encode_codes(tl.load(p_x + at, mask=at < n, other=0.0), FORMAT), mask=at < n)


@triton.jit
def _round(p_x, p_out, n, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(p_x + at, mask=at < n, other=0.0)
    tl.store(p_out + at, rounded(x, p_out.dtype.element_ty, INTERPRETED), mask=at < n)


def all_codes(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype)


def encoded(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(len(x), dtype=torch.uint8, device=DEVICE)
    _encode[(triton.cdiv(len(x), BLOCK),)](x.to(DEVICE), out, len(x), FORMAT=FORMATS[dtype], BLOCK=BLOCK)
    return out


def neighbours(x: Tensor) -> Tensor:
    """Numbers, those just above and below them, and their negatives."""
    one_up, one_down = (torch.nextafter(x, torch.full_like(x, to)) for to in (torch.inf, -torch.inf))
    near = torch.cat([x, one_up, one_down])
    return torch.cat([near, -near])


@formats
def test_every_code_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    codes = all_codes(dtype)
    out = torch.empty(256, device=DEVICE)
    _decode[(1,)](codes.view(torch.uint8), out, 256, FORMAT=FORMATS[dtype], BLOCK=256)
    expected = codes.float()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    is_number = ~expected.isnan()  # a GPU may drop the sign of a NaN
    assert torch.equal(out[is_number].signbit(), expected[is_number].signbit())


@formats
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(dtype: torch.dtype) -> None:
    values = all_codes(dtype)[:128].float()
    values = values[values.isfinite()]
    ties = (values[1:] + values[:-1]) / 2  # exact: one more bit of mantissa
    x = neighbours(torch.cat([ties, values]).cpu())
    codes = encoded(x, dtype)
    assert torch.equal(codes, quantize_fp8(x, 1.0, dtype).view(torch.uint8).to(DEVICE))
    even = codes[: len(ties)]
    assert torch.equal(even, even & 0xFE)


@pytest.mark.parametrize(
    ("dtype", "greatest", "code"), [(torch.float8_e4m3fn, 448, 0x7E), (torch.float8_e5m2, 57344, 0x7B)]
)
def test_what_is_too_great_saturates_and_nan_stays_nan(dtype: torch.dtype, greatest: float, code: int) -> None:
    x = torch.tensor([greatest, greatest * 1.07, 1e30, torch.inf, -torch.inf, -1e30, torch.nan, 0.0, -0.0, 1e-40])
    codes = encoded(x, dtype).tolist()
    assert codes == [code, code, code, code, code | 0x80, code | 0x80, 0x7F, 0, 0x80, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_goes_to_the_nearest_and_ties_to_even(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**31), 2**31, 2**15 - 1, dtype=torch.int64).to(torch.int32)
    ties = torch.arange(0x3F800000, 0x3F900000, 0x1000, dtype=torch.int32)  # of bfloat16 and float16, and their codes
    x = torch.cat([bits, ties]).view(torch.float32)
    x = torch.cat([x, torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.4e38])]).to(DEVICE)
    out = torch.empty(len(x), dtype=dtype, device=DEVICE)
    _round[(triton.cdiv(len(x), BLOCK),)](x, out, len(x), INTERPRETED=is_interpreted(), BLOCK=BLOCK)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)
