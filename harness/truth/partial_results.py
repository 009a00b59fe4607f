"""Find whether a wrong output consists of right partial results merged with wrong weights.

A split-KV kernel computes one result for each split of the keys. If only the merge is wrong, each wrong row is a linear
combination of the results of its splits, which least squares finds.
"""

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.visible_span import visible_span
from attncheck.harness.truth.softmax_hypotheses import parts_of_request, unmasked_scores
from attncheck.harness.truth.truth import Truth

_SPLITS = (1024, 512, 256, 128, 64, 32)
"""Keys in a split, the largest first, because splits of a smaller size can be combined to any larger one."""

_MOST_ROWS = 64
"""Maximum number of wrong rows for which combinations are tried."""

_MOST_SCORES = 2**24
"""Scores ``H * rows * keys`` of a request above which combinations are not tried, because all are held at once."""


def merged_wrongly(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> list[tuple[str, Tensor]]:
    """Return (meaning, output ``[T, H, Dv]``) of the combination nearest to ``values``, for each split size.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``. Only wrong rows are recombined. A split size is left
    out if a request with wrong rows has fewer than two splits, or more splits than a quarter of the channels: then any
    output would fit.
    """
    wrong = (shares > 1).any(dim=1)
    if truth.rows.tree is not None or not 0 < int(wrong.sum()) <= _MOST_ROWS:
        return []
    found = []
    for split in _SPLITS:
        out = truth.out.clone()
        for index, request in enumerate(problem.requests):
            own = wrong[request.first_row : request.first_row + request.rows].nonzero().flatten()
            if not len(own):
                continue
            number = -(-request.num_keys // split)
            too_many = truth.params.num_heads * request.rows * request.num_keys > _MOST_SCORES
            if number < 2 or number > values.shape[-1] // 4 or too_many:
                break
            rows = request.first_row + own
            out[rows] = _nearest(truth, index, own, values[rows], split)
        else:
            found.append((f"the partial results of splits of {split} keys are merged with wrong weights", out))
    return found


def _nearest(truth: Truth, index: int, own: Tensor, values: Tensor, split: int) -> Tensor:
    """Return the combination of splits nearest to ``values [r, H, Dv]``, for rows ``own [r]`` of a request."""
    params = truth.params
    query, _, held = parts_of_request(truth.rows, index)
    held = held.repeat_interleave(params.group_size, dim=1).transpose(0, 1)  # [H, keys, Dv]
    scores = unmasked_scores(params, truth.rows, index)[:, own]
    num_keys = scores.shape[-1]
    first, last = visible_span(params, own + (num_keys - len(query)), num_keys)
    key = torch.arange(num_keys, device=scores.device)
    scores = scores.masked_fill((key < first[:, None]) | (key > last[:, None]), -torch.inf)
    parts = []
    for part, kept in zip(scores.split(split, dim=-1), held.split(split, dim=1), strict=True):
        weights = torch.nan_to_num(part.softmax(dim=-1))  # 0 for a split without a visible key
        parts.append(torch.einsum("hrk,hkv->hrv", weights, kept))
    results = torch.stack(parts, dim=-1)  # [H, r, Dv, splits]
    wanted = values.transpose(0, 1)[..., None]
    # Use the pseudo-inverse: results of splits without a visible key are 0, so the rank may be deficient.
    combined: Tensor = results @ (torch.linalg.pinv(results, rtol=1e-12) @ wanted)
    return combined[..., 0].transpose(0, 1)
