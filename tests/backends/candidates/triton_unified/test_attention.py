import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified import attention
from attncheck.backends.candidates.triton_unified.attention import ragged_attention, unified_attention
from attncheck.backends.candidates.triton_unified.launch import unified_attention_op
from attncheck.reference import AttentionParams, varlen_attention

MIXED = [(1, 37), (20, 20), (5, 33), (1, 1), (3, 70)]
"""Decodes, a prompt and later chunks: lengths on either side of the edges of pages (16) and tiles (32)."""

Batch = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)], ids=str
)
def test_a_mixed_batch_is_computed_in_one_launch(paged: Batch, dtype: torch.dtype, allowed: float) -> None:
    paged(MIXED, (4, 2, 16), dtype=dtype).assert_right(allowed)


@pytest.mark.parametrize("heads", [(3, 1, 16), (10, 2, 16), (7, 1, 24), (2, 2, 40), (20, 1, 8)], ids=str)
def test_groups_and_head_sizes_need_be_no_powers_of_two(paged: Batch, heads: tuple[int, int, int]) -> None:
    paged([(9, 40), (1, 33), (2, 2)], heads).assert_right()


@pytest.mark.parametrize("head_size_v", [8, 24])
def test_values_have_a_size_of_their_own(paged: Batch, head_size_v: int) -> None:
    paged([(3, 40), (1, 5)], (4, 2, 16), head_size_v=head_size_v).assert_right()


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 544])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_are_of_any_size_in_any_order(paged: Batch, block_size: int, layout: str) -> None:
    paged([(5, 50), (1, 33)], (2, 2, 16), block_size=block_size, layout=layout).assert_right()


@pytest.mark.parametrize(
    "modifier",
    [
        {"window": (0, 0)},
        {"window": (7, 0)},
        {"window": (31, -1)},
        {"window": (40, 0)},
        {"window": (6, 6), "causal": False},
        {"window": (-1, 2), "causal": False},
        {"causal": False},
        {"attn_chunk_size": 1},
        {"attn_chunk_size": 13},
        {"attn_chunk_size": 16},
        {"logits_soft_cap": 0.5},
        {"logits_soft_cap": 1e6},
        {"alibi_slopes": (0.5, -0.03)},
        {"alibi_slopes": (0.25, 3.0), "causal": False},
        {"sinks": (0.7, -math.inf)},
        {"scale": 0.0},
        {"scale": -0.7},
        {"window": (9, 0), "logits_soft_cap": 2.0, "alibi_slopes": (0.1, 0.2), "sinks": (1.0, -2.0)},
    ],
    ids=str,
)
def test_modifiers_are_those_of_the_reference(paged: Batch, modifier: dict[str, Any]) -> None:
    paged(MIXED, (2, 1, 16), **modifier).assert_right()


def test_a_cap_far_below_the_scores_leaves_them_finite(paged: Batch) -> None:
    """|s / cap| from a fraction to hundreds, where forms with exp overflow."""
    paged([(4, 40)], (2, 1, 16), scale=400.0, logits_soft_cap=1.5).assert_right(1e-5)


def test_a_cap_far_above_the_scores_bends_nothing(paged: Batch) -> None:
    """Scores of a thousandth beside a cap of a thousand: 1 - exp(-2x) would keep no digit of them."""
    batch = paged([(1, 40)], (2, 1, 16), scale=1e-3, logits_soft_cap=1e3)
    out, _ = batch.attend()
    plain, _ = paged([(1, 40)], (2, 1, 16), scale=1e-3).attend()
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, (0.7, -math.inf)], ids=["no sinks", "sinks"])
def test_rows_that_see_nothing_are_empty(paged: Batch, sinks: tuple[float, ...] | None) -> None:
    """A request without keys, and rows before the first key; of a sink the LSE is the sink itself."""
    batch = paged([(1, 0), (5, 3), (1, 20)], (2, 1, 16), sinks=sinks)
    batch.assert_right()
    out, lse = batch.attend()
    assert (out[:3] == 0).all()
    expected = [-math.inf, -math.inf] if sinks is None else [pytest.approx(0.7), -math.inf]
    assert lse[0].tolist() == expected
    assert lse[2].tolist() == expected


def test_rows_of_no_request_are_left_alone(paged: Batch) -> None:
    batch = paged([(2, 20), (3, 3)], (2, 1, 16))
    batch.query_start_loc[-1] = 4
    batch.query[4:] = torch.nan
    out, lse = batch.attend()
    assert out[4:].isnan().all()
    assert lse[4:].isnan().all()
    assert out[:4].isfinite().all()


def test_requests_without_rows_are_not_looked_at(paged: Batch) -> None:
    """Their lengths and tables may hold anything."""
    batch = paged([(2, 20), (0, 0), (3, 30), (0, 0)], (2, 1, 16))
    expected = batch.attend()
    batch.seq_lens[1], batch.seq_lens[3] = 2**30, -5
    batch.block_table[1], batch.block_table[3] = 2**30, -1
    assert all(torch.equal(x, y) for x, y in zip(batch.attend(), expected, strict=True))


@pytest.mark.parametrize("bound", [5, 64, 4096])
def test_the_bound_of_query_lengths_changes_nothing(paged: Batch, bound: int) -> None:
    paged([(5, 33), (1, 20), (4, 4)], (2, 1, 16)).assert_right(max_query_len=bound)


def test_addresses_need_more_than_32_bits(paged: Batch) -> None:
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


def test_queries_and_outputs_may_be_views(paged: Batch) -> None:
    batch = paged([(5, 40), (1, 7)], (4, 2, 16))
    expected, expected_lse = batch.attend()
    rows = len(batch.query)
    batch.query = batch.query.new_empty(16, rows, 9).permute(1, 2, 0)[:, 3:7].copy_(batch.query)
    out = expected.new_empty(4, rows, 33).transpose(0, 1)[..., 1::2]
    lse = expected_lse.new_empty(4, rows).T
    unified_attention(batch.query, batch.key_cache, batch.value_cache, out, **batch.arguments(), output_lse=lse)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_a_cache_of_another_float_is_not_rounded(paged: Batch) -> None:
    paged([(3, 40)], (2, 1, 16), dtype=torch.float32, cache_dtype=torch.float16).assert_right()
    paged([(3, 40)], (2, 1, 16), dtype=torch.float16, cache_dtype=torch.float32).assert_right(5e-4)


def test_a_tree_is_seen_by_requests_of_its_size_alone(paged: Batch) -> None:
    """Two branches behind the root: row 3 follows row 1, and the other branch is hidden from it."""
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    verified, plain = paged([(4, 37), (4, 4)], (2, 1, 16)), paged([(3, 37), (5, 40)], (2, 1, 16))
    on_device = tree.to(verified.query.device)
    out, lse = verified.attend(tree=on_device)
    truth, truth_lse = verified.truth(tree_mask=on_device)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=5e-6)
    assert not torch.allclose(out, verified.attend()[0], atol=1e-2)
    plain.assert_right(tree=on_device)


def test_a_tree_may_hide_the_first_new_key(paged: Batch) -> None:
    """The first tile is full but for its last key, which is the root's, and which one row does not see."""
    batch = paged([(2, 33)], (2, 1, 16))
    tree = torch.tensor([[True, False], [False, True]], device=batch.query.device)
    out, _ = batch.attend(tree=tree)
    torch.testing.assert_close(out.double(), batch.truth(tree_mask=tree)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [33, 48])
def test_rows_on_both_sides_of_the_edge_of_a_long_chunk(paged: Batch, chunk: int) -> None:
    """Whole tiles lie in a chunk that some rows of a block see, and others do not."""
    paged([(20, 60), (3, 99)], (2, 1, 16), attn_chunk_size=chunk).assert_right()


def test_rows_before_the_first_key_are_in_a_chunk_before_the_first(paged: Batch) -> None:
    batch = paged([(9, 3)], (2, 1, 16), attn_chunk_size=4, causal=False)
    batch.assert_right()
    assert batch.attend()[1].isneginf()[:6].all()


def test_keys_may_be_rows_of_the_step() -> None:
    params = AttentionParams(4, 2, 16, causal=False, window=(5, 5))
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(50, heads, 16, generator=draw).to(DEVICE) for heads in (4, 2, 2))
    starts = torch.tensor([0, 33, 34, 45], dtype=torch.int32, device=DEVICE)
    key[45:], value[45:] = torch.nan, torch.nan
    out, lse = torch.full_like(query, torch.nan), torch.full((50, 4), torch.nan, device=DEVICE)
    ragged_attention(query, key, value, out, query_start_loc=starts, max_query_len=33, params=params, output_lse=lse)
    truth, truth_lse = varlen_attention(query[:45], key[:45], value[:45], starts, starts, params)
    torch.testing.assert_close(out[:45].double(), truth, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse[:45].double(), truth_lse, rtol=0, atol=5e-6)
    assert out[45:].isnan().all()


def test_the_operator_writes_what_its_schema_declares(paged: Batch) -> None:
    """So tracing, fake tensors and graphs may trust it."""
    batch = paged([(1, 20), (2, 5)], (2, 1, 16))
    seen: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "unified_attention_op", lambda *given: seen.append(given))
        batch.attend()
    torch.library.opcheck(unified_attention_op, seen[0], test_utils=("test_schema", "test_faketensor"))
