"""Inputs that reveal faults: needles have the intended weights, and are where off-by-one errors show."""

from typing import Any

import pytest
import torch

from attncheck.harness.problem import queries as inputs
from attncheck.harness.problem.problem import Problem, build_problem


def weights(problem: Problem, request: int) -> torch.Tensor:
    """Dense softmax weights ``[H, rows, keys]`` of one request, and of keys beyond what a row sees."""
    layer, r = problem.layer, problem.requests[request]
    query = problem.query[r.first_row : r.first_row + r.rows].double()
    group = layer.num_heads // layer.num_kv_heads
    keys = problem.keys[r.base : r.base + r.num_keys].double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.softmax_scale
    position = torch.arange(r.rows) + r.first_position
    distance = position[:, None] - torch.arange(r.num_keys)[None, :]
    left, right = layer.window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if layer.is_causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)


@pytest.mark.parametrize(("keys", "head_size"), [(37, 64), (1000, 64), (9000, 128), (300, 16), (5000, 256)])
def test_decode_needles_weigh_about_half(make_case: Any, keys: int, head_size: int) -> None:
    problem = build_problem(make_case((1, keys), head_size=head_size, num_heads=16), 0)
    heaviest = weights(problem, 0).amax(dim=-1).flatten()
    # Some heads point at keys of no request, some have large or equal scores; most carry a visible needle.
    assert int((heaviest > 0.15).sum()) >= 8
    assert int(((heaviest > 0.15) & (heaviest < 0.95)).sum()) >= 6


def test_needles_are_at_both_ends_and_at_page_edges(make_case: Any) -> None:
    problem = build_problem(make_case((1, 1000), num_heads=16), 0)
    heavy = {int(i) for i in weights(problem, 0)[:, 0].argmax(dim=-1)}
    assert {0, 999, 998} <= heavy
    assert heavy & {992, 991}, "the last page begins at 992"


def test_large_and_equal_scores_are_among_the_rows(make_case: Any) -> None:
    problem = build_problem(make_case((64, 64)), 0)
    scores = torch.einsum("qhd,khd->hqk", problem.query.double(), problem.keys.double().repeat_interleave(4, 1))
    largest = (scores * problem.layer.softmax_scale).abs().amax(dim=-1)
    assert float(largest.max()) > 1000
    assert bool((largest == 0).any())
    plain = build_problem(make_case((64, 64), inputs=("needles",)), 0)
    scores = torch.einsum("qhd,khd->hqk", plain.query.double(), plain.keys.double().repeat_interleave(4, 1))
    assert float((scores * plain.layer.softmax_scale).abs().max()) < 100


def test_soft_capped_layers_meet_scores_around_and_far_above_the_cap(make_case: Any) -> None:
    problem = build_problem(make_case((40, 200), logits_soft_cap=50.0), 0)
    scores = torch.einsum("qhd,khd->hqk", problem.query.double(), problem.keys.double().repeat_interleave(4, 1))
    ratio = (scores * problem.layer.softmax_scale).abs().amax(dim=-1) / 50.0
    assert float(ratio.max()) > 50
    assert int(((ratio > 0.9) & (ratio < 1.3)).sum()) > 20


def test_float16_queries_stay_finite(make_case: Any) -> None:
    problem = build_problem(make_case((9, 100), dtype="float16", scale=1e-4, logits_soft_cap=50.0), 0)
    assert bool(torch.isfinite(problem.query).all())


@pytest.mark.parametrize("layer", [{}, {"sliding_window": 9, "alibi": True}, {"logits_soft_cap": 20.0, "sinks": True}])
def test_how_many_rows_are_taken_at_once_changes_nothing(
    make_case: Any, monkeypatch: pytest.MonkeyPatch, layer: dict[str, Any]
) -> None:
    case = make_case((1, 40), (17, 30), (5, 3), (9, 9), **layer)
    whole = build_problem(case, 0).query
    monkeypatch.setattr(inputs, "_ROWS_AT_ONCE", 4)
    assert torch.equal(build_problem(case, 0).query, whole)
