"""Split one step into the calls of ``forward`` that its execution path needs, each with its own metadata.

======================  =====================================================================================
path                    calls
======================  =====================================================================================
most                    one
``local``               one; over virtual requests, one for each chunk, unless the backend declares ``local`` or
                        the chunk is not a whole number of pages
``cascade``             one with ``common_prefix_len`` if the backend declares ``cascade``, else two to merge
``split_kv``, ``dcp``   one for each part of the keys, merged by their LSE
``micro_batch``         one for each micro-batch; their rows are placed one after another
======================  =====================================================================================
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from attncheck.backends.declarations import is_chunked, is_merged
from attncheck.harness.driver.step import Step
from attncheck.harness.problem.page_layout import key_places
from attncheck.harness.problem.problem import Problem
from attncheck.reference import (
    CommonAttentionMetadata,
    UBatchSlice,
    make_local_attention_virtual_batches,
    split_attn_metadata,
)
from attncheck.reference.spec import MicroBatchOptions, StrideForm


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
    if is_merged(case.batch, features):
        parts = range(len(step.problem.parts))
        return tuple(_whole(step, step.common_metadata(part), carries_sinks=part == 0) for part in parts)
    if case.batch.path.name == "cascade":
        prefix = min(request.shared_prefix for request in case.batch.requests)
        return (_whole(step, step.common_metadata(), common_prefix_len=prefix),)
    if is_chunked(case.layer, case.cache, case.batch, features):
        chunk = case.layer.attn_chunk_size or 0
        virtual = make_local_attention_virtual_batches(chunk, step.common_metadata(), case.cache.block_size)
        nth, position = _places(virtual)
        call = replace(_whole(step, step.loosened(virtual)), nth=nth, position=position)
        return (_ordered(call, threshold),)
    return (_whole(step, step.common_metadata()),)


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
    for index, (piece, metadata) in enumerate(zip(slices, split_attn_metadata(slices, common), strict=True)):
        tokens = piece.token_slice
        real = max(0, min(tokens.stop, step.num_rows) - tokens.start)
        nth, position = _places(metadata)
        calls.append(
            ForwardCall(
                common=step.loosened(metadata),
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


def _places(common: CommonAttentionMetadata) -> tuple[Tensor, Tensor]:
    """Return, for every row of the requests, its index within its request and its position."""
    query_lens = common.query_start_loc_cpu.diff().long()
    first_rows, computed = common.query_start_loc_cpu[:-1].long(), common.num_computed_tokens_cpu.long()
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
    common, rows = call.common, torch.cat([tokens, torch.arange(len(tokens), len(call.query))])
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


def _taken(x: Tensor, index: Tensor | Sequence[int]) -> Tensor:
    return x[torch.as_tensor(index, device=x.device)]


def changed_inputs(pristine: ForwardCall, call: ForwardCall) -> Iterator[str]:
    """Yield the names of inputs and metadata fields that differ from ``pristine``.

    Of query, key and value, only real rows are compared.
    """
    real = {"query": pristine.num_rows, "key": pristine.num_key_rows, "value": pristine.num_key_rows}
    for name, count in real.items():
        was, now = getattr(pristine, name), getattr(call, name)
        if was is not None and not _same_numbers(was[:count], now[:count]):
            yield name
    for field in fields(CommonAttentionMetadata):
        if not _same(getattr(pristine.common, field.name), getattr(call.common, field.name)):
            yield f"metadata.{field.name}"


def _same_numbers(was: Tensor, now: Tensor) -> bool:
    """Return whether two tensors are equal; NaN, which a step may contain, equals NaN."""
    if was.shape != now.shape:
        return False
    if was.dtype == now.dtype and torch.equal(was, now):
        return True
    return bool(((was == now) | (torch.isnan(was) & torch.isnan(now))).all())


def _same(was: object, now: object) -> bool:
    """Return whether two values of a field are equal, of the same type and, for tensors, on the same device."""
    if type(was) is not type(now):
        return False
    if isinstance(was, Tensor) and isinstance(now, Tensor):
        alike = (was.device, was.dtype, was.shape) == (now.device, now.dtype, now.shape)
        return alike and torch.equal(was, now)
    if isinstance(was, np.ndarray) and isinstance(now, np.ndarray):
        return was.dtype == now.dtype and np.array_equal(was, now)
    return was == now
