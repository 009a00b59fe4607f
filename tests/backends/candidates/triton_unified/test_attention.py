"""The attention kernel over mixed batches on pages, and how its keys are cut into segments and its rows into tiles."""

import itertools
import math

import pytest
import torch
from paged_batches import make_batch

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified import attention
from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.launch import unified_attention_op
from attncheck.backends.candidates.triton_unified.tiling import (
    SplitScratch,
    allocate_scratch,
    choose_segments,
    choose_tiling,
)
from attncheck.reference import AttentionParams, paged_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Paged:
    """``lens``: (query_len, seq_len) of each request. Pages of 16 tokens."""

    def __init__(self, lens, params, dtype):
        made = make_batch(*zip(*lens, strict=True), params, block_size=16, dtype=dtype, unowned_rows=0)
        self.lens, self.params = lens, params
        tensors = made.query, made.key_cache, made.value_cache
        self.query, self.key_cache, self.value_cache = (tensor.to(DEVICE) for tensor in tensors)
        tables = made.block_table, made.seq_lens, made.query_start_loc
        self.block_table, self.seq_lens, self.query_start_loc = (table.to(DEVICE, torch.int32) for table in tables)

    def arguments(self):
        return {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "max_query_len": max(q for q, _ in self.lens),
            "params": self.params,
        }

    def attend(self, **changed):
        """Output and LSE of the kernel, NaN where it did not write."""
        out = torch.full_like(self.query, torch.nan)
        lse = torch.full(self.query.shape[:2], torch.nan, device=DEVICE)
        arguments = {**self.arguments(), "output_lse": lse, **changed}
        unified_attention(self.query, self.key_cache, self.value_cache, out, **arguments)
        return out, lse


def paged(lens, heads, **given):
    """``paged(lens, (num_heads, num_kv_heads, head_size), **of AttentionParams)``."""
    dtype = given.pop("dtype", torch.float32)
    return Paged(lens, AttentionParams(*heads, **given), dtype)


def test_a_cap_far_below_the_scores_leaves_them_finite():
    """|s / cap| from a fraction to hundreds, where forms with exp overflow."""
    batch = paged([(4, 40)], (2, 1, 16), scale=400.0, logits_soft_cap=1.5)
    out, lse = batch.attend()
    tables = batch.block_table, batch.seq_lens, batch.query_start_loc
    truth, truth_lse = paged_attention(batch.query, batch.key_cache, batch.value_cache, *tables, batch.params)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=2e-6, atol=5e-6)


def test_a_cap_far_above_the_scores_bends_nothing():
    """Scores of a thousandth beside a cap of a thousand: 1 - exp(-2x) would keep no digit of them."""
    batch = paged([(1, 40)], (2, 1, 16), scale=1e-3, logits_soft_cap=1e3)
    out, _ = batch.attend()
    plain, _ = paged([(1, 40)], (2, 1, 16), scale=1e-3).attend()
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)


def test_addresses_need_more_than_32_bits():
    """Blocks from the 700,000th on, 8 KiB apart, of a pool of which nothing else is touched."""
    batch = paged([(1, 40), (3, 20)], (2, 2, 16), dtype=torch.float16)
    first, stride = 700_000, 4096  # elements: 2.9e9 before the first block
    expected = batch.attend()
    shape = (first + len(batch.key_cache), *batch.key_cache.shape[1:])
    high = []
    for cache in (batch.key_cache, batch.value_cache):
        pool = torch.empty(shape[0] * stride, dtype=cache.dtype, device=cache.device)
        view = pool.as_strided(shape, (stride, *cache.stride()[1:]))
        view[first:] = cache
        high.append(view)
    batch.key_cache, batch.value_cache = high
    batch.block_table += first
    assert all(torch.equal(x, y) for x, y in zip(batch.attend(), expected, strict=True))


def test_queries_and_outputs_may_be_views():
    batch = paged([(5, 40), (1, 7)], (4, 2, 16))
    expected, expected_lse = batch.attend()
    rows = len(batch.query)
    batch.query = batch.query.new_empty(16, rows, 9).permute(1, 2, 0)[:, 3:7].copy_(batch.query)
    out = expected.new_empty(4, rows, 33).transpose(0, 1)[..., 1::2]
    lse = expected_lse.new_empty(4, rows).T
    unified_attention(batch.query, batch.key_cache, batch.value_cache, out, **batch.arguments(), output_lse=lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_the_operator_writes_what_its_schema_declares():
    """So tracing, fake tensors and graphs may trust it."""
    batch = paged([(1, 20), (2, 5)], (2, 1, 16))
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "unified_attention_op", lambda *given: seen.append(given))
        batch.attend()
    torch.library.opcheck(unified_attention_op, seen[0], test_utils=("test_schema", "test_faketensor"))


def scratch_of(batch, segments):
    """Scratch that makes ``segments`` segments of a batch; it is full of NaN."""
    p, device = batch.params, batch.query.device
    results = len(batch.query) * p.num_heads * segments
    out, lse = (torch.full((size,), torch.nan, device=device) for size in (results * p.value_head_size, results))
    return SplitScratch(out, lse, programs=10**6, most=segments)


@pytest.mark.parametrize("position", [0, 31, 32, 127, 128])
def test_a_key_at_the_edge_of_a_segment_is_counted_once(position):
    """All scores are 0 but that of one key, which outweighs the others: the output is its value."""
    batch = paged([(1, 130)], (1, 1, 16), scale=1.0)
    page, slot = batch.block_table[0, position // 16], position % 16
    batch.key_cache[batch.key_cache == batch.key_cache] = 0.0
    batch.query[:] = 1.0
    batch.key_cache[page, slot] = 4.0  # a score of 64
    out, lse = batch.attend(scratch=scratch_of(batch, 4))
    torch.testing.assert_close(out[0, 0], batch.value_cache[page, slot, 0], rtol=0, atol=1e-6)
    assert lse.item() == pytest.approx(64.0, abs=1e-5)
    batch.key_cache[page, slot] = 0.0
    assert batch.attend(scratch=scratch_of(batch, 4))[1].item() == pytest.approx(math.log(130), abs=1e-6)


@pytest.mark.parametrize("split", [1, 4])
def test_what_is_no_number_stays_none(split):
    """A key of NaN, seen by the first request alone; not the answer of a row that sees nothing."""
    batch = paged([(1, 100), (1, 20)], (2, 1, 16))
    batch.key_cache[batch.block_table[0, 4], 3] = torch.nan
    out, lse = batch.attend(scratch=scratch_of(batch, split))
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()


def test_scratch_holds_what_wanted_programs_leave():
    given = {"head_size_v": 24, "device": torch.device("cpu"), "interpreted": True}
    scratch = allocate_scratch(num_heads=8, num_kv_heads=2, max_rows=4096, **given)
    assert len(scratch.lse) == 8 * 16
    assert len(scratch.out) == 8 * 16 * 24
    assert len(allocate_scratch(num_heads=2, num_kv_heads=2, max_rows=1, **given).lse) == 1 * 2 * 4


def test_segments_stop_where_nothing_is_won():
    plenty = {"programs": 8, "wanted": 2112, "results": 32, "room": 10**6, "keys": 10**5, "block_n": 64, "most": 32}
    assert choose_segments(**plenty) == 32
    assert choose_segments(**plenty | {"programs": 512}) == 4
    assert choose_segments(**plenty | {"programs": 2113}) == 1
    assert choose_segments(**plenty | {"room": 300}) == 8
    assert choose_segments(**plenty | {"keys": 200}) == 2
    assert choose_segments(**plenty | {"most": 4}) == 4
    # Segments have four tiles once the device is busy: 132 multiprocessors with two programs each.
    busy = plenty | {"programs": 64, "results": 256}
    assert [choose_segments(**busy | {"keys": keys}) for keys in (2048, 4096, 256)] == [8, 16, 4]
    assert choose_segments(**busy | {"programs": 8, "keys": 2048}) == 32


def tiling_of(max_query_len=4096, **sizes):
    plain = {"group": 4, "head_size": 128, "itemsize": 2, "is_coded": False, "interpreted": False}
    return choose_tiling(max_query_len=max_query_len, **plain | sizes)


@pytest.mark.parametrize("interpreted", [True, False])
def test_every_row_has_a_block_of_its_own(interpreted):
    """Whatever the query lengths, the numbers of blocks suffice, and a tile holds the rows of a block."""
    for group, max_query_len in itertools.product((1, 3, 5, 8, 20, 128), (1, 2, 7, 300)):
        sizes = {"group": group, "head_size": 64, "shared_memory": 10**6, "interpreted": interpreted}
        tiling = tiling_of(max_query_len, **sizes)
        assert tiling.block_q >= 1
        assert tiling.block_q * group <= tiling.block_m
        lens = [max_query_len, 1, max_query_len, 0, max(1, max_query_len - 1)]
        last, start = -1, 0
        for request, query_len in enumerate(lens):
            blocks = -(-query_len // tiling.block_q)
            first = request if tiling.one_block else start // tiling.block_q + request
            assert first > last
            last, start = max(last, first + blocks - 1), start + query_len
        assert last < tiling.num_blocks(start, len(lens))


def test_tiles_fit_the_shared_memory_there_is():
    """64 KiB: those of ROCm. Queries, as many stages of keys and values as there are, and 8 KiB for reductions."""
    widths = {64: 64, 128: 128, 160: 256, 256: 256}
    for kib, max_query_len, itemsize in itertools.product((227, 163, 99, 64), (1, 12, 4096), (2, 4)):
        for head_size, width in widths.items():
            tiling = tiling_of(max_query_len, head_size=head_size, itemsize=itemsize, shared_memory=kib * 1024)
            keys_and_values = 2 * tiling.block_n * max(1, tiling.num_stages - 1)
            assert (tiling.block_m + keys_and_values) * width * itemsize + 8 * 1024 <= kib * 1024


def test_stages_go_before_lines_and_lines_before_keys():
    tilings = {kib: tiling_of(head_size=256, shared_memory=kib * 1024) for kib in (227, 163, 104, 103, 71)}
    assert {kib: (each.num_stages, each.block_m, each.block_n) for kib, each in tilings.items()} == {
        227: (4, 128, 32),
        163: (3, 128, 32),
        104: (2, 128, 32),
        103: (2, 64, 32),
        71: (2, 64, 16),
    }
    lengths = range(1, 100)
    tilings = [tiling_of(length, group=group, shared_memory=232448) for length in lengths for group in (1, 3, 4, 8)]
    assert {(each.block_m, each.one_block) for each in tilings} == {(16, True), (64, False), (128, False)}
    # Codes have small tiles where they are decoded in registers.
    for kib, lines in ((99, 64), (163, 64), (227, 128)):
        assert tiling_of(is_coded=True, shared_memory=kib * 1024).block_m == lines
        assert tiling_of(shared_memory=kib * 1024).block_m == 128
