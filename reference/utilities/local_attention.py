"""Chunked local attention for kernels without such a mask: requests are cut at chunk edges into virtual requests.

With chunks of ``C`` tokens, a query at position ``p`` sees the keys of its own chunk, ``p // C * C`` to ``p``. The
behaviour is vLLM's, except for padding requests.
"""

import numpy as np
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_index, require_positive_int
from attncheck.reference.utilities.host_batch import Integers, host_array, query_bounds
from attncheck.reference.utilities.metadata import CommonAttentionMetadata


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
