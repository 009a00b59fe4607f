"""The candidate flex_attention: the masks of its calls, and that packing and added rows change no result."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from attncheck.backends.base.gathering import UnpagedRequest, grouped_requests
from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.candidates.flex_attention.packing import Call, block_mask
from attncheck.reference.spec import LayerSpec

PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, dtype="float32", scale=0.3)
MIXED = [(1, 5), (1, 33), (7, 19), (20, 20), (3, 48)]


def call_of(intervals, num_keys, **tree):
    low, high = torch.tensor(intervals).T
    return Call([], torch.zeros(num_keys, 1, 1), torch.zeros(num_keys, 1, 1), own=high - 1, low=low, high=high, **tree)


CAUSAL = [(0, row + 1) for row in range(300)]
TWO_REQUESTS = [(0, row + 1) for row in range(200)] + [(200, 201 + row) for row in range(200)]
WINDOW = [(max(0, row - 140), row + 1) for row in range(500)]
DECODES = [(10 * row, 10 * row + 10) for row in range(60)]
MASKS = {
    "causal": (CAUSAL, 300),
    "two requests": (TWO_REQUESTS, 400),
    "window": (WINDOW, 500),
    "decodes": (DECODES, 600),
    "all": ([(0, 256)] * 256, 256),
    "rows that see nothing": ([(0, 0)] * 130 + [(90, 300)] * 200 + [(7, 7)], 300),
}


@pytest.mark.parametrize(("intervals", "num_keys"), MASKS.values(), ids=MASKS.keys())
def test_blocks_are_those_that_torch_finds_in_the_whole_mask(intervals, num_keys):
    found = block_mask(call_of(intervals, num_keys))
    expected = create_block_mask(found.mask_mod, None, None, len(intervals), num_keys, device="cpu")
    dense = create_mask(found.mask_mod, None, None, len(intervals), num_keys, device="cpu")[0, 0]
    assert dense.tolist() == [[low <= key < high for key in range(num_keys)] for low, high in intervals]
    for name in ("kv", "full_kv"):
        counts, indices = (getattr(mask, f"{name}_num_blocks")[0, 0] for mask in (found, expected))
        assert counts.tolist() == indices.tolist()
        for row, count in enumerate(counts.tolist()):
            ours, theirs = (getattr(mask, f"{name}_indices")[0, 0, row, :count] for mask in (found, expected))
            assert ours.tolist() == theirs.tolist()


def test_no_block_of_a_tree_is_taken_for_whole():
    tree = torch.eye(4, dtype=torch.bool)
    found = block_mask(call_of([(0, 256)] * 4, 256, node=torch.arange(4), tree=tree))
    assert found.full_kv_num_blocks.sum() == 0
    assert found.kv_num_blocks.tolist() == [[[2]]]


def test_a_table_has_two_blocks_of_keys_at_least():
    assert block_mask(call_of([(0, 3)], 3)).kv_indices.shape == (1, 1, 1, 2)


def test_requests_are_packed_within_a_limit_and_apart_from_those_with_a_tree():
    """No case has both: a tree has as many nodes as each request of its step has rows. A step of an engine may."""
    key, tree = torch.zeros(5, 1, 1), torch.eye(2, dtype=torch.bool)
    trees = (tree, None, None, None, tree, tree)
    found = [UnpagedRequest(slice(2 * i, 2 * i + 2), 3, 0, key, key, each) for i, each in enumerate(trees)]

    def groups(limit):
        return [[piece.rows.start // 2 for piece in group] for group in grouped_requests(found, limit)]

    assert groups(None) == [[0], [1, 2, 3], [4, 5]]
    assert groups(4 * 10) == [[0], [1, 2], [3], [4, 5]]  # rows times keys of two requests
    assert groups(4 * 10 - 1) == [[0], [1], [2], [3], [4], [5]]


def assert_right(step):
    step.run()
    torch.testing.assert_close(step.output.double(), step.truth, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(step.output_lse.double(), step.truth_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scores", [1, 500, 4000])
def test_packing_and_cutting_change_no_result(scores, make_step, monkeypatch):
    monkeypatch.setattr("attncheck.backends.candidates.flex_attention.backend._EAGER_SCORES", scores)
    requests = [(1, 5), (3, 48)] if scores == 1 else MIXED
    step = make_step(FlexBackend, replace(PLAIN, alibi=True, sliding_window=11), requests)
    impl = step.impl()
    step.impl = lambda: impl
    assert_right(step)
    assert impl.chosen_kernels == {"eager"}


@pytest.mark.parametrize(
    "modifiers", [{}, {"alibi": True, "logits_soft_cap": 1.5}, {"sinks": True}, {"head_size_v": 16}]
)
def test_rows_that_are_added_where_it_is_compiled_change_no_result(modifiers, make_step, monkeypatch):
    of_heads = Call.of_heads
    monkeypatch.setattr(Call, "of_heads", lambda call, group, multiple: of_heads(call, group, 256))
    assert_right(make_step(FlexBackend, replace(PLAIN, **modifiers), MIXED))
