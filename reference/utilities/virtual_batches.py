"""Batches rewritten for kernels: chunked local attention, and KV-sharing fast prefill.

Chunked local attention serves kernels without such a mask: requests are cut at chunk edges into virtual requests. With
chunks of ``C`` tokens, a query at position ``p`` sees the keys of its own chunk, ``p // C * C`` to ``p``. The behaviour
is vLLM's, except for padding requests.

In fast prefill, a layer that writes no K/V needs no query for tokens whose logits are not used. A batch is reduced to
the other tokens, and a backend is wrapped so that its builder does so. The behaviour is vLLM's when the logits fields
are set. Inputs for which vLLM would compute a wrong result are rejected.
"""

from dataclasses import fields
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_index, require_int, require_positive_int, require_shape
from attncheck.reference.utilities.builder import subclass_attention_backend
from attncheck.reference.utilities.metadata import CommonAttentionMetadata, Integers, host_array, query_bounds


def make_local_attention_virtual_batches(
    attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int = 0
) -> CommonAttentionMetadata:
    """Return the batch of virtual requests; queries, output and ``slot_mapping`` keep their order.

    The queries of a request are at positions ``s - q`` to ``s - 1``. For every chunk ``j`` they touch, in order, the
    queries and keys in that chunk become one virtual request:

    - It has ``min(s - j * C, C)`` keys. ``max(s - q - j * C, 0)`` of them are computed; the rest is the query length.
    - Its pages are the ``C // block_size`` columns of the row from ``j * C // block_size`` on. For a column beyond the
      table, the last column is read, because no key is there.

    A padding request (``q = s = 0``) becomes one request without query and keys, with the pages of chunk 0. (vLLM gives
    it a whole chunk of keys, and counts its columns from the right end.) A request with ``q = 0 < s`` becomes one
    virtual request for its last chunk.

    attn_chunk_size: ``C``, a multiple of ``block_size``.
    common_attn_metadata: lengths are read from ``query_start_loc_cpu`` and ``seq_lens_cpu`` on the host;
        ``0 <= q <= s``. It is not modified.
    block_size: tokens per page; the default 0 is rejected.

    The lengths and offsets of the result are int32 and new. ``block_table_tensor`` is new, of the table's dtype and
    device. ``slot_mapping`` is the same tensor, ``num_actual_tokens`` is kept, ``causal`` is True, and the optional
    fields are ``None``. Raise :class:`~attncheck.errors.ReferenceArgumentError` for invalid arguments.

    >>> starts, lens = torch.tensor([0, 5, 6], dtype=torch.int32), torch.tensor([7, 9], dtype=torch.int32)
    >>> batch = CommonAttentionMetadata(
    ...     query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, seq_lens_cpu=lens,
    ...     num_computed_tokens_cpu=torch.tensor([2, 8], dtype=torch.int32), num_reqs=2, num_actual_tokens=6,
    ...     max_query_len=5, max_seq_len=9, slot_mapping=torch.arange(6),
    ...     block_table_tensor=torch.tensor([[7, 3, 9, 1, 2], [4, 8, 6, 5, 0]]))
    >>> virtual = make_local_attention_virtual_batches(4, batch, block_size=2)
    >>> virtual.query_start_loc.tolist(), virtual.seq_lens.tolist(), virtual.block_table_tensor.tolist()
    ([0, 2, 5, 6], [4, 3, 1], [[7, 3], [9, 1], [0, 0]])
    """
    attn_chunk_size = require_positive_int("attn_chunk_size", attn_chunk_size)
    block_size = require_positive_int("block_size", block_size)
    if attn_chunk_size % block_size:
        raise ReferenceArgumentError("attn_chunk_size", attn_chunk_size, f"a multiple of block_size {block_size}")
    _, query_lens = query_bounds(common_attn_metadata)
    num_reqs = len(query_lens)
    seq_lens = host_array("seq_lens_cpu", common_attn_metadata.seq_lens_cpu, num_reqs).astype(np.int64)
    computed = seq_lens - query_lens
    if computed.min() < 0:
        longer = int((computed < 0).argmax())
        lengths = (int(query_lens[longer]), int(seq_lens[longer]))
        raise ReferenceArgumentError(f"(query, seq) lengths of request {longer}", lengths, "query <= seq")
    table = common_attn_metadata.block_table_tensor
    require_index("block_table_tensor", table)
    shape = tuple(table.shape)
    if len(shape) != 2 or shape[0] < num_reqs or not shape[1]:
        raise ReferenceArgumentError("block_table_tensor.shape", shape, f"[{num_reqs}, pages], at least one page")

    last_chunk = np.maximum(seq_lens - 1, 0) // attn_chunk_size
    first_chunk = np.minimum(computed // attn_chunk_size, last_chunk)
    num_chunks = last_chunk - first_chunk + 1
    ends = num_chunks.cumsum()
    request = np.repeat(np.arange(num_reqs), num_chunks)
    chunk = np.arange(len(request)) - (ends - num_chunks - first_chunk)[request]
    chunk_start = chunk * attn_chunk_size
    keys = np.minimum(seq_lens[request] - chunk_start, attn_chunk_size).astype(np.int32)
    before = np.maximum(computed[request] - chunk_start, 0).astype(np.int32)
    queries = keys - before
    starts = np.zeros(len(request) + 1, dtype=np.int32)
    queries.cumsum(out=starts[1:])

    device = common_attn_metadata.query_start_loc.device
    query_start_loc_cpu, seq_lens_cpu = torch.from_numpy(starts), torch.from_numpy(keys)
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc_cpu.to(device, copy=True),
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=seq_lens_cpu.to(device, copy=True),
        seq_lens_cpu=seq_lens_cpu,
        num_computed_tokens_cpu=torch.from_numpy(before),
        num_reqs=len(request),
        num_actual_tokens=common_attn_metadata.num_actual_tokens,
        max_query_len=int(queries.max()),
        max_seq_len=int(keys.max()),
        block_table_tensor=_pages(table, request, chunk, attn_chunk_size // block_size),
        slot_mapping=common_attn_metadata.slot_mapping,
        causal=True,
    )


def _pages(table: Tensor, request: Integers, chunk: Integers, pages: int) -> Tensor:
    """Return ``[table[r, min(j * pages + k, W - 1)] for k in range(pages)]`` of every virtual request ``(r, j)``."""
    width = table.shape[1]
    first_page = chunk * pages
    rows, columns = (torch.from_numpy(index).to(table.device) for index in (request, first_page))
    if first_page.max() + pages <= width:
        # Copying whole windows of a row is an order of magnitude faster than copying page by page.
        return table.unfold(1, pages, 1)[rows, columns]
    wanted = columns[:, None] + torch.arange(pages, device=table.device)
    return table[rows[:, None], wanted.clamp_(max=width - 1)]


KV_SHARING_FAST_PREFILL_METADATA_FIELDS: list[tuple[str, Any, Any]] = [
    ("logits_indices_padded", Tensor | None, None),
    ("num_logits_indices", int, 0),
]
"""The constant list of fields that ``subclass_attention_metadata`` adds for fast prefill."""


@runtime_checkable
class KVSharingFastPrefillMetadata(Protocol):
    """Metadata that lists the rows whose logits are used. ``isinstance`` checks only that the attributes exist."""

    logits_indices_padded: Tensor
    num_logits_indices: int


def make_kv_sharing_fast_prefill_common_attn_metadata(
    common_attn_metadata: CommonAttentionMetadata,
) -> CommonAttentionMetadata:
    """Return the batch reduced to the tokens whose logits are used, or itself if ``max_query_len`` is 1.

    The first ``num_logits_indices`` entries of ``logits_indices_padded`` are these tokens, ascending. The rest is
    padding of any value. A request without such a token keeps its context and has no query. Indices must be the last
    tokens of their request: otherwise causal attention over the shorter queries would differ.

    Start locations, ``seq_lens_cpu`` and ``num_computed_tokens_cpu`` (``seq_lens`` minus the new query lengths) of the
    result are new. ``seq_lens``, ``max_seq_len``, ``block_table_tensor`` and the whole ``slot_mapping`` are the
    input's. ``causal`` is True, and the optional fields are ``None``. The indices are read on the host, which waits for
    a GPU.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for invalid arguments, and for a batch without logits
    indices.
    """
    batch = common_attn_metadata
    if batch.max_query_len == 1:
        return batch
    indices_padded, count = _armed(batch)
    starts, query_lens = query_bounds(batch)
    require_shape("seq_lens", batch.seq_lens, len(query_lens))
    indices = _logits_indices(indices_padded, count, starts)
    # The indices ascend, so the number of indices below a request's first token is the position of its first index.
    new_starts = np.searchsorted(indices, starts)
    wanted = new_starts[1:] - new_starts[:-1]
    _require_last_tokens(indices, starts, new_starts)

    query_start_loc = torch.from_numpy(new_starts)
    seq_lens_cpu = batch.seq_lens.to("cpu", copy=True)
    computed = seq_lens_cpu - torch.from_numpy(wanted)
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc.to(batch.query_start_loc.device, batch.query_start_loc.dtype),
        query_start_loc_cpu=query_start_loc.to(batch.query_start_loc_cpu.dtype, copy=True),
        seq_lens=batch.seq_lens,
        seq_lens_cpu=seq_lens_cpu,
        num_computed_tokens_cpu=computed.to(batch.num_computed_tokens_cpu.dtype),
        num_reqs=len(query_lens),
        num_actual_tokens=len(indices),
        max_query_len=int(wanted.max()),
        max_seq_len=batch.max_seq_len,
        block_table_tensor=batch.block_table_tensor,
        slot_mapping=batch.slot_mapping,
        causal=True,
    )


def create_fast_prefill_custom_backend(prefix: str, underlying_attn_backend: type[Any]) -> type[Any]:
    """Return a subclass of the backend class, named with ``prefix``, whose builder receives the reduced batch.

    The builder returns an instance of both the underlying metadata class and :class:`KVSharingFastPrefillMetadata`. It
    has the dataclass fields of the underlying builder's metadata, by reference, and the logits fields of the unreduced
    batch. The underlying classes and both metadata objects are not modified.

    ``build`` raises :class:`~attncheck.errors.ReferenceArgumentError` if a logits field is ``None`` (also for a pure
    decode), or if the underlying metadata is not a dataclass or is frozen.
    """
    underlying_builder: Any = underlying_attn_backend.get_builder_cls()

    @cache
    def with_logits_fields(built_cls: type[Any]) -> type[Any]:
        bases, module = (built_cls, KVSharingFastPrefillMetadata), {"__module__": built_cls.__module__}
        return type(f"KVSharingFastPrefill{built_cls.__name__}", bases, module)

    class FastPrefillAttentionBuilder(underlying_builder):  # type: ignore[misc]  # a class known at run time only
        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> Any:
            indices_padded, count = _armed(common_attn_metadata)
            reduced = make_kv_sharing_fast_prefill_common_attn_metadata(common_attn_metadata)
            built = super().build(common_prefix_len, reduced, fast_build)
            kind: Any = type(built)
            settings = getattr(kind, "__dataclass_params__", None)
            if settings is None or settings.frozen:
                raise ReferenceArgumentError("the underlying metadata", kind, "an unfrozen dataclass")
            result = object.__new__(with_logits_fields(kind))
            for field in fields(kind):
                setattr(result, field.name, getattr(built, field.name))
            result.logits_indices_padded, result.num_logits_indices = indices_padded, count
            return result

    return subclass_attention_backend(prefix, underlying_attn_backend, FastPrefillAttentionBuilder)


def _armed(batch: CommonAttentionMetadata) -> tuple[Tensor, int]:
    indices_padded, count = batch.logits_indices_padded, batch.num_logits_indices
    if indices_padded is None or count is None:
        missing = "logits_indices_padded" if indices_padded is None else "num_logits_indices"
        raise ReferenceArgumentError(missing, None, "given: the batch is not armed for fast prefill")
    return indices_padded, count


def _logits_indices(indices_padded: Tensor, count: int, starts: Integers) -> Integers:
    """Return the indices without padding, on the host; raise unless they are ascending tokens of the batch."""
    if indices_padded.is_floating_point() or indices_padded.is_complex() or indices_padded.dtype == torch.bool:
        raise ReferenceArgumentError("logits_indices_padded.dtype", indices_padded.dtype, "of integers")
    require_shape("logits_indices_padded", indices_padded, None)
    count = require_int("num_logits_indices", count, 0, len(indices_padded))
    indices: Integers = indices_padded[:count].to("cpu", torch.int64).numpy()
    outside = (indices < starts[0]) | (indices >= starts[-1])
    if outside.any():
        found = int(indices[outside.argmax()])
        raise ReferenceArgumentError("logits_indices_padded", found, f"a token, {starts[0]} to before {starts[-1]}")
    falls = indices[1:] <= indices[:-1]
    if falls.any():
        first = int(falls.argmax())
        raise ReferenceArgumentError("logits_indices_padded", indices[first : first + 2].tolist(), "ascending")
    return indices


def _require_last_tokens(indices: Integers, starts: Integers, new_starts: Integers) -> None:
    # Ascending indices are the request's last tokens if the first index is (end of request - number of indices).
    (requests,) = (new_starts[1:] > new_starts[:-1]).nonzero()
    ends = starts[requests + 1]
    earlier = indices[new_starts[requests]] != ends - (new_starts[requests + 1] - new_starts[requests])
    if earlier.any():
        request = int(requests[earlier.argmax()])
        own = indices[new_starts[request] : new_starts[request + 1]].tolist()
        raise ReferenceArgumentError(
            "logits_indices_padded",
            own,
            f"the last tokens of request {request}, which ends before {starts[request + 1]}",
        )
