"""The indexer's scores and budget, its judgement of sets with ties, and what it finds in a backend's function."""

import itertools

import pytest
import torch
from made_cases import make_case

from attncheck.errors import ReferenceArgumentError
from attncheck.harness.checks.indexer import (
    BEHIND,
    BELOW,
    FEW,
    TWICE,
    Indexing,
    Scores,
    build_indexer,
    scores_of,
    wrong_rows,
)
from attncheck.reference import sparse_attn_indexer
from attncheck.reference.step_spec import IndexerOptions

OPTIONS = IndexerOptions(index_topk=5, index_n_heads=3, index_head_dim=16)
CASE = make_case((9, 9), (1, 20), (6, 30), padding=(1, 2), path="indexer", options=OPTIONS)


def by_hand(problem):
    """The score of each row and key up to it, from the definition, in Python's float64."""
    found = []
    for request in problem.requests:
        keys = problem.keys[request.base : request.base + request.num_keys].tolist()
        for row in range(request.first_row, request.first_row + request.rows):
            query, weights = problem.query[row].tolist(), problem.weights[row].tolist()
            scores = [
                sum(
                    weight * max(0.0, sum(a * b for a, b in zip(head, key, strict=True)))
                    for weight, head in zip(weights, query, strict=True)
                )
                for key in keys
            ]
            found.append(scores[: request.first_position + row - request.first_row + 1])
    return found


def test_scores_and_the_reference_are_those_of_the_definition():
    problem = build_indexer(CASE, 0)
    scores = scores_of(problem)
    arguments = problem.arguments(torch.device("cpu"))
    named = sparse_attn_indexer(*arguments.values(), index_topk=5)
    assert torch.equal(arguments["index_cache"], problem.cache(with_new=True))
    for row, right in enumerate(by_hand(problem)):
        assert scores.value[row, : len(right)].tolist() == pytest.approx(right)
        assert int(scores.num_visible[row]) == len(right)
        best = sorted(range(len(right)), key=lambda key, right=right: (-right[key], key))[:5]
        if row % 8 != 2:  # equal scores are in any order
            assert named[row, : len(best)].tolist() == best
        assert named[row, len(best) :].tolist() == [-1] * (5 - len(best))
    assert (named[len(scores.value) :] == -1).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [16, 128])
def test_float32_sums_in_any_order_stay_within_the_slack(dtype, size):
    """Channel by channel, in blocks, and head by head: the worst share is neither above 1 nor far below it."""
    options = IndexerOptions(index_n_heads=8, index_head_dim=size)
    worst = 0.0
    for seed in range(4):
        problem = build_indexer(make_case((40, 60), path="indexer", options=options, dtype=dtype), seed)
        right = scores_of(problem)
        query, keys = problem.query.float(), problem.keys.float()
        for order in (range(size), reversed(range(size))):
            products = torch.zeros(len(query), 8, len(keys))
            for channel in order:
                products += query[:, :, channel, None] * keys[None, None, :, channel]
            sums = torch.zeros(len(query), len(keys))
            for head in range(8):
                sums += problem.weights[:, head, None] * products[:, head].relu()
            share = (sums.double() - right.value).abs() / right.slack
            worst = max(worst, float(share.nan_to_num(nan=0.0).max()))
    assert 0.01 < worst < 1


def judged(indices, values, slack=0.5, visible=None):
    value = torch.tensor([values], dtype=torch.float64)
    scores = Scores(value, torch.full_like(value, slack), torch.tensor([visible or len(values)]))
    kinds, share = wrong_rows(torch.tensor([indices]), scores)
    return {kind for kind, wrong in kinds.items() if bool(wrong.any())}, float(share)


def test_keys_within_rounding_of_each_other_are_exchangeable():
    values = [9.0, 5.0, 4.5, 3.9, 0.0]
    for pair in itertools.permutations((0, 1)):
        assert judged(pair, values) == (set(), 0.0)
    assert judged((0, 2), values) == (set(), pytest.approx(0.5))
    found, share = judged((0, 3), values)
    assert (found, share) == ({BELOW}, pytest.approx(1.1))
    assert judged((0, 2), [1.0] * 5, slack=0.0) == (set(), 0.0)


@pytest.mark.parametrize(
    ("indices", "visible", "kinds"),
    [
        ((2, 0, -1), 2, {BEHIND, FEW}),
        ((0, 99, 1), 3, {BEHIND, FEW}),
        ((2, 0), 3, {BELOW}),
        ((0, 0, 1), 3, {TWICE, FEW}),
        ((-1, 0, 1), 3, {FEW}),
        ((1, -1, 0), 2, set()),
        ((0, -1, -7), 1, set()),
    ],
)
def test_each_fault_of_a_set_has_a_name(indices, visible, kinds):
    assert judged(indices, [5.0, 4.0, 2.0, 1.0], visible=visible)[0] == kinds


def test_undefined_arguments_are_refused():
    arguments = build_indexer(CASE, 0).arguments(torch.device("cpu"))
    for changes, named in (
        ({"weights": torch.zeros(3, 3)}, "weights.shape"),
        ({"key": arguments["key"][:4]}, "at least"),
        ({"index_cache": torch.zeros(2, 2, 7)}, "index_cache.shape"),
    ):
        with pytest.raises(ReferenceArgumentError, match=named):
            sparse_attn_indexer(*(arguments | changes).values(), index_topk=5)
    with pytest.raises(ReferenceArgumentError, match="index_topk"):
        sparse_attn_indexer(*arguments.values(), index_topk=0)


def test_all_faults_that_fit_are_named():
    """With one head, leaving out the weights and taking their magnitude choose the same keys."""
    one_head = make_case((9, 9), (6, 30), path="indexer", options=IndexerOptions(index_topk=5, index_n_heads=1))

    def without_weights(query, weights, *rest, index_topk):
        return sparse_attn_indexer(query, torch.ones_like(weights), *rest, index_topk=index_topk)

    found = Indexing(None, without_weights, one_head, 0, torch.device("cpu")).numerics()
    first, second = "the weights are missing", "the weights count by their magnitude"
    assert found.meaning == f"perhaps: {first}; also possible: {second}"
    many = Indexing(None, without_weights, CASE, 0, torch.device("cpu")).numerics()
    assert many.meaning == first
