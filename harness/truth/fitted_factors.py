"""Find the factor by which scale, soft cap or ALiBi slopes are wrong, if the output is right for another number.

The factor is searched for on the smallest requests with wrong rows, on a grid and then between two of its points, and
is then refined on all rows.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.tolerance import share_of_budget
from attncheck.harness.truth.truth import Truth
from attncheck.reference import AttentionParams

_REACH, _WIDE_STEP, _STEP = math.log(4.0), 0.15, 0.05
"""Natural logarithms: of the largest factor tried, and of the steps between points of the coarse and the fine grid."""

_FINEST = 2e-6
"""Difference of two logarithms below which the search ends."""

_LEAST = 2e-4
"""Natural logarithm that a factor must exceed in absolute value; below it, the factor counts as 1."""

FACTOR = " times the layer's"
"""End of the meanings."""

_NEAR = 1e-3
"""Difference of two logarithms within which a factor is that of an earlier case."""

_NEARER = 2.0
"""How many times nearer than the truth the best answer must be on the smallest requests."""

_FEWEST = 3
"""Wrong rows and heads that one factor must explain."""

_FEW_SCORES, _MOST_SCORES = 2**17, 2**20
"""Scores ``H * rows * keys``: maximum for the smallest requests together, and for a single request."""

_GOLDEN = (math.sqrt(5) - 1) / 2

Altered = Callable[[float], AttentionParams]


def other_factors(
    problem: Problem,
    truth: Truth,
    values: Tensor,
    shares: Tensor,
    near: Collection[str] = (),
    among: Collection[str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of the factor nearest to ``values``, for each number of the layer.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``. ``near``: meanings of an earlier case; then only their
    factors are tried, on the smallest requests. ``among``: the only ones of :func:`fitted_numbers` to try, among
    other words; None for all.
    """
    every = [(truth, slice(None))]
    few = [
        (truth.of_requests(index, index + 1), slice(taken.first_row, taken.first_row + taken.rows))
        for index in _smallest_wrong(problem, truth, shares)
        for taken in (problem.requests[index],)
    ]
    if not few:
        return
    for name, altered in _numbers(truth.params):

        def off(parts: list[tuple[Truth, slice]], log: float, altered: Altered = altered) -> float:
            total = 0.0
            for part, rows in parts:
                out, _ = part.rows.attend(altered(math.exp(log)))
                error = share_of_budget(values[rows] - out, part.budget)
                total += float(torch.log1p(error)[shares[rows] > 1].sum())
            return total

        known = [float(text.split()[-4]) for text in near if text.startswith(f"the {name} ") and text.endswith(FACTOR)]
        if known:
            log = _narrowed(partial(off, few), math.log(known[-1]), _NEAR)
            yield f"the {name} {math.exp(log):.4g}{FACTOR}", truth.rows.attend(altered(math.exp(log)))[0]
        if near or (among is not None and _words(name) not in among):
            continue
        coarse = [step * _WIDE_STEP for step in range(-round(_REACH / _WIDE_STEP), round(_REACH / _WIDE_STEP) + 1)]
        middle = min(coarse, key=partial(off, few))
        fine = [middle + step * _STEP for step in range(-2, 3)]
        best = _narrowed(partial(off, few), min(fine, key=partial(off, few)), _STEP)
        if _NEARER * off(few, best) > off(few, 0.0):
            continue
        log = _narrowed(partial(off, every), best, _STEP / 10)
        if abs(log) > _LEAST:
            yield f"the {name} {math.exp(log):.4g}{FACTOR}", truth.rows.attend(altered(math.exp(log)))[0]


def fitted_numbers(params: AttentionParams) -> list[str]:
    """Return the causes that :func:`other_factors` may yield, in words without figures."""
    return [_words(name) for name, _ in _numbers(params)]


def _words(name: str) -> str:
    return f"the {name} N{FACTOR}"


def _numbers(params: AttentionParams) -> Iterator[tuple[str, Altered]]:
    """Yield each number that may be wrong by a factor, in words, with a function from the factor to the parameters."""
    yield "scale is", lambda factor: replace(params, scale=params.softmax_scale * factor)
    cap, slopes = params.soft_cap, params.alibi_slopes
    if cap is not None:
        yield "soft cap is", lambda factor: replace(params, logits_soft_cap=cap * factor)
    if slopes is not None:
        yield "ALiBi slopes are", lambda factor: replace(params, alibi_slopes=tuple(factor * each for each in slopes))


def _smallest_wrong(problem: Problem, truth: Truth, shares: Tensor) -> list[int]:
    """Return the requests with wrong rows that have the fewest scores.

    Empty if even the smallest has too many, or if too few rows are wrong.
    """
    wrong = (shares > 1).any(dim=1)
    scores = {
        index: request.rows * request.num_keys * truth.params.num_heads
        for index, request in enumerate(problem.requests)
        if bool(wrong[request.first_row : request.first_row + request.rows].any())
    }
    ordered = sorted(scores, key=scores.__getitem__)
    if problem.parts or int((shares > 1).sum()) < _FEWEST or scores[ordered[0]] > _MOST_SCORES:
        return []
    sums = accumulate(scores[index] for index in ordered)
    return [index for index, total in zip(ordered, sums, strict=True) if index == ordered[0] or total <= _FEW_SCORES]


def _narrowed(off: Callable[[float], float], middle: float, reach: float) -> float:
    """Return the minimum of ``off`` within ``reach`` of ``middle``, by golden-section search."""
    low, high = middle - reach, middle + reach
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = off(left), off(right)
    while high - low > _FINEST:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = off(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = off(right)
    return (low + high) / 2
