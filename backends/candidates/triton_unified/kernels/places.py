"""Lookups in kernels: the request of a block of rows, and the page and slot of a position."""

import triton
import triton.language as tl


@triton.jit
def find_request(block, query_start_loc, num_reqs, block_q):
    """Return the request of the ``block``-th block of rows, and the block's index within that request.

    Each request reserves one more number for a partial block: request ``r`` begins at number ``query_start_loc[r] //
    block_q + r``. Some numbers therefore have no row: they lie after the request's last row.
    """
    low = block * 0
    high = low + num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // block_q + middle <= block:
            low = middle
        else:
            high = middle
    return low, block - (tl.load(query_start_loc + low) // block_q + low)


@triton.jit
def find_slot(position, page_size, IS_SHIFT: tl.constexpr):
    """Return the page of a request that holds ``position``, and the slot in that page.

    IS_SHIFT: ``page_size`` is the binary logarithm of the page size, which avoids a division.
    """
    if IS_SHIFT:
        page = position >> page_size
        return page, position - (page << page_size)
    page = position // page_size
    return page, position - page * page_size
