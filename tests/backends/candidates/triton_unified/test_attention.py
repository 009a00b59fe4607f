from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attncheck.backends.candidates.triton_unified import attention
from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.launch import unified_attention_op
from attncheck.reference import paged_attention

Batch = Callable[..., Any]


def test_a_cap_far_below_the_scores_leaves_them_finite(paged: Batch) -> None:
    """|s / cap| from a fraction to hundreds, where forms with exp overflow."""
    batch = paged([(4, 40)], (2, 1, 16), scale=400.0, logits_soft_cap=1.5)
    out, lse = batch.attend()
    tables = batch.block_table, batch.seq_lens, batch.query_start_loc
    truth, truth_lse = paged_attention(batch.query, batch.key_cache, batch.value_cache, *tables, batch.params)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=2e-6, atol=5e-6)


def test_a_cap_far_above_the_scores_bends_nothing(paged: Batch) -> None:
    """Scores of a thousandth beside a cap of a thousand: 1 - exp(-2x) would keep no digit of them."""
    batch = paged([(1, 40)], (2, 1, 16), scale=1e-3, logits_soft_cap=1e3)
    out, _ = batch.attend()
    plain, _ = paged([(1, 40)], (2, 1, 16), scale=1e-3).attend()
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-6)


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


def test_the_operator_writes_what_its_schema_declares(paged: Batch) -> None:
    """So tracing, fake tensors and graphs may trust it."""
    batch = paged([(1, 20), (2, 5)], (2, 1, 16))
    seen: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "unified_attention_op", lambda *given: seen.append(given))
        batch.attend()
    torch.library.opcheck(unified_attention_op, seen[0], test_utils=("test_schema", "test_faketensor"))
