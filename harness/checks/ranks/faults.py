"""The outputs of ranks that merge in a wrong way, and the fault that a wrong output shows."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.checks.interface import is_answer
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.truth import Truth, rows_of
from attncheck.reference import layer_params, merge_attn_states, merge_many
from attncheck.reference.spec import DCPOptions

State = tuple[Tensor, Tensor]
"""Output ``[T, H, Dv]`` and LSE ``[T, H]``, float64."""


def likely_fault(problem: Problem, truth: Truth, output: Tensor) -> str | None:
    """Return the fault of the merge that gives ``output`` in every row and head, or None if none of them does."""
    output = output[: len(truth.out)].to(truth.out.device).double()
    for meaning, answer in _faulty_answers(problem, truth.out.device):
        if is_answer(output, answer, truth.budget, problem.dtype):
            return meaning
    return None


def _faulty_answers(problem: Problem, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield each fault of a merge with its output; the new keys are spread over the ranks or not."""
    for spreads_new in (False, True):
        states = list(_states(problem, device, spreads_new=spreads_new))
        own = states.pop()
        outs, lses = (torch.stack(each) for each in zip(*states, strict=True))
        for meaning, merge in _MERGES.items():
            merged = merge(outs, lses)
            yield meaning, merged[0] if spreads_new else merge_attn_states(*merged, *own)[0]


def _states(problem: Problem, device: torch.device, *, spreads_new: bool) -> Iterator[State]:
    """Yield the state over the keys of each rank, then over those on no rank: the new ones, unless they are spread."""
    options = problem.case.batch.path.options
    if not isinstance(options, DCPOptions):
        raise TypeError(f"{problem.case.key} has no ranks")
    rows, params = rows_of(problem, device), layer_params(problem.layer)
    spread = [r.num_keys if spreads_new else max(0, r.first_position) for r in problem.requests]

    def is_elsewhere(rank: int, request: int, _row: Tensor, positions: Tensor) -> Tensor:
        holder = positions // options.interleave % options.size
        return torch.where(positions < spread[request], holder, options.size) != rank

    for rank in range(options.size + 1):
        hidden = partial(is_elsewhere, rank)
        yield rows.attend(params, None, hidden)


def _added(outs: Tensor, lses: Tensor) -> State:
    return outs.sum(0), lses.logsumexp(0)


def _averaged(outs: Tensor, lses: Tensor) -> State:
    return outs.mean(0), lses.logsumexp(0)


def _in_base_2(outs: Tensor, lses: Tensor) -> State:
    total = (lses * math.log(2)).logsumexp(0) / math.log(2)
    weights = (lses - total).exp2().nan_to_num()
    return (outs * weights[..., None]).sum(0), total


def _apart(outs: Tensor, lses: Tensor) -> State:
    """Return the state of each head on its own rank."""
    pieces = zip(outs.chunk(len(outs), 2), lses.chunk(len(lses), 2), strict=True)
    out, lse = zip(*((out[rank], lse[rank]) for rank, (out, lse) in enumerate(pieces)), strict=True)
    return torch.cat(out, 1), torch.cat(lse, 1)


def _of_first(outs: Tensor, lses: Tensor) -> State:
    """Return the state of the first rank's heads for the heads of each rank."""
    out, lse = merge_many(list(outs), list(lses))
    ranks = len(outs)
    return out.chunk(ranks, 1)[0].repeat(1, ranks, 1), lse.chunk(ranks, 1)[0].repeat(1, ranks)


_MERGES: dict[str, Callable[[Tensor, Tensor], State]] = {
    "the outputs of the ranks are added without the weights of their LSEs": _added,
    "the outputs of the ranks are averaged without the weights of their LSEs": _averaged,
    "natural LSEs of the ranks are merged with powers of 2": _in_base_2,
    "each rank returns the attention to its own keys; their results are not merged": _apart,
    "every rank returns the heads of the first rank": _of_first,
}
