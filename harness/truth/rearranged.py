"""Right numbers in wrong places: rows, heads and channels of output or query that are exchanged or lost."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.hypotheses import Hypothesis
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.wrong_rows import places

_ALIKE = 0.05
"""Relative difference below which a channel counts as equal to another one."""

_WIDTHS = (8, 16, 32, 64, 128, 256)
"""Numbers of channels that a kernel may assume for a head, or for a tile of a head."""

_MOST_ROWS = 512
"""Rows of a step up to which the source of a wrong row is searched for."""

_FEWEST = 8
"""Wrong rows and heads from which on a match of channels is no coincidence."""

_NAMED = 3
"""Places that a message names one by one."""


def query_explanations(truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of using queries of other rows or heads, and of products over some of the channels."""
    rows, params = truth.rows, truth.params
    starts, number = rows.cu_seqlens_q[:-1], rows.num_rows
    first, length = (each.repeat_interleave(number) for each in (starts, number))
    nth = rows.places.node
    if bool((number > 1).any()):
        moved = {
            "the query of a row is that of the row before in its request": (nth - 1) % length,
            "the query of a row is that of the next row of its request": (nth + 1) % length,
            "every row of a request has the query of its first row": torch.zeros_like(nth),
            "every row of a request has the query of its last row": length - 1,
        }
        for meaning, place in moved.items():
            other = replace(rows, query=rows.query[first + place])
            yield Hypothesis(meaning, partial(other.attend, params))
    for meaning, heads in _head_orders(params.num_heads):
        other = replace(rows, query=rows.query[:, heads])
        yield Hypothesis(f"query head h has the query of head {meaning}", partial(other.attend, params))
    size = params.head_size
    channel = torch.arange(size, device=rows.query.device)
    kept = {f"only channels 0 to {width - 1} count in the scores": channel < width for width in _WIDTHS if width < size}
    if size // 2 not in _WIDTHS:
        kept[f"only channels 0 to {size // 2 - 1} count in the scores"] = channel < size // 2
    kept["the last channel is missing in the scores"] = channel < size - 1
    for meaning, counts in kept.items():
        yield Hypothesis(meaning, partial(replace(rows, query=rows.query * counts).attend, params))
    for meaning, order in _orders(channel):
        other = replace(rows, query=rows.query[..., order])
        yield Hypothesis(f"the channels of query and key do not match: {meaning}", partial(other.attend, params))


def _head_orders(number: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (name of the head whose query head h gets, list of these heads)."""
    if number > 1:
        yield "h - 1", [(head - 1) % number for head in range(number)]
        yield "num_heads - 1 - h", list(reversed(range(number)))
    if number > 2:
        yield "h + 1", [(head + 1) % number for head in range(number)]


def packed_queries(truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of reading the query as if every request had equally many rows."""
    rows = truth.rows
    number = rows.num_rows
    place = torch.arange(len(rows.query), device=rows.query.device)
    request = torch.arange(len(number), device=place.device).repeat_interleave(number)
    longest = int(number.max())
    for width in dict.fromkeys((longest, 1 << (longest - 1).bit_length())):
        other = (request * width + rows.places.node).clamp(max=len(place) - 1)
        if not torch.equal(other, place):
            packed = replace(rows, query=rows.query[other])
            yield Hypothesis(
                f"queries are read as if every request had {width} rows", partial(packed.attend, truth.params)
            )


def _orders(channel: Tensor) -> Iterator[tuple[str, Tensor]]:
    size = len(channel)
    yield "in one of them the halves are exchanged", channel.roll(size // 2)
    yield "in one of them they are in reversed order", channel.flip(0)
    if size % 2 == 0:
        halves = torch.cat([channel[::2], channel[1::2]])
        yield "one has even and odd ones interleaved, the other in halves", halves
        yield "one has the halves interleaved, the other not", halves.argsort()


def misplaced(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output ``[T, H, Dv]``) of right outputs in other channels, heads and rows, nearest to ``values``.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``.
    """
    wrong = shares > 1
    number = values[wrong].median()
    yield f"every number of the output is {float(number):.3g}", torch.full_like(values, float(number))
    yield from _channels(truth, values, wrong)
    yield from _heads(truth, values, wrong)
    yield from _rows(problem, truth, values, wrong)


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
    if len(got) < _FEWEST:
        return
    norm = (right * right).sum(dim=0)
    far = (got * got).sum(dim=0)[:, None] - 2 * got.T @ right + norm[None]  # [Dv, Dv]: channel got, channel right
    source = far.argmin(dim=1)
    source = torch.where(bad, source, torch.arange(size, device=source.device))
    near = far.gather(1, source[:, None])[:, 0] <= _ALIKE**2 * norm[source]
    if bool(near[bad].all()) and bool((source != torch.arange(size, device=source.device)).any()):
        named = [f"channel {c} holds channel {int(source[c])}" for c in which.tolist()[:_NAMED]]
        more = f", ... ({len(which)} in all)" if len(which) > _NAMED else ""
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
        named = [f"head {head} holds that of head {int(source[head])}" for head in moved[:_NAMED]]
        more = f", ... ({len(moved)} in all)" if len(moved) > _NAMED else ""
        # Within a group, all heads read the same keys, so exchanged queries give the same.
        group = torch.div(torch.arange(number, device=values.device), truth.params.group_size, rounding_mode="floor")
        what = "queries or outputs" if torch.equal(group[source], group) else "outputs"
        yield f"{what} are those of other heads: {', '.join(named)}{more}", truth.out[:, source]


def _rows(problem: Problem, truth: Truth, values: Tensor, wrong: Tensor) -> Iterator[tuple[str, Tensor]]:
    rows = wrong.any(dim=1).nonzero().flatten()
    if len(truth.out) > _MOST_ROWS:
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
        named = [f"row {row} ({problem.row_name(row)}) holds that of row {int(source[row])}" for row in moved[:_NAMED]]
        words = ", ".join(named) + (f", ... ({len(moved)} in all)" if len(moved) > _NAMED else "")
    yield f"outputs are those of other rows: {words}", truth.out[source]


def rescaled(_problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, output) of the right output times a factor, one for all wrong rows and heads."""
    wrong = shares > 1
    if int(wrong.sum()) < 2:
        return
    own = (truth.out**2).sum(dim=-1).clamp(min=1e-300)
    factor = float(((values * truth.out).sum(dim=-1) / own)[wrong].median())
    yield f"the output is the right one times {factor:.3g}", truth.out * factor
