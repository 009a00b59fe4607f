"""Describe wrong rows, heads and channels in words, by what they have in common and right ones do not."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.visible_span import visible_span
from attncheck.harness.truth.truth import Truth, params_of

_STEPS = (128, 64, 32, 16, 8, 4, 2)
"""Numbers of rows or keys in a tile, a page or a vector; faults at their edges repeat at this distance."""

_FEWEST = 8
"""Rows, wrong and right ones together, from which on a distance at which they repeat is no coincidence."""

_CLEAR = 2.0
"""Budgets that an error must reach in each named row, head or channel: of errors near 1 budget, chance chooses some."""

_REPEATED = "whose "
"""Prefix of the phrases that state a distance at which rows repeat."""


def pattern(problem: Problem, truth: Truth, error: Tensor, shares: Tensor) -> str | None:
    """Return in words which rows, heads and channels are wrong, or None if all are, or nothing separates them.

    ``error`` ``[T, H, Dv]``: difference of the output from the truth. ``shares`` ``[T, H]``: the same in budgets.
    """
    of_rows, of_heads = shares.amax(dim=1).cpu(), shares.amax(dim=0).cpu()
    of_channels = (error.abs() / truth.budget.peak[..., None])[shares > 1].amax(dim=0).cpu()
    rows, heads, channels = (each > 1 for each in (of_rows, of_heads, of_channels))
    found = []
    if _is_clear(of_rows) and (phrase := shared_by(problem, rows, ~rows)):
        found.append(f"rows {phrase}")
    if _is_clear(of_heads):
        found.append(which_heads(problem, heads))
    if _is_clear(of_channels):
        found.append(f"only {places('channel', channels.nonzero().flatten().tolist())}")
    return f"wrong are {', '.join(found)}" if found else None


def _is_clear(errors: Tensor) -> bool:
    """Return whether some errors are above 1 budget, all of these clearly, and some are not."""
    wrong = errors > 1
    return bool(wrong.any()) and not bool(wrong.all()) and bool((errors[wrong] >= _CLEAR).all())


def shared_by(problem: Problem, rows: Tensor, others: Tensor) -> str | None:
    """Return in words what all of ``rows`` and none of ``others`` (bool ``[T]``) have in common, or None if unknown."""
    known = [(phrase, has) for phrase, has in _properties(problem, rows, others) if bool(has[rows].all())]
    exact = [phrase for phrase, has in known if not bool(has[others].any())]
    if exact:
        return exact[0]
    repeated = [(phrase, has) for phrase, has in known if phrase.startswith(_REPEATED)]
    for phrase, has in repeated:
        for other, also in known:
            if not other.startswith(_REPEATED) and not bool((has & also)[others].any()):
                return f"{other}, {phrase}"
    return None


def _properties(problem: Problem, rows: Tensor, others: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield properties that rows may share: (in words, bool ``[T]``).

    ``rows``: the wrong ones; ``others``: right ones.
    """

    def each(values: Sequence[int]) -> Tensor:
        return torch.tensor([v for v, r in zip(values, problem.requests, strict=True) for _ in range(r.rows)])

    requests, size = problem.requests, problem.cache.block_size
    query_len, num_keys = each([r.rows for r in requests]), each([r.num_keys for r in requests])
    request, cached = each(range(len(requests))), each([r.cached for r in requests])
    nth = torch.cat([torch.arange(r.rows) for r in requests])
    position, row = nth + num_keys - query_len, torch.arange(len(nth))
    yield "with query_len 1", query_len == 1
    yield "with query_len > 1", query_len > 1
    yield "without context", cached == 0
    yield "with context", cached > 0
    yield "with query_len > 1 and context", (query_len > 1) & (cached > 0)
    first = int(request[rows][0])
    yield f"of request {first}", request == first
    yield "of requests other than request 0", request > 0
    yield "of requests other than the last", request < len(requests) - 1
    yield "first of their requests", nth == 0
    yield "last of their requests", nth == query_len - 1
    yield "behind the first of their requests", nth > 0
    yield "before the last of their requests", nth < query_len - 1
    yield "where the last page is full", num_keys % size == 0
    yield "where the last page is not full", num_keys % size != 0
    if int(rows.sum()) > 1 and int((rows | others).sum()) >= _FEWEST:
        for step in _STEPS:
            for name, value in (("position", position), ("number in the request", nth), ("number", row)):
                yield f"whose {name} is a multiple of {step}", value % step == 0
                yield f"whose {name} is {step - 1} modulo {step}", value % step == step - 1
    start, _ = visible_span(params_of(problem), position, num_keys)
    yield "whose keys begin inside of a page", start % size != 0
    yield "whose keys begin behind the first key", start > 0
    values = (
        ("seq_len", num_keys),
        ("query_len", query_len),
        ("row of the request", nth),
        ("position", position),
        ("context_len", num_keys - query_len),
        ("pages", -(-num_keys // size)),
        ("number in the batch", row),
    )
    for name, value in values:
        least, most = int(value[rows].min()), int(value[rows].max())
        if least == most:
            yield f"with {name} {least}", value == least
        yield f"with {name} >= {least}", value >= least
        yield f"with {name} <= {most}", value <= most


def which_heads(problem: Problem, heads: Tensor) -> str:
    """Return the wrong ``heads`` (bool ``[H]``) in words, with what they have in common."""
    group = problem.layer.num_heads // problem.layer.num_kv_heads
    indices = heads.nonzero().flatten().tolist()
    text = f"only {places('head', indices)}"
    if group == 1:
        return text
    own = torch.arange(len(heads))
    if len(indices) == group and indices[0] % group == 0 and indices[-1] < indices[0] + group:
        return f"{text} (those of KV head {indices[0] // group})"
    for name, nth in (("first", 0), ("last", group - 1)):
        if torch.equal(heads, own % group == nth):
            return f"{text} (the {name} of each KV head)"
    return text


def places(name: str, indices: Sequence[int]) -> str:
    """Return indices in words: ``channels 32 to 63``, ``heads 1, 3, 5``, ``channel 7``.

    >>> places("channel", [8, 9, 10, 11]), places("head", [5]), places("channel", list(range(1, 40, 2)))
    ('channels 8 to 11', 'head 5', 'channels 1, 3, 5, ... (20 in all, 2 apart)')
    """
    if len(indices) == 1:
        return f"{name} {indices[0]}"
    apart = {b - a for a, b in pairwise(indices)}
    if apart == {1} and len(indices) > 2:
        return f"{name}s {indices[0]} to {indices[-1]}"
    if len(indices) <= 6:
        return f"{name}s {', '.join(map(str, indices))}"
    steps = f", {apart.pop()} apart" if len(apart) == 1 else ""
    return f"{name}s {', '.join(map(str, indices[:3]))}, ... ({len(indices)} in all{steps})"
