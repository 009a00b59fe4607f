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
"""Keys in a split, if a kernel fixes this number."""

_NUMBERS = (2, 4, 8, 16)
"""Numbers of splits of every request, each of whole tiles of ``_TILE`` keys."""

_TILE = 64

LogWeight = Callable[[Tensor, Tensor], Tensor]
"""``(LSE, largest score)`` of every split, ``[H, rows, splits]`` -> the logarithm of its weight."""


def merging_explanations(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults for each usual way to split the keys; none if there are too many scores to hold at once."""
    lengths = rows.num_keys.tolist()
    longest = max(lengths)
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
    tried = set()
    for name, split_of in _cuts():
        splits = tuple(split_of(number) for number in lengths)
        if splits in tried or all(split >= number for split, number in zip(splits, lengths, strict=True)):
            continue
        tried.add(splits)
        for how, log_weight in faults.items():
            weigh = partial(_weigh, split_of, log_weight)
            meaning = f"the partial results of {name} are {how}"
            yield Hypothesis(meaning, partial(attend_scores, params, rows, scores, weigh))


def _cuts() -> Iterator[tuple[str, Callable[[int], int]]]:
    """Yield (splits in words, function from the number of keys of a request to those of a split)."""
    for split in _SPLITS:
        yield f"splits of {split} keys", partial(_fixed, split)
    for number in _NUMBERS:
        yield f"{number} splits of the keys, in tiles of {_TILE},", partial(_whole_tiles, number)


def _fixed(split: int, _num_keys: int) -> int:
    return split


def _whole_tiles(number: int, num_keys: int) -> int:
    return max(math.ceil(num_keys / number / _TILE), 1) * _TILE


def _weigh(
    split_of: Callable[[int], int], log_weight: LogWeight, s_HqK: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return weights of the keys, and LSE, as ``attend_scores`` needs them. A sink is one more part."""
    num_keys = s_HqK.shape[-1]
    split = split_of(num_keys)
    parts = s_HqK.split(split, -1)
    lse_HqP = torch.stack([part.logsumexp(-1) for part in parts], -1)
    weight_HqP = log_weight(lse_HqP, torch.stack([part.amax(-1) for part in parts], -1))
    total = weight_HqP.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.expand_as(total))
    moved_HqP = (weight_HqP - lse_HqP - total).nan_to_num(nan=0.0, neginf=0.0)
    return torch.exp(s_HqK + moved_HqP.repeat_interleave(split, -1)[..., :num_keys]), total
