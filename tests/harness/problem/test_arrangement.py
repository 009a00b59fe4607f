"""Requests arranged in another way keep their rows, keys and values, and own pages of their own."""

from typing import Any

import pytest
import torch

from attncheck.harness.problem.problem import Arrangement, Problem, arranged, build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionType, DCPOptions, PaddingSpec, RequestSpec

CPU = torch.device("cpu")


def truths_agree(problem: Problem, how: Arrangement) -> None:
    """The truth of the arranged problem, computed afresh, is that of the same rows."""
    other, rows = arranged(problem, how), how.rows_of(problem)
    whole, own = (truth_of(each, CPU, refuse_blindness=False) for each in (problem, other))
    assert torch.allclose(own.out, whole.out[rows], rtol=1e-12, atol=1e-12)
    assert torch.allclose(own.lse, whole.lse[rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("which", "elsewhere"), [((3, 2, 1, 0), False), ((1,), True), ((0, 3), False), ((2, 0, 1, 3, 2), True)]
)
def test_the_truth_of_the_rows_holds_for_them_elsewhere(make_case: Any, which: Any, elsewhere: bool) -> None:
    truths_agree(build_problem(make_case(sliding_window=16), 0), Arrangement(which, elsewhere))


def test_keys_lie_in_the_blocks_of_the_block_table(make_case: Any) -> None:
    problem = build_problem(make_case(), 0)
    for how in (Arrangement((2, 0, 3)), Arrangement((2, 0, 3, 1), elsewhere=True, spare_columns=4)):
        other = arranged(problem, how)
        size = other.cache.block_size
        for row, request in enumerate(other.requests):
            for position in range(request.num_keys):
                slot = int(other.block_table[row, position // size]) * size + position % size
                assert slot == int(other.key_slots[request.base + position])


def test_other_pages_are_others_and_the_same_pages_are_the_same(make_case: Any) -> None:
    problem = build_problem(make_case(), 0)
    backwards = arranged(problem, Arrangement((3, 2, 1, 0)))
    assert [r.pages for r in backwards.requests] == [r.pages for r in reversed(problem.requests)]
    elsewhere = arranged(problem, Arrangement((0, 1, 2, 3), elsewhere=True))
    assert all(a.pages != b.pages for a, b in zip(elsewhere.requests, problem.requests, strict=True))
    assert elsewhere.block_table.shape == problem.block_table.shape


def test_spare_columns_name_the_null_page_and_padding_is_added(make_case: Any) -> None:
    problem = build_problem(make_case(), 0)
    other = arranged(problem, Arrangement((0, 1, 2, 3), spare_columns=3, padding=PaddingSpec(requests=2, tokens=5)))
    assert other.block_table[:, -3:].tolist() == [[0] * 3] * 4
    assert torch.equal(other.block_table[:, :-3], problem.block_table)
    assert (other.case.batch.padding.requests, other.case.batch.padding.tokens) == (2, 5)


def test_a_request_that_comes_twice_owns_pages_twice(make_case: Any) -> None:
    problem = build_problem(make_case(), 0)
    other = arranged(problem, Arrangement((1, 0, 1), elsewhere=True))
    first, _, again = other.requests
    assert not set(first.pages) & set(again.pages)
    assert torch.equal(other.keys[first.base : first.base + 40], other.keys[again.base : again.base + 40])


@pytest.mark.parametrize(
    ("requests", "fields"),
    [
        (((9, 9), (1, 1), (20, 20)), {"attn_type": AttentionType.ENCODER_ONLY}),
        (((1, 5), (1, 70), (1, 71)), {"path": "dcp", "options": DCPOptions(size=4, interleave=2)}),
        (
            (
                RequestSpec(query_len=1, seq_len=70, shared_prefix=32, count=2),
                RequestSpec(query_len=5, seq_len=60, shared_prefix=32),
            ),
            {"path": "cascade"},
        ),
        (((5, 3), (1, 20), (4, 30)), {}),
    ],
)
def test_layers_and_paths_of_all_kinds_are_arranged(make_case: Any, requests: Any, fields: dict[str, Any]) -> None:
    problem = build_problem(make_case(*requests, **fields), 0)
    for elsewhere in (False, problem.has_pool):
        truths_agree(problem, Arrangement((2, 1, 0), elsewhere))
