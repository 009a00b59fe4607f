"""Faults of an online softmax: earlier sums are not rescaled when a tile of keys raises the maximum.

With ``m_t`` the maximum after tile ``t`` and ``m`` the final one, a correct kernel ends with ``sum exp(s - m) V`` over
``sum exp(s - m)``. If one of the two is not rescaled, the keys of tile ``t`` stay in it with ``exp(s - m_t)``.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor

from attncheck.harness.truth.hypotheses import Hypothesis
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams

_TILES = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of keys in a tile, besides the page size."""

MOST_SCORES = 2**25
"""Scores ``H * rows * keys`` of a request above which they are not all held at once."""

_FAULTS = (
    ("the accumulator is not rescaled", True, False),
    ("the sum of the weights is not rescaled", False, True),
    ("neither the accumulator nor the sum of the weights is rescaled", True, True),
)
"""(meaning, whether the accumulator keeps old weights, whether the sum of the weights does)."""

Weigh = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""``(scores [H, rows, keys], sinks [H, 1, 1] or None)`` -> weights of the keys, and the LSE ``[H, rows, 1]``."""


def rescaling_explanations(params: AttentionParams, rows: UnpagedAttention, block_size: int) -> Iterator[Hypothesis]:
    """Yield the faults for each usual tile size shorter than the longest request; tiles are counted from position 0."""
    most, longest = int(rows.num_rows.max()), int(rows.num_keys.max())
    if most * longest * params.num_heads > MOST_SCORES:
        return
    scores = cache(partial(masked_scores, params, rows))
    for tile in sorted({*_TILES, block_size}):
        if tile < longest:
            for what, spoils_acc, spoils_sum in _FAULTS:
                meaning = f"{what} when a tile of {tile} keys raises the maximum"
                weigh = partial(_online, tile, spoils_acc, spoils_sum)
                yield Hypothesis(meaning, partial(attend_scores, params, rows, scores, weigh))


def masked_scores(params: AttentionParams, rows: UnpagedAttention, request: int) -> Tensor:
    """Return the masked scores of a request, float64 ``[H, rows, keys]``."""
    scores = unmasked_scores(params, rows, request)
    num_rows, num_keys = scores.shape[1:]
    q_pos = torch.arange(num_rows, device=scores.device)[:, None] + (num_keys - num_rows)
    k_pos = torch.arange(num_keys, device=scores.device)[None]
    return scores.masked_fill(~rows.sees(params, q_pos, k_pos, num_keys - num_rows), -torch.inf)


def unmasked_scores(params: AttentionParams, rows: UnpagedAttention, request: int) -> Tensor:
    """Return the scores of a request as if every row saw every key, float64 ``[H, rows, keys]``."""
    query, keys, _ = parts_of_request(rows, request)
    query_qNgD = query.unflatten(1, (params.num_kv_heads, params.group_size))
    scores = torch.einsum("qngd,knd->ngqk", query_qNgD, keys).flatten(0, 1) * params.softmax_scale
    if params.soft_cap is not None:
        scores = torch.tanh(scores / params.soft_cap) * params.soft_cap
    if params.alibi_slopes is not None:
        q_pos = torch.arange(len(query), device=query.device)[:, None] + (len(keys) - len(query))
        distance = (torch.arange(len(keys), device=query.device)[None] - q_pos).double()
        bias = -(-distance.clamp(max=0)).sqrt() if params.alibi_sqrt else distance
        slopes = torch.tensor(params.alibi_slopes, dtype=torch.float64, device=query.device)
        scores = scores + slopes[:, None, None] * bias
    return scores


def parts_of_request(rows: UnpagedAttention, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, keys and values of a request, float64."""
    q, k = (starts[request : request + 2].tolist() for starts in (rows.cu_seqlens_q, rows.cu_seqlens_k))
    return rows.query[slice(*q)].double(), rows.keys[slice(*k)].double(), rows.values[slice(*k)].double()


def softmax_weights(s_HqK: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the right weights of the keys, ``[H, rows, keys]``, and the LSE ``[H, rows, 1]``."""
    return _online(s_HqK.shape[-1], False, False, s_HqK, sinks)


def attend_scores(
    params: AttentionParams,
    rows: UnpagedAttention,
    scores: Callable[[int], Tensor],
    weigh: Weigh = softmax_weights,
) -> tuple[Tensor, Tensor]:
    """Return output ``[T, H, Dv]`` and LSE ``[T, H]`` from ``scores``, which maps a request to ``[H, rows, keys]``."""
    outs, lses = [], []
    for request in range(len(rows.cu_seqlens_q) - 1):
        values_KNv = parts_of_request(rows, request)[2]
        s_HqK = scores(request)
        if not s_HqK.numel():
            outs.append(s_HqK.new_zeros(s_HqK.shape[1], params.num_heads, values_KNv.shape[-1]))
            lses.append(s_HqK.new_full((s_HqK.shape[1], params.num_heads), -torch.inf))
            continue
        sinks = None if params.sinks is None else s_HqK.new_tensor(params.sinks)[:, None, None]
        weights, lse = weigh(s_HqK, sinks)
        by_kv_head = weights.unflatten(0, (params.num_kv_heads, params.group_size))
        outs.append(torch.einsum("ngqk,knv->qngv", by_kv_head, values_KNv).flatten(1, 2))
        lses.append(lse.squeeze(-1).transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


def _online(
    tile: int, spoils_acc: bool, spoils_sum: bool, s_HqK: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Weigh keys as an online softmax over tiles does that does not rescale the accumulator, or the sum of weights."""
    top_Hqt = torch.stack([part.amax(-1) for part in s_HqK.split(tile, -1)], -1).cummax(-1).values
    last = top_Hqt[..., -1:] if sinks is None else torch.maximum(top_Hqt[..., -1:], sinks)
    right = torch.exp(s_HqK - last.masked_fill(last == -torch.inf, 0.0))
    pivot = top_Hqt.masked_fill(top_Hqt == -torch.inf, 0.0).repeat_interleave(tile, -1)[..., : s_HqK.shape[-1]]
    old = torch.exp(s_HqK - pivot)
    total = (old if spoils_sum else right).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - last)
    weights = (old if spoils_acc else right) / total.masked_fill(total == 0, 1.0)
    return weights, last + total.log()
