"""A batch over a paged cache: the rows and pages of each request, and reading the slots it owns.

The index tensors are read on the host once and checked before any computation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import host_ints, host_offsets, is_float8, require_index, require_shape
from attncheck.reference.attention.quant import fp8_values
from attncheck.reference.attention.visibility import Span


@dataclass(frozen=True)
class PagedRequest:
    """A request with at least one row. ``pages``: int64, its blocks in order, on the device of the rows."""

    index: int
    rows: slice
    seq_len: int
    pages: Tensor

    @property
    def query_len(self) -> int:
        """Number of query rows."""
        return int(self.rows.stop - self.rows.start)

    @property
    def context_len(self) -> int:
        """Position of the first row; negative if the request has more rows than keys."""
        return self.seq_len - self.query_len

    def span(self, kv_range: Sequence[int] | None) -> Span:
        """Return the request's key positions within ``kv_range``; all of them if it is None."""
        lo, hi = (0, self.seq_len) if kv_range is None else kv_range
        return min(lo, self.seq_len), min(hi, self.seq_len)


def paged_requests(
    query: tuple[str, Tensor],
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    stored: Callable[[int], int] | None = None,
) -> list[PagedRequest]:
    """Return the requests that have rows, in order; requests without rows are skipped.

    query: name and tensor whose rows ``query_start_loc`` delimits. cache: ``[NB, BS, ...]``.
    stored: maps a number of first positions to how many of them this cache holds (a rank holds a part). ``None``: all.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for decreasing offsets, negative lengths, a table narrower
    than a length, or an owned block outside the cache.
    """
    name, rows = query
    starts = host_offsets("query_start_loc", query_start_loc, name, rows.shape[0])
    lens = host_ints("seq_lens", seq_lens, len(starts) - 1)
    require_index("block_table", block_table)
    require_shape("block_table", block_table, len(lens), None, legend="one row a request")
    num_blocks, block_size = cache.shape[:2]
    table = block_table.cpu()
    requests = []
    for index, ((start, end), seq_len) in enumerate(zip(pairwise(starts), lens, strict=True)):
        if start == end:
            continue
        if seq_len < 0:
            raise ReferenceArgumentError(f"seq_lens[{index}]", seq_len, "at least 0")
        pages = -(-(seq_len if stored is None else stored(seq_len)) // block_size)
        if pages > table.shape[1]:
            raise ReferenceArgumentError(
                "block_table.shape", tuple(table.shape), f"at least {pages} wide for seq_lens[{index}] {seq_len}"
            )
        owned = table[index, :pages].long()
        wrong = (owned < 0) | (owned >= num_blocks)
        if wrong.any():
            page = int(wrong.int().argmax())
            raise ReferenceArgumentError(
                f"block_table[{index}, {page}]", int(owned[page]), f"a block of the cache, 0 to {num_blocks - 1}"
            )
        requests.append(PagedRequest(index, slice(start, end), seq_len, owned.to(rows.device)))
    return requests


def read_tokens(cache: Tensor, pages: Tensor, lo: int, hi: int, scale: float | Tensor, compute: torch.dtype) -> Tensor:
    """Return the stored tokens ``lo .. hi - 1`` of a request, ``[k, ...]``. No other slot is read.

    Codes of a float8 cache are dequantised to ``compute``. Other caches keep their dtype.
    """
    tokens = torch.arange(lo, hi, device=pages.device)
    blocks, offsets = pages[tokens // cache.shape[1]], tokens % cache.shape[1]
    if not is_float8(cache):
        return cache[blocks, offsets]
    codes = cache.view(torch.uint8)[blocks, offsets].view(cache.dtype)
    if isinstance(scale, Tensor) and scale.numel() != 1 and scale.dim() > 1:
        scale = scale[blocks.to(scale.device), offsets.to(scale.device)]
    return fp8_values(codes, per_head(scale), compute)


def per_head(scale: float | Tensor) -> float | Tensor:
    """Return a scale of one element, or of one per head, in a shape that broadcasts to ``[rows, heads, size]``."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.reshape(()) if scale.numel() == 1 else scale.unsqueeze(-1)


def require_kv_range(kv_range: object) -> None:
    """Raise if ``kv_range`` is neither None nor a pair of positions ``0 <= lo <= hi``."""
    if kv_range is None:
        return
    if not (
        isinstance(kv_range, Sequence)
        and len(kv_range) == 2
        and all(type(end) is int for end in kv_range)
        and 0 <= kv_range[0] <= kv_range[1]
    ):
        raise ReferenceArgumentError("kv_range", kv_range, "two integers 0 <= lo <= hi, or None")
