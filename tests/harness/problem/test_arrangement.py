"""Requests arranged in another way keep their rows, keys and values, and own pages of their own."""

import pytest
import torch

from attncheck.harness.problem.problem import Arrangement, arranged, build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import AttentionType
from attncheck.reference.step_spec import DCPOptions, PaddingSpec, RequestSpec

CPU = torch.device("cpu")


def truths_agree(problem, how):
    """The truth of the arranged problem, computed afresh, is that of the same rows."""
    other, rows = arranged(problem, how), how.rows_of(problem)
    whole, own = (truth_of(each, CPU, refuse_blindness=False) for each in (problem, other))
    assert torch.allclose(own.out, whole.out[rows], rtol=1e-12, atol=1e-12)
    assert torch.allclose(own.lse, whole.lse[rows], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("which", "elsewhere"), [((3, 2, 1, 0), False), ((1,), True), ((0, 3), False), ((2, 0, 1, 3, 2), True)]
)
def test_the_truth_of_the_rows_holds_for_them_elsewhere(make_case, which, elsewhere):
    truths_agree(build_problem(make_case(sliding_window=16), 0), Arrangement(which, elsewhere))


def test_pages_and_tables_of_an_arrangement(make_case):
    problem = build_problem(make_case(), 0)
    own = [request.pages for request in problem.requests]
    backwards = arranged(problem, Arrangement((3, 2, 1, 0)))
    assert [request.pages for request in backwards.requests] == own[::-1]
    twice = arranged(problem, Arrangement((1, 0, 1), elsewhere=True))
    first, _, again = twice.requests
    assert not set(first.pages) & set(again.pages)
    assert torch.equal(twice.keys[first.base : first.base + 40], twice.keys[again.base : again.base + 40])
    how = Arrangement((0, 1, 2, 3), elsewhere=True, spare_columns=3, padding=PaddingSpec(requests=2, tokens=5))
    spread = arranged(problem, how)
    assert all(a.pages != b for a, b in zip(spread.requests, own, strict=True))
    assert spread.block_table[:, -3:].tolist() == [[0] * 3] * 4  # the null page
    assert spread.block_table.shape[1] == problem.block_table.shape[1] + 3
    assert (spread.case.batch.padding.requests, spread.case.batch.padding.tokens) == (2, 5)
    for other in (backwards, spread):
        size = other.cache.block_size
        for row, request in enumerate(other.requests):
            for position in range(request.num_keys):
                slot = int(other.block_table[row, position // size]) * size + position % size
                assert slot == int(other.key_slots[request.base + position])


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
def test_layers_and_paths_of_all_kinds_are_arranged(make_case, requests, fields):
    problem = build_problem(make_case(*requests, **fields), 0)
    for elsewhere in (False, problem.has_pool):
        truths_agree(problem, Arrangement((2, 1, 0), elsewhere))
