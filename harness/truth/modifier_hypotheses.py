"""Faults of scale, soft cap, ALiBi and sinks that change the scores without ignoring the modifier."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.hypotheses import Hypothesis
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
"""Numbers of keys in a tile or split, each of which may count the sinks once."""

_LIKE = 0.02
"""Difference of two sinks below which they count as equal."""

_FEWEST_ROWS = 3
"""Wrong rows of a head that its fitted sink must explain; in fewer, a sink would fit any factor on the output."""

_LEAST_SHARE = 0.05
"""Share of the weights that the keys and the sink each need before their ratio determines the sink."""


def modifier_explanations(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults that these parameters allow, except those of sinks, which :func:`other_sinks` yields."""

    def with_changes(meaning: str, *features: str, **changes: object) -> Hypothesis:
        return Hypothesis(meaning, lambda: rows.attend(replace(params, **changes)), features)  # type: ignore[arg-type]

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
    number, group = params.num_heads, params.group_size
    for factor, name in ((-1.0, "the ALiBi bias has the wrong sign"), (2.0, "the ALiBi bias is applied twice")):
        yield name, tuple(factor * slope for slope in slopes)
    factors = {
        "scale": params.softmax_scale,
        "log2(e)": _LOG2E,
        "ln(2)": 1 / _LOG2E,
        "1/2": 0.5,
        "sqrt(head size)": params.head_size**0.5,
    }
    for name, factor in factors.items():
        yield f"the ALiBi bias is multiplied by {name}", tuple(factor * slope for slope in slopes)
    yield "the ALiBi slopes are in reversed order of heads", slopes[::-1]
    yield "every head has the ALiBi slope of head 0", (slopes[0],) * number
    yield (
        "query head h has the ALiBi slope of its KV head, h // group size",
        tuple(slopes[head // group] for head in range(number)),
    )
    yield (
        "query head h has the ALiBi slope of head h % group size",
        tuple(slopes[head % group] for head in range(number)),
    )
    yield (
        "query head h has the ALiBi slope of head h % num_kv_heads",
        tuple(slopes[head % params.num_kv_heads] for head in range(number)),
    )
    for shift in (1, -1):
        yield (
            f"query head h has the ALiBi slope of head h {'+' if shift > 0 else '-'} 1",
            tuple(slopes[(head + shift) % number] for head in range(number)),
        )
    for base in dict.fromkeys((number, 1 << (number - 1).bit_length(), 1 << (number.bit_length() - 1))):
        plain = tuple(2.0 ** (-8.0 * (head + 1) / base) for head in range(number))
        yield f"the ALiBi slopes are 2 ** (-8 (h + 1) / {base}), whatever the layer's are", plain


def other_sinks(params: AttentionParams, rows: UnpagedAttention) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of faults of sinks."""
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


def fitted_sinks(_problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output) of the sinks that fit ``values``, one per wrong head for all rows."""
    params = truth.params
    if params.sinks is None:
        return
    bare, lse = truth.rows.attend(replace(params, sinks=None))
    share = (values * bare).sum(-1) / (bare * bare).sum(-1).clamp(min=1e-300)
    is_determined = (share > _LEAST_SHARE) & (share < 1 - _LEAST_SHARE) & torch.isfinite(lse)
    found = lse + torch.log(1 / share.clamp(1e-9, 1 - 1e-9) - 1)
    wrong = shares > 1
    fitted = torch.where(is_determined & wrong, found, torch.nan).nanmedian(dim=0).values
    fitted = torch.where(wrong.any(dim=0), fitted, fitted.new_tensor(params.sinks))
    has_evidence = bool((wrong.sum(dim=0) >= _FEWEST_ROWS)[wrong.any(dim=0)].all())
    if (
        has_evidence
        and bool(torch.isfinite(fitted).all())
        and (words := _sinks_in_words(fitted.tolist(), params.sinks))
    ):
        yield words, bare * torch.sigmoid(lse - fitted)[..., None]


def _sinks(params: AttentionParams, sinks: Tensor) -> Iterator[tuple[str, Tensor]]:
    group, number = params.group_size, params.num_heads
    head = torch.arange(number, device=sinks.device)
    yield "the sinks are multiplied by the scale", sinks * params.softmax_scale
    yield "the sinks are divided by the scale", sinks / params.softmax_scale
    yield "the sinks are to base 2: multiplied by ln(2)", sinks / _LOG2E
    yield "the sinks are multiplied by log2(e)", sinks * _LOG2E
    yield "the sinks have the wrong sign", -sinks
    yield "every sink is 0", torch.zeros_like(sinks)
    yield "sinks above 0 are taken for 0", sinks.clamp(max=0)
    if params.soft_cap is not None:
        yield "the soft cap is applied to the sinks", torch.tanh(sinks / params.soft_cap) * params.soft_cap
    yield "every head has the sink of head 0", sinks[:1].expand(number)
    yield "query head h has the sink of its KV head, h // group size", sinks[head // group]
    yield "every head has the sink of the first head of its group", sinks[head // group * group]
    yield "query head h has the sink of head h % group size", sinks[head % group]
    yield "query head h has the sink of head h % num_kv_heads", sinks[head % params.num_kv_heads]
    yield "the sinks are in reversed order of heads", sinks.flip(0)
    yield "query head h has the sink of head h + 1", sinks.roll(-1)
    yield "query head h has the sink of head h - 1", sinks.roll(1)


def _sinks_in_words(found: list[float], right: tuple[float, ...]) -> str:
    """Return which sinks differ; "" if none does."""
    named = [
        f"head {head}: {new:.3g}, not {old:.3g}"
        for head, (new, old) in enumerate(zip(found, right, strict=True))
        if abs(new - old) > _LIKE
    ]
    more = f" and {len(named) - 3} more" if len(named) > 3 else ""
    return f"the sinks are others ({', '.join(named[:3])}{more})" if named else ""
