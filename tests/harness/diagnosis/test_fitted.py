"""Numbers wrong by a factor, other heads and exchanged pages are named; what wrong rows share is described."""

import re
from dataclasses import replace

import pytest
import torch

from attncheck.harness.diagnosis.patterns import pattern, shared_by, which_heads
from attncheck.harness.problem.problem import STALE_ROWS, build_problem, foreign_slots, rows_in_pool, stale_rows
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reference import Precision
from attncheck.reports.run_file.causes import likely_causes

BATCH = (1, 130), (5, 37), (20, 20)


def causes_of(asked, lost=None, **changes):
    """The likely causes of an honest run under other parameters; ``lost``: rows and heads that are NaN besides."""
    problem, truth = asked
    out = truth.rows.attend(replace(truth.params, **changes), Precision.kernel(problem.dtype))[0].double()
    out = out.to(problem.dtype).double()
    if lost is not None:
        out[lost] = torch.nan
    return likely_causes(asked.explained(out))


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 0.97), ("bfloat16", 1.02), ("float32", 3.1)])
def test_a_scale_wrong_by_a_factor(ask, dtype, factor):
    (cause,) = causes_of(ask(*BATCH, dtype=dtype), scale=0.125 * factor)
    words = re.fullmatch(r"the scale is (\S+) times the layer's", cause)
    assert float(words[1]) == pytest.approx(factor, rel=2e-3)


def test_a_soft_cap_or_slopes_wrong_by_a_factor(ask):
    capped, sloped = ask(*BATCH, logits_soft_cap=7.0, dtype="float32"), ask(*BATCH, alibi=True, dtype="float32")
    assert causes_of(capped, logits_soft_cap=6.3)[0] == "the soft cap is 0.9 times the layer's"
    slopes = tuple(1.3 * slope for slope in sloped.problem.layer.alibi_slopes)
    assert causes_of(sloped, alibi_slopes=slopes)[0] == "the ALiBi slopes are 1.3 times the layer's"


def test_beside_values_that_are_not_finite_the_finite_ones_are_explained(ask):
    lost = torch.zeros(26, 8, dtype=torch.bool)
    lost[::3, 2] = True
    (cause,) = causes_of(ask(*BATCH, logits_soft_cap=7.0), lost, logits_soft_cap=7.0 * 1.2)
    assert cause.startswith("the soft cap is 1.2")


@pytest.mark.parametrize(("shift", "other"), [(1, "h - 1"), (-1, "h + 1")])
def test_queries_of_the_next_head(ask, shift, other):
    asked = ask(*BATCH)
    rows = asked.truth.rows
    out, _ = replace(rows, query=rows.query.roll(shift, 1)).attend(asked.truth.params)
    assert likely_causes(asked.explained(out)) == (f"query head h has the query of head {other}",)


def test_overflow_under_a_cap_is_recognised_by_the_scores(ask):
    asked = ask(*BATCH, logits_soft_cap=7.0)
    problem, truth = asked
    keys = problem.keys.double().repeat_interleave(4, dim=1)
    far = torch.zeros(truth.lse.shape, dtype=torch.bool)
    for request in problem.requests:
        for row in range(request.rows):
            seen = keys[request.base : request.base + request.first_position + row + 1]
            query = problem.query[request.first_row + row].double()
            scores = torch.einsum("hd,khd->hk", query, seen) / 8 / 7.0
            far[request.first_row + row] = scores.abs().amax(dim=1) > 88.7
    assert 0 < int(far.sum()) < far.numel() // 2
    out = truth.out.masked_fill(far[..., None], torch.nan)
    explanation = "NaN or Inf just where a score is "
    assert asked.explained(out).startswith(explanation)
    out[tuple((~far).nonzero()[0])] = torch.nan
    assert explanation not in asked.explained(out)


# The contents of a pool are known slot by slot, and pages that are exchanged are named.


@pytest.mark.parametrize("first_block", [None, 8388600])
def test_the_contents_of_a_pool_are_known_slot_by_slot(make_case, first_block):
    cache = {"first_block": first_block}
    problem = build_problem(make_case((1, 40), (3, 21), cache=cache, num_kv_heads=1, head_size=16), 0)
    read = rows_in_pool(problem)
    assert read(torch.tensor([-1])) is None
    assert read(torch.tensor([problem.num_blocks * 16])) is None
    tail = foreign_slots(problem)["the unused tail of a last page"]
    found = read(torch.cat([problem.key_slots, tail]))
    assert found is not None
    for rows, own, stale in zip(found, (problem.keys, problem.values), stale_rows(problem), strict=True):
        assert torch.equal(rows[: len(own)], own)
        assert torch.equal(rows[len(own) :], stale[torch.arange(len(tail)) % STALE_ROWS])
    if first_block:
        untouched = read(torch.tensor([16 * 1234567]))
        assert untouched is not None
        assert not any(bool(rows.any()) for rows in untouched)


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        (lambda pages: (*pages[:-2], pages[-1], pages[-2]), "the last two pages of the block table are exchanged"),
        (lambda pages: (pages[-1], *pages[1:-1], pages[0]), "the first and the last page of the block table are"),
        (lambda pages: (pages[0], pages[2], pages[1], *pages[3:]), "pages 1 and 2 of the block table are exchanged"),
        (lambda pages: pages[::-1], "all pages, in reversed order, of the block table are exchanged"),
    ],
)
def test_exchanged_pages_are_named(ask, order, cause):
    asked = ask((1, 100), (6, 90), (20, 120), alibi=True)
    problem, truth = asked
    size, slots = problem.cache.block_size, []
    for request in problem.requests:
        pages = order(request.pages)
        slots += [pages[position // size] * size + position % size for position in range(request.num_keys)]
    found = rows_in_pool(problem)(torch.tensor(slots))
    out, _ = replace(truth.rows, keys=found[0], values=found[1]).attend(truth.params)
    assert likely_causes(asked.explained(out))[0].startswith(cause)


# What wrong rows, heads, channels and keys share is described in words; the rows are counted by hand here. Rows 0;
# 1 to 5; 6 to 38; 39 are at positions 36; 35 to 39; 0 to 32; 129. Pages of 16.


def mask(size, *places):
    return torch.isin(torch.arange(size), torch.tensor(places))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((0, 39), "with query_len 1"),
        (range(6, 39), "without context"),
        (range(1, 6), "with query_len > 1 and context"),
        (range(1, 40), "of requests other than request 0"),
        ((0, 5, 38, 39), "last of their requests"),
        ((6, 22, 38), "whose position is a multiple of 16"),
        ((21, 37), "whose position is 15 modulo 16"),
        ((0, 1, 6, 14, 22, 30, 38, 39), "whose number in the request is a multiple of 8"),
        ((6, 14, 22, 30, 38), "whose position is a multiple of 8"),
        ((38,), "with row of the request 32"),
        ((0, 1, 2, 3, 4, 5, 39), "with context"),
        ((0, 2, 3, 4, 5, 39), "with position >= 36"),
        (range(9), "with number in the batch <= 8"),
        ((0, 9, 23), None),
    ],
)
def test_rows_are_described_by_what_the_others_do_not_have(make_case, rows, words):
    wrong = mask(40, *rows)
    shared = shared_by(build_problem(make_case(), 0), wrong, ~wrong)
    assert shared == words


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ((4, 5, 6, 7), "only heads 4 to 7 (those of KV head 1)"),
        ((0, 4), "only heads 0, 4 (the first of each KV head)"),
        ((3, 7), "only heads 3, 7 (the last of each KV head)"),
        ((6,), "only head 6"),
    ],
)
def test_heads_are_described_by_their_group(make_case, heads, words):
    assert which_heads(build_problem(make_case(), 0), mask(8, *heads)) == words


def test_rows_heads_and_channels_are_described_together(ask):
    problem, truth = ask()
    error = torch.zeros_like(truth.out)
    error[6:39, 2, 48:] = 1.0
    shares = share_of_budget(error, truth.budget)
    assert pattern(problem, truth, error, shares) == (
        "wrong are rows without context, only head 2, only channels 48 to 63"
    )
    assert pattern(problem, truth, torch.ones_like(error), shares + 2) is None


@pytest.mark.parametrize(("factor", "amount"), [(0.6, "too little"), (1.6, "too much")])
def test_keys_of_other_weights_are_named(ask, factor, amount):
    asked = ask((1, 120), (20, 150), (1, 140))
    problem, truth = asked
    keys = truth.rows.keys.clone()
    for request in problem.requests:
        keys[request.base + 64 : request.base + request.num_keys] *= factor
    output, _ = replace(truth.rows, keys=keys).attend(truth.params)
    assert asked.explained(output).startswith(f"not known; the heaviest keys weigh {amount}")


@pytest.mark.parametrize(("size", "words"), [(3.0, "wrong are rows with position 38, only head 1"), (1.1, None)])
def test_errors_near_the_budget_name_no_place(ask, size, words):
    """Of errors that hardly exceed the budget, chance chooses the row and the head."""
    problem, truth = ask()
    shares = torch.zeros(truth.out.shape[:2], dtype=torch.float64)
    shares[4, 1] = size
    error = size * shares.sign()[..., None] * truth.budget.peak[..., None].expand_as(truth.out)
    assert pattern(problem, truth, error, shares) == words
