"""The indexer's scores and budget, its judgement of sets with ties, and what it finds in a backend's function."""

import itertools

import pytest
import torch
from made_cases import make_case

from attncheck.cases.loader import load_suite
from attncheck.errors import ReferenceArgumentError
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.checks.indexer import (
    BEHIND,
    BELOW,
    FEW,
    GAP,
    OTHER,
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
FP8 = IndexerOptions(index_topk=5, index_n_heads=3, index_head_dim=16, index_cache_dtype="fp8_e4m3")
FP8_CASE = make_case((9, 9), (1, 20), (6, 30), padding=(1, 2), path="indexer", options=FP8)


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


@pytest.mark.parametrize("case", [CASE, FP8_CASE], ids=["auto", "fp8"])
def test_scores_and_the_reference_are_those_of_the_definition(case):
    problem = build_indexer(case, 0)
    scores = scores_of(problem)
    arguments = problem.arguments(torch.device("cpu"))
    named = sparse_attn_indexer(*arguments.values(), index_topk=5)
    assert torch.equal(arguments["index_cache"], problem.cache(with_new=True))
    for row, right in enumerate(by_hand(problem)):
        assert scores.value[row, : len(right)].tolist() == pytest.approx(right)
        assert int(scores.num_visible[row]) == len(right)
        best = sorted(range(len(right)), key=lambda key, right=right: (-right[key], key))[:5]
        if row % 9 != 2:  # equal scores are in any order
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
        ((-1, 0, 1), 3, {FEW, GAP}),
        ((1, -1, 0), 2, {GAP}),
        ((1, 0, -1), 2, set()),
        ((0, -1, -7), 1, {OTHER}),
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
        ({"index_cache": torch.zeros(2, 2, 16, dtype=torch.uint8)}, "index_cache.shape"),
        ({"index_cache": torch.zeros(99, 20, 16, dtype=torch.uint8).mT}, "contiguous blocks"),
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
    assert found.meaning == f"{first}; also possible: {second}"
    many = Indexing(None, without_weights, CASE, 0, torch.device("cpu")).numerics()
    assert many.meaning == first


def test_fp8_keys_lie_as_in_vllm():
    """Bytes by hand: two keys of four numbers in a block, then the scale of each."""
    cache = torch.zeros(2, 2, 8, dtype=torch.uint8)
    key = torch.tensor([[448.0, -1.0, 0.5, 0.0], [0.25, 0.125, -0.25, 0.0]])
    query = torch.ones(1, 1, 4).to(torch.float8_e4m3fn)
    batch = torch.tensor([[1]]), torch.tensor([2]), torch.tensor([0, 1]), torch.tensor([2, 3])
    named = sparse_attn_indexer(query, torch.ones(1, 1), key, cache, *batch, index_topk=2)
    assert named.tolist() == [[0, 1]]
    assert not cache[0].any()
    codes, scales = cache[1].flatten()[:8], cache[1].flatten()[8:].view(torch.float32)
    assert codes.tolist() == [0x7E, 0xB8, 0x30, 0x00, 0x7E, 0x76, 0xFE, 0x00]  # 448 is 0x7E, 224 is 0x76
    assert scales.tolist() == pytest.approx([1.0, 0.25 / 448])


def fp8_indexer(*, scale=lambda largest: largest / 448, by_reciprocal=False, scores=None):
    """An indexer of FP8 keys in float32, which computes the scales and the scores in a way of its own."""

    def indexer(query, weights, key, cache, block_table, seq_lens, query_start_loc, slot_mapping, *, index_topk):
        block_size, size, blocks = cache.shape[1], key.shape[1], cache.view(len(cache), -1)
        codes = blocks[:, : block_size * size].view(torch.float8_e4m3fn).unflatten(1, (block_size, size))
        scales = blocks[:, block_size * size :].view(torch.float32)
        new = slot_mapping >= 0
        place = slot_mapping[new] // block_size, slot_mapping[new] % block_size
        numbers, largest = key[new].float(), key[new].float().abs().amax(dim=1)
        scales[place] = scale(largest)
        quotients = numbers * (448 / largest)[:, None] if by_reciprocal else numbers / scales[place][:, None]
        codes[place] = quotients.clamp(-448, 448).to(torch.float8_e4m3fn)
        chosen = torch.full((len(query), index_topk), -1, dtype=torch.int32)
        for request, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
            for row in range(start, end):
                position = torch.arange(int(seq_lens[request]) - end + row + 1)
                seen = block_table[request][position // block_size].long(), position % block_size
                products = (scores or torch.matmul)(query[row].float(), codes[seen].float().T)
                best = ((weights[row] @ products.relu()) * scales[seen]).topk(min(index_topk, len(position)))
                chosen[row, : len(best.indices)] = best.indices.int()
        return chosen

    return indexer


def sums_of_tensor_cores(query, keys):
    """Products of 32 channels at a time, aligned to the largest, with 13 bits behind its first."""
    total = torch.zeros(len(query), keys.shape[1])
    for channels in torch.arange(len(keys)).split(32):
        terms = torch.cat([query[:, channels, None] * keys[None, channels], total[:, None]], dim=1)
        step = torch.exp2(terms.abs().amax(dim=1, keepdim=True).clamp(min=1e-30).log2().floor() - 13)
        total = ((terms / step).trunc() * step).sum(dim=1)
    return total


@pytest.mark.parametrize("name", ["fp8.float32", "fp8-sizes.v1-16"])
def test_tensor_cores_lose_about_half_of_the_slack_at_most(name):
    (case,) = (case for case in load_suite("indexer").cases if case.id == name)
    worst = 0.0
    for seed in range(3):
        problem = build_indexer(case, seed)
        right = scores_of(problem)
        for request in problem.requests:
            keys = problem.keys[request.base : request.base + request.num_keys].float()
            for row in range(request.first_row, request.first_row + request.rows):
                products = sums_of_tensor_cores(problem.query[row].float(), keys.T)
                value, slack = right.value[row, : len(keys)], right.slack[row, : len(keys)]
                share = (problem.weights[row] @ products.relu() - value).abs() / slack
                worst = max(worst, float(share.nan_to_num(nan=0.0).max()))
    assert 0.2 < worst < 0.6


RIGHT = {
    "float32": {},
    "scales of powers of two": {"scale": lambda largest: torch.exp2((largest / 448).log2().ceil())},
    "reciprocal": {"by_reciprocal": True},
    "scale above": {"scale": lambda largest: largest / 448 * (1 + 2.0**-23)},
    "scale below": {"scale": lambda largest: largest / 448 * (1 - 2.0**-23)},
    "tensor cores": {"scores": sums_of_tensor_cores},
}


@pytest.mark.parametrize("options", RIGHT.values(), ids=RIGHT)
def test_right_arithmetic_of_fp8_keys_passes(options):
    for case in (case for case in load_suite("indexer").cases if case.id in ("fp8.bfloat16", "fp8-sizes.v1-16")):
        for seed in range(2):
            indexing = Indexing(None, fp8_indexer(**options), case, seed, torch.device("cpu"))
            found = [indexing.numerics(), indexing.cache_write(), indexing.containment()]
            assert all(isinstance(each, Holds) for each in found), found


def in_float16(query, weights, keys):
    return (weights[:, None] * (query @ keys.T).relu()).half().float().sum(dim=0)


def with_bfloat16_weights(query, weights, keys):
    return weights.bfloat16().float() @ (query @ keys.T).relu()


def with_tf32_weights(query, weights, keys):
    return (weights.view(torch.int32) & -(2**13)).view(torch.float32) @ (query @ keys.T).relu()


@pytest.mark.parametrize("scores", [in_float16, with_bfloat16_weights, with_tf32_weights])
def test_coarse_scores_are_found_with_every_seed(scores):
    (case,) = (case for case in load_suite("indexer").cases if case.id == "mixed.bfloat16")

    def indexer(query, weights, key, cache, block_table, seq_lens, query_start_loc, slot_mapping, *, index_topk):
        cache.flatten(0, 1)[slot_mapping] = key
        chosen = torch.full((len(query), index_topk), -1, dtype=torch.int32)
        for request, (start, end) in enumerate(itertools.pairwise(query_start_loc.tolist())):
            for row in range(start, end):
                position = torch.arange(int(seq_lens[request]) - end + row + 1)
                keys = cache[block_table[request][position // 16].long(), position % 16].float()
                best = scores(query[row].float(), weights[row], keys).topk(min(index_topk, len(position))).indices
                chosen[row, : len(best)] = best.int()
        return chosen

    for seed in range(5):
        assert isinstance(Indexing(None, indexer, case, seed, torch.device("cpu")).numerics(), Broken)
