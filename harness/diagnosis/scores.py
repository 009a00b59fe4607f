"""Faults of scores, modifiers, softmax and log-sum-exp."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.faults import Hypothesis, altered
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams

_LOG2E = math.log2(math.e)

_FACTORS = (
    (_LOG2E, "log2(e): a softmax to base 2 of scores that have this factor already, or a natural one of such scores"),
    (1 / _LOG2E, "ln(2): a softmax to base 2 of natural scores"),
    (2.0, "2"),
    (0.5, "1/2"),
    (math.sqrt(2.0), "the square root of 2"),
    (math.sqrt(0.5), "the square root of 1/2"),
    (4.0, "4"),
    (0.25, "1/4"),
    (-1.0, "-1"),
)
"""Factors on the scores that kernels leave out or apply once too often: (factor, its name)."""

_CAPS = (1.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0)
"""Soft caps that models use, and that a kernel may hard-code."""

_PARTS = (16, 32, 64, 128, 256, 512)
"""Numbers of keys in a tile or split. A kernel may count the sinks once in each."""


def modifier_explanations(_problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults that these parameters allow, except those of sinks, which :func:`other_sinks` yields."""
    params, rows = truth.params, truth.rows

    def with_changes(meaning: str, *features: str, **changes: Any) -> Hypothesis:
        return altered(meaning, rows, replace(params, **changes), *features)

    scale, size = params.softmax_scale, params.value_head_size
    if size != params.head_size:
        yield with_changes(f"the scale is that of the value's head size, {size}", scale=size**-0.5)
    for factor, name in _FACTORS:
        yield with_changes(f"the scores are multiplied by {name}", scale=scale * factor)
    cap = params.soft_cap
    if cap is not None:
        feature = "logits_soft_cap"
        yield with_changes("the soft cap is applied before the scale", feature, logits_soft_cap=cap * scale)
        yield with_changes("the soft cap is multiplied by log2(e)", feature, logits_soft_cap=cap * _LOG2E)
        yield with_changes("the soft cap is multiplied by ln(2)", feature, logits_soft_cap=cap / _LOG2E)
        meaning = "the soft cap divides the scores, and does not multiply their tanh"
        yield with_changes(meaning, feature, logits_soft_cap=1.0, scale=scale / cap)
        meaning = "the soft cap multiplies the tanh of scores that it does not divide"
        yield with_changes(meaning, feature, logits_soft_cap=cap, scale=scale * cap)
        for other in _CAPS:
            if other != cap:
                yield with_changes(f"the soft cap is {other:g} instead of {cap:g}", feature, logits_soft_cap=other)
    if params.alibi_slopes is not None:
        for meaning, slopes in _slopes(params, params.alibi_slopes):
            yield with_changes(meaning, "alibi", alibi_slopes=slopes)
        if not params.alibi_sqrt:
            yield from _alibi_references(params, params.alibi_slopes, rows)


def _alibi_references(
    params: AttentionParams, slopes: tuple[float, ...], rows: UnpagedAttention
) -> Iterator[Hypothesis]:
    """Yield the faults of measuring ALiBi's distance from elsewhere, which show beside sinks, and in the LSE."""
    num_keys, _, node, context_len = rows.places
    position = context_len + node
    measured_from = {
        "position 0": position,
        "the first new position of the request": node,
        "the last key of the request": position - (num_keys - 1),
    }

    def compute(distance: Tensor) -> tuple[Tensor, Tensor]:
        bare, lse = rows.attend(replace(params, sinks=None))
        lse = lse + distance[:, None] * lse.new_tensor(slopes)
        if params.sinks is None:
            return bare, lse
        total = torch.logaddexp(lse, lse.new_tensor(params.sinks))
        return bare * torch.exp(lse - total)[..., None], total

    for place, distance in measured_from.items():
        meaning = f"the ALiBi bias is measured from {place}, not from the query"
        yield Hypothesis(meaning, partial(compute, distance), ("alibi",))


def _slopes(params: AttentionParams, slopes: tuple[float, ...]) -> Iterator[tuple[str, tuple[float, ...]]]:
    number = params.num_heads
    factors = {
        "has the wrong sign": -1.0,
        "is applied twice": 2.0,
        "is multiplied by scale": params.softmax_scale,
        "is multiplied by log2(e)": _LOG2E,
        "is multiplied by ln(2)": 1 / _LOG2E,
        "is multiplied by 1/2": 0.5,
        "is multiplied by sqrt(head size)": params.head_size**0.5,
    }
    for how, factor in factors.items():
        yield f"the ALiBi bias {how}", tuple(factor * slope for slope in slopes)
    for meaning, heads in _heads_of_others("ALiBi slope", params):
        yield meaning, tuple(slopes[head] for head in heads)
    for base in dict.fromkeys((number, 1 << (number - 1).bit_length(), 1 << (number.bit_length() - 1))):
        plain = tuple(2.0 ** (-8.0 * (head + 1) / base) for head in range(number))
        yield f"the ALiBi slopes are 2 ** (-8 (h + 1) / {base}), whatever the layer's are", plain


def _heads_of_others(name: str, params: AttentionParams) -> Iterator[tuple[str, list[int]]]:
    """Yield (meaning, head whose number each query head has) of faults in a number of each head, named ``name``."""
    heads, group = range(params.num_heads), params.group_size
    yield f"the {name}s are in reversed order of heads", list(reversed(heads))
    yield f"every head has the {name} of head 0", [0] * len(heads)
    others = {
        "its KV head, h // group size": [head // group for head in heads],
        "head h % group size": [head % group for head in heads],
        "head h % num_kv_heads": [head % params.num_kv_heads for head in heads],
        "head h + 1": [(head + 1) % len(heads) for head in heads],
        "head h - 1": [(head - 1) % len(heads) for head in heads],
    }
    for which, source in others.items():
        yield f"query head h has the {name} of {which}", source


def other_sinks(truth: Truth) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of faults of sinks."""
    params, rows = truth.params, truth.rows
    if params.sinks is None:
        return
    bare, lse = rows.attend(replace(params, sinks=None))
    sinks = torch.tensor(params.sinks, dtype=torch.float64, device=bare.device)

    # A sink divides the output without it by 1 + exp(sink - lse).
    def with_sinks(other: Tensor) -> Tensor:
        return bare * torch.sigmoid(lse - other)[..., None]

    num_keys = rows.places.num_keys.double()[:, None]
    for keys in _PARTS:
        count = (num_keys / keys).ceil().clamp(min=1)
        if bool((count > 1).any()):
            yield f"the sinks are counted once for every {keys} keys", with_sinks(sinks + count.log())
    for number in (2, 4, 8, 16):
        yield f"the sinks are counted {number} times", with_sinks(sinks + math.log(number))
    yield from ((meaning, with_sinks(other)) for meaning, other in _sinks(params, sinks))


def _sinks(params: AttentionParams, sinks: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "the sinks are multiplied by the scale", sinks * params.softmax_scale
    yield "the sinks are divided by the scale", sinks / params.softmax_scale
    yield "the sinks are to base 2: multiplied by ln(2)", sinks / _LOG2E
    yield "the sinks are multiplied by log2(e)", sinks * _LOG2E
    yield "the sinks have the wrong sign", -sinks
    yield "every sink is 0", torch.zeros_like(sinks)
    yield "sinks above 0 are taken for 0", sinks.clamp(max=0)
    if params.soft_cap is not None:
        yield "the soft cap is applied to the sinks", torch.tanh(sinks / params.soft_cap) * params.soft_cap
    for meaning, source in _heads_of_others("sink", params):
        yield meaning, sinks[source]
    heads = torch.arange(params.num_heads, device=sinks.device)
    first = heads // params.group_size * params.group_size
    yield "every head has the sink of the first head of its group", sinks[first]


# With `m_t` the maximum after tile `t` and `m` the final one, a correct kernel ends with `sum exp(s - m) V` over `sum
# exp(s - m)`. If one of the two is not rescaled, the keys of tile `t` stay in it with `exp(s - m_t)`.

_TILES = (16, 32, 64, 128, 256, 512, 1024)
"""Numbers of keys in a tile, besides the page size."""

_MOST_SCORES = 2**25
"""Scores ``H * rows * keys`` of a request above which they are not all held at once."""

_FAULTS = (
    ("the accumulator is not rescaled", True, False),
    ("the sum of the weights is not rescaled", False, True),
    ("neither the accumulator nor the sum of the weights is rescaled", True, True),
)
"""(meaning, whether the accumulator keeps old weights, whether the sum of the weights does)."""

Weigh = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""``(scores [H, rows, keys], sinks [H, 1, 1] or None)`` -> weights of the keys, and the LSE ``[H, rows, 1]``."""


def are_too_many(params: AttentionParams, rows: UnpagedAttention) -> bool:
    """Return whether the scores of the longest requests are too many to hold at once."""
    return int(rows.num_rows.max()) * int(rows.num_keys.max()) * params.num_heads > _MOST_SCORES


def rescaling_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults for each usual tile size shorter than the longest request; tiles are counted from position 0."""
    weighings = {
        tile: {
            f"{what} when a tile of {tile} keys raises the maximum": partial(_online, tile, spoils_acc, spoils_sum)
            for what, spoils_acc, spoils_sum in _FAULTS
        }
        for tile in sorted({*_TILES, problem.cache.block_size})
    }
    yield from _weighed_otherwise(truth, weighings)


def _weighed_otherwise(truth: Truth, weighings: Mapping[int, Mapping[str, Weigh]]) -> Iterator[Hypothesis]:
    """Yield faults in weighing keys, by the number of keys in a tile or split; none if there are too many scores."""
    params, rows = truth.params, truth.rows
    if are_too_many(params, rows):
        return
    scores = cache(partial(masked_scores, params, rows))
    for size, ways in weighings.items():
        if size < int(rows.num_keys.max()):
            for meaning, weigh in ways.items():
                yield Hypothesis(meaning, partial(attend_scores, params, rows, scores, weigh))


def masked_scores(params: AttentionParams, rows: UnpagedAttention, request: int) -> Tensor:
    """Return the masked scores of a request, float64 ``[H, rows, keys]``."""
    scores = unmasked_scores(params, rows, request)
    num_rows, num_keys = scores.shape[1:]
    q_pos = torch.arange(num_rows, device=scores.device)[:, None] + (num_keys - num_rows)
    k_pos = torch.arange(num_keys, device=scores.device)[None]
    return scores.masked_fill(~rows.sees(params, request, q_pos, k_pos), -torch.inf)


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


_FEW_CAPS = 5.0
"""Score in soft caps below which ``exp`` inside ``tanh`` overflows in no dtype."""

_PADDED_TILES = (8, 16, 32, 64, 128)
"""Numbers of keys to whose multiples a kernel may pad those of a request."""

_FINITE_MASKS = (0.0, -10_000.0)
"""Scores that kernels have given to hidden keys."""

Scores = Callable[[int], Tensor]
"""``request`` -> scores ``[H, rows, keys]``, -inf where a key is hidden."""


def score_explanations(_problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults that these parameters allow; none if there are too many scores to hold at once."""
    params, rows = truth.params, truth.rows
    if not len(rows.keys) or are_too_many(params, rows):
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
        yield altered(words, rows, root, "alibi")
    if any(bool(hidden(request).any()) for request in range(len(rows.num_rows))):
        unhidden = partial(unmasked_scores, params, rows)

        def filled(score: float, request: int) -> Tensor:
            return unhidden(request).masked_fill(hidden(request), score)

        for score in _FINITE_MASKS:
            words = f"hidden keys get a finite score, such as {score:g}, not -inf"
            yield with_scores(words, partial(filled, score))
        if cap is not None:
            words = "the soft cap is applied after the mask: hidden keys get a score of -cap"
            yield with_scores(words, partial(filled, -cap), "logits_soft_cap")
        words = "the mask is applied after the softmax: hidden keys count in its sum"
        yield Hypothesis(words, partial(_masked_late, params, rows))
    yield Hypothesis("the output is not divided by the sum of the weights", partial(_unnormalised, params, rows))
    yield Hypothesis("the output is divided by the number of keys too", partial(_averaged, params, rows))
    for tile in _PADDED_TILES:
        rest = -rows.places.num_keys.double()[:, None] % tile
        if bool((rest > 0).any()):
            meaning = f"the places behind the last key, up to a multiple of {tile}, count with a score of"
            yield Hypothesis(f"{meaning} 0", partial(_padded, params, rows, rest))
            if cap is not None:
                yield Hypothesis(f"{meaning} -cap", partial(_padded, params, rows, rest, -cap))
    if params.sinks is None:
        plus_one = replace(params, sinks=(0.0,) * params.num_heads)
        meaning = "1 is added to the sum of the weights: a sink of 0, or an empty part with an LSE of 0"
        yield altered(meaning, rows, plus_one)


def largest_scores(params: AttentionParams, rows: UnpagedAttention) -> Tensor | None:
    """Return the largest score of each row and head, ``[T, H]``, or None if there are too many scores to hold at once.

    It is -inf if the row sees no key and has no sink.
    """
    if are_too_many(params, rows):
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
    least = float(size[wrong].min())
    most = float(size.masked_fill(wrong, 0.0).max())
    return least if least > max(most, _FEW_CAPS) else None


def _masked_late(params: AttentionParams, rows: UnpagedAttention) -> tuple[Tensor, Tensor]:
    out, lse = rows.attend(params)
    _, every = attend_scores(params, rows, partial(unmasked_scores, params, rows))
    share = torch.nan_to_num(torch.exp(lse - every))
    return out * share[..., None], every


def _unnormalised(params: AttentionParams, rows: UnpagedAttention) -> tuple[Tensor, Tensor]:
    out, lse = rows.attend(params)
    top = largest_scores(params, rows)
    total = torch.ones_like(lse) if top is None else torch.nan_to_num(torch.exp(lse - top))
    return out * total[..., None], lse


def _averaged(params: AttentionParams, rows: UnpagedAttention) -> tuple[Tensor, Tensor]:
    out, lse = rows.attend(params)
    return out / rows.places.num_keys.double()[:, None, None].clamp(min=1), lse


def _padded(
    params: AttentionParams, rows: UnpagedAttention, count: Tensor, score: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the result with ``count [T, 1]`` more keys in the sum, all of this score, whose value is 0."""
    out, lse = rows.attend(params)
    total = torch.logaddexp(lse, count.log() + score)
    return out * torch.nan_to_num(torch.exp(lse - total))[..., None], total


def lse_explanations(truth: Truth, got: Tensor, *, output_holds: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, LSE ``[T, H]``) of faults of the LSE alone. ``got``: the wrong LSE.

    ``output_holds``: whether the output is right. If not, both may be wrong for the same reason, and few faults are
    tried.
    """
    right = truth.lse
    yield "the LSE is -inf, as if no key were seen", torch.full_like(right, -math.inf)
    for base, name in ((2, "2"), (10, "10")):
        yield (
            f"the logarithm is to base {name} (declare lse_base, or multiply by ln {name})",
            right / math.log(base),
        )
    if truth.params.sinks is not None and output_holds:
        sinks = torch.tensor(truth.params.sinks, dtype=torch.float64, device=right.device)
        yield "the sinks are in the output but not in the LSE", right + torch.log1p(-torch.exp(sinks - right))
    if not output_holds:
        return
    top = largest_scores(truth.params, truth.rows)
    if top is not None:
        yield "the LSE is the largest score: the sum of the weights is missing", top
        rest = torch.nan_to_num(right - top, nan=-math.inf)
        yield "the largest score is missing: the LSE is the logarithm of the sum alone", rest
        yield "the logarithm of the sum is subtracted, not added", torch.nan_to_num(2 * top - right, nan=-math.inf)
        yield "the logarithm of the sum is to base 2, the largest score natural", top + rest / math.log(2)
        yield "the largest score is not scaled", top / truth.params.softmax_scale + rest
    yield "the LSE has the wrong sign", -right
    yield "the LSE is the sum of the weights, without its logarithm", right.exp()
    yield "the LSE is multiplied by the scale", right * truth.params.softmax_scale
    yield "the LSE is divided by the scale", right / truth.params.softmax_scale
    yield "the LSE is multiplied by ln(2)", right * math.log(2)
    number = truth.params.num_heads
    heads = torch.arange(number, device=right.device)
    source = (got[:, :, None] - right[:, None]).abs().nan_to_num(nan=0.0).sum(dim=0).argmin(dim=1)
    named = [f"head {head} has that of head {int(of)}" for head, of in enumerate(source.tolist()) if head != of][:3]
    yield "every head has the LSE of head 0", right[:, :1].expand_as(right)
    yield (
        "every head has the LSE of the first of its group",
        right[:, heads // truth.params.group_size * truth.params.group_size],
    )
    yield "the LSEs are in reversed order of heads", right.flip(1)
    yield f"LSEs are those of other heads: {', '.join(named)}", right[:, source]
    yield "the LSEs are laid out heads first", right.T.reshape(right.shape)
    if len(right) > 1:
        yield "every row has the LSE of the next row", right.roll(-1, 0)
        yield "every row has the LSE of the row before", right.roll(1, 0)
        yield "every row has the LSE of row 0", right[:1].expand_as(right)


_SPLITS = (32, 64, 128, 256, 512, 1024)
"""Numbers of keys in a split."""

LogWeight = Callable[[Tensor, Tensor], Tensor]
"""``(LSE, largest score)`` of every split, ``[H, rows, splits]`` -> the logarithm of its weight."""


def merging_explanations(_problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults for each usual size of a split; none if there are too many scores to hold at once."""
    params = truth.params
    first = torch.arange(params.num_heads, device=truth.out.device) // params.group_size * params.group_size
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
    weighings = {
        split: {
            f"the partial results of splits of {split} keys are {how}": partial(_weigh, split, log_weight)
            for how, log_weight in faults.items()
        }
        for split in _SPLITS
    }
    yield from _weighed_otherwise(truth, weighings)


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
