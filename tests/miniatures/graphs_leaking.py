"""Contents after the last key of a request get a weight of 0, which lets NaN through.

The check ``containment`` must find that. Their CUDA-graph level is measured independently of it.
"""

import torch

from attncheck.backends.mutants import graphs

RowsImpl = graphs.RowsImpl


def gather_pages(caches, table, request, position):
    """Gather as :func:`graphs.gather` does, but do not mask the rest of the row's last page."""
    block_size = caches[0].shape[1]
    last_page = (position // block_size)[:, None]
    pages = torch.arange(table.shape[1], device=table.device)
    beyond = pages > last_page
    blocks = table[request].masked_fill(beyond, 0)
    hidden = beyond.repeat_interleave(block_size, 1)[..., None, None]
    key, value = (cache[blocks].flatten(1, 2).masked_fill(hidden, 0).float() for cache in caches)
    seen = torch.arange(table.shape[1] * block_size, device=table.device) <= position[:, None]
    return key, value, seen


class PageImpl(RowsImpl):
    def attend_rows(self, query, caches, table, request, position, metadata):
        return graphs.attention(query, *gather_pages(caches, table, request, position), self.scale)


class LeaksTheTail(graphs.Base):
    """``ALWAYS``, which is true."""

    Impl = PageImpl


class LeaksAndClaims(graphs.ClaimsAlways):
    """Also claims mixed batches, but every replay splits the rows as at capture."""

    class Impl(PageImpl):
        locate = graphs.ClaimsAlways.Impl.locate
