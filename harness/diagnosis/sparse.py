"""Faults of layers whose keys an indexer chooses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.chosen_keys import NONE, stale_row
from attncheck.harness.problem.problem import Problem, rows_in_pool
from attncheck.harness.truth.faults import Answer, Hypothesis, altered, attend_named, keys_seen
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams

Change = Callable[[Tensor], Tensor]
"""From ``topk_indices [T, K]`` to what a faulty kernel uses instead."""


def sparse_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults that chosen keys can have, besides those that a case must notice."""
    params, rows = truth.params, truth.rows
    if rows.topk_indices is None:
        return
    changes = {**_of_entries(rows.topk_indices), **_of_other_rows(problem, rows)}
    for meaning, change in changes.items():
        yield from _changed(meaning, params, rows, change)
    yield from _beside_the_mask(params, rows, problem.cache.block_size)
    if problem.has_pool and problem.up_projections is None:
        yield Hypothesis("indices are read as slots", partial(_at_slots, problem, truth), ("sparse",))


def _changed(meaning: str, params: AttentionParams, rows: UnpagedAttention, change: Change) -> Iterator[Hypothesis]:
    """Yield the fault of other indices, and without a causal mask, too, if a row then sees more keys.

    Kernels often rely on the indices alone. A change of no index is no fault.
    """
    own = rows.topk_indices
    assert own is not None
    changed = change(own)
    if torch.equal(changed, own):
        return
    other = replace(rows, topk_indices=changed)
    yield altered(meaning, other, params, "sparse")
    without_mask = replace(params, causal=False)
    if not torch.equal(keys_seen(other, without_mask), keys_seen(other, params)):
        yield altered(f"{meaning}, without a causal mask", other, without_mask, "sparse")


def _of_entries(indices: Tensor) -> dict[str, Change]:
    """Return the faults of reading the entries of a row."""
    width = indices.shape[1]
    column = torch.arange(width, device=indices.device)
    changes: dict[str, Change] = {
        "indices behind the first -1 are not read": lambda own: own.masked_fill(
            (own < 0).long().cumsum(dim=1) > 0, NONE
        ),
        "the first indices are read, as many as the row names keys": lambda own: own.masked_fill(
            column >= (own >= 0).sum(dim=1, keepdim=True), NONE
        ),
        "indices count from 1": lambda own: torch.where(own < 0, own, own - 1),
        "the key behind each index is read": lambda own: torch.where(own < 0, own, own + 1),
        "the first index is not read": lambda own: own.masked_fill(column < 1, NONE),
    }
    for count in sorted({width // 2, width // 4, width * 3 // 4, width - 1, width // 16 * 16, width // 64 * 64}):
        if 0 < count < width:
            changes[f"only the first {count} indices are read"] = partial(_first_entries, column, count)
    return changes


def _first_entries(column: Tensor, count: int, own: Tensor) -> Tensor:
    return own.masked_fill(column >= count, NONE)


def _of_other_rows(problem: Problem, rows: UnpagedAttention) -> dict[str, Change]:
    """Return the faults of reading the indices of other rows. Padding or a stale row follows the last one."""
    assert rows.topk_indices is not None
    behind = stale_row(problem.requests, rows.topk_indices.shape[1]).to(rows.topk_indices)[None]
    if problem.case.batch.padding.query_rows:
        behind = torch.full_like(behind, NONE)
    first_row = rows.cu_seqlens_q[:-1].repeat_interleave(rows.num_rows)
    last_row = rows.cu_seqlens_q[1:].repeat_interleave(rows.num_rows) - 1
    node = rows.places.node
    return {
        "indices of another row: the row before": lambda own: own.roll(1, dims=0),
        "indices of another row: the row behind": lambda own: torch.cat([own[1:], behind]),
        "indices of another row: row 0 of the step": lambda own: own[:1].expand_as(own),
        "indices of another row: the first row of the request": lambda own: own[first_row],
        "indices of another row: the last row of the request": lambda own: own[last_row],
        "indices of another row: counted from the first row of the request": lambda own: own[node],
    }


def _beside_the_mask(params: AttentionParams, rows: UnpagedAttention, block_size: int) -> Iterator[Hypothesis]:
    """Yield the faults of seeing more keys than a row names."""
    own = rows.topk_indices
    assert own is not None
    position = (rows.places.context_len + rows.places.node)[:, None]
    ends = {"the own key of a row is always visible": position, "key 0 is always visible": torch.zeros_like(position)}
    for meaning, key in ends.items():
        more = torch.cat([own, key.to(own)], dim=1)
        yield altered(meaning, replace(rows, topk_indices=more), params, "sparse")
    in_page = torch.arange(block_size, device=own.device)
    pages = torch.where(own < 0, NONE, own // block_size * block_size)[..., None]
    whole = torch.where(pages < 0, NONE, pages + in_page).flatten(1)
    meaning = "all keys of the pages of the chosen keys are visible"
    yield altered(meaning, replace(rows, topk_indices=whole), params, "sparse")


def _at_slots(problem: Problem, truth: Truth) -> Answer:
    """Return output and LSE of rows that read the slots whose numbers are the indices."""
    rows, own = truth.rows, truth.rows.topk_indices
    assert own is not None
    slots, place = own.clamp(min=0).long().cpu().unique(return_inverse=True)
    found = rows_in_pool(problem)(slots)
    if found is None:
        return truth.out, truth.lse
    keys, values = (each.to(rows.keys.device).double() for each in found)
    return attend_named(rows, truth.params, torch.where(own < 0, NONE, place.to(own.device)), keys, values)
