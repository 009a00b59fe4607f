"""vLLM's common attention metadata: one step's batch, as every layer and backend receives it. Data only."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

PAD_SLOT_ID = -1
"""Value of padded entries in ``slot_mapping``, and in other lists that are longer than their contents."""


@dataclass
class CommonAttentionMetadata:
    """One step's batch, shared by all layers; vLLM's fields in vLLM's order (constructor order is field order).

    ``R`` requests and ``T`` tokens, padding included. Per request: ``q`` new tokens, ``s`` tokens after this step,
    ``c = s - q`` tokens computed before it. Padding is at the end: requests with ``q = 0`` (so that the last offset
    repeats), ``s = 0``, ``c = 0``; tokens with slot -1.

    The constructor copies, converts and checks nothing, so that dummy batches with inconsistent numbers are possible.
    Index tensors are int32 (``slot_mapping`` int64). A field named ``..._cpu`` is on the host, and the field without
    the suffix on the device of the batch. On a machine without a device both may be the same tensor, so none may be
    written.

    This loop defines where a request's tokens are among the rows, their positions, and the slots of their keys:

    >>> import torch
    >>> starts, lens = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
    >>> table, block_size = torch.tensor([[7, 2, 0], [4, 9, 0]], dtype=torch.int32), 4
    >>> slots = []
    >>> for r in range(2):
    ...     for position in range(lens[r] - (starts[r + 1] - starts[r]), lens[r]):
    ...         slots.append(int(table[r, position // block_size]) * block_size + position % block_size)
    >>> batch = CommonAttentionMetadata(
    ...     query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=lens, seq_lens_cpu=lens.clone(),
    ...     num_computed_tokens_cpu=torch.tensor([2, 5], dtype=torch.int32), num_reqs=2, num_actual_tokens=4,
    ...     max_query_len=3, max_seq_len=6, block_table_tensor=table, slot_mapping=torch.tensor(slots))
    >>> batch.slot_mapping.tolist(), batch.causal
    ([30, 31, 8, 37], True)
    """

    query_start_loc: Tensor
    """``[R + 1]``, device: the first query row of each request, then the end of the last one."""
    query_start_loc_cpu: Tensor
    """``[R + 1]``, host: the same values."""
    seq_lens: Tensor
    """``[R]``, device: ``s``, tokens in the cache after this step's are written."""
    seq_lens_cpu: Tensor
    """``[R]``, host: the same values."""
    num_computed_tokens_cpu: Tensor
    """``[R]``, host: ``c``, tokens whose K/V is in the cache before this step."""
    num_reqs: int
    """``R``."""
    num_actual_tokens: int
    """``T``; at least ``query_start_loc[R]``, larger only when tokens are padded."""
    max_query_len: int
    """The largest ``q``, or an upper bound of it."""
    max_seq_len: int
    """The largest ``s``, or an upper bound of it."""
    block_table_tensor: Tensor
    """``[R, W]``, device: a request's blocks, page by page; entries from ``ceil(s / block_size)`` on are undefined."""
    slot_mapping: Tensor
    """``[T]`` int64, device: the slot of each new token's K/V, counted over all blocks; negative for no write."""
    causal: bool = True
    """Whether a token sees no later key. If False, a layer's causal window is mirrored."""
    logits_indices_padded: Tensor | None = None
    """Tokens whose logits are computed, ascending, then padding; ``None`` for no fast prefill."""
    num_logits_indices: int | None = None
    """Number of entries of ``logits_indices_padded`` before the padding."""
    encoder_seq_lens: npt.NDArray[np.int32] | None = None
    """``[R]``, host: encoder lengths, for cross attention."""
    dcp_local_seq_lens: Tensor | None = None
    """``[R]``, device: context on this rank under decode context parallelism."""


@dataclass
class PrefillingMetadata(CommonAttentionMetadata):
    """The common metadata with the additional field of newer vLLM versions."""

    is_prefilling: Tensor | None = None
    """``[R]`` bool, host: whether the request's prompt is not fully computed yet."""
