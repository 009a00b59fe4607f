"""Faults of merging the partial results of splits of the keys: each is weighed by another number than its LSE."""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from attncheck.harness.truth.hypotheses import Hypothesis
from attncheck.harness.truth.softmax_hypotheses import MOST_SCORES, attend_scores, masked_scores
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams

_SPLITS = (32, 64, 128, 256, 512, 1024)
"""Numbers of keys in a split."""

LogWeight = Callable[[Tensor, Tensor], Tensor]
"""``(LSE, largest score)`` of every split, ``[H, rows, splits]`` -> the logarithm of its weight."""


def merging_explanations(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults for each usual size of a split; none if there are too many scores to hold at once."""
    longest = int(rows.num_keys.max())
    if int(rows.num_rows.max()) * longest * params.num_heads > MOST_SCORES:
        return
    first = torch.arange(params.num_heads, device=rows.keys.device) // params.group_size * params.group_size
    faults: dict[str, LogWeight] = {
        "averaged, whatever their LSE": lambda lse, _top: lse.masked_fill(~torch.isneginf(lse), 0.0),
        "weighed by their largest scores, not by their LSE": lambda _lse, top: top,
        "weighed by sums that are not rescaled to a common maximum": lambda lse, top: (lse - top).nan_to_num(
            nan=-math.inf
        ),
        "merged by an LSE to base 2": lambda lse, _top: lse / math.log(2),
        "merged to base 2 by a natural LSE": lambda lse, _top: lse * math.log(2),
    }
    if params.group_size > 1:
        faults["merged by the LSE of the first head of each group"] = lambda lse, _top: lse[first]
    scores = cache(partial(masked_scores, params, rows))
    for split in _SPLITS:
        if split >= longest:
            break
        for how, log_weight in faults.items():
            weigh = partial(_weigh, split, log_weight)
            meaning = f"the partial results of splits of {split} keys are {how}"
            yield Hypothesis(meaning, partial(attend_scores, params, rows, scores, weigh))


def _weigh(split: int, log_weight: LogWeight, s_HqK: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return weights of the keys, and LSE, as ``attend_scores`` needs them. A sink is one more part."""
    num_keys = s_HqK.shape[-1]
    parts = s_HqK.split(split, -1)
    lse_HqP = torch.stack([part.logsumexp(-1) for part in parts], -1)
    weight_HqP = log_weight(lse_HqP, torch.stack([part.amax(-1) for part in parts], -1))
    total = weight_HqP.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.expand_as(total))
    moved_HqP = (weight_HqP - lse_HqP - total).nan_to_num(nan=0.0, neginf=0.0)
    return torch.exp(s_HqK + moved_HqP.repeat_interleave(split, -1)[..., :num_keys]), total
