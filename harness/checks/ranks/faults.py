"""The outputs of ranks that merge in a wrong way, and the fault that a wrong output shows."""

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.checks.interface import is_answer
from attncheck.harness.problem.problem import Problem, ranks_of
from attncheck.harness.truth.truth import Truth, rows_of
from attncheck.reference import layer_params, merge_attn_states


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
        *states, own = _states(problem, device, spreads_new=spreads_new)
        outs, lses = (torch.stack(each) for each in zip(*states, strict=True))
        for meaning, merge in _MERGES.items():
            weights, total = merge(lses)
            out = (outs * weights[..., None]).sum(0)
            yield meaning, out if spreads_new else merge_attn_states(out, total, *own)[0]


def _states(problem: Problem, device: torch.device, *, spreads_new: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield output and LSE over the keys of each rank, then over those on no rank: new ones, unless they are spread."""
    options = ranks_of(problem.case)
    rows, params = rows_of(problem, device), layer_params(problem.layer)
    spread = [r.num_keys if spreads_new else max(0, r.first_position) for r in problem.requests]

    def is_elsewhere(rank: int, request: int, _row: Tensor, positions: Tensor) -> Tensor:
        holder = positions // options.interleave % options.size
        return torch.where(positions < spread[request], holder, options.size) != rank

    for rank in range(options.size + 1):
        yield rows.attend(params, None, partial(is_elsewhere, rank))


def _added(lses: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(lses), lses.logsumexp(0)


def _in_base_2(lses: Tensor) -> tuple[Tensor, Tensor]:
    total = (lses * math.log(2)).logsumexp(0) / math.log(2)
    return (lses - total).exp2().nan_to_num(), total


def _apart(lses: Tensor) -> tuple[Tensor, Tensor]:
    ranks = torch.arange(len(lses), device=lses.device)
    is_own = ranks[:, None] == ranks.repeat_interleave(lses.shape[2] // len(lses))
    return is_own[:, None].double(), torch.where(is_own[:, None], lses, 0.0).sum(0)


_MERGES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "the outputs of the ranks are added without the weights of their LSEs": _added,
    "natural LSEs of the ranks are merged with powers of 2": _in_base_2,
    "each rank returns the attention to its own keys; their results are not merged": _apart,
}
"""By fault: the weights of the ranks and the merged LSE, from the LSEs ``[ranks, T, H]``."""
