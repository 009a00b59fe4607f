"""The calls one step is made of: a path may be played by several over ``forward``, each with metadata of its own.

======================  =====================================================================================
path                    calls
======================  =====================================================================================
most                    one
``local``               one; over virtual requests, one a chunk, unless the backend declares ``local``
``cascade``             one with ``common_prefix_len`` for a backend that declares ``cascade``, else two to merge
``split_kv``, ``dcp``   one a part of the keys, to merge by their LSE
``micro_batch``         one a piece of the rows, placed one after another
======================  =====================================================================================

Must not know: how a call is made, caches, truths.
"""

import itertools
from dataclasses import dataclass, replace

from torch import Tensor

from attncheck.backends.declarations import is_merged
from attncheck.harness.step import Step
from attncheck.reference import (
    CommonAttentionMetadata,
    UBatchSlice,
    make_local_attention_virtual_batches,
    split_attn_metadata,
)
from attncheck.reference.spec import MicroBatchOptions


@dataclass(frozen=True)
class Call:
    """What one ``build`` and one ``forward`` are handed.

    rows: which rows of the step the query is, padding included; its first ``num_rows`` rows are real, and so are the
    first ``num_key_rows`` of key and value. builder: which of the session's builders makes the metadata.
    """

    common: CommonAttentionMetadata
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    rows: slice
    num_rows: int
    num_key_rows: int
    common_prefix_len: int = 0
    carries_sinks: bool = True
    builder: int = 0


def num_builders(step: Step) -> int:
    """How many calls are built before the first is made, each by a builder of its own: one a micro-batch."""
    options = step.problem.case.batch.path.options
    return 1 + len(options.cuts) if isinstance(options, MicroBatchOptions) else 1


def calls_of(step: Step, features: frozenset[str]) -> tuple[Call, ...]:
    """The calls for a backend that declares ``features``, in order; metadata are fresh copies."""
    case = step.problem.case
    if isinstance(case.batch.path.options, MicroBatchOptions):
        return _micro_batches(step, case.batch.path.options.cuts)
    if is_merged(case.batch, features):
        parts = range(len(step.problem.parts))
        return tuple(_whole(step, step.common_metadata(part), carries_sinks=part == 0) for part in parts)
    if case.batch.path.name == "cascade":
        prefix = min(request.shared_prefix for request in case.batch.requests)
        return (_whole(step, step.common_metadata(), common_prefix_len=prefix),)
    if case.batch.path.name == "local" and "local" not in features:
        chunk = case.layer.attn_chunk_size or 0
        virtual = make_local_attention_virtual_batches(chunk, step.common_metadata(), case.cache.block_size)
        return (_whole(step, _loosened(virtual, step)),)
    return (_whole(step, step.common_metadata()),)


def _loosened(common: CommonAttentionMetadata, step: Step) -> CommonAttentionMetadata:
    """Rewritten metadata have exact maxima again."""
    longer = common.max_query_len + step.looseness, common.max_seq_len + step.looseness
    return replace(common, max_query_len=longer[0], max_seq_len=longer[1])


def _whole(
    step: Step, common: CommonAttentionMetadata, *, common_prefix_len: int = 0, carries_sinks: bool = True
) -> Call:
    return Call(
        common=common,
        query=step.query,
        key=step.key,
        value=step.value,
        rows=slice(0, len(step.query)),
        num_rows=step.num_rows,
        num_key_rows=step.num_key_rows,
        common_prefix_len=common_prefix_len,
        carries_sinks=carries_sinks,
    )


def _micro_batches(step: Step, cuts: tuple[int, ...]) -> tuple[Call, ...]:
    """One call for the rows between two cuts; the last takes the padding, too."""
    common = step.common_metadata()
    starts, num_tokens = common.query_start_loc_cpu.tolist(), len(step.query)
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
        calls.append(
            Call(
                common=_loosened(metadata, step),
                query=step.query[tokens],
                key=None if step.key is None else step.key[tokens],
                value=None if step.value is None else step.value[tokens],
                rows=tokens,
                num_rows=real,
                num_key_rows=0 if step.key is None else real,
                builder=index,
            )
        )
    return tuple(calls)
