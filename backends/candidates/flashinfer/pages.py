"""A block table as the library takes it: the pages of all requests in a row, and how full the last one of each is.

Three requests of 5, 0 and 8 keys on pages of 4 tokens have ``indptr`` ``[0, 2, 2, 4]`` and ``last_page_len``
``[1, 0, 4]``; a request without keys has no page, which the library's ``get_seq_lens`` reads as a length of 0. Lengths
are read on the host, pages on the device: nothing waits. Must not know: what is planned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pages:
    """``n`` requests. indptr: int32 ``[n + 1]``, host. last_page_len: int32 ``[n]``, host. indices: int32, device."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def pages_of(block_table: Tensor, block_size: int, requests: Sequence[int], seq_lens: Sequence[int]) -> Pages:
    """The pages that hold the first ``seq_lens[i]`` tokens of the table's row ``requests[i]``; no other is looked at.

    block_table: ``[R, W]``, device.
    """
    lens = torch.tensor(seq_lens, dtype=torch.int64)
    counts = (lens + block_size - 1) // block_size
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=indptr[1:])
    rows = torch.tensor(requests, dtype=torch.int64).repeat_interleave(counts)
    columns = torch.arange(len(rows)) - indptr[:-1].repeat_interleave(counts)
    # Not pinned, so that it is read before the call returns; non-blocking, since a blocking copy waits for the device.
    places = torch.stack([rows, columns]).to(block_table.device, non_blocking=True)
    return Pages(
        indptr=indptr.to(torch.int32),
        indices=block_table[places[0], places[1]].to(torch.int32),
        last_page_len=(lens - (counts - 1).clamp(min=0) * block_size).to(torch.int32),
    )
