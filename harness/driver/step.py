"""The inputs of a step: common metadata, operands of ``forward``, and buffers that persist between steps."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.backends.declarations import is_chunked, is_merged
from attncheck.harness.driver.chunks import chunks_of_rank
from attncheck.harness.problem.chosen_keys import stale_row
from attncheck.harness.problem.pages import key_places
from attncheck.harness.problem.problem import Problem
from attncheck.reference import (
    CommonAttentionMetadata,
    SparseMetadata,
    UBatchSlice,
    make_local_attention_virtual_batches,
    split_attn_metadata,
)
from attncheck.reference.step_spec import (
    FastPrefillOptions,
    MicroBatchOptions,
    PCPOptions,
    SpecDecodeOptions,
    StrideForm,
    StridesSpec,
    TreeOptions,
)

# Lay out query, key, value and output in memory: the same values with other strides and gaps.
#
# A model's layer passes slices of one fused tensor, so a kernel that assumes a stride reads the wrong rows.

_ROOM = 16
"""Elements of each gap. Kernels that load several elements at once stay aligned."""

_ODD = 7
"""Stride of a dimension of size 1, which no correct kernel uses."""


def operand_views(rows: Sequence[Tensor], strides: StridesSpec) -> tuple[Tensor, ...]:
    """Return query, key and value (``[T, H, D]`` each) with the same values, in the memory layout of ``strides``.

    Fused operands with equal row counts and dtypes are slices of one tensor. Gaps hold NaN, except those of fused
    operands, which hold the other operands or zeros.
    """
    forms: list[StrideForm] = [strides.query, strides.key, strides.value]
    views = [x if form == "fused" else _copied(x, form) for x, form in zip(rows, forms, strict=True)]
    fused = [i for i, form in enumerate(forms) if form == "fused"]
    for kind in {(len(rows[i]), rows[i].dtype) for i in fused}:
        group = [i for i in fused if (len(rows[i]), rows[i].dtype) == kind]
        for i, view in zip(group, _fused([rows[i] for i in group]), strict=True):
            views[i] = view
    return tuple(views)


def empty_rows(
    shape: Sequence[int], form: StrideForm, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return an uninitialised tensor of ``shape`` (rows first) in the layout ``form``, and all its memory, flat."""
    count, *sizes = shape
    width = 1
    for size in sizes:
        width *= size
    offset, room = (0, 0) if form == "contiguous" else (_ROOM, _ROOM)
    if form in ("padded", "fused"):
        memory = torch.empty(count * (width + _ROOM), dtype=dtype, device=device)
        return memory.view(count, width + _ROOM)[:, :width].unflatten(1, sizes), memory
    memory = torch.empty(offset + count * width + room, dtype=dtype, device=device)
    rows = memory[offset : offset + count * width]
    if form == "transposed" and sizes:
        heads, *inner = sizes
        return rows.view(heads, count, *inner).transpose(0, 1), memory
    rows = rows.view(count, *sizes)
    if form == "odd":
        steps = [_ODD if size == 1 else step for size, step in zip(rows.shape, rows.stride(), strict=True)]
        rows = rows.as_strided(rows.shape, steps)
    return rows, memory


def _copied(rows: Tensor, form: StrideForm) -> Tensor:
    copy, memory = empty_rows(rows.shape, form, rows.dtype, rows.device)
    memory.fill_(torch.nan)
    return copy.copy_(rows)


def _fused(group: Sequence[Tensor]) -> list[Tensor]:
    """Return slices of one tensor, with a gap of zeros after the last, so that a single operand is strided, too."""
    widths = [rows.shape[1] * rows.shape[2] for rows in group]
    gap = group[0].new_empty(len(group[0]), _ROOM).zero_()  # there is no new_zeros of float8
    whole = torch.cat([*(rows.flatten(1) for rows in group), gap], dim=1)
    parts = whole.split([*widths, _ROOM], dim=1)
    return [part.unflatten(1, rows.shape[1:]) for part, rows in zip(parts, group, strict=False)]


# The tensors and metadata that a model runner passes to a backend for one problem.
#
# They follow vLLM's conventions: padding requests have query length 0, `seq_lens` 0 and null pages; padding tokens have
# slot -1 and rows of NaN.

_LOOSE = 7
"""By how much a loose maximum or length exceeds the batch's true one, if the step has room for it."""

HOST_TENSORS = ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu")
"""The metadata tensors that the contract puts on the host."""

ON_HOST = (*HOST_TENSORS, "rswa_prefix_lens")
"""All metadata tensors on the host: vLLM's runner keeps the last one there, too."""

HOST_LENS = "host_lens"
"""Name of ``seq_lens_cpu`` and ``num_computed_tokens_cpu`` among what is loose."""


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
    """On the host, as all metadata of a step: only its fresh copies are on the device."""
    slot_keys: Tensor
    """int64, on the host: the problem's key written to each slot, or -1 for none (padding too)."""
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    pad_seq_len: int
    loose: tuple[str, ...]
    """What is above the batch's own: names of maxima of the metadata, and ``host_lens``."""
    output_form: StrideForm
    """Memory layout of the output."""
    topk_indices: Tensor | None = None
    """int32 ``[T + ROWS_BEHIND, K]``, on the host: the keys that an indexer chose; None without an indexer."""

    @property
    def num_key_rows(self) -> int:
        """Rows of key and value, without padding."""
        return 0 if self.key is None else len(self.problem.new_keys)

    @property
    def is_in_problem_order(self) -> bool:
        """Whether the requests of this step are in the order of the problem."""
        return self.order == tuple(range(len(self.order)))

    @property
    def num_rows(self) -> int:
        """Rows that belong to requests and whose outputs are judged."""
        return len(self.row_order)

    def common_metadata(self, part: int | None = None) -> CommonAttentionMetadata:
        """Return fresh metadata of this step; the tensors are copies, so that a backend's changes to them show.

        ``part``: index of a part of the keys, for the call that attends to this part only and writes its new keys.
        """
        seq_lens, table, slots = self.seq_lens, self.block_table, self.slot_mapping
        is_aligned = True
        if part is not None:
            seq_lens, table, slots = self._of_part(part)
            is_aligned = self.problem.parts[part].is_aligned
        query_start_loc, seq_lens_there, table, slots = (
            tensor.to(self.query.device, non_blocking=True, copy=True)
            for tensor in (self.query_start_loc, seq_lens, table, slots)
        )
        host_starts = self.query_start_loc.clone()
        host_lens = seq_lens.clone()
        query_lens = host_starts[1:] - host_starts[:-1]
        cross = self.problem.is_cross
        metadata = CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=host_starts,
            seq_lens=seq_lens_there,
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
            mm_req_doc_ranges=self._doc_ranges(),
            rswa_prefix_lens=self._prefix_lens(),
        )
        if (held := self.problem.dcp_local_seq_lens) is not None:
            local = torch.tensor([held[i] for i in self.order], dtype=torch.int32)
            local = _padded(local, len(seq_lens) - len(local), 0)
            metadata.dcp_local_seq_lens = local.to(self.query.device, non_blocking=True, copy=True)
        if self.topk_indices is not None:
            indices = self.topk_indices.to(self.query.device, non_blocking=True, copy=True)
            metadata = with_topk_indices(metadata, indices)
        if isinstance(self.problem.case.batch.path.options, FastPrefillOptions):
            metadata.logits_indices_padded = self._logits_indices()
            metadata.num_logits_indices = self.num_rows
        return metadata

    def loosened(self, common: CommonAttentionMetadata, *, is_divided: bool = False) -> CommonAttentionMetadata:
        """Return exact metadata of this step with upper bounds for the names in ``loose``.

        They stay valid bounds: ``max_query_len`` is at most the step's tokens, and all lengths are at most what the
        table holds. ``is_divided``: the requests are pieces of the step's requests, whose lengths on the host are
        exact, because a model runner divides exact lengths.
        """
        tokens, room = common.num_actual_tokens, common.num_actual_tokens
        if self.problem.has_pool:
            room = common.block_table_tensor.shape[1] * self.problem.cache.block_size
        limits = {"max_query_len": tokens, "max_seq_len": room}
        looser: dict[str, Any] = {}
        if HOST_LENS in self.loose and not is_divided:
            more = bounded_requests(self.problem, common) * (room - common.seq_lens_cpu).clamp(0, _LOOSE)
            looser["seq_lens_cpu"] = common.seq_lens_cpu + more
            looser["num_computed_tokens_cpu"] = common.num_computed_tokens_cpu + more
            looser["max_seq_len"] = max(common.max_seq_len, int(looser["seq_lens_cpu"].max()))
        for name in self.loose:
            if name in limits:
                exact = int(getattr(common, name))
                looser[name] = max(looser.get(name, exact), min(exact + _LOOSE, limits[name]))
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
        return lens, table, torch.where(mine, self.slot_mapping, -1)

    def _doc_ranges(self) -> dict[int, list[tuple[int, int]]] | None:
        """Return the image spans of each request, as vLLM's runner passes them; None if no request has one."""
        ranges = [self.problem.requests[i].prefix.mm_req_doc_ranges for i in self.order]
        return {number: list(own) for number, own in enumerate(ranges)} if any(ranges) else None

    def _prefix_lens(self) -> Tensor | None:
        """Return int32 ``[R]``, on the host as in vLLM's runner: the first keys of each request; None without them."""
        if self.problem.layer.rswa_window is None:
            return None
        padding = [0] * (len(self.seq_lens) - len(self.order))
        lens = [self.problem.requests[i].prefix.rswa_prefix_len for i in self.order]
        return torch.tensor([*lens, *padding], dtype=torch.int32)

    def _logits_indices(self) -> Tensor:
        """Return int64 token indices whose rows are judged, the last ones of each request, padded with token 0."""
        requests = [self.problem.requests[i] for i in self.order]
        ends = self.query_start_loc[1 : 1 + len(requests)].tolist()
        tokens = [torch.arange(end - r.rows, end) for r, end in zip(requests, ends, strict=True)]
        padding = torch.zeros(len(self.query) - self.num_rows, dtype=torch.int64)
        return torch.cat([*tokens, padding]).to(self.query.device, non_blocking=True)


ROWS_BEHIND = 3
"""Rows of ``topk_indices`` behind those of a step, as a buffer of many tokens has them."""


def with_topk_indices(common: CommonAttentionMetadata, topk_indices: Tensor) -> SparseMetadata:
    """Return the metadata with the keys that an indexer chose."""
    own = {field.name: getattr(common, field.name) for field in fields(common)}
    return SparseMetadata(**(own | {"topk_indices": topk_indices}))


def _topk_indices(problem: Problem, rows: Tensor, num_padding: int, conventions: Conventions) -> Tensor | None:
    """Return the indices of a step whose rows are ``rows`` of the problem, then padding, which names no key.

    Stale rows follow. All indices have the form that the conventions state.
    """
    indices = problem.topk_indices
    if indices is None:
        return None
    stale = stale_row(problem.requests, indices.shape[1])
    if conventions.topk_indices_form == "slots":
        of_rows = [torch.full((r.rows,), r.base) for r in problem.requests]
        place = indices + torch.cat(of_rows)[:, None]
        indices = torch.where(indices < 0, -1, problem.key_slots[place.clamp(min=0)].int())
        stale = problem.key_slots[stale.long()].int()
    return torch.cat([_padded(indices[rows], num_padding, -1), stale.expand(ROWS_BEHIND, -1)])


def bounded_requests(problem: Problem, common: CommonAttentionMetadata) -> Tensor:
    """Return bool ``[R]``, host: the requests whose lengths on the host may be upper bounds.

    As in vLLM, these are decodes, also those that verify drafts: only the device has the number of drafts that the
    step before accepted. Lengths of prompts, of their chunks, and of an encoder are exact.
    """
    if problem.is_cross:
        return torch.zeros(common.num_reqs, dtype=torch.bool)
    options = problem.case.batch.path.options
    drafts = 0
    if isinstance(options, SpecDecodeOptions):
        drafts = options.num_speculative_tokens
    elif isinstance(options, TreeOptions):
        drafts = len(options.parents) - 1
    query_lens = common.query_start_loc_cpu.diff()
    return (query_lens > 0) & (query_lens <= 1 + drafts) & (common.num_computed_tokens_cpu > 0)


def refill_host(common: CommonAttentionMetadata, names: Sequence[str]) -> None:
    """Overwrite the host tensors ``names`` with those of another valid step, as a model runner does after ``build``.

    That step has one request fewer, each with one token and at most 2 keys. So no number exceeds those of the tensors
    on the device. A single request is kept; if it has one token and 2 keys, it gets 1 key.
    """
    with_tokens = int((common.query_start_loc_cpu.diff() > 0).sum())
    real = max(1, with_tokens - 1)
    is_real = torch.arange(common.num_reqs) < real
    is_same = with_tokens == 1 and int(common.query_start_loc_cpu[1]) == 1 and int(common.seq_lens_cpu[0]) == 2
    seq_lens = common.seq_lens_cpu.clamp(max=1 if is_same else 2)
    contents = {
        "query_start_loc_cpu": torch.arange(common.num_reqs + 1).clamp(max=real),
        "seq_lens_cpu": torch.where(is_real, seq_lens, 0),
        "num_computed_tokens_cpu": torch.where(is_real, (seq_lens - 1).clamp(min=0), 0),
    }
    for name in names:
        getattr(common, name).copy_(contents[name])


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
    conventions: Conventions = Conventions(),  # noqa: B008 (frozen)
    new_rows: tuple[Tensor, Tensor] | None = None,
) -> Step:
    """Return the step of ``problem`` on ``device``, its requests in ``order`` (default: the order of the case).

    Every call makes new tensors with equal contents. ``padding_fill``: value of the padding rows of query, key and
    value. ``pad_seq_len``: ``seq_lens`` of padding requests. ``loose``: the maxima of the metadata that are loose upper
    bounds, as in a step padded for a captured graph, and ``host_lens`` for such lengths on the host. ``new_rows``: keys
    and values of the same shapes as the problem's, from which the step takes its new rows instead. ``strides``: memory
    layout of the operands; None for the case's own.
    """
    order = tuple(range(len(problem.requests)) if order is None else order)
    requests = [problem.requests[i] for i in order]
    padding = problem.case.batch.padding
    rows = torch.cat([torch.arange(r.first_row, r.first_row + r.rows) for r in requests])
    new_keys, slot_keys = _writes(problem, order)
    # In cross attention the key rows come from the encoder: the decoder's padding tokens add none.
    slot_padding, key_padding = (0, 0) if problem.is_cross else (padding.tokens, padding.query_rows)
    query = _padded(_rows_at(problem.query, rows), padding.query_rows, padding_fill)
    key, value = (
        _padded(_rows_at(all_rows, new_keys), key_padding + padding.key_rows, padding_fill)
        for all_rows in new_rows or (problem.keys, problem.values)
    )
    strides = strides or strides_of(problem)
    operands = [each.to(device, non_blocking=True) for each in (problem.passed_query(query), key, value)]
    query, key, value = operand_views(operands, strides)
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
        slot_mapping=_padded(_slots_of(problem, slot_keys), slot_padding, -1),
        slot_keys=_padded(slot_keys, slot_padding, -1),
        query_start_loc=starts.int(),
        seq_lens=lens.int(),
        block_table=table,
        pad_seq_len=pad_seq_len,
        loose=loose,
        output_form=strides.output,
        topk_indices=_topk_indices(problem, rows, padding.query_rows, conventions),
    )


def _writes(problem: Problem, order: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return indices into the problem's keys: of the step's key rows, and of its slots (-1: not written).

    A layer that shares another layer's cache has no key rows, but the metadata still hold the slots of its tokens.
    """
    requests = [problem.requests[i] for i in order]
    if problem.writes_nothing:
        tokens = [torch.arange(r.num_keys - r.query_len, r.num_keys) for r in requests]
        index = torch.cat([torch.where(t < 0, -1, t + r.base) for t, r in zip(tokens, requests, strict=True)])
        return index[:0], index
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


# Split one step into the calls of `forward` that its execution path needs, each with its own metadata.
#
# ======================  =====================================================================================
# path                    calls
# ======================  =====================================================================================
# most                    one
# `local`               one; over virtual requests, one for each chunk, unless the backend declares `local` or
#                         the chunk is not a whole number of pages
# `cascade`             one with `common_prefix_len` if the backend declares `cascade`, else two to merge
# `split_kv`, `dcp`   one for each part of the keys, merged by their LSE
# `micro_batch`         one for each micro-batch; their rows are placed one after another
# `pcp`                 one for each rank, whose rows are chunks of requests
# ======================  =====================================================================================


@dataclass(frozen=True)
class ForwardCall:
    """The inputs of one ``build`` and one ``forward``.

    rows: int64 ``[num_rows]``, on the host; the step's row at each real row of the query. Padding rows come after
    these. nth: int64 ``[num_rows]``, on the host; the row's index among the rows of its request in this call. position:
    int64 ``[num_rows]``, on the host; its position among the keys of the call. The first ``num_key_rows`` rows of key
    and value are real. builder: index of the session's builder that makes the metadata. output_form: memory layout of
    the output.
    """

    common: CommonAttentionMetadata
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    rows: Tensor
    nth: Tensor
    position: Tensor
    num_key_rows: int
    common_prefix_len: int = 0
    carries_sinks: bool = True
    builder: int = 0
    output_form: StrideForm = "contiguous"

    @property
    def num_rows(self) -> int:
        """Rows of the query, without padding."""
        return len(self.rows)


def num_builders(problem: Problem) -> int:
    """Return how many builders the problem needs: one for each micro-batch, all built before the first call is made."""
    options = problem.case.batch.path.options
    return 1 + len(options.cuts) if isinstance(options, MicroBatchOptions) else 1


def forward_calls_of(step: Step, features: frozenset[str], threshold: int | None = None) -> tuple[ForwardCall, ...]:
    """Return the calls of a step, in order, for a backend that declares ``features``; the metadata are fresh copies.

    ``threshold``: the builder's ``reorder_batch_threshold``, by which the requests of the step are ordered. A call
    whose requests are pieces of the step's requests is ordered by it, too.
    """
    case = step.problem.case
    if isinstance(case.batch.path.options, MicroBatchOptions):
        return micro_batches_of(step, case.batch.path.options.cuts, threshold)
    if isinstance(case.batch.path.options, PCPOptions):
        return prefill_ranks_of(step, case.batch.path.options.size, threshold)
    if is_merged(case.batch, features):
        parts = range(len(step.problem.parts))
        made = (step.loosened(step.common_metadata(part), is_divided=True) for part in parts)
        return tuple(_whole(step, common, carries_sinks=part == 0) for part, common in enumerate(made))
    if case.batch.path.name == "cascade":
        prefix = min(request.shared_prefix for request in case.batch.requests)
        return (_whole(step, step.loosened(step.common_metadata()), common_prefix_len=prefix),)
    if is_chunked(case.layer, case.cache, case.batch, features):
        chunk = case.layer.attn_chunk_size or 0
        virtual = make_local_attention_virtual_batches(chunk, step.common_metadata(), case.cache.block_size)
        nth, position = _places(virtual)
        call = replace(_whole(step, step.loosened(virtual, is_divided=True)), nth=nth, position=position)
        return (_ordered(call, threshold),)
    return (_whole(step, step.loosened(step.common_metadata())),)


def _whole(
    step: Step, common: CommonAttentionMetadata, *, common_prefix_len: int = 0, carries_sinks: bool = True
) -> ForwardCall:
    requests = [step.problem.requests[i] for i in step.order]
    request, nth = key_places([request.rows for request in requests])
    first = torch.tensor([request.first_position for request in requests])
    return ForwardCall(
        common=common,
        query=step.query,
        key=step.key,
        value=step.value,
        rows=torch.arange(step.num_rows),
        nth=nth,
        position=nth + first[request],
        num_key_rows=step.num_key_rows,
        common_prefix_len=common_prefix_len,
        carries_sinks=carries_sinks,
        output_form=step.output_form,
    )


def micro_batches_of(step: Step, cuts: tuple[int, ...], threshold: int | None = None) -> tuple[ForwardCall, ...]:
    """Return one call for the rows between each two cuts; the last one includes the padding.

    ``threshold``: as in :func:`forward_calls_of`.
    """
    common = step.common_metadata()
    starts, num_tokens = common.query_start_loc_cpu.tolist(), len(step.query)
    if not step.problem.layer.is_causal:
        # These cuts lie between requests; move them to the same requests in the order of the step.
        ends = list(itertools.accumulate(request.query_len for request in step.problem.requests))
        cuts = tuple(starts[1 + ends.index(cut)] for cut in cuts)
    slices = []
    for first, end in itertools.pairwise((0, *cuts, num_tokens)):
        is_last = end == num_tokens
        first_request = sum(start <= first for start in starts[1:])
        end_request = common.num_reqs if is_last else sum(start < end for start in starts[:-1])
        slices.append(UBatchSlice(slice(first_request, end_request), slice(first, end)))
    calls = []
    for index, (piece, divided) in enumerate(zip(slices, split_attn_metadata(slices, common), strict=True)):
        tokens = piece.token_slice
        real = max(0, min(tokens.stop, step.num_rows) - tokens.start)
        metadata: CommonAttentionMetadata = divided
        if isinstance(common, SparseMetadata):
            metadata = with_topk_indices(metadata, _indices_of(common, torch.arange(tokens.start, tokens.stop)))
        nth, position = _places(metadata)
        calls.append(
            ForwardCall(
                common=step.loosened(metadata, is_divided=True),
                query=step.query[tokens],
                key=None if step.key is None else step.key[tokens],
                value=None if step.value is None else step.value[tokens],
                rows=torch.arange(tokens.start, tokens.start + real),
                nth=nth,
                position=position,
                num_key_rows=0 if step.key is None else real,
                builder=index,
                output_form=step.output_form,
            )
        )
    return tuple(_ordered(call, threshold) for call in calls)


def prefill_ranks_of(step: Step, size: int, threshold: int | None = None) -> tuple[ForwardCall, ...]:
    """Return one call for each rank of prefill context parallelism; a rank without rows makes none.

    Each chunk is a request whose keys end with its last row. Chunks of one request share its pages. A rank writes the
    keys of its own rows: those of other ranks must be in the cache. ``threshold``: as in :func:`forward_calls_of`.
    """
    common = step.common_metadata()
    starts, computed = common.query_start_loc_cpu.tolist(), common.num_computed_tokens_cpu.tolist()
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    is_prefilling = [rows > 1 or not context for rows, context in zip(query_lens, computed, strict=True)]
    calls = []
    for rank in range(size):
        chunks = chunks_of_rank(query_lens, is_prefilling, size, rank)
        if not chunks:
            continue
        firsts = [starts[c.request] + c.offset for c in chunks]
        rows = torch.cat([torch.arange(first, first + c.length) for first, c in zip(firsts, chunks, strict=True)])
        ends = [0, *itertools.accumulate(c.length for c in chunks)]
        before = [computed[c.request] + c.offset for c in chunks]
        lens = [context + c.length for context, c in zip(before, chunks, strict=True)]
        host = {name: torch.tensor(each, dtype=torch.int32) for name, each in (("starts", ends), ("lens", lens))}
        metadata = replace(
            common,
            query_start_loc=host["starts"].to(step.query.device, copy=True),
            query_start_loc_cpu=host["starts"],
            seq_lens=host["lens"].to(step.query.device, copy=True),
            seq_lens_cpu=host["lens"],
            num_computed_tokens_cpu=torch.tensor(before, dtype=torch.int32),
            num_reqs=len(chunks),
            num_actual_tokens=len(rows),
            max_query_len=max(c.length for c in chunks),
            max_seq_len=max(lens),
            block_table_tensor=_taken(common.block_table_tensor, [c.request for c in chunks]),
            slot_mapping=_taken(common.slot_mapping, rows),
        )
        nth, position = _places(metadata)
        call = ForwardCall(
            common=step.loosened(metadata, is_divided=True),
            query=_taken(step.query, rows),
            key=None if step.key is None else _taken(step.key, rows),
            value=None if step.value is None else _taken(step.value, rows),
            rows=rows,
            nth=nth,
            position=position,
            num_key_rows=0 if step.key is None else len(rows),
            output_form=step.output_form,
        )
        calls.append(_ordered(call, threshold))
    return tuple(calls)


def _places(common: CommonAttentionMetadata) -> tuple[Tensor, Tensor]:
    """Return, for every row of the requests, its index within its request and its position."""
    query_lens = common.query_start_loc_cpu.diff().long()
    first_rows = common.query_start_loc_cpu[:-1].long()
    computed = common.num_computed_tokens_cpu.long()
    nth = torch.arange(int(query_lens.sum())) - first_rows.repeat_interleave(query_lens)
    return nth, nth + computed.repeat_interleave(query_lens)


def _ordered(call: ForwardCall, threshold: int | None) -> ForwardCall:
    """Return the call with requests of at most ``threshold`` rows first, then longer ones, then padding requests."""
    if threshold is None:
        return call
    starts = call.common.query_start_loc_cpu.tolist()
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    order = sorted(range(len(query_lens)), key=lambda i: (query_lens[i] == 0, query_lens[i] > threshold))
    if order == list(range(len(order))):
        return call
    tokens = torch.cat([torch.arange(starts[i], starts[i + 1], dtype=torch.int64) for i in order])
    common = call.common
    rows = torch.cat([tokens, torch.arange(len(tokens), len(call.query))])
    if isinstance(common, SparseMetadata):
        common = with_topk_indices(common, _indices_of(common, rows))
    ordered_starts = (
        torch.tensor([0, *(query_lens[i] for i in order)]).cumsum(0).to(call.common.query_start_loc_cpu.dtype)
    )
    return replace(
        call,
        common=replace(
            common,
            query_start_loc=ordered_starts.to(common.query_start_loc.device, copy=True),
            query_start_loc_cpu=ordered_starts,
            seq_lens=_taken(common.seq_lens, order),
            seq_lens_cpu=_taken(common.seq_lens_cpu, order),
            num_computed_tokens_cpu=_taken(common.num_computed_tokens_cpu, order),
            block_table_tensor=_taken(common.block_table_tensor, order),
            slot_mapping=_taken(common.slot_mapping, rows),
        ),
        query=_taken(call.query, rows),
        key=None if call.key is None else _taken(call.key, rows),
        value=None if call.value is None else _taken(call.value, rows),
        rows=call.rows[tokens],
        nth=call.nth[tokens],
        position=call.position[tokens],
    )


def _indices_of(common: SparseMetadata, rows: Tensor) -> Tensor:
    """Return ``topk_indices`` of some rows of the step, then those that are left from earlier steps."""
    indices = common.topk_indices
    assert indices is not None
    return torch.cat([_taken(indices, rows), indices[-ROWS_BEHIND:]])


def _taken(x: Tensor, index: Tensor | Sequence[int]) -> Tensor:
    return x[torch.as_tensor(index, device=x.device)]
