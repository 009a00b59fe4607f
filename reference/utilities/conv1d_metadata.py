"""Launch metadata for kernels of state-space layers: programs of a causal conv1d, and the blocks that hold states.

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
"""Tokens of one request per program; the only block size."""

_FEWEST_PROGRAMS = 1024


def compute_causal_conv1d_metadata(
    query_start_loc_p: Tensor,
) -> tuple[dict[int, dict[str, Any]], Tensor, Tensor]:
    """Return ``(by_block_size, batch_ptr, token_chunk_offset_ptr)`` for prefills in chunks of :data:`BLOCK_M` tokens.

    query_start_loc_p: ``[N + 1]`` int32 or int64, any device: start locations of the prefills, non-decreasing. On a
        GPU the host waits for them.

    A program processes one chunk: its request, and the chunk's index within the request. Requests without tokens have
    no chunk. ``by_block_size`` has the single key 8:

    ==========================  ====================================================================================
    ``nums``                    ``[N]`` of the input's dtype, host: chunks of each request
    ``tot``, ``mlist_len``      number of chunks
    ``mlist``                   ``[tot]`` int64, host: the request of each chunk
    ``offsetlist``              ``[tot]`` int32, host: the chunk's index within its request
    ``batch_ptr``               ``[2 * max(1024, tot)]`` int32, device: ``mlist``, then ``PAD_SLOT_ID``
    ``token_chunk_offset_ptr``  likewise for ``offsetlist``
    ==========================  ====================================================================================

    The second and third results are the last two tensors. All tensors are new. Raise
    :class:`~attncheck.errors.ReferenceArgumentError` for invalid start locations.

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


def mamba_get_block_table_tensor(
    block_table: Tensor, seq_lens: Tensor, kv_cache_spec: Any, mamba_cache_mode: str
) -> Tensor:
    """Return the blocks of each request's state: ``block_table`` itself in mode ``none``, else its current columns.

    In the other modes there is a state for the end of every block of tokens. The current columns are the one of the
    request's last token and the ``num_speculative_blocks`` after it. For a request without tokens they start at column
    0.

    block_table: ``[R, W]``. seq_lens: ``[R]``. kv_cache_spec: has ``block_size`` and ``num_speculative_blocks``. Raise
    :class:`~attncheck.errors.ReferenceArgumentError` if the table has too few columns.
    """
    if mamba_cache_mode == "none":
        return block_table
    require_index("seq_lens", seq_lens)
    first = ((seq_lens.long() - 1) // kv_cache_spec.block_size).clamp(min=0)
    columns = first[:, None] + torch.arange(1 + kv_cache_spec.num_speculative_blocks, device=first.device)
    if len(columns) and int(columns.max()) >= block_table.shape[1]:
        raise ReferenceArgumentError(
            "block_table.shape", tuple(block_table.shape), f"above {int(columns.max())} columns"
        )
    return block_table[torch.arange(len(columns), device=first.device)[:, None], columns]
