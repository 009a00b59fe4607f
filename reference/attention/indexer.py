"""The indexer of sparse attention: it scores the cached keys of each row, and returns the best of them.

The score of the row ``t`` and the key ``s`` is the sum over the indexer's heads ``h`` of ``w[t, h] * relu(q[t, h] .
k[s])`` (DeepSeek-V3.2, 2025, section 2.1; ``fp8_mqa_logits`` of vLLM). The heads share one key. Weights may be
negative; the model's scale is part of them.
"""

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    host_ints,
    require_float,
    require_positive_int,
    require_same_device,
    require_shape,
)
from attncheck.reference.attention.paged import paged_requests, token_places

SCALE_BYTES = 4
"""Bytes of the float32 scale of an FP8 key."""

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

SMALLEST_MAXIMUM = 1e-4
"""Least magnitude that a scale is made for, as in vLLM."""


@torch.no_grad()
def sparse_attn_indexer(
    query: Tensor,
    weights: Tensor,
    key: Tensor,
    index_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    slot_mapping: Tensor,
    *,
    index_topk: int,
) -> Tensor:
    """Write the new keys, and return the keys of the largest scores of each row: int32 ``[T, index_topk]``.

    An entry is the position of a key up to the row's own, the best one first; behind the last, entries are -1. Of equal
    scores, the earlier key comes first. Rows of no request name no key.

    query, weights: ``[T, H, D]`` and ``[T, H]``, any float dtype; float8 for the query alone, whose scales are part of
        the weights.
    key: ``[T', D]``: row ``t`` goes to slot ``slot_mapping[t]``, negative slots are skipped.
    index_cache: ``[NB, BS, D]``, of any strides, or FP8 keys as in :func:`fp8_index_cache`, which are scaled here.
        Slots that no request owns are never read.
    block_table, seq_lens, query_start_loc, slot_mapping: as in
        :func:`~attncheck.reference.attention.paged.paged_attention`, ``[T]`` for the last.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for undefined arguments.

    >>> cache, query = torch.tensor([[[1.0], [3.0], [2.0]]]), torch.ones(1, 1, 1)
    >>> batch = torch.tensor([[0]]), torch.tensor([3]), torch.tensor([0, 1]), torch.tensor([-1])
    >>> sparse_attn_indexer(query, torch.ones(1, 1), query[0], cache, *batch, index_topk=2).tolist()
    [[1, 2]]
    """
    require_positive_int("index_topk", index_topk)
    has_fp8_keys = index_cache.dtype == torch.uint8
    if not has_fp8_keys:
        require_float("index_cache", index_cache)
    for name, tensor in (("weights", weights), ("key", key)):
        require_float(name, tensor)
    require_float("query", query, float8=True)
    require_shape("query", query, None, None, None, legend="rows, heads, size")
    rows, heads, size = query.shape
    require_shape("weights", weights, rows, heads, legend="rows, heads")
    slot_size = size + SCALE_BYTES if has_fp8_keys else size
    require_shape("index_cache", index_cache, None, None, slot_size, legend="blocks, block_size, size")
    require_shape("key", key, None, size, legend="rows, size")
    require_same_device("query", query, weights=weights, key=key, index_cache=index_cache)
    slots = host_ints("slot_mapping", slot_mapping)
    if len(key) < len(slots):
        raise ReferenceArgumentError("key.shape", tuple(key.shape), f"at least {len(slots)} rows, one a slot")
    requests = paged_requests(("query", query), index_cache, block_table, seq_lens, query_start_loc)
    block_size = index_cache.shape[1]
    keys, scales = fp8_index_cache(index_cache) if has_fp8_keys else (index_cache, None)
    for row, slot in enumerate(slots):
        place = slot // block_size, slot % block_size
        if slot >= 0 and scales is None:
            keys[place] = key[row].to(keys.dtype)
        elif slot >= 0 and scales is not None:
            scales[place] = key[row].float().abs().amax().clamp(min=SMALLEST_MAXIMUM) / FP8_MAX
            keys[place] = (key[row].float() / scales[place]).to(keys.dtype)
    chosen = torch.full((rows, index_topk), -1, dtype=torch.int32, device=query.device)
    for request in requests:
        places = token_places(request.pages, 0, request.seq_len, block_size)
        cached = keys[places].double()
        if scales is not None:
            cached *= scales[places].double()[:, None]
        scores = index_scores(query[request.rows], weights[request.rows], cached)
        for row in range(request.query_len):
            own = scores[row, : max(request.context_len + row + 1, 0)]
            best = own.sort(descending=True, stable=True).indices[:index_topk]
            chosen[request.rows.start + row, : len(best)] = best.to(torch.int32)
    return chosen


def fp8_index_cache(index_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the FP8 keys and their scales: float8_e4m3fn ``[NB, BS, D]`` and float32 ``[NB, BS]``.

    index_cache: uint8 ``[NB, BS, D + 4]``, contiguous within a block, with ``BS * D`` a multiple of 4. The memory of a
    block holds all of its keys, then all of its scales, as ``indexer_k_quant_and_cache`` of vLLM writes it with a scale
    for each key. A scale is the largest magnitude of the key, at least 1e-4, divided by 448.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for another layout.
    """
    num_blocks, block_size, slot_size = index_cache.shape
    key_bytes = block_size * (slot_size - SCALE_BYTES)
    if key_bytes % SCALE_BYTES or not all(block.is_contiguous() for block in index_cache[:1]):
        allowed = "contiguous blocks, whose keys have a multiple of 4 bytes"
        raise ReferenceArgumentError("index_cache", f"{list(index_cache.shape)}, {index_cache.stride()}", allowed)
    blocks = index_cache.view(num_blocks, -1)
    keys = blocks[:, :key_bytes].view(torch.float8_e4m3fn)
    return keys.unflatten(1, (block_size, -1)), blocks[:, key_bytes:].view(torch.float32)


def index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the scores of all ``keys [n, D]`` for each row of ``query [q, H, D]``: float64 ``[q, n]``."""
    products = torch.einsum("qhd,nd->qhn", query.double(), keys.double())
    return torch.einsum("qh,qhn->qn", weights.double(), products.relu())
