"""vLLM's common attention metadata, which every layer and backend receives, and tensors derived from it.

The behaviour is vLLM's. The host tensors of a batch are read as checked numpy arrays, because they have one number per
request, and torch's call overhead exceeds the arithmetic.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import require_index, require_int, require_positive_int

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
    """``[R]``, host: the same values, or upper bounds of them for decodes, as vLLM's ``seq_lens_cpu_upper_bound``."""
    num_computed_tokens_cpu: Tensor
    """``[R]``, host: ``c``, tokens whose K/V is in the cache before this step: ``seq_lens_cpu`` minus ``q``."""
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
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    """Image spans of each request by its index: first and last position, from the prompt's first token on.

    Its spans do not overlap. They may lie behind the tokens of this step, or be cut by its end."""
    rswa_prefix_lens: Tensor | None = None
    """``[R]``, host: number of first keys that rows see beyond ``model_config.rswa_window``; vLLM's prompt lengths."""


@dataclass
class PrefillingMetadata(CommonAttentionMetadata):
    """The common metadata with the additional field of newer vLLM versions."""

    is_prefilling: Tensor | None = None
    """``[R]`` bool, host: whether the request's prompt is not fully computed yet."""


@dataclass
class SparseMetadata(CommonAttentionMetadata):
    """The common metadata of layers with an indexer. vLLM keeps the indices in a buffer of the model instead."""

    topk_indices: Tensor | None = None
    """``[M, K]`` int32, device, ``M >= T``: the keys that each token attends to; negative for none.

    Positions within the token's request, or slots if the backend's conventions state so. They are a mask: their order
    has no meaning. Rows of padding tokens name no key; those from ``T`` on are left from earlier steps."""


Integers: TypeAlias = npt.NDArray[np.signedinteger[Any]]


def host_array(name: str, tensor: Tensor, size: int | None = None) -> Integers:
    """Return a one-dimensional index tensor of the host as an array that shares its memory and must not be written."""
    if tensor.dtype is not torch.int32 and tensor.dtype is not torch.int64:
        raise ReferenceArgumentError(f"{name}.dtype", tensor.dtype, "int32 or int64")
    if not tensor.is_cpu:
        raise ReferenceArgumentError(f"{name}.device", str(tensor.device), "cpu: it is read on the host")
    shape = tuple(tensor.shape)
    if len(shape) != 1 or (size is not None and shape[0] != size):
        raise ReferenceArgumentError(f"{name}.shape", shape, "one axis" if size is None else f"[{size}]")
    return tensor.numpy()


def steps_of(name: str, starts: Integers) -> Integers:
    """Return the difference between each start location and the one before; raise if they decrease."""
    steps = starts[1:] - starts[:-1]
    if len(steps) and steps.min() < 0:
        first = int((steps < 0).argmax())
        raise ReferenceArgumentError(name, starts[first : first + 2].tolist(), f"non-decreasing (entry {first + 1})")
    return steps


def query_bounds(metadata: CommonAttentionMetadata) -> tuple[Integers, Integers]:
    """Return ``query_start_loc_cpu`` and the query lengths of the ``num_reqs`` requests; raise if there are none."""
    num_reqs = require_int("num_reqs", metadata.num_reqs, 1)
    starts = host_array("query_start_loc_cpu", metadata.query_start_loc_cpu, num_reqs + 1)
    return starts, steps_of("query_start_loc_cpu", starts)


def get_dcp_local_seq_lens(
    seq_lens: Tensor,
    dcp_size: int = 1,
    dcp_rank: int | Tensor | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> Tensor:
    """Return how many of the first ``seq_lens`` tokens each rank, or one rank, holds: int32, new, on the same device.

    seq_lens: any shape, int32 or int64, non-negative.
    dcp_size, cp_kv_cache_interleave_size: ``N`` and ``I``.
    dcp_rank: an integer, or one int32 or int64 element on the device of ``seq_lens``, which the host then reads. The
        result has the shape of ``seq_lens``. ``None``: all ranks, along an added last axis of ``N`` (also if ``N`` is
        1) whose sum is ``seq_lens``.

    Every full round of ``N * I`` tokens gives each rank ``I`` tokens. Of the rest, rank ``r`` holds the tokens beyond
    the first ``r * I``, at most ``I``. Raise :class:`~attncheck.errors.ReferenceArgumentError` for invalid arguments.

    >>> get_dcp_local_seq_lens(torch.tensor([10, 3, 0]), dcp_size=2, cp_kv_cache_interleave_size=4).tolist()
    [[6, 4], [3, 0], [0, 0]]
    """
    require_index("seq_lens", seq_lens)
    dcp_size = require_positive_int("dcp_size", dcp_size)
    stripe = require_positive_int("cp_kv_cache_interleave_size", cp_kv_cache_interleave_size)
    rank = None if dcp_rank is None else _one_rank(dcp_rank, dcp_size, seq_lens.device)
    if seq_lens.numel() and (least := int(seq_lens.min())) < 0:
        raise ReferenceArgumentError("seq_lens", least, "0 or more")

    lens = seq_lens.to(torch.int64)
    ranks: int | Tensor
    if rank is None:
        lens, ranks = lens.unsqueeze(-1), torch.arange(dcp_size, device=lens.device)
    else:
        ranks = rank
    rounds = lens.div(dcp_size * stripe, rounding_mode="floor")
    rest = lens - rounds * (dcp_size * stripe)
    return (rounds * stripe + (rest - ranks * stripe).clamp(0, stripe)).to(torch.int32)


def _one_rank(dcp_rank: int | Tensor, dcp_size: int, device: torch.device) -> int:
    if not isinstance(dcp_rank, Tensor):
        return require_int("dcp_rank", dcp_rank, 0, dcp_size - 1)
    require_index("dcp_rank", dcp_rank)
    if dcp_rank.numel() != 1 or dcp_rank.device != device:
        found = f"{tuple(dcp_rank.shape)} on {dcp_rank.device}"
        raise ReferenceArgumentError("dcp_rank", found, f"an integer, or one element on {device}")
    return require_int("dcp_rank", int(dcp_rank), 0, dcp_size - 1)


PrefixRanges = Mapping[int, Sequence[tuple[int, int]]]
"""The ranges by request index; requests without ranges may be absent."""


def compute_mm_prefix_range_tensor(
    mm_prefix_range: PrefixRanges | None, num_seqs: int, device: torch.device
) -> Tensor | None:
    """Return int32 ``[num_seqs, most ranges of a request, 2]`` on ``device``, padded with 0, or None if it is all 0.

    >>> compute_mm_prefix_range_tensor({1: [(2, 5)]}, 2, torch.device("cpu")).tolist()
    [[[0, 0]], [[2, 5]]]
    """
    ranges = [list((mm_prefix_range or {}).get(request, ())) for request in range(num_seqs)]
    table = torch.zeros(num_seqs, max(map(len, ranges), default=0), 2, dtype=torch.int32)
    for row, own in zip(table, ranges, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32).view(-1, 2)
    return table.to(device) if table.any() else None


def fill_mm_prefix_query_ranges(
    out: npt.NDArray[np.int32],
    mm_prefix_range: PrefixRanges | None,
    query_start_loc_cpu: Tensor,
    seq_lens_cpu: Tensor,
) -> int:
    """Write the range of each new token, ``(-1, -1)`` for none, to the front of ``out``; return the number of rows.

    out: ``[at least the new tokens, 2]`` int32. If no range holds a new token, it is not written and 0 is returned.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` if ``out`` has too few rows.
    """
    starts = host_array("query_start_loc_cpu", query_start_loc_cpu)
    query_lens = steps_of("query_start_loc_cpu", starts)
    seq_lens = host_array("seq_lens_cpu", seq_lens_cpu, len(query_lens))
    if not mm_prefix_range or not starts[-1]:
        return 0
    if len(out) < starts[-1]:
        raise ReferenceArgumentError("out.shape", out.shape, f"[at least {starts[-1]}, 2]")
    rows = np.full((int(starts[-1]), 2), -1, dtype=np.int32)
    for request, ranges in mm_prefix_range.items():
        end = int(starts[request + 1])
        positions = np.arange(int(seq_lens[request] - query_lens[request]), int(seq_lens[request]))
        for first, last in ranges:
            if first < last:
                rows[int(starts[request]) : end][(first <= positions) & (positions <= last)] = first, last
    if not (rows >= 0).any():
        return 0
    out[: len(rows)] = rows
    return len(rows)


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
