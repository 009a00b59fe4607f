"""Places inside kernels: which request a block of rows belongs to, and which page and slot hold a position."""

import triton
import triton.language as tl


@triton.jit
def find_request(block, query_start_loc, num_reqs, block_q):
    """The request that the ``block``-th block of rows belongs to, and which of its blocks it is.

    Blocks are numbered with room for one that is not full behind each request: request ``r`` begins at number
    ``query_start_loc[r] // block_q + r``. Some numbers are nobody's: they lie behind the request's last row.
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
    """The page of a request that holds ``position``, and the slot in that page.

    IS_SHIFT: ``page_size`` is the binary logarithm of the page size, so that nothing is divided.
    """
    if IS_SHIFT:
        page = position >> page_size
        return page, position - (page << page_size)
    page = position // page_size
    return page, position - page * page_size
