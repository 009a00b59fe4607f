"""Faults specific to an execution path: parts lost or counted twice, rows placed as if nothing had been cut.

Like :mod:`attncheck.harness.truth.hypotheses`, these explain wrong outputs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.hypotheses import Hypothesis
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, merge_many, visible
from attncheck.reference.spec import FastPrefillOptions, MicroBatchOptions

Places = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""``(request, row positions, key positions)`` -> the positions that a faulty mask uses instead."""


def path_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield the faults that the problem's path can have. ``params`` and ``rows`` are those of the truth."""
    if problem.layout.part_of_key is not None and len(problem.parts) > 1:
        yield from _part_explanations(problem.layout.part_of_key, params, rows)
    if params.alibi_slopes is not None:
        return  # the faults below move only the mask; a kernel with such a fault would move the ALiBi bias, too
    context = [request.num_keys - request.query_len for request in problem.requests]
    if params.attn_chunk_size is not None:
        meaning = "chunks are counted from the first new row, not from position 0"
        yield _placed(meaning, rows, params, lambda r, q, k: (q - context[r], k - context[r]))
    match problem.case.batch.path.options:
        case MicroBatchOptions(cuts=cuts):
            yield _pieces_before(problem, cuts, params, rows)
        case FastPrefillOptions():
            left_out = [request.query_len - request.rows for request in problem.requests]
            meaning = "the rows are treated as the first new ones of their requests, not as the last"
            yield _placed(meaning, rows, params, lambda r, q, k: (q - left_out[r], k))
        case _:
            pass


def _part_explanations(part_of_key: Tensor, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    by_request = part_of_key.to(rows.keys.device).split(rows.num_keys.tolist())
    number = int(part_of_key.max()) + 1
    bare = replace(params, sinks=None)

    def state(part: int, how: AttentionParams) -> tuple[Tensor, Tensor]:
        return rows.attend(how, hidden=lambda r, _q, k: by_request[r][k] != part)

    def states() -> list[tuple[Tensor, Tensor]]:
        return [state(part, bare if part else params) for part in range(number)]

    def without(part: int) -> tuple[Tensor, Tensor]:
        return rows.attend(params if part else bare, hidden=lambda r, _q, k: by_request[r][k] == part)

    def twice(part: int) -> tuple[Tensor, Tensor]:
        return _merged([*states(), state(part, bare)])

    for part in range(number):
        yield Hypothesis(f"part {part} of the keys is missing", partial(without, part))
        yield Hypothesis(f"only part {part} of the keys is seen", partial(state, part, params))
        yield Hypothesis(f"part {part} of the keys is counted twice", partial(twice, part))
    if params.sinks is not None:
        meaning = "every part carries the sinks"
        yield Hypothesis(meaning, lambda: _merged([state(part, params) for part in range(number)]))
    yield Hypothesis(
        "the parts are merged by an LSE to base 2 (declare lse_base, or multiply by ln 2)",
        lambda: _merged(states(), lambda lse: lse / math.log(2)),
    )
    yield Hypothesis(
        "a part in which a row sees nothing is merged with an LSE of 0, not of -inf",
        lambda: _merged(states(), lambda lse: lse.masked_fill(torch.isneginf(lse), 0.0)),
    )
    yield Hypothesis(
        "the outputs of the parts are averaged, whatever their LSE", lambda: _merged(states(), torch.zeros_like)
    )


def _merged(
    states: Sequence[tuple[Tensor, Tensor]], wrong: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    return merge_many([out for out, _ in states], [lse if wrong is None else wrong(lse) for _, lse in states])


def _pieces_before(
    problem: Problem, cuts: tuple[int, ...], params: AttentionParams, rows: UnpagedAttention
) -> Hypothesis:
    """Return the fault of missing the keys of earlier micro-batches of the same request."""
    total, device = len(problem.query), rows.query.device
    edges = torch.tensor([0, *cuts, total], device=device)
    start = edges[torch.bucketize(torch.arange(total, device=device), edges[1:], right=True)]

    def before(r: int, q: Tensor, k: Tensor) -> Tensor:
        request = problem.requests[r]
        start_of_piece = start[q - request.first_position + request.first_row] - request.first_row
        return (k >= request.first_position) & (k < request.first_position + start_of_piece)

    return Hypothesis("the keys of the pieces before are missing", lambda: rows.attend(params, hidden=before))


def _placed(meaning: str, rows: UnpagedAttention, params: AttentionParams, places: Places) -> Hypothesis:
    """Return the fault of using the mask of other positions, over the same keys."""
    every = replace(params, causal=False, window=(-1, -1), attn_chunk_size=None)
    return Hypothesis(meaning, lambda: rows.attend(every, hidden=lambda r, q, k: ~visible(params, *places(r, q, k))))
