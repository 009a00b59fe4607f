import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified import launch
from attncheck.backends.candidates.triton_unified.tiling import (
    SplitScratch,
    Tiling,
    allocate_scratch,
    choose_segments,
    choose_tiling,
)

Batch = Callable[..., Any]


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Into how many segments the launches of a test cut the keys, in order."""
    chosen: list[int] = []

    def noted(**given: int) -> int:
        chosen.append(choose_segments(**given))
        return chosen[-1]

    monkeypatch.setattr(launch, "choose_segments", noted)
    return chosen


def scratch_of(batch: Any, segments: int, fill: float = torch.nan) -> SplitScratch:
    """Scratch that makes ``segments`` segments of a batch; what it holds beforehand must not matter."""
    p, device = batch.params, batch.query.device
    results = len(batch.query) * p.num_heads * segments
    out = torch.full((results * p.value_head_size,), fill, device=device)
    return SplitScratch(out, torch.full((results,), fill, device=device), programs=10**6, most=segments)


@pytest.mark.parametrize("position", [0, 31, 32, 63, 64, 95, 96, 127, 128, 129])
def test_a_key_at_the_edge_of_a_segment_is_counted_once(paged: Batch, position: int) -> None:
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


@pytest.mark.parametrize("fill", [torch.nan, torch.inf, 1e30])
def test_what_scratch_held_cannot_matter(paged: Batch, fill: float) -> None:
    batch = paged([(1, 5), (1, 0)], (2, 1, 16))
    batch.block_table = batch.block_table.repeat(1, 20)  # a wide table, as of a model with a long context
    out, lse = batch.attend(scratch=scratch_of(batch, 4, fill))
    assert out.isfinite().all()
    assert lse[1].tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("split", [1, 4])
def test_what_is_no_number_stays_none(paged: Batch, split: int) -> None:
    """A key of NaN, seen by the first request alone; not the answer of a row that sees nothing."""
    batch = paged([(1, 100), (1, 20)], (2, 1, 16))
    batch.key_cache[batch.block_table[0, 4], 3] = torch.nan
    out, lse = batch.attend(scratch=scratch_of(batch, split))
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()


def test_scratch_holds_what_wanted_programs_leave() -> None:
    scratch = allocate_scratch(
        num_heads=8, num_kv_heads=2, head_size_v=24, max_rows=4096, device=torch.device("cpu"), interpreted=True
    )
    assert len(scratch.lse) == 8 * 16
    assert len(scratch.out) == 8 * 16 * 24
    tiny = allocate_scratch(
        num_heads=2, num_kv_heads=2, head_size_v=24, max_rows=1, device=torch.device("cpu"), interpreted=True
    )
    assert len(tiny.lse) == 1 * 2 * 4


def test_segments_stop_where_nothing_is_won() -> None:
    plenty = {"programs": 8, "wanted": 2112, "results": 32, "room": 10**6, "keys": 10**5, "block_n": 64, "most": 32}
    assert choose_segments(**plenty) == 32
    assert choose_segments(**plenty | {"programs": 512}) == 4
    assert choose_segments(**plenty | {"programs": 2113}) == 1
    assert choose_segments(**plenty | {"room": 300}) == 8
    assert choose_segments(**plenty | {"keys": 200}) == 2
    assert choose_segments(**plenty | {"most": 4}) == 4


def test_segments_have_four_tiles_once_the_device_is_busy() -> None:
    """Of 132 multiprocessors with two programs each, which 32 requests of two KV heads reach by four segments."""
    busy = {"programs": 64, "wanted": 2112, "results": 256, "room": 10**6, "block_n": 64, "most": 32}
    assert choose_segments(**busy, keys=2048) == 8
    assert choose_segments(**busy, keys=4096) == 16
    assert choose_segments(**busy, keys=256) == 4
    assert choose_segments(**busy | {"programs": 8}, keys=2048) == 32


@pytest.mark.parametrize("group", [1, 3, 5, 8, 20, 128])
@pytest.mark.parametrize("max_query_len", [1, 2, 7, 300])
@pytest.mark.parametrize("interpreted", [True, False])
def test_every_row_has_a_block_of_its_own(group: int, max_query_len: int, interpreted: bool) -> None:
    """Whatever the query lengths, the numbers of blocks suffice, and a tile holds the rows of a block."""
    tiling = choose_tiling(
        max_query_len=max_query_len,
        group=group,
        head_size=64,
        itemsize=2,
        is_coded=False,
        shared_memory=10**6,
        interpreted=interpreted,
    )
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


def tiling_of(max_query_len: int = 4096, **sizes: Any) -> Tiling:
    plain = {"group": 4, "head_size": 128, "itemsize": 2, "is_coded": False, "interpreted": False}
    return choose_tiling(max_query_len=max_query_len, **plain | sizes)


@pytest.mark.parametrize("kib", [227, 163, 99, 64])
@pytest.mark.parametrize("max_query_len", [1, 12, 4096])
@pytest.mark.parametrize("head_size", [64, 128, 160, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_shared_memory_there_is(kib: int, max_query_len: int, head_size: int, itemsize: int) -> None:
    """64 KiB: those of ROCm. Queries, as many stages of keys and values as there are, and 8 KiB for reductions."""
    tiling = tiling_of(max_query_len, head_size=head_size, itemsize=itemsize, shared_memory=kib * 1024)
    width = {64: 64, 128: 128, 160: 256, 256: 256}[head_size]
    keys_and_values = 2 * tiling.block_n * max(1, tiling.num_stages - 1)
    assert (tiling.block_m + keys_and_values) * width * itemsize + 8 * 1024 <= kib * 1024


def test_stages_go_before_lines_and_lines_before_keys() -> None:
    def shape(kib: int) -> tuple[int, int, int]:
        tiling = tiling_of(head_size=256, shared_memory=kib * 1024)
        return tiling.num_stages, tiling.block_m, tiling.block_n

    assert [shape(kib) for kib in (227, 163, 104, 103, 71)] == [
        (4, 128, 32),
        (3, 128, 32),
        (2, 128, 32),
        (2, 64, 32),
        (2, 64, 16),
    ]


def test_tiles_have_three_sizes() -> None:
    lengths = range(1, 100)
    tilings = {tiling_of(length, group=group, shared_memory=232448) for length in lengths for group in (1, 3, 4, 8)}
    assert {(tiling.block_m, tiling.one_block) for tiling in tilings} == {(16, True), (64, False), (128, False)}


@pytest.mark.parametrize(("kib", "lines"), [(99, 64), (163, 64), (227, 128)])
def test_codes_have_small_tiles_where_they_are_decoded_in_registers(kib: int, lines: int) -> None:
    assert tiling_of(is_coded=True, shared_memory=kib * 1024).block_m == lines
    assert tiling_of(shared_memory=kib * 1024).block_m == 128
