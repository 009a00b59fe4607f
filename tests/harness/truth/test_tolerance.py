"""The budget: right kernels stay inside it, blind answers do not, and it is the documented formula."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.cases.model import Case
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.harness.truth.unpaged import UnpagedAttention, budget_of, score_bound, share_of_budget
from attncheck.reference import AttentionParams
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec

CPU = torch.device("cpu")


def float32_kernel(problem, *, round_p, peak=1.0):
    """Plain float32 attention, written without the reference; optionally with the softmax rounded to the dtype.

    ``peak``: what the largest weight of a row is before it is divided by their sum.
    """
    layer, outputs = problem.layer, []
    for r in problem.requests:
        group = layer.num_heads // layer.num_kv_heads
        query = problem.query[r.first_row : r.first_row + r.rows].float()
        keys = problem.keys[r.base : r.base + r.num_keys].float().repeat_interleave(group, 1)
        values = problem.values[r.base : r.base + r.num_keys].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.softmax_scale
        distance = (torch.arange(r.rows) + r.first_position)[:, None] - torch.arange(r.num_keys)
        hidden = distance < 0
        if layer.sliding_window:
            hidden |= distance >= layer.sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = peak * torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        total = weights.sum(dim=-1)
        if round_p:
            weights = weights.to(problem.dtype).float()
        outputs.append((torch.einsum("hqk,khd->qhd", weights, values) / total.T[..., None]).to(problem.dtype))
    return torch.cat(outputs)


def shares(problem, truth, output):
    return share_of_budget(output.double() - truth.out, truth.budget)


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    keys=st.integers(1, 700),
    rows=st.integers(1, 40),
    head_size=st.sampled_from([16, 64, 128]),
    scale=st.sampled_from([None, 0.03, 0.5]),
    round_p=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_right_kernels_are_never_accused(dtype, keys, rows, head_size, scale, round_p, seed):
    case = Case(
        suite="made",
        id="right",
        layer=LayerSpec(num_heads=4, num_kv_heads=2, head_size=head_size, dtype=dtype, scale=scale),
        cache=CacheSpec(),
        batch=BatchSpec(requests=(RequestSpec(query_len=rows, seq_len=rows + keys - 1),)),
    )
    problem = build_problem(case, seed)
    truth = truth_of(problem, CPU)
    assert float(shares(problem, truth, float32_kernel(problem, round_p=round_p)).max()) <= 1.0


@pytest.mark.parametrize("head_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_luck_of_few_numbers_fails_no_kernel(make_case, dtype, head_size):
    for seed in range(20):
        problem = build_problem(make_case((4, 60), (1, 130), head_size=head_size, dtype=dtype), seed)
        output = float32_kernel(problem, round_p=True, peak=0.7)
        assert float(shares(problem, truth_of(problem, CPU), output).max()) <= 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("keys", [2, 17, 500, 4096])
def test_zeros_a_constant_and_the_mean_of_v_are_far_outside(make_case, dtype, keys):
    problem = build_problem(make_case((1, keys), (1, keys), dtype=dtype), 0)
    truth = truth_of(problem, CPU)
    mean = torch.cat([problem.values[r.base : r.base + r.num_keys].double().mean(0)[None] for r in problem.requests])
    for blind in (
        torch.zeros_like(truth.out),
        torch.full_like(truth.out, 0.1),
        mean.repeat_interleave(4, dim=1),
    ):
        worst_row = shares(problem, truth, blind).amax(dim=1)
        assert bool((worst_row > 10).all())


@pytest.mark.parametrize(("second_key", "ruled_by"), [(3.0, "two roundings"), (1.3, "the loss")])
def test_the_budget_is_the_formula(second_key, ruled_by):
    """One row, one head, two keys, equal columns: by hand; values that cancel make the loss the larger part."""
    query, keys = torch.tensor([[[2.0]]]), torch.tensor([[[1.0]], [[second_key]]])
    values = torch.tensor([[[1.0]], [[-1.0]]]).expand(2, 1, 8)
    rows = UnpagedAttention(query, keys, values, torch.tensor([0, 1]), torch.tensor([0, 2]))
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, head_size_v=8, scale=0.5)
    out, lse, weighted = rows.attend_weighted(params)
    budget = budget_of(rows, params, torch.bfloat16, out, lse, weighted)
    lead = float(torch.tensor(second_key)) - 1.0
    truth = (math.exp(-lead) - 1) / (math.exp(-lead) + 1)
    # In bfloat16 the softmax numerators are exp(-lead) rounded and 1, the output is rounded once more.
    e = float(torch.tensor(math.exp(-lead)).bfloat16())
    low = float(torch.tensor((e - 1) / (math.exp(-lead) + 1), dtype=torch.float64).bfloat16())
    loss, roundings = 3 * abs(low - truth), 2**-7 * abs(truth)
    assert (loss > roundings) == (ruled_by == "the loss")
    floor = 8 * 2**-24 * (1 + 0.5 * 2 * second_key) * 1.0
    assert float(out[0, 0, 0]) == pytest.approx(truth, abs=1e-12)
    assert float(budget.peak) == pytest.approx(max(loss, roundings) + floor, rel=1e-4)
    assert float(budget.norm) == pytest.approx(8**0.5 * float(budget.peak))


def test_score_bound_counts_only_keys_the_row_sees(make_case):
    keys = torch.tensor([1.0, 100.0, 2.0]).reshape(3, 1, 1)
    rows = UnpagedAttention(torch.ones(2, 1, 1), keys, keys, torch.tensor([0, 2]), torch.tensor([0, 3]))
    windowed = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, window=(0, 0))
    assert score_bound(rows, windowed).flatten().tolist() == [100.0, 2.0]
    capped = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, logits_soft_cap=5.0)
    assert score_bound(rows, capped).flatten().tolist() == [5.0, 5.0]
    biased = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, window=(0, 0), alibi_slopes=(0.5,))
    assert score_bound(rows, biased).flatten().tolist() == [101.5, 3.5]


def test_a_cap_hides_the_rounding_of_large_scores_and_not_that_of_large_terms():
    query = torch.tensor([[[30.0, -40.0]], [[30.0, -40.0]]])
    keys = torch.tensor([[[40.0, 30.0]], [[80.0, -60.0]]])  # scores of 0 and 4800
    rows = UnpagedAttention(query, keys, keys, torch.tensor([0, 2]), torch.tensor([0, 2]))
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=2, scale=1.0, logits_soft_cap=5.0)
    assert score_bound(rows, params).flatten().tolist() == pytest.approx([2500.0, 2500.0])
    second = replace(params, window=(0, 0))
    assert score_bound(rows, second).flatten().tolist() == pytest.approx([2500.0, 5.0])


def test_nan_is_infinitely_wrong_and_no_error_is_right(make_case):
    problem = build_problem(make_case((1, 1)), 0)
    truth = truth_of(problem, CPU)
    error = torch.zeros_like(truth.out)
    assert float(share_of_budget(error, truth.budget).max()) == 0.0
    error[0, 0, 0] = float("nan")
    assert float(share_of_budget(error, truth.budget)[0, 0]) == math.inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_of_the_rounded_softmax_is_an_honest_lse(make_case, dtype):
    for seed in range(5):
        problem = build_problem(make_case((3, 700), (1, 33), dtype=dtype), seed)
        truth = truth_of(problem, CPU)
        for r in problem.requests:
            rows = slice(r.first_row, r.first_row + r.rows)
            keys = problem.keys[r.base : r.base + r.num_keys].float().repeat_interleave(4, 1)
            scores = torch.einsum("qhd,khd->qhk", problem.query[rows].float(), keys) * problem.layer.softmax_scale
            distance = (torch.arange(r.rows) + r.first_position)[:, None, None] - torch.arange(r.num_keys)
            scores = scores.masked_fill(distance < 0, float("-inf"))
            top = scores.amax(dim=-1, keepdim=True)
            lse = (top + torch.exp(scores - top).to(problem.dtype).float().sum(-1, keepdim=True).log())[..., 0]
            assert bool(((lse - truth.lse[rows]).abs() <= truth.budget.lse[rows]).all())
            assert bool(((lse + 0.02 - truth.lse[rows]).abs() > truth.budget.lse[rows]).any())


@pytest.mark.parametrize("scale", [0.01, 0.4])
def test_a_tanh_of_exponentials_is_within_the_budget(make_case, scale):
    """Small scores lose most: 2 sigmoid(2x) - 1 is off by some roundings of 1, times the cap."""
    cap = 30.0
    changes = {"dtype": "float32", "scale": scale, "logits_soft_cap": cap, "sliding_window": 3}
    for seed in range(5):
        problem = build_problem(make_case((15, 15), (31, 31), **changes), seed)
        truth = truth_of(problem, CPU)
        for r in problem.requests:
            rows = slice(r.first_row, r.first_row + r.rows)
            keys = problem.keys[r.base : r.base + r.num_keys].repeat_interleave(4, 1)
            scores = torch.einsum("qhd,khd->qhk", problem.query[rows], keys) * scale
            scores = cap * (2 / (1 + torch.exp(-2 * scores / cap)) - 1)
            distance = (torch.arange(r.rows) + r.first_position)[:, None, None] - torch.arange(r.num_keys)
            lse = scores.masked_fill((distance < 0) | (distance > 2), float("-inf")).logsumexp(-1)
            assert bool(((lse - truth.lse[rows]).abs() <= truth.budget.lse[rows]).all())
            assert bool(((lse + 1e-4 - truth.lse[rows]).abs() > truth.budget.lse[rows]).any())


def test_what_underflows_in_float32_may_vanish(make_case):
    """A sink far above every score: the keys' weights lie below the smallest float32."""
    keys = torch.full((3, 1, 1), -300.0)
    rows = UnpagedAttention(torch.ones(1, 1, 1), keys, torch.ones(3, 1, 1), torch.tensor([0, 1]), torch.tensor([0, 3]))
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, sinks=(5.0,))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        out, lse, weighted = rows.attend_weighted(params)
        assert 0 < float(out) < 1e-100
        budget = budget_of(rows, params, dtype, out, lse, weighted)
        assert float(share_of_budget(-out, budget).max()) <= 1.0
        assert float(share_of_budget(torch.full_like(out, 1e-3), budget).max()) > 1.0
