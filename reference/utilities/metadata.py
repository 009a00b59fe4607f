"""What one step's batch looks like to every layer and every backend: vLLM's common attention metadata.

Holds data, computes nothing.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

PAD_SLOT_ID = -1
"""No slot: what fills padded entries of ``slot_mapping``, and of other lists that are longer than what they list."""


@dataclass
class CommonAttentionMetadata:
    """One step's batch, shared by all layers; vLLM's fields in vLLM's order (constructor order is field order).

    ``R`` requests, padding requests included, of ``T`` tokens, padding tokens included. Per request: ``q`` new tokens,
    ``s`` tokens after this step, ``c = s - q`` tokens computed before it. Padding stands at the tail: requests with
    ``q = 0`` (so that the last offset repeats), ``s = 0``, ``c = 0``; tokens with slot -1.

    The constructor stores what it is given: nothing is copied, converted or checked, so that dummy batches with
    inconsistent numbers can be made. Index tensors are int32 (``slot_mapping`` int64); a field named ``..._cpu`` lives
    on the host, its namesake on the device of the batch. On a machine without a device both may be one tensor, so
    nobody may write into any of them.

    Where a request's tokens lie, what they are and where their keys go is defined by this loop:

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
    """``[R + 1]``, device: where each request begins among the query rows of the step; behind them, where they end."""
    query_start_loc_cpu: Tensor
    """``[R + 1]``, host: the same."""
    seq_lens: Tensor
    """``[R]``, device: ``s``, tokens in the cache once this step's are written."""
    seq_lens_cpu: Tensor
    """``[R]``, host: the same."""
    num_computed_tokens_cpu: Tensor
    """``[R]``, host: ``c``, tokens whose K/V stood in the cache before this step."""
    num_reqs: int
    """``R``."""
    num_actual_tokens: int
    """``T``; at least ``query_start_loc[R]``, larger only when tokens are padded."""
    max_query_len: int
    """The longest ``q``, or an upper bound of it."""
    max_seq_len: int
    """The longest ``s``, or an upper bound of it."""
    block_table_tensor: Tensor
    """``[R, W]``, device: a request's blocks, page by page; entries past ``ceil(s / block_size)`` mean nothing."""
    slot_mapping: Tensor
    """``[T]`` int64, device: the slot, counted over all blocks, that takes a new token's K/V; negative: none."""
    causal: bool = True
    """Whether a token sees no later key. Off, a layer's causal window is mirrored."""
    logits_indices_padded: Tensor | None = None
    """The tokens to be given logits, ascending, and padding behind them; ``None``: no fast prefill."""
    num_logits_indices: int | None = None
    """How many of ``logits_indices_padded`` are real."""
    encoder_seq_lens: npt.NDArray[np.int32] | None = None
    """``[R]``, host: encoder lengths, for cross attention."""
    dcp_local_seq_lens: Tensor | None = None
    """``[R]``, device: context held by this rank under decode context parallelism."""


@dataclass
class PrefillingMetadata(CommonAttentionMetadata):
    """The same with what newer versions of vLLM know besides."""

    is_prefilling: Tensor | None = None
    """``[R]`` bool, host: whether the request's prompt is not yet computed to its end."""
