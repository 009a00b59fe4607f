"""The states to merge: the same everywhere, of every kind, with a budget that holds honest kernels."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.cases.model import Tolerance
from attncheck.harness.checks.functions import MergeProblem, build_merge, merge_truth
from attncheck.harness.truth.unpaged import share_of_budget

CPU = torch.device("cpu")


def finite_pairs(problem: MergeProblem) -> torch.Tensor:
    return torch.isfinite(problem.lse_a) & torch.isfinite(problem.lse_b)


def test_the_same_bits_on_every_machine(merge_case: Any) -> None:
    problem = build_merge(merge_case((2, 9), (1, 1), dtype="float32", num_heads=8), 0)
    rows = problem.lse_a[0].tolist()
    assert rows == build_merge(problem.case, 0).lse_a[0].tolist()
    assert rows != build_merge(problem.case, 1).lse_a[0].tolist()
    assert rows[2] == -math.inf
    assert [math.floor(value * 2**10) for value in (rows[0], rows[1])] == PINNED


PINNED = [2254, -380]
"""Of the first two log-sum-exps, in 1/1024: another generator gives other problems under the same hash."""


def test_rows_and_heads_are_about_everything_that_goes_wrong(merge_case: Any) -> None:
    problem = build_merge(merge_case((33, 70)), 0)
    a, b = problem.lse_a, problem.lse_b
    both = finite_pairs(problem)
    assert bool((a.isneginf() & b.isneginf()).any())
    assert bool((a.isneginf() & b.isfinite()).any())
    assert bool((a.isfinite() & b.isneginf()).any())
    assert bool((a == b)[both].any())
    assert bool(((a - b)[both] > 90).any())
    assert bool(((b - a)[both] > 90).any())
    assert bool(((a > 88) & (b > 88)).any())
    assert bool(((a < -88) & (b < -88) & both).any())
    assert bool(((a - 80).abs() <= 2).any() & ((b + 80).abs() <= 2).any())
    for head in range(8):
        assert a[:, head].isneginf().any(), head


def test_where_the_cut_decides_the_states_follow_the_lengths(merge_case: Any) -> None:
    problem = build_merge(merge_case((4, 1004), (3, 3), inputs=()), 0)
    assert problem.positions == ((0, 1000), (0, 1001), (0, 1002), (0, 1003), (1, 0), (1, 1), (1, 2))
    # No context, no first state, but where the second has to be the empty one.
    assert torch.equal(problem.lse_a[4:].isfinite(), problem.lse_b[4:].isneginf() & problem.lse_a[4:].isfinite())
    assert int(problem.lse_a[4:].isneginf().sum()) > 20
    rows = problem.lse_a[:4]
    assert bool(((rows - math.log(1000)).abs() <= 2.01)[rows.isfinite() & (rows > 3)].all())
    assert not bool((problem.lse_a[torch.isfinite(problem.lse_a)].abs() > 9.1).any())  # ``inputs`` has no large states


def test_rubbish_is_only_in_empty_states(merge_case: Any) -> None:
    problem = build_merge(merge_case((33, 70), dtype="float32"), 0)
    plain, other = problem.arguments(CPU), problem.arguments(CPU, 7.0)
    for state in "ab":
        empty = problem.arguments(CPU)[f"lse_{state}"].isinf()
        changed = (plain[f"out_{state}"] != other[f"out_{state}"]).all(dim=-1)
        assert torch.equal(changed, empty)


def test_views_are_strided_and_swapping_swaps(merge_case: Any) -> None:
    problem = build_merge(merge_case((5, 40)), 0)
    given, swapped = problem.arguments(CPU), problem.arguments(CPU, swapped=True)
    assert not given["out_b"].is_contiguous()
    assert not given["lse_b"].is_contiguous()
    for one, other in ("ab", "ba"):
        assert torch.equal(given[f"out_{one}"], swapped[f"out_{other}"])
        assert torch.equal(given[f"lse_{one}"], swapped[f"lse_{other}"])
    plain = build_merge(merge_case((5, 40), inputs=("needles",)), 0).arguments(CPU)
    assert all(tensor.is_contiguous() for tensor in plain.values())


def test_the_truth_is_the_weighted_mean(merge_case: Any) -> None:
    problem = build_merge(merge_case((9, 40), dtype="float32"), 0)
    truth = merge_truth(problem, CPU)
    for row in range(9):
        for head in range(8):
            a, b = float(problem.lse_a[row, head]), float(problem.lse_b[row, head])
            if math.isinf(a) and math.isinf(b):
                assert float(truth.lse[row, head]) == -math.inf
                assert not bool(truth.out[row, head].any())
                continue
            highest = max(a, b)
            w_a, w_b = math.exp(a - highest), math.exp(b - highest)
            assert float(truth.lse[row, head]) == pytest.approx(highest + math.log(w_a + w_b), abs=1e-12)
            x, y = float(problem.out_a[row, head, 5]), float(problem.out_b[row, head, 5])
            assert float(truth.out[row, head, 5]) == pytest.approx((w_a * x + w_b * y) / (w_a + w_b), abs=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_kernel_that_counts_in_powers_of_two_is_within_the_budget(merge_case: Any, dtype: str) -> None:
    problem = build_merge(merge_case((33, 70), (20, 20), dtype=dtype), 0)
    truth = merge_truth(problem, CPU)
    out_a, lse_a, out_b, lse_b = (tensor.float() for tensor in problem.arguments(CPU).values())
    a, b = lse_a * math.log2(math.e), lse_b * math.log2(math.e)
    highest = torch.maximum(a, b)
    pivot = torch.where(highest.isinf(), 0.0, highest)
    w_a, w_b = torch.exp2(a - pivot), torch.exp2(b - pivot)
    share = (w_a / (w_a + w_b)).nan_to_num()[..., None]
    other = (w_b / (w_a + w_b)).nan_to_num()[..., None]
    out = (out_a * share + out_b * other).to(problem.dtype)
    assert float(share_of_budget(out.double() - truth.out, truth.budget).max()) < 0.7
    lse = (highest + torch.log2(w_a + w_b)) * math.log(2)
    error = torch.where(truth.lse.isinf(), 0.0, (lse.double() - truth.lse).abs())
    assert float((error / truth.budget.lse).max()) < 0.7


def test_a_case_may_widen_its_budget(merge_case: Any) -> None:
    case = merge_case((5, 40))
    wider = replace(case, tolerance=Tolerance(factor=4.0, reason="a test"))
    one, four = (merge_truth(build_merge(c, 0), CPU).budget for c in (case, wider))
    for name in ("norm", "peak", "lse"):
        assert torch.equal(getattr(one, name) * 4, getattr(four, name))
