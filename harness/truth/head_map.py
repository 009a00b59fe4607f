"""Find which KV head each wrong query head reads, if its output is right for another KV head."""

from dataclasses import replace

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import UnpagedAttention

_MOST_REQUESTS = 4
"""Maximum number of requests in whose rows other KV heads are tried."""

_NAMED = 4
"""Heads that a message names one by one."""


def other_heads(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> list[tuple[str, Tensor]]:
    """Return (meaning, output ``[T, H, Dv]``) of the map from query heads to KV heads that comes nearest to ``values``.

    ``shares``: the errors of ``values`` in budgets, ``[T, H]``. Only wrong heads are remapped. Empty for a single KV
    head, for latent attention, and if the worst rows of the wrong heads are in more than ``_MOST_REQUESTS`` requests.
    """
    params = truth.params
    wrong = (shares > 1).any(dim=0).nonzero().flatten().tolist()
    if params.num_kv_heads < 2 or problem.layer.mla is not None:
        return []
    worst = {head: _request_of(problem, int(shares[:, head].argmax())) for head in wrong}
    if len(set(worst.values())) > _MOST_REQUESTS:
        return []
    own = torch.arange(params.num_heads, device=values.device) // params.group_size
    reads = own.clone()
    for request in set(worst.values()):
        nearest = _nearest(problem, truth, values, own, request)
        for head in (head for head in wrong if worst[head] == request):
            reads[head] = nearest[head]
    out, _ = _reading(truth, reads).attend(replace(params, num_kv_heads=params.num_heads))
    return [(_words([(head, int(reads[head]), int(own[head])) for head in wrong]), out)]


def _request_of(problem: Problem, row: int) -> int:
    return next(i for i, r in enumerate(problem.requests) if r.first_row <= row < r.first_row + r.rows)


def _nearest(problem: Problem, truth: Truth, values: Tensor, own: Tensor, index: int) -> Tensor:
    """Return int64 ``[H]``: for each query head, the other KV head whose output in request ``index`` is nearest."""
    request, params = problem.requests[index], truth.params
    taken = slice(request.first_row, request.first_row + request.rows)
    keys = slice(request.base, request.base + request.num_keys)
    rows = truth.rows
    starts = torch.tensor([[0, request.rows], [0, request.num_keys]], device=rows.keys.device)
    errors = []
    others = [(own + shift) % params.num_kv_heads for shift in range(1, params.num_kv_heads)]
    for reads in others:
        part = replace(
            rows,
            query=rows.query[taken],
            keys=rows.keys[keys][:, reads],
            values=rows.values[keys][:, reads],
            cu_seqlens_q=starts[0],
            cu_seqlens_k=starts[1],
        )
        out, _ = part.attend(replace(params, num_kv_heads=params.num_heads))
        errors.append(torch.linalg.vector_norm((out - values[taken]).transpose(0, 1).flatten(1), dim=1))
    return torch.stack(others)[torch.stack(errors).argmin(dim=0), torch.arange(len(own), device=own.device)]


def _reading(truth: Truth, reads: Tensor) -> UnpagedAttention:
    return replace(truth.rows, keys=truth.rows.keys[:, reads], values=truth.rows.values[:, reads])


def _words(found: list[tuple[int, int, int]]) -> str:
    """Return the head map in words, from triples (query head, KV head it reads, KV head it should read)."""
    heads, read = [each[0] for each in found], [each[1] for each in found]
    if len(found) > 1 and len(set(read)) == 1:
        return f"query heads {', '.join(map(str, heads))} read KV head {read[0]} instead of their own"
    named = [f"query head {head} reads KV head {new} instead of {old}" for head, new, old in found[:_NAMED]]
    more = f" (and {len(found) - _NAMED} more heads read others)" if len(found) > _NAMED else ""
    return ", ".join(named) + more
