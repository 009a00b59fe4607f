"""Find which KV head each wrong query head reads, if its output is right for another KV head."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import UnpagedAttention

_MOST_REQUESTS = 4
"""Maximum number of requests in whose rows other KV heads are tried."""

_PARTS = {"": ("keys", "values"), "keys of ": ("keys",), "values of ": ("values",)}
"""What is read from another KV head, in words, and its fields."""

_NAMED = 4
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
            nearest = _nearest(problem, truth, values, own, request, fields)
            for head in (head for head in wrong if worst[head] == request):
                reads[head] = nearest[head]
        out, _ = _reading(truth.rows, own, reads, fields).attend(replace(params, num_kv_heads=params.num_heads))
        yield _words(part, [(head, int(reads[head]), int(own[head])) for head in wrong]), out


def _request_of(problem: Problem, row: int) -> int:
    return next(i for i, r in enumerate(problem.requests) if r.first_row <= row < r.first_row + r.rows)


def _nearest(
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


def _words(part: str, found: list[tuple[int, int, int]]) -> str:
    """Return the head map in words, from triples (query head, KV head it reads, KV head it should read)."""
    heads, read = [each[0] for each in found], [each[1] for each in found]
    if len(found) > 1 and len(set(read)) == 1:
        return f"query heads {', '.join(map(str, heads))} read {part}KV head {read[0]} instead of their own"
    named = [f"query head {head} reads {part}KV head {new} instead of {old}" for head, new, old in found[:_NAMED]]
    more = f" (and {len(found) - _NAMED} more heads read others)" if len(found) > _NAMED else ""
    return ", ".join(named) + more
