"""Find the span of keys each wrong row sees, if its output is right for a span with another start or end.

Examples are a mask left out in one tile, a window that begins at a page boundary, and a lost tail: each row then sees
more or fewer keys at one end of its span, and how many differs from row to row.
"""

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem, Request
from attncheck.harness.problem.visible_span import visible_span
from attncheck.harness.truth.softmax_hypotheses import parts_of_request, unmasked_scores
from attncheck.harness.truth.truth import Truth

WINDOW_START = "the window begins"
"""Prefix of the meaning of a fault at the first key of a sliding window."""

_MOST_ROWS = 128
"""Maximum number of wrong rows for which spans are tried."""

_MOST_SCORES = 2**24
"""Scores ``H * rows * keys`` of a request above which spans are not tried, because all are held at once."""

_MOST_KEYS = 8192
"""Keys of a request above which spans are not tried, because every possible end is tried in turn."""


def other_spans(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> list[tuple[str, Tensor]]:
    """Return (meaning, output ``[T, H, Dv]``) of the spans nearest to ``values``: with other ends, with other starts.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``. Only wrong rows get another span. Empty if no other
    span comes nearer, if the layer has a tree, or if there are too many rows or keys.
    """
    wrong = (shares > 1).any(dim=1)
    if truth.rows.tree is not None or not 0 < int(wrong.sum()) <= _MOST_ROWS:
        return []
    outs = {"end": truth.out.clone(), "start": truth.out.clone()}
    moved: dict[str, list[int]] = {"end": [], "start": []}
    for index, request in enumerate(problem.requests):
        own = wrong[request.first_row : request.first_row + request.rows].nonzero().flatten()
        if not len(own):
            continue
        scores = truth.params.num_heads * request.rows * request.num_keys
        if scores > _MOST_SCORES or request.num_keys > _MOST_KEYS:
            return []
        for place, (out, shift) in _nearest(truth, index, request, own, values, shares).items():
            outs[place][request.first_row + own] = out
            moved[place] += shift.tolist()
    return [
        (_words(place, shifts, has_window=min(truth.params.window) >= 0), outs[place])
        for place, shifts in moved.items()
        if any(shifts)
    ]


def _nearest(
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
        nearest, least = truth.out[rows], torch.full((len(own),), torch.inf, dtype=torch.float64, device=scores.device)
        shift = torch.zeros_like(own)
        top = sinks[:, None].expand(-1, len(own))
        part, total = held.new_zeros(len(held), len(own), held.shape[-1]), (top > -torch.inf).double()
        for at in key.tolist() if place == "end" else reversed(key.tolist()):
            score = scores[..., at].masked_fill(~inside[:, at], -torch.inf)
            higher = torch.maximum(top, score)
            pivot = higher.masked_fill(higher == -torch.inf, 0.0)
            fade, weight, top = torch.exp(top - pivot), torch.exp(score - pivot), higher
            part, total = part * fade[..., None] + weight[..., None] * held[:, None, at], total * fade + weight
            answer = (part / total.clamp(min=1e-300)[..., None]).transpose(0, 1)
            error = (torch.linalg.vector_norm(answer - values[rows], dim=-1) * is_wrong).sum(dim=1)
            is_better = error < least
            least = torch.where(is_better, error, least)
            nearest = torch.where(is_better[:, None, None], answer, nearest)
            shift = torch.where(is_better, at - last if place == "end" else first - at, shift)
        found[place] = nearest, shift
    return found


def _words(place: str, shifts: list[int], *, has_window: bool) -> str:
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
