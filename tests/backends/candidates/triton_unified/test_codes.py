"""FP8 codes and rounded numbers, as the kernels read and write them, against torch's and the reference's."""

import pytest
import torch

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.reference import AttentionParams, quantize_fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
formats = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3fn", "e5m2"])


def all_codes(dtype):
    return torch.arange(256, dtype=torch.uint8, device=DEVICE).view(dtype)


def stored(x, dtype):
    """What the writer makes of float32 numbers in a cache of this dtype, whose rows have 256 numbers."""
    rows = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 1, 256).to(DEVICE)
    cache = torch.zeros(len(rows), 1, 1, 256, device=DEVICE).to(dtype)
    scale = torch.ones(1, device=DEVICE)
    slots = torch.arange(len(rows), device=DEVICE)
    reshape_and_cache(rows, rows, cache, cache.clone(), slots, k_scale=scale, v_scale=scale)
    return cache.flatten()[: len(x)]


@formats
def test_every_code_is_read_as_torch_reads_it(dtype):
    """A row sees a single key, so that the output is its value."""
    key, value = (torch.zeros(1, 16, 1, size, dtype=torch.uint8, device=DEVICE).view(dtype) for size in (16, 256))
    value[0, 0, 0] = all_codes(dtype)
    out = torch.zeros(1, 1, 256, device=DEVICE)
    one = torch.ones(1, device=DEVICE)
    block_table, seq_lens, starts = torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=DEVICE).split([1, 1, 2])
    unified_attention(
        torch.zeros(1, 1, 16, device=DEVICE),
        key,
        value,
        out,
        block_table=block_table[None],
        seq_lens=seq_lens,
        query_start_loc=starts,
        max_query_len=1,
        params=AttentionParams(1, 1, 16, head_size_v=256),
        k_scale=one,
        v_scale=one,
    )
    torch.testing.assert_close(out.flatten(), all_codes(dtype).float(), rtol=0, atol=0, equal_nan=True)


@formats
def test_ties_go_to_the_even_code_and_their_neighbours_to_the_nearest(dtype):
    values = all_codes(dtype)[:128].float().cpu()
    values = values[values.isfinite()]
    ties = (values[1:] + values[:-1]) / 2  # exact: one more bit of mantissa
    x = torch.cat([ties, values])
    x = torch.cat([x, *(torch.nextafter(x, torch.full_like(x, to)) for to in (torch.inf, -torch.inf))])
    extreme = torch.tensor([448 * 1.07, 57344 * 1.07, 1e30, torch.inf, torch.nan, 1e-40])
    x = torch.cat([x, extreme])
    x = torch.cat([x, -x])
    codes = stored(x, dtype).view(torch.uint8)
    assert torch.equal(codes, quantize_fp8(x, 1.0, dtype).view(torch.uint8).to(DEVICE))
    even = codes[: len(ties)]
    assert torch.equal(even, even & 0xFE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_goes_to_the_nearest_and_ties_to_even(dtype):
    bits = torch.arange(-(2**31), 2**31, 2**17 - 1, dtype=torch.int64).to(torch.int32)
    ties = torch.arange(0x3F800000, 0x3F900000, 0x1000, dtype=torch.int32)  # of bfloat16 and float16, and their codes
    x = torch.cat([bits, ties]).view(torch.float32)
    x = torch.cat([x, torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3.4e38])]).to(DEVICE)
    torch.testing.assert_close(stored(x, dtype), x.to(dtype), rtol=0, atol=0, equal_nan=True)
