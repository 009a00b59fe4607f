"""The tensors and metadata that a model runner passes to a backend for one problem.

They follow vLLM's conventions: padding requests have query length 0, ``seq_lens`` 0 and null pages; padding tokens have
slot -1 and rows of NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.harness.driver.operand_strides import operand_views
from attncheck.harness.problem.problem import Problem
from attncheck.reference import CommonAttentionMetadata
from attncheck.reference.spec import FastPrefillOptions, StrideForm, StridesSpec

_LOOSE = 7
"""By how much a loose maximum exceeds the batch's true one, if the step has room for it."""


@dataclass(frozen=True)
class Step:
    """One step's tensors on a device, including padding tokens and padding requests."""

    problem: Problem
    order: tuple[int, ...]
    """The problem's requests in the order of this step."""
    row_order: Tensor
    """int64 ``[real rows]``: the problem's row at each row of this step."""
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    slot_mapping: Tensor
    slot_keys: Tensor
    """int64, on the host: the problem's key written to each slot, or -1 for none (padding too)."""
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    pad_seq_len: int
    loose: tuple[str, ...]
    """The maxima of the metadata that are above the batch's true ones."""
    output_form: StrideForm
    """Memory layout of the output."""

    @property
    def num_key_rows(self) -> int:
        """Rows of key and value, without padding."""
        return 0 if self.key is None else len(self.problem.new_keys)

    @property
    def is_in_problem_order(self) -> bool:
        """Whether the requests of this step are in the order of the problem."""
        return _is_as_given(self.order)

    @property
    def num_rows(self) -> int:
        """Rows that belong to requests and whose outputs are judged."""
        return len(self.row_order)

    def common_metadata(self, part: int | None = None) -> CommonAttentionMetadata:
        """Return fresh metadata of this step; the tensors are copies, so that a backend's changes to them show.

        ``part``: index of a part of the keys, for the call that attends to this part only and writes its new keys.
        """
        seq_lens, table, slots = self.seq_lens.clone(), self.block_table.clone(), self.slot_mapping.clone()
        is_aligned = True
        if part is not None:
            seq_lens, table, slots = self._of_part(part)
            is_aligned = self.problem.parts[part].is_aligned
        query_start_loc = self.query_start_loc.clone()
        host_starts, host_lens = self.query_start_loc.cpu().clone(), seq_lens.cpu().clone()
        query_lens = host_starts[1:] - host_starts[:-1]
        cross = self.problem.is_cross
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=host_starts,
            seq_lens=seq_lens,
            seq_lens_cpu=host_lens,
            num_computed_tokens_cpu=host_lens - query_lens,
            num_reqs=len(seq_lens),
            num_actual_tokens=int(host_starts[-1]) + self.problem.case.batch.padding.tokens,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(host_lens.max()),
            block_table_tensor=_slice_of_wider(table, self.problem.case.batch.block_table.row_gap),
            slot_mapping=slots,
            causal=self.problem.layer.is_causal and is_aligned,
            encoder_seq_lens=np.array(host_lens.tolist(), dtype=np.int32) if cross else None,
        )
        if isinstance(self.problem.case.batch.path.options, FastPrefillOptions):
            metadata.logits_indices_padded = self._logits_indices()
            metadata.num_logits_indices = self.num_rows
        return self.loosened(metadata)

    def loosened(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """Return metadata whose exact maxima are raised for the names in ``loose``.

        They stay valid bounds: ``max_query_len`` is at most the step's tokens, ``max_seq_len`` at most what the table
        holds.
        """
        tokens, room = common.num_actual_tokens, common.num_actual_tokens
        if self.problem.has_pool:
            room = common.block_table_tensor.shape[1] * self.problem.cache.block_size
        limits = {"max_query_len": tokens, "max_seq_len": room}
        looser: dict[str, Any] = {}
        for name in self.loose:
            exact = int(getattr(common, name))
            looser[name] = max(exact, min(exact + _LOOSE, limits[name]))
        return replace(common, **looser)

    def _of_part(self, part: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``seq_lens``, block table and slots of one part of the keys; keys of other parts have slot -1."""
        own, part_of_key = self.problem.parts[part], self.problem.layout.part_of_key
        if part_of_key is None:
            raise ValueError("the problem is not split into parts")
        padding = len(self.seq_lens) - len(self.order)
        lens = torch.tensor([*(own.lengths[i] for i in self.order), *[self.pad_seq_len] * padding]).int()
        table = torch.zeros(len(lens), own.table.shape[1], dtype=torch.int32)
        table[: len(self.order)] = own.table[list(self.order)]
        mine = (self.slot_keys >= 0) & (part_of_key[self.slot_keys.clamp(min=0)] == part)
        slots = torch.where(mine.to(self.slot_mapping.device), self.slot_mapping, -1)
        device = self.query.device
        return lens.to(device), table.to(device), slots

    def _logits_indices(self) -> Tensor:
        """Return int64 token indices whose rows are judged, the last ones of each request, padded with token 0."""
        requests = [self.problem.requests[i] for i in self.order]
        ends = self.query_start_loc[1 : 1 + len(requests)].tolist()
        tokens = [torch.arange(end - r.rows, end) for r, end in zip(requests, ends, strict=True)]
        padding = torch.zeros(len(self.query) - self.num_rows, dtype=torch.int64)
        return torch.cat([*tokens, padding]).to(self.query.device)


def request_order(problem: Problem, threshold: int | None) -> list[int]:
    """Return request indices with at most ``threshold`` new tokens first, as a runner sorts a batch.

    None keeps the order of the problem.
    """
    requests = range(len(problem.requests))
    if threshold is None:
        return list(requests)
    return sorted(requests, key=lambda i: problem.requests[i].query_len > threshold)


def strides_of(problem: Problem) -> StridesSpec:
    """Return the memory layout of a problem's operands.

    It is the case's own; if the case has none, fused for inputs of kind ``views``, else contiguous.
    """
    if problem.case.strides is not None:
        return problem.case.strides
    rows: StrideForm = "fused" if "views" in problem.inputs else "contiguous"
    return StridesSpec(query=rows, key=rows, value=rows)


def make_step(
    problem: Problem,
    device: torch.device,
    order: Sequence[int] | None = None,
    *,
    padding_fill: float = float("nan"),
    pad_seq_len: int = 0,
    loose: tuple[str, ...] = (),
    strides: StridesSpec | None = None,
    new_rows: tuple[Tensor, Tensor] | None = None,
) -> Step:
    """Return the step of ``problem`` on ``device``, its requests in ``order`` (default: the order of the case).

    Every call makes new tensors with equal contents. ``padding_fill``: value of the padding rows of query, key and
    value. ``pad_seq_len``: ``seq_lens`` of padding requests. ``loose``: the maxima of the metadata that are loose upper
    bounds, as in a step padded for a captured graph. ``new_rows``: keys and values of the same shapes as the problem's,
    from which the step takes its new rows instead. ``strides``: memory layout of the operands; None for the case's own.
    """
    order = tuple(range(len(problem.requests)) if order is None else order)
    requests = [problem.requests[i] for i in order]
    padding = problem.case.batch.padding
    if _is_as_given(order):
        rows = torch.arange(len(problem.query))
    else:
        rows = torch.cat([torch.arange(r.first_row, r.first_row + r.rows) for r in requests])
    new_keys, slot_keys = _writes(problem, order)
    # In cross attention the key rows come from the encoder: the decoder's padding tokens add none.
    slot_padding, key_padding = (0, 0) if problem.is_cross else (padding.tokens, padding.query_rows)
    query = _padded(_rows_at(problem.query, rows), padding.query_rows, padding_fill).to(device)
    key, value = (
        _padded(_rows_at(all_rows, new_keys), key_padding + padding.key_rows, padding_fill).to(device)
        for all_rows in new_rows or (problem.keys, problem.values)
    )
    strides = strides or strides_of(problem)
    query, key, value = operand_views((query, key, value), strides)
    no_keys = problem.writes_nothing or (problem.is_cross and not len(new_keys))
    lens = torch.tensor([*(r.num_keys for r in requests), *[pad_seq_len] * padding.requests])
    table = _padded(problem.block_table.index_select(0, torch.tensor(order, dtype=torch.int64)), padding.requests, 0)
    starts = torch.tensor([0, *(r.query_len for r in requests), *[0] * padding.requests]).cumsum(0)
    return Step(
        problem=problem,
        order=order,
        row_order=rows,
        query=query,
        key=None if no_keys else key,
        value=None if no_keys else value,
        slot_mapping=_padded(_slots_of(problem, slot_keys), slot_padding, -1).to(device),
        slot_keys=_padded(slot_keys, slot_padding, -1),
        query_start_loc=starts.int().to(device),
        seq_lens=lens.int().to(device),
        block_table=table.to(device),
        pad_seq_len=pad_seq_len,
        loose=loose,
        output_form=strides.output,
    )


def _is_as_given(order: Sequence[int]) -> bool:
    return tuple(order) == tuple(range(len(order)))


def _writes(problem: Problem, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return indices into the problem's keys: of the step's key rows, and of its slots (-1: not written).

    A layer that shares another layer's cache has no key rows, but the metadata still hold the slots of its tokens.
    """
    requests = [problem.requests[i] for i in order]
    if problem.writes_nothing:
        tokens = [torch.arange(r.num_keys - r.query_len, r.num_keys) for r in requests]
        index = torch.cat([torch.where(t < 0, -1, t + r.base) for t, r in zip(tokens, requests, strict=True)])
        return index[:0], index
    if _is_as_given(order):
        return problem.new_keys, problem.new_keys
    counts = [r.num_keys - r.cached + (0 if problem.is_cross else max(0, -r.first_position)) for r in problem.requests]
    pieces = problem.new_keys.split(counts)
    index = torch.cat([pieces[i] for i in order])
    return index, index


def _slots_of(problem: Problem, index: Tensor) -> Tensor:
    if not len(problem.keys):
        return torch.full((len(index),), -1)
    return torch.where(index >= 0, problem.key_slots[index], -1)


def _rows_at(rows: Tensor, index: Tensor) -> Tensor:
    """Return ``rows[index]``, or zeros if there are no rows.

    A token before position 0 has a key that is not written anywhere.
    """
    if not len(rows):
        return rows.new_zeros(len(index), *rows.shape[1:])
    return rows.index_select(0, (index % len(rows)).to(rows.device))


def _padded(rows: Tensor, count: int, fill: float) -> Tensor:
    return torch.cat([rows, rows.new_full((count, *rows.shape[1:]), fill)]) if count else rows


def _slice_of_wider(table: Tensor, gap: int) -> Tensor:
    """Return the table itself, or if ``gap`` > 0 a slice of a table that has ``gap`` more columns and one more row.

    The additional entries name page 0.
    """
    if not gap:
        return table
    wider = table.new_zeros(len(table) + 1, table.shape[1] + gap)
    part = wider[: len(table), : table.shape[1]]
    part.copy_(table)
    return part
