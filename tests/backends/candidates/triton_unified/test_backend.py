"""The backend around the Triton kernels: cache writes, FP8 codes, and the merge of segments."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from attncheck.backends.candidates.triton_unified.attention import ragged_attention, unified_attention
from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.candidates.triton_unified.merging import merge_attn_states
from attncheck.backends.contract import KVCacheSpec
from attncheck.reference import AttentionParams, CommonAttentionMetadata, quantize_fp8
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

pytest.importorskip("triton")


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE = BatchSpec(requests=(RequestSpec(query_len=1),))


def test_the_scratch_is_the_same_in_every_step():
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_num_attention_heads=lambda _: 4),
        parallel_config=None,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        speculative_config=None,
    )
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float16, head_size_v=24)
    builder = UnifiedBackend.get_builder_cls()(spec, ["layer.0"], config, DEVICE)
    common = CommonAttentionMetadata(
        *(torch.zeros(2, dtype=torch.int32) for _ in range(5)), 1, 0, 1, 1, torch.zeros(1, 1), torch.zeros(0)
    )
    first, second = (builder.build(0, common) for _ in range(2))
    assert first.scratch is second.scratch
    assert len(first.scratch.out) == 24 * len(first.scratch.lse)  # the size of a value


def test_heads_that_fit_no_tile_are_not_supported_and_refused():
    layer = LayerSpec(num_heads=2, num_kv_heads=1, head_size=256)
    assert UnifiedBackend.unsupported_reasons(layer, CacheSpec(), DECODE) == []
    assert UnifiedBackend.get_impl_cls()(2, 256, 0.1, 1).head_size == 256
    for name, size in (("head_size", 257), ("head_size_v", 300)):
        layer = LayerSpec(**{"num_heads": 2, "num_kv_heads": 1, "head_size": 64, name: size})
        reason = f"{name} {size}: supported are sizes up to 256"
        assert UnifiedBackend.unsupported_reasons(layer, CacheSpec(), DECODE) == [reason]
        with pytest.raises(ValueError, match=f"{size}: supported are sizes up to 256"):
            UnifiedBackend.get_impl_cls()(2, layer.head_size, 0.1, 1, head_size_v=layer.value_head_size)


def rows(*shape, dtype=torch.float32):
    return torch.zeros(shape, device=DEVICE).to(dtype)


def indices(*numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def test_what_does_not_go_together_is_refused(refusals):
    arguments = {
        "query": rows(3, 2, 16),
        "key_cache": rows(4, 16, 1, 16),
        "value_cache": rows(4, 16, 1, 16),
        "output": rows(3, 2, 16),
        "block_table": indices(1).reshape(1, 1),
        "seq_lens": indices(3),
        "query_start_loc": indices(0, 3),
        "max_query_len": 3,
        "params": AttentionParams(2, 1, 16),
    }
    wrong = [
        ("query is torch.float64, keys are torch.float32", {"query": rows(3, 2, 16, dtype=torch.float64)}),
        ("keys have shape (4, 16, 2, 16), not [..., 1, 16]; keys are", {"key_cache": rows(4, 16, 2, 16)}),
        (
            "keys are torch.float32 (4, 16, 1, 16), values torch",
            {"value_cache": rows(4, 16, 1, 16, dtype=torch.float16)},
        ),
        ("output has shape (2, 2, 16) for a query of (3, 2, 16)", {"output": rows(2, 2, 16)}),
        ("output has dtype torch.float8_e4m3fn, and", {"output": rows(3, 2, 16, dtype=torch.float8_e4m3fn)}),
        ("output has dtype torch.float32, and output_scale is given", {"output_scale": rows(1)}),
        ("block_table has shape (1, 1) and strides (1, 1); query_start_loc", {"seq_lens": indices(3, 3)}),
        ("params and sinks differ in whether there are any", {"sinks": rows(2)}),
        ("k_scale has shape (3,), not [1]", {"k_scale": rows(3)}),
        ("tree is torch.bool (3, 2), not a square of bools", {"tree": rows(3, 2, dtype=torch.bool)}),
        ("query_start_loc or seq_lens has gaps", {"query_start_loc": indices(0, 1, 3)[::2]}),
    ]
    found = refusals(lambda changed: unified_attention(**arguments | changed[1]), wrong)
    for message, (reason, _) in zip(found, wrong, strict=True):
        assert message.startswith(f"unified attention: {reason}")
    query, new = rows(3, 2, 16), rows(3, 1, 16)
    given = {"query_start_loc": indices(0, 3), "max_query_len": 3, "alibi_slopes": None}
    for reason, options, changes in (
        ("lookback", {"attn_chunk_size": 8, "attn_chunk_lookback": 1}, {}),
        ("square-root form", {"alibi_slopes": (0.5, 0.25), "alibi_sqrt": True}, {"alibi_slopes": rows(2)}),
    ):
        params = AttentionParams(2, 1, 16, **options)
        with pytest.raises(NotImplementedError, match=f"{reason}.* not supported"):
            ragged_attention(query, new, new, rows(3, 2, 16), params=params, **given | changes)


HEADS, SIZE, BLOCKS, PAGE = 3, 24, 5, 6


def numbers(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


def test_nothing_is_written_for_no_rows_nor_beyond_the_cache():
    cache = numbers(BLOCKS, PAGE, HEADS, SIZE)
    before = cache.clone()
    key = numbers(2, HEADS, SIZE)
    reshape_and_cache(key, key, cache[:4], cache[:4], torch.empty(0, dtype=torch.int64, device=DEVICE))
    reshape_and_cache(key, key, cache[:4], cache[:4], torch.tensor([-7, 4 * PAGE], device=DEVICE))
    assert torch.equal(cache, before)


def test_offsets_beyond_32_bits_are_reached():
    # Memory without a write is never backed by pages.
    memory = torch.empty(2**31 + 12, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    cache = memory.as_strided((3, 1, 1, 4), (2**30 + 4, 4, 4, 1))
    slots = torch.tensor([2], device=DEVICE)
    row = torch.tensor([[[1.0, 2.0, -3.0, 448.0]]], device=DEVICE)
    reshape_and_cache(row, row, cache, cache, slots)
    assert cache[2].float().flatten().tolist() == [1.0, 2.0, -3.0, 448.0]


def test_what_does_not_fit_is_refused(refusals):
    cache = torch.zeros(BLOCKS, PAGE, HEADS, SIZE)
    given = {"key": torch.ones(2, HEADS, SIZE), "value": torch.ones(2, HEADS, SIZE), "key_cache": cache}
    given |= {"value_cache": cache, "slot_mapping": torch.tensor([1, 2])}
    codes = torch.zeros(BLOCKS, PAGE, HEADS, SIZE, dtype=torch.float8_e5m2)
    wrong = [
        ("key has shape (1, 3, 24), not [2+, 3, 24]", {"key": torch.zeros(1, HEADS, SIZE)}),
        ("key has dtype torch.float64", {"key": torch.zeros(2, HEADS, SIZE, dtype=torch.float64)}),
        ("caches have dtypes torch.float16 and torch.float32", {"key_cache": cache.half()}),
        ("caches have shapes (5, 6, 3, 24) and (5, 6, 24)", {"value_cache": torch.zeros(BLOCKS, PAGE, SIZE)}),
        ("slot_mapping is torch.float32 (2,), not int32 or int64 [T]", {"slot_mapping": torch.zeros(2)}),
        (
            "k_scale has shape (2,): neither 1 element, [3] nor [5, 6, 3]",
            {"key_cache": codes, "value_cache": codes, "k_scale": torch.ones(2)},
        ),
    ]
    found = refusals(lambda changed: reshape_and_cache(**given | changed[1]), wrong)
    for message, (reason, _) in zip(found, wrong, strict=True):
        assert message.removeprefix("reshape_and_cache: ").startswith(reason)
    assert not cache.any()


def test_a_compiled_step_writes_the_same_into_views_of_one_tensor():
    def step(pool, key, slots):
        reshape_and_cache(key, key + 1, pool[0], pool[1], slots)
        return pool.sum()

    key, slots = numbers(3, HEADS, SIZE), torch.tensor([1, -1, 6], device=DEVICE)
    plain, compiled = (torch.zeros(2, BLOCKS, PAGE, HEADS, SIZE, device=DEVICE) for _ in range(2))
    expected = step(plain, key, slots)
    assert torch.compile(step, backend="aot_eager", fullgraph=True)(compiled, key, slots) == expected
    assert plain.any()
    assert torch.equal(plain, compiled)


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


INF = math.inf


def one(lse_a, lse_b, out_a=3.0, out_b=-1.0):
    """Of states of a single number."""
    outs = [torch.tensor([[[out]]], device=DEVICE) for out in (out_a, out_b)]
    lses = [torch.tensor([[lse]], device=DEVICE) for lse in (lse_a, lse_b)]
    out, lse = merge_attn_states(outs[0], lses[0], outs[1], lses[1])
    return out.item(), lse.item()


def test_a_logarithm_that_is_nan_is_no_mark():
    for lses in ((math.nan, 0.0), (0.0, math.nan), (math.nan, -INF)):
        assert all(math.isnan(x) for x in one(*lses))


def test_more_rows_than_one_program_takes():
    out = torch.arange(700.0, device=DEVICE).view(700, 1, 1)
    lse = torch.zeros(700, 1, device=DEVICE)
    merged, log = merge_attn_states(out, lse, torch.full_like(out, torch.nan), torch.full_like(lse, -INF))
    assert torch.equal(merged, out)
    assert torch.equal(log, lse)


def test_no_rows_are_no_rows_and_what_does_not_fit_is_refused():
    state = torch.zeros(9, 3, 40, device=DEVICE), torch.zeros(9, 3, device=DEVICE)
    out, lse = merge_attn_states(*(x[:0] for x in (*state, *state)))
    assert (out.shape, lse.shape) == ((0, 3, 40), (0, 3))
    for place, wrong, message in (
        (0, torch.zeros(2, 3), "out_a has shape (2, 3), not [T, H, Dv]; lse_a has shape (9, 3), not (2, 3)"),
        (1, torch.zeros(9, 1), "lse_a has shape (9, 1), not (9, 3)"),
        (2, torch.zeros(9, 3, 1), "out_b has shape (9, 3, 1), not (9, 3, 40)"),
        (3, torch.zeros(9, 3, dtype=torch.int32), "lse_b has dtype torch.int32"),
    ):
        given = [*state, *state]
        given[place] = wrong
        with pytest.raises(ValueError, match=f"^merge_attn_states: {re.escape(message)}"):
            merge_attn_states(*given)


def test_fake_tensors_have_the_shapes():
    with FakeTensorMode():
        out, lse = torch.zeros(4, 2, 8, dtype=torch.float16), torch.zeros(4, 2)
        merged, log = merge_attn_states(out, lse, out, lse)
    assert (merged.shape, merged.dtype, log.shape, log.dtype) == ((4, 2, 8), torch.float16, (4, 2), torch.float32)
