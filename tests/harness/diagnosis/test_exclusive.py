"""A named cause excludes others: kernels written out by hand whose fault another cause fits in part, or by chance."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.reports.run_file.causes import likely_causes

SINKS = {"sinks": True}


@dataclass(frozen=True)
class Row:
    """One row: scores ``[H, K]`` of the keys it sees, their values ``[H, K, Dv]``, its place, and the layer's numbers."""

    scores: Tensor
    values: Tensor
    number: int
    position: int
    num_keys: int
    query_len: int
    sinks: Tensor
    slopes: Tensor


def right(row: Row, scores: Tensor | None = None, extra: Tensor | None = None) -> Tensor:
    """``sum P V`` with the sinks, or ``extra [H, n]``, in the sum of the weights."""
    scores = row.scores if scores is None else scores
    both = torch.cat([scores, row.sinks[:, None] if extra is None else extra], dim=1)
    weights = both.softmax(dim=1)[:, : scores.shape[1]]
    return torch.einsum("hk,hkv->hv", weights, row.values)


def shifted(distance: Callable[[Row], int]) -> Callable[[Row], Tensor]:
    return lambda row: right(row, row.scores + row.slopes[:, None] * distance(row))


def times(factor: Callable[[Row], Any]) -> Callable[[Row], Tensor]:
    return lambda row: right(row) * factor(row)


def padded(row: Row) -> Tensor:
    """Keys to a multiple of 64 have a score of 0, which the soft cap makes of -inf times 0 in some kernels."""
    return right(row, extra=torch.zeros(8, -row.num_keys % 64).double())


def merged(split: int, weigh: Callable[[Tensor], Tensor], *, by: Callable[[Tensor], Tensor] = lambda w: w) -> Any:
    """Results of splits, each of the weight that ``weigh`` gives to its scores ``[H, k]``."""

    def attend(row: Row) -> Tensor:
        parts = list(zip(row.scores.split(split, 1), row.values.split(split, 1), strict=True))
        outs = torch.stack([torch.einsum("hk,hkv->hv", part.softmax(1), own) for part, own in parts])
        weights = by(torch.stack([weigh(part) for part, _ in parts]))
        return (weights / weights.sum(0))[..., None].mul(outs).sum(0)

    return attend


def by_sums(scores: Tensor) -> Tensor:
    return (scores - scores.amax(1, keepdim=True)).exp().sum(1)


def of_kv_heads(heads: list[int]) -> Callable[[Row], Tensor]:
    """Return attention with the right keys, and with values of other KV heads."""
    return lambda row: torch.einsum("hk,hkv->hv", row.scores.softmax(1), row.values[[4 * head for head in heads]])


def causes(ask: Any, attend: Callable[[Row], Tensor], batch: Any, **layer: Any) -> tuple[str, ...]:
    asked = ask(*batch, **({"dtype": "float32"} | layer))
    problem, truth = asked
    number = torch.arange(8) // 4
    sinks = torch.tensor(truth.params.sinks or (-math.inf,) * 8, dtype=torch.float64)
    slopes = torch.tensor(truth.params.alibi_slopes or (0.0,) * 8, dtype=torch.float64)
    out, cap = torch.zeros_like(truth.out), truth.params.soft_cap
    for request in problem.requests:
        for nth in range(request.rows):
            index, position = request.first_row + nth, request.num_keys - request.rows + nth
            held = slice(request.base, request.base + position + 1)
            keys, values = (part[held].double()[:, number].transpose(0, 1) for part in (problem.keys, problem.values))
            scores = torch.einsum("hd,hkd->hk", problem.query[index].double(), keys) * truth.params.softmax_scale
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            scores = scores + slopes[:, None] * (torch.arange(position + 1) - position)
            row = Row(scores, values, index, position, request.num_keys, request.rows, sinks, slopes)
            out[index] = attend(row)
    out = out.to(problem.dtype).double()
    if attend is right:
        assert bool((out - truth.out).norm(dim=-1).le(truth.budget.norm).all())
        return ()
    return likely_causes(asked.explained(out))


BATCH = (1, 150), (5, 90), (12, 12)
NAMED: dict[str, tuple[Callable[[Row], Tensor], dict[str, Any]]] = {
    "the ALiBi bias is measured from the first new position of the request, not from the query": (
        shifted(lambda row: row.position - (row.num_keys - row.query_len)),
        {"sinks": True, "alibi": True},
    ),
    "the ALiBi bias is measured from the last key of the request, not from the query": (
        shifted(lambda row: row.position - (row.num_keys - 1)),
        {"sinks": True, "alibi": True},
    ),
    "the places behind the last key, up to a multiple of 64, count with a score of 0": (
        padded,
        {"logits_soft_cap": 3.0},
    ),
    "query heads 0, 1, 2, 3 read values of KV head 1 instead of their own": (of_kv_heads([1] * 8), {}),
    "query head h reads values of KV head h % num_kv_heads instead of h // group size": (of_kv_heads([0, 1] * 4), {}),
    "the partial results of splits of 32 keys are averaged, whatever their LSE": (
        merged(32, lambda scores: torch.ones(8).double()),
        {},
    ),
    "the partial results of splits of 64 keys are weighed by sums that are not rescaled to a common maximum": (
        merged(64, by_sums),
        {},
    ),
    "the partial results of splits of 64 keys are merged by an LSE to base 2": (
        merged(64, lambda scores: (scores.logsumexp(1) / math.log(2)).exp()),
        {},
    ),
    "the partial results of splits of 64 keys are merged by the LSE of the first head of each group": (
        merged(64, lambda scores: scores.logsumexp(1).exp(), by=lambda w: w[:, [0] * 4 + [4] * 4]),
        {},
    ),
}


@pytest.mark.parametrize("cause", NAMED)
def test_a_fault_is_named_and_no_other(ask: Any, cause: str) -> None:
    attend, layer = NAMED[cause]
    assert causes(ask, attend, BATCH, **layer)[:1] == (cause,)


def spread(row: Row) -> Tensor:
    """A factor for each head of each row, without a pattern."""
    return 0.8 + 0.15 * torch.sin(torch.arange(8).double() * 1.7 + row.number * 2.9)[:, None]


def other_lse(row: Row) -> Tensor:
    """The sinks are merged with an LSE that another number multiplies in each row."""
    lse = row.scores.logsumexp(1)
    return (
        right(row, extra=torch.full((8, 1), -math.inf).double())
        * torch.sigmoid(lse * (1 - 0.03 * (row.number % 5 + 1)) - row.sinks)[:, None]
    )


def reweighed(row: Row) -> Tensor:
    """Every split of 32 keys has a weight of its own."""
    parts = row.scores.shape[1] // 32 + 1
    factor = torch.sin(torch.arange(parts).double() * 3.1 + row.number).repeat_interleave(32)[: row.scores.shape[1]]
    return right(row, row.scores + factor)


UNKNOWN: dict[str, tuple[Callable[[Row], Tensor], Any, dict[str, Any]]] = {
    "a factor for each row and head": (times(spread), BATCH, SINKS),
    "a factor for each head of a single row": (times(spread), [(1, 70)], SINKS),
    "a sink beside another LSE": (other_lse, BATCH, SINKS),
    "other weights for each split": (reweighed, BATCH, {}),
    "small weights are dropped": (
        lambda row: torch.einsum("hk,hkv->hv", row.scores.softmax(1).clamp(min=0.02) - 0.02, row.values),
        BATCH,
        {},
    ),
    "a run of keys in the middle is lost": (
        lambda row: (
            right(row, row.scores.index_fill(1, torch.arange(11, 18).clamp(max=row.position), -math.inf))
            if row.position > 20
            else right(row)
        ),
        BATCH,
        {},
    ),
    "values in another order": (
        lambda row: torch.einsum(
            "hk,hkv->hv", row.scores.softmax(1), row.values[:, torch.arange(row.position + 1) * 7 % (row.position + 1)]
        ),
        BATCH,
        {},
    ),
    "one channel of one row is another number": (
        lambda row: right(row).index_fill(1, torch.tensor([9]), 0.3) if row.number == 3 else right(row),
        BATCH,
        {},
    ),
    "every fifth key of a few is lost": (
        lambda row: (
            right(row, row.scores.index_fill(1, torch.tensor([3]), -math.inf)) if row.position > 3 else right(row)
        ),
        [(1, 5), (3, 4)],
        {},
    ),
}


@pytest.mark.parametrize("fault", UNKNOWN)
def test_a_fault_that_has_no_name_gets_none(ask: Any, fault: str) -> None:
    attend, batch, layer = UNKNOWN[fault]
    assert causes(ask, attend, batch, **layer) == ()


@pytest.mark.parametrize("fault", ["a factor for each row and head", "other weights for each split"])
def test_rounding_to_the_dtype_adds_no_name(ask: Any, fault: str) -> None:
    attend, batch, layer = UNKNOWN[fault]
    assert causes(ask, attend, batch, dtype="bfloat16", **layer) == ()


@pytest.mark.parametrize("layer", [{}, {"sinks": True, "alibi": True}, {"logits_soft_cap": 3.0}])
def test_the_right_kernel_is_right(ask: Any, layer: dict[str, Any]) -> None:
    assert causes(ask, right, BATCH, **layer) == ()


def test_a_factor_is_no_rounding(ask: Any) -> None:
    assert causes(ask, times(lambda row: 0.99), BATCH, dtype="bfloat16") == ()
