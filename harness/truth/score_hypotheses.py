"""Faults in computing and summing scores: order of cap and bias, masks after the softmax, sums left out."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.truth.hypotheses import Hypothesis
from attncheck.harness.truth.softmax_hypotheses import (
    MOST_SCORES,
    attend_scores,
    masked_scores,
    unmasked_scores,
)
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams

_FEW_CAPS = 5.0
"""Score in soft caps below which ``exp`` inside ``tanh`` overflows in no dtype."""

_TILES = (8, 16, 32, 64, 128)
"""Numbers of keys to whose multiples a kernel may pad those of a request."""

Scores = Callable[[int], Tensor]
"""``request`` -> scores ``[H, rows, keys]``, -inf where a key is hidden."""


def score_explanations(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults that these parameters allow; none if there are too many scores to hold at once."""
    most, longest = int(rows.num_rows.max()), int(rows.num_keys.max())
    if not longest or most * longest * params.num_heads > MOST_SCORES:
        return
    plain = replace(params, logits_soft_cap=None, alibi_slopes=None, sinks=None)
    cap, slopes = params.soft_cap, params.alibi_slopes

    def with_scores(meaning: str, scores: Scores, *features: str) -> Hypothesis:
        return Hypothesis(meaning, partial(attend_scores, params, rows, scores), features)

    def hidden(request: int) -> Tensor:
        return torch.isneginf(masked_scores(plain, rows, request))

    if cap is not None:

        def clipped(request: int) -> Tensor:
            product = unmasked_scores(replace(params, logits_soft_cap=None, alibi_slopes=None), rows, request)
            bias = unmasked_scores(params, rows, request) - unmasked_scores(capped, rows, request)
            return (product.clamp(-cap, cap) + bias).masked_fill(hidden(request), -torch.inf)

        capped = replace(params, alibi_slopes=None)
        yield with_scores("the soft cap clips the scores, and is no tanh", clipped, "logits_soft_cap")
    if cap is not None and slopes is not None:

        def biased_first(request: int) -> Tensor:
            scores = unmasked_scores(replace(params, logits_soft_cap=None), rows, request)
            return (torch.tanh(scores / cap) * cap).masked_fill(hidden(request), -torch.inf)

        yield with_scores("the soft cap is applied after the ALiBi bias", biased_first, "logits_soft_cap", "alibi")
    if slopes is not None:

        def scaled_bias(request: int) -> Tensor:
            bare = unmasked_scores(replace(params, alibi_slopes=None), rows, request)
            bias = unmasked_scores(params, rows, request) - bare
            return (bare - bias.abs()).masked_fill(hidden(request), -torch.inf)

        if not params.causal:
            yield with_scores("the ALiBi bias uses the distance without its sign", scaled_bias, "alibi")
        root = replace(params, alibi_sqrt=not params.alibi_sqrt)
        words = "the ALiBi bias is the square root of the distance" if root.alibi_sqrt else "no square root is taken"
        yield Hypothesis(words, partial(rows.attend, root), ("alibi",))
    if any(bool(hidden(request).any()) for request in range(len(rows.num_rows))):
        unhidden = partial(unmasked_scores, params, rows)
        zero = "hidden keys get a score of 0, not of -inf"
        yield with_scores(zero, lambda request: unhidden(request).masked_fill(hidden(request), 0.0))
        words = "the mask is applied after the softmax: hidden keys count in its sum"
        yield Hypothesis(words, partial(_masked_late, params, rows))
    yield Hypothesis(
        "the output is not divided by the sum of the weights", partial(_times, params, rows, _unnormalised)
    )
    yield Hypothesis("the output is divided by the number of keys too", partial(_times, params, rows, _averaged))
    for tile in _TILES:
        rest = -rows.places.num_keys.double()[:, None] % tile
        if bool((rest > 0).any()):
            meaning = f"the places behind the last key, up to a multiple of {tile}, count with a score of 0"
            yield Hypothesis(meaning, partial(_padded, params, rows, rest))
    if params.sinks is None:
        plus_one = replace(params, sinks=(0.0,) * params.num_heads)
        yield Hypothesis(
            "1 is added to the sum of the weights: a sink of 0, or an empty part with an LSE of 0",
            partial(rows.attend, plus_one),
        )


def largest_scores(params: AttentionParams, rows: UnpagedAttention) -> Tensor | None:
    """Return the largest score of each row and head, ``[T, H]``, or None if there are too many scores to hold at once.

    It is -inf if the row sees no key and has no sink.
    """
    if int(rows.num_rows.max()) * int(rows.num_keys.max()) * params.num_heads > MOST_SCORES:
        return None
    tops = []
    for request in range(len(rows.num_rows)):
        scores = masked_scores(params, rows, request)
        empty = scores.new_full((*scores.shape[:2], 1), -torch.inf)
        tops.append(torch.cat([scores, empty], dim=-1).amax(dim=-1).T)
    top: Tensor = torch.cat(tops)
    return top if params.sinks is None else torch.maximum(top, top.new_tensor(params.sinks))


def overflowing_caps(params: AttentionParams, rows: UnpagedAttention, wrong: Tensor) -> float | None:
    """Return how many soft caps a score must reach to make its row and head ``wrong`` (bool ``[T, H]``).

    None if no such number separates wrong rows and heads from right ones, or if there are too many scores to hold at
    once.
    """
    bare = replace(params, logits_soft_cap=None, alibi_slopes=None, sinks=None)
    tops = [largest_scores(each, rows) for each in (bare, replace(bare, scale=-bare.softmax_scale))]
    if params.soft_cap is None or tops[0] is None or tops[1] is None:
        return None
    size = torch.maximum(tops[0], tops[1]).nan_to_num(neginf=0.0) / params.soft_cap
    least, most = float(size[wrong].min()), float(size.masked_fill(wrong, 0.0).max())
    return least if least > max(most, _FEW_CAPS) else None


def _masked_late(params: AttentionParams, rows: UnpagedAttention) -> tuple[Tensor, Tensor]:
    out, lse = rows.attend(params)
    _, every = attend_scores(params, rows, partial(unmasked_scores, params, rows))
    share = torch.nan_to_num(torch.exp(lse - every))
    return out * share[..., None], every


def _times(
    params: AttentionParams,
    rows: UnpagedAttention,
    factor: Callable[[AttentionParams, UnpagedAttention, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    out, lse = rows.attend(params)
    return out * factor(params, rows, lse)[..., None], lse


def _unnormalised(params: AttentionParams, rows: UnpagedAttention, lse: Tensor) -> Tensor:
    top = largest_scores(params, rows)
    return torch.ones_like(lse) if top is None else torch.nan_to_num(torch.exp(lse - top))


def _padded(params: AttentionParams, rows: UnpagedAttention, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result with ``count [T, 1]`` more keys in the sum, whose score is 0 and whose value is 0."""
    out, lse = rows.attend(params)
    total = torch.logaddexp(lse, count.log())
    return out * torch.nan_to_num(torch.exp(lse - total))[..., None], total


def _averaged(_params: AttentionParams, rows: UnpagedAttention, _lse: Tensor) -> Tensor:
    return 1 / rows.places.num_keys.double()[:, None].clamp(min=1)
