"""Right but for NaN: what stands behind the last key of a request is given a weight of 0, and NaN comes through.

That is ``containment``'s to tell. How high a graph holds these is a question of its own.
"""

import torch

from attncheck.backends.contract import AttentionCGSupport
from attncheck.backends.mutants import graphs

RowsImpl = graphs.RowsImpl


def gather_pages(caches, table, request, position):
    """As :func:`graphs.gather`, but the row's last page is taken with all that stands in it."""
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
    """``ALWAYS``, and a graph holds it there."""

    Impl = PageImpl


class LeaksAndCutsAlike(graphs.EqualRows):
    """``UNIFORM_BATCH``: how many rows a request has is a number of the host, and the graph keeps it."""

    class Impl(PageImpl):
        locate = graphs.EqualRows.Impl.locate


class LeaksAndClaims(LeaksAndCutsAlike):
    """Promises mixed batches as well: every replay cuts the rows as the capture's dummies were cut."""

    level = AttentionCGSupport.ALWAYS
