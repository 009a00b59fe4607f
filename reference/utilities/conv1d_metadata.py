"""Which program of a causal conv1d kernel handles which chunk of which prefill.

The behaviour is vLLM's.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_index
from attncheck.reference.utilities.host_batch import host_array, steps_of
from attncheck.reference.utilities.metadata import PAD_SLOT_ID

BLOCK_M = 8
"""Tokens of one request that one program handles; the only block size."""

_FEWEST_PROGRAMS = 1024


def compute_causal_conv1d_metadata(
    query_start_loc_p: Tensor,
) -> tuple[dict[int, dict[str, Any]], Tensor, Tensor]:
    """``(by_block_size, batch_ptr, token_chunk_offset_ptr)`` for prefills cut into chunks of :data:`BLOCK_M` tokens.

    query_start_loc_p: ``[N + 1]`` int32 or int64, any device: start locations of the prefills, non-decreasing. On a
        GPU the host waits for them.

    A program handles one chunk: its request, and the chunk's place within it. Requests without tokens have none.
    ``by_block_size`` has the one key 8:

    ==========================  ====================================================================================
    ``nums``                    ``[N]`` of the input's dtype, host: chunks of each request
    ``tot``, ``mlist_len``      how many chunks there are
    ``mlist``                   ``[tot]`` int64, host: the request of each chunk
    ``offsetlist``              ``[tot]`` int32, host: the chunk's place within its request
    ``batch_ptr``               ``[2 * max(1024, tot)]`` int32, device: ``mlist``, then ``PAD_SLOT_ID``
    ``token_chunk_offset_ptr``  the same of ``offsetlist``
    ==========================  ====================================================================================

    The second and third results are the last two tensors. All are new. Raises
    :class:`~attncheck.errors.ReferenceArgumentError`.

    >>> by_block_size, batch_ptr, _ = compute_causal_conv1d_metadata(torch.tensor([0, 5, 21, 29, 29]))
    >>> by_block_size[8]["mlist"].tolist(), by_block_size[8]["offsetlist"].tolist(), batch_ptr[:6].tolist()
    ([0, 1, 1, 2], [0, 0, 1, 0], [0, 1, 1, 2, -1, -1])
    """
    require_index("query_start_loc_p", query_start_loc_p)
    starts = host_array("query_start_loc_p", query_start_loc_p.cpu())
    if not len(starts):
        raise ReferenceArgumentError("query_start_loc_p.shape", (0,), "[requests + 1]")
    nums = -(-steps_of("query_start_loc_p", starts) // BLOCK_M)
    ends = nums.cumsum(dtype=np.int64)
    request = np.repeat(np.arange(len(nums)), nums)
    tot = len(request)
    place = (np.arange(tot) - (ends - nums)[request]).astype(np.int32)
    pointers = np.full((2, 2 * max(_FEWEST_PROGRAMS, tot)), PAD_SLOT_ID, dtype=np.int32)
    pointers[:, :tot] = request, place
    batch_ptr, token_chunk_offset_ptr = (torch.from_numpy(row).to(query_start_loc_p.device) for row in pointers)
    listing = {
        "nums": torch.from_numpy(nums),
        "tot": tot,
        "mlist": torch.from_numpy(request),
        "mlist_len": tot,
        "offsetlist": torch.from_numpy(place),
        "batch_ptr": batch_ptr,
        "token_chunk_offset_ptr": token_chunk_offset_ptr,
    }
    return {BLOCK_M: listing}, batch_ptr, token_chunk_offset_ptr
