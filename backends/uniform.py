"""Writes and gathers for steps in which every request has the same number of rows, in a form that a graph can capture.

All shapes follow from numbers that a graph freezes: rows per request, requests, pages in a table row, and the bound of
all lengths. Lengths, tables and slots are read on the device, by operators that neither wait for it nor have shapes
that depend on contents. So a replay stays right after the tensors were refilled. The contents of other slots do not
matter, and only the mapped slots are written.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.base.gathering import chosen_keys, encode_fp8, stored_values, without_unchosen
from attncheck.backends.impl import AttentionLayer
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.attention.params import AttentionParams

_PIECE_ELEMENTS = 2**24
"""Maximum elements of a piece's keys (or values), counted as if repeated for every query head: 64 MiB in float32.

A larger step is computed in several pieces.
"""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""The integer dtype, by bytes per element, in which a cache is copied, so that NaN and codes keep their bits."""


@dataclass(frozen=True)
class UniformRequests:
    """Some of a step's requests, without paging: ``n`` requests of ``q`` rows, with room for ``s`` keys each.

    rows: where their rows lie in query and output.
    query_positions: int64 ``[n, q]``, negative if a request has more rows than keys.
    key_positions: int64 ``[n, s]``.
    exists: bool ``[n, s]``, whether there is a key at that position.
    key, value: ``[n, s, num_kv_heads, head size]``; keys gathered from a cache repeat the last key where there is none,
        because even values that no row sees must not be NaN.
    is_real: bool ``[n, q]``, False for rows of padding.
    chosen: bool ``[n, q, s]``, the keys that an indexer chose for each row; None without an indexer.
    """

    rows: slice
    query_positions: Tensor
    key_positions: Tensor
    exists: Tensor
    key: Tensor
    value: Tensor
    is_real: Tensor
    chosen: Tensor | None = None


def uniform_query_len(metadata: PagedMetadata, limit: int) -> int | None:
    """Return the number of rows per request if all have the same number, at most ``limit``; otherwise None.

    Padding requests, which have no rows, are not counted.
    """
    lens = metadata.query_lens
    query_len = lens[0] if lens else 0
    num_padding = lens.count(0)
    real = lens[: len(lens) - num_padding]
    return query_len if 0 < query_len <= limit and set(real) == {query_len} else None


def write_slots(
    layer: AttentionLayer, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store row ``t`` of key and value at slot ``slot_mapping[t]``; skip negative slots and extra rows.

    The result is that of :func:`~attncheck.backends.base.gathering.write_pages`. This form works for every step and can
    be captured.
    """
    num_rows = len(slot_mapping)
    if not num_rows:
        return
    has_slot, slots = (slot_mapping >= 0)[:, None, None], slot_mapping.clamp(min=0)
    place = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, layer._k_scale), (value, value_cache, layer._v_scale)):
        rows = new[:num_rows]
        stored = encode_fp8(rows, scale, cache.dtype) if cache.itemsize == 1 else rows.to(cache.dtype)
        bits = cache.view(_BITS[cache.itemsize])
        # A row without a slot writes back what slot 0 holds, bit for bit. Slot 0 is in the null page, which no row
        # names.
        bits[place] = torch.where(has_slot, stored.view(bits.dtype), bits[place])


def uniform_requests(
    params: AttentionParams,
    metadata: PagedMetadata,
    query_len: int,
    layer: AttentionLayer,
    key: Tensor | None,
    value: Tensor | None,
    caches: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Iterator[UniformRequests]:
    """Yield the step's requests in pieces, ``query_len`` rows each, padding included.

    Keys come from ``caches`` through the block table, converted to ``dtype``, or row by row from ``key`` and ``value``.
    """
    common, device = metadata.common, metadata.common.seq_lens.device
    num_reqs = min(common.num_reqs, common.num_actual_tokens // query_len)
    left, _ = params.window
    num_keys = query_len
    if caches is not None:
        num_keys = min(common.max_seq_len, common.block_table_tensor.shape[1] * caches[0].shape[1])
        num_keys = num_keys if left < 0 else min(num_keys, left + query_len)
    step = _requests_at_once(params, num_keys)
    for first in range(0, num_reqs, step):
        requests = slice(first, min(first + step, num_reqs))
        rows = slice(requests.start * query_len, requests.stop * query_len)
        seq_lens = common.seq_lens[requests, None].to(torch.int64)
        first_position = seq_lens - query_len
        first_key = torch.zeros_like(seq_lens) if left < 0 else (first_position - left).clamp(min=0)
        key_positions = first_key + torch.arange(num_keys, device=device)
        exists = key_positions < seq_lens
        if caches is not None:
            table, scales = common.block_table_tensor[requests], (layer._k_scale, layer._v_scale)
            place = _places(table, key_positions, seq_lens, caches[0].shape[1])
            gathered = [cache.view(_BITS[cache.itemsize])[place].view(cache.dtype) for cache in caches]
            found = [stored_values(stored, scale, dtype) for stored, scale in zip(gathered, scales, strict=True)]
        elif key is not None and value is not None:
            is_absent = ~exists[:, :, None, None]
            found = [given[rows].unflatten(0, exists.shape).masked_fill(is_absent, 0) for given in (key, value)]
        else:
            raise RuntimeError("neither a cache nor keys and values to attend to")
        chosen = None
        if metadata.topk_indices is not None:
            chosen = chosen_keys(metadata.topk_indices[rows].unflatten(0, (-1, query_len)), num_keys)
            found = [without_unchosen(each, chosen) for each in found]
        is_real = torch.arange(rows.start, rows.stop, device=device) < common.query_start_loc[-1]
        yield UniformRequests(
            rows=rows,
            query_positions=first_position + torch.arange(query_len, device=device),
            key_positions=key_positions,
            exists=exists,
            key=found[0],
            value=found[1],
            is_real=is_real.unflatten(0, (-1, query_len)),
            chosen=chosen,
        )


def _requests_at_once(params: AttentionParams, num_keys: int) -> int:
    elements = params.num_heads * num_keys * max(params.head_size, params.value_head_size)
    return max(1, _PIECE_ELEMENTS // max(1, elements))


def _places(table: Tensor, positions: Tensor, seq_lens: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Return block and offset of positions ``[n, s]`` of the requests of ``table``.

    Positions beyond the last key map to the last key, and those of a request without keys to block 0, because other
    table entries need not be pages.
    """
    within = torch.minimum(positions, seq_lens - 1).clamp_(0, table.shape[1] * block_size - 1)
    return table.gather(1, within // block_size) * (seq_lens > 0), within % block_size
