"""Faults that are fitted to the error: keys, rows, heads, channels, sinks and factors."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from attncheck.harness.diagnosis.patterns import places
from attncheck.harness.diagnosis.scores import parts_of_request, unmasked_scores
from attncheck.harness.problem.pages import Request, visible_span
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import UnpagedAttention, share_of_budget
from attncheck.reference import AttentionParams
from attncheck.reports.analysis.reasons import named

_ALIKE = 0.05
"""Relative difference below which a channel counts as equal to another one."""

_MOST_REARRANGED = 512
"""Rows of a step up to which the source of a wrong row is searched for."""

_FEWEST_REARRANGED = 8
"""Wrong rows and heads from which on a match of channels is no coincidence."""

_NAMED_PLACES = 3
"""Places that a message names one by one."""


def misplaced(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of right outputs, nearest to ``values``: in other places, or scaled.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``.
    """
    wrong = shares > 1
    number = values[wrong].median()
    yield f"every number of the output is {float(number):.3g}", torch.full_like(values, float(number))
    yield from _channels(truth, values, wrong)
    yield from _heads(truth, values, wrong)
    yield from _rows(problem, truth, values, wrong)
    if int(wrong.sum()) > 1:
        own = (truth.out**2).sum(dim=-1).clamp(min=1e-300)
        factor = float(((values * truth.out).sum(dim=-1) / own)[wrong].median())
        yield f"the output is the right one times {factor:.3g}", truth.out * factor


def _channels(truth: Truth, values: Tensor, wrong: Tensor) -> Iterator[tuple[str, Tensor]]:
    got, right = values[wrong], truth.out[wrong]  # [n, Dv]
    size = right.shape[1]
    bad = ((got - right).abs() > truth.budget.peak[wrong][:, None]).any(dim=0)
    if not bool(bad.any()):
        return
    which = bad.nonzero().flatten()
    if not bool(bad.all()):
        out = truth.out.clone()
        out[..., which] = 0.0
        yield f"{places('channel', which.tolist())} of the output are 0", out
    if len(got) < _FEWEST_REARRANGED:
        return
    norm = (right * right).sum(dim=0)
    far = (got * got).sum(dim=0)[:, None] - 2 * got.T @ right + norm[None]  # [Dv, Dv]: channel got, channel right
    source = far.argmin(dim=1)
    source = torch.where(bad, source, torch.arange(size, device=source.device))
    near = far.gather(1, source[:, None])[:, 0] <= _ALIKE**2 * norm[source]
    if bool(near[bad].all()) and bool((source != torch.arange(size, device=source.device)).any()):
        named = [f"channel {c} holds channel {int(source[c])}" for c in which.tolist()[:_NAMED_PLACES]]
        more = f", ... ({len(which)} in all)" if len(which) > _NAMED_PLACES else ""
        yield f"channels of the output are exchanged: {', '.join(named)}{more}", truth.out[..., source]


def _heads(truth: Truth, values: Tensor, wrong: Tensor) -> Iterator[tuple[str, Tensor]]:
    number = truth.params.num_heads
    source = torch.arange(number, device=values.device)
    heads = wrong.any(dim=0).nonzero().flatten().tolist()
    for head in heads:
        rows = wrong[:, head]
        off = torch.linalg.vector_norm(truth.out[rows] - values[rows, head][:, None], dim=-1)
        source[head] = off.norm(dim=0).argmin()
    moved = [head for head in heads if int(source[head]) != head]
    if moved:
        named = [f"head {head} holds that of head {int(source[head])}" for head in moved[:_NAMED_PLACES]]
        more = f", ... ({len(moved)} in all)" if len(moved) > _NAMED_PLACES else ""
        # Within a group, all heads read the same keys, so exchanged queries give the same.
        group = torch.div(torch.arange(number, device=values.device), truth.params.group_size, rounding_mode="floor")
        what = "queries or outputs" if torch.equal(group[source], group) else "outputs"
        yield f"{what} are those of other heads: {', '.join(named)}{more}", truth.out[:, source]


def _rows(problem: Problem, truth: Truth, values: Tensor, wrong: Tensor) -> Iterator[tuple[str, Tensor]]:
    rows = wrong.any(dim=1).nonzero().flatten()
    if len(truth.out) > _MOST_REARRANGED:
        return
    source = torch.arange(len(values), device=values.device)
    source[rows] = torch.cdist(values[rows].flatten(1), truth.out.flatten(1)).argmin(dim=1)
    moved = [row for row in rows.tolist() if int(source[row]) != row]
    if not moved:
        return
    shifts = {int(source[row]) - row for row in moved}
    if len(shifts) == 1:
        (shift,) = shifts
        words = f"each holds that of the row {abs(shift)} {'behind' if shift > 0 else 'before'} it"
    else:
        named = [
            f"row {row} ({problem.row_name(row)}) holds that of row {int(source[row])}" for row in moved[:_NAMED_PLACES]
        ]
        words = ", ".join(named) + (f", ... ({len(moved)} in all)" if len(moved) > _NAMED_PLACES else "")
    yield f"outputs are those of other rows: {words}", truth.out[source]


# The factor by which scale, soft cap or ALiBi slopes are wrong is searched for on the smallest requests with wrong
# rows, on a grid and then between two of its points, and is then refined on all rows.

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

_FEWEST_SCALED = 3
"""Wrong rows and heads that one factor must explain."""

_FEW_SCORES, _MOST_SCALED = 2**17, 2**20
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
        if near or (among is not None and _factor_in_words(name) not in among):
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
    return [_factor_in_words(name) for name, _ in _numbers(params)]


def _factor_in_words(name: str) -> str:
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
    if problem.parts or int((shares > 1).sum()) < _FEWEST_SCALED or scores[ordered[0]] > _MOST_SCALED:
        return []
    sums = accumulate(scores[index] for index in ordered)
    return [index for index, total in zip(ordered, sums, strict=True) if index == ordered[0] or total <= _FEW_SCORES]


def _narrowed(off: Callable[[float], float], middle: float, reach: float) -> float:
    """Return the minimum of ``off`` within ``reach`` of ``middle``, by golden-section search."""
    low, high = middle - reach, middle + reach
    left = high - _GOLDEN * (high - low)
    right = low + _GOLDEN * (high - low)
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


_MOST_REQUESTS = 4
"""Maximum number of requests in whose rows other KV heads are tried."""

_PARTS = {"": ("keys", "values"), "keys of ": ("keys",), "values of ": ("values",)}
"""What is read from another KV head, in words, and its fields."""

_NAMED_HEADS = 4
"""Heads that a message names one by one."""


def other_heads(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of the map from query heads to KV heads that comes nearest to ``values``.

    The map holds for keys and values, or for one of them alone. ``shares``: the errors of ``values`` in budgets,
    ``[T, H]``. Only wrong heads are remapped. Nothing for a single KV head, for latent attention, and if the worst rows
    of the wrong heads are in more than ``_MOST_REQUESTS`` requests.
    """
    params = truth.params
    wrong = (shares > 1).any(dim=0).nonzero().flatten().tolist()
    if params.num_kv_heads < 2 or problem.layer.mla is not None:
        return
    worst = {head: _request_of(problem, int(shares[:, head].argmax())) for head in wrong}
    if len(set(worst.values())) > _MOST_REQUESTS:
        return
    own = torch.arange(params.num_heads, device=values.device) // params.group_size
    for part, fields in _PARTS.items():
        reads = own.clone()
        for request in set(worst.values()):
            nearest = _nearest_head(problem, truth, values, own, request, fields)
            for head in (head for head in wrong if worst[head] == request):
                reads[head] = nearest[head]
        out, _ = _reading(truth.rows, own, reads, fields).attend(replace(params, num_kv_heads=params.num_heads))
        yield _heads_in_words(part, [(head, int(reads[head]), int(own[head])) for head in wrong]), out


def _request_of(problem: Problem, row: int) -> int:
    return next(i for i, r in enumerate(problem.requests) if r.first_row <= row < r.first_row + r.rows)


def _nearest_head(
    problem: Problem, truth: Truth, values: Tensor, own: Tensor, index: int, fields: tuple[str, ...]
) -> Tensor:
    """Return int64 ``[H]``: for each query head, the other KV head whose output in request ``index`` is nearest."""
    request, params = problem.requests[index], truth.params
    taken = slice(request.first_row, request.first_row + request.rows)
    rows = truth.rows.of_requests(index, index + 1)
    errors = []
    others = [(own + shift) % params.num_kv_heads for shift in range(1, params.num_kv_heads)]
    for reads in others:
        out, _ = _reading(rows, own, reads, fields).attend(replace(params, num_kv_heads=params.num_heads))
        errors.append(torch.linalg.vector_norm((out - values[taken]).transpose(0, 1).flatten(1), dim=1))
    return torch.stack(others)[torch.stack(errors).argmin(dim=0), torch.arange(len(own), device=own.device)]


def _reading(rows: UnpagedAttention, own: Tensor, reads: Tensor, fields: tuple[str, ...]) -> UnpagedAttention:
    """Return ``rows`` with a KV head for each query head: ``reads`` for ``fields``, and its ``own`` for the other."""
    keys, values = (reads if name in fields else own for name in ("keys", "values"))
    return replace(rows, keys=rows.keys[:, keys], values=rows.values[:, values])


def _heads_in_words(part: str, found: list[tuple[int, int, int]]) -> str:
    """Return the head map in words, from triples (query head, KV head it reads, KV head it should read)."""
    heads = [each[0] for each in found]
    read = [each[1] for each in found]
    if len(found) > 1 and len(set(read)) == 1:
        return f"query heads {', '.join(map(str, heads))} read {part}KV head {read[0]} instead of their own"
    named = [f"query head {head} reads {part}KV head {new} instead of {old}" for head, new, old in found[:_NAMED_HEADS]]
    more = f" (and {len(found) - _NAMED_HEADS} more heads read others)" if len(found) > _NAMED_HEADS else ""
    return ", ".join(named) + more


# Find the span of keys each wrong row sees, if its output is right for a span with another start or end.
#
# Examples are a mask left out in one tile, a window that begins at a page boundary, and a lost tail: each row then sees
# more or fewer keys at one end of its span, and how many differs from row to row.

WINDOW_START = "the window begins"
"""Prefix of the meaning of a fault at the first key of a sliding window."""

_MOST_SPANS = 128
"""Maximum number of wrong rows for which spans are tried."""

_MOST_SPANNED = 2**24
"""Scores ``H * rows * keys`` of a request above which spans are not tried, because all are held at once."""

_MOST_KEYS = 8192
"""Keys of a request above which spans are not tried, because every possible end is tried in turn."""


def other_spans(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> list[tuple[str, Tensor]]:
    """Return (meaning, output ``[T, H, Dv]``) of the spans nearest to ``values``: with other ends, with other starts.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``. Only wrong rows get another span. Empty if no other
    span comes nearer, if a tree, prefixes or an indexer make the mask, or if there are too many rows or keys.
    """
    wrong = (shares > 1).any(dim=1)
    if truth.rows.tree is not None or not truth.rows.is_plain or not 0 < int(wrong.sum()) <= _MOST_SPANS:
        return []
    outs = {"end": truth.out.clone(), "start": truth.out.clone()}
    moved: dict[str, list[int]] = {"end": [], "start": []}
    for index, request in enumerate(problem.requests):
        own = wrong[request.first_row : request.first_row + request.rows].nonzero().flatten()
        if not len(own):
            continue
        scores = truth.params.num_heads * request.rows * request.num_keys
        if scores > _MOST_SPANNED or request.num_keys > _MOST_KEYS:
            return []
        for place, (out, shift) in _nearest_span(truth, index, request, own, values, shares).items():
            outs[place][request.first_row + own] = out
            moved[place] += shift.tolist()
    return [
        (_span_in_words(place, shifts, has_window=min(truth.params.window) >= 0), outs[place])
        for place, shifts in moved.items()
        if any(shifts)
    ]


def _nearest_span(
    truth: Truth, index: int, request: Request, own: Tensor, values: Tensor, shares: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the nearest outputs ``[r, H, Dv]`` for rows ``own [r]`` of a request, and how many keys the end was moved.

    The dict has one entry for spans with other ends, and one for other starts.
    """
    params = truth.params
    scores = unmasked_scores(params, truth.rows, index)[:, own]
    held = parts_of_request(truth.rows, index)[2].repeat_interleave(params.group_size, dim=1).transpose(0, 1)
    first, last = visible_span(params, own + (request.num_keys - request.rows), request.num_keys)
    key = torch.arange(request.num_keys, device=scores.device)
    sinks = (
        scores.new_full((params.num_heads,), -torch.inf) if params.sinks is None else scores.new_tensor(params.sinks)
    )
    rows = request.first_row + own
    is_wrong = (shares[rows] > 1).double()
    found = {}
    for place, inside in (("end", key >= first[:, None]), ("start", key <= last[:, None])):
        nearest = truth.out[rows]
        least = torch.full((len(own),), torch.inf, dtype=torch.float64, device=scores.device)
        shift = torch.zeros_like(own)
        top = sinks[:, None].expand(-1, len(own))
        part = held.new_zeros(len(held), len(own), held.shape[-1])
        total = (top > -torch.inf).double()
        for at in key.tolist() if place == "end" else reversed(key.tolist()):
            score = scores[..., at].masked_fill(~inside[:, at], -torch.inf)
            higher = torch.maximum(top, score)
            pivot = higher.masked_fill(higher == -torch.inf, 0.0)
            fade = torch.exp(top - pivot)
            weight = torch.exp(score - pivot)
            top = higher
            part = part * fade[..., None] + weight[..., None] * held[:, None, at]
            total = total * fade + weight
            answer = (part / total.clamp(min=1e-300)[..., None]).transpose(0, 1)
            error = (torch.linalg.vector_norm(answer - values[rows], dim=-1) * is_wrong).sum(dim=1)
            is_better = error < least
            least = torch.where(is_better, error, least)
            nearest = torch.where(is_better[:, None, None], answer, nearest)
            shift = torch.where(is_better, at - last if place == "end" else first - at, shift)
        found[place] = nearest, shift
    return found


def _span_in_words(place: str, shifts: list[int], *, has_window: bool) -> str:
    """Return the fault in words; a shift above 0 means more keys than in the right span."""
    low, high = min(shifts), max(shifts)
    if place == "start":
        name = WINDOW_START if has_window else "the keys begin"
        if low >= 0:
            return f"{name} too early: up to {high} older keys are seen"
        if high <= 0:
            return f"{name} too late: up to {-low} of its first keys are missing"
        return f"{name} up to {high} keys too early or {-low} keys too late"
    if low >= 0:
        return f"keys after the last visible one are seen, up to {high} of them"
    if high <= 0:
        return f"the last visible keys are missing, up to {-low} of them"
    return f"the keys end up to {high} too late or {-low} too early"


_LIKE = 0.02
"""Difference of two sinks below which they count as equal."""

_FEWEST_ROWS = 3
"""Wrong rows of a head that its fitted sink must explain; in fewer, a sink would fit any factor on the output."""

_LEAST_SHARE = 0.05
"""Share of the weights that the keys and the sink each need before their ratio determines the sink."""


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


def _sinks_in_words(found: list[float], right: tuple[float, ...]) -> str:
    others = [
        f"head {head}: {new:.3g}, not {old:.3g}"
        for head, (new, old) in enumerate(zip(found, right, strict=True))
        if abs(new - old) > _LIKE
    ]
    return f"the sinks are others ({named(others, 3)})" if others else ""
