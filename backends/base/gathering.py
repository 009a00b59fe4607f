"""Writes new rows into pages, and gathers the keys that a request's rows see, for candidates that use plain tensors.

Only slots that a request owns, and only keys that some row of the request can see, are read. So the contents of other
slots (NaN after a free, a stale tail, a block that a window has returned) do not matter. A float8 cache holds codes,
whose values are ``code * scale``; a scale is a float32 tensor with one element or one per head. This is plain torch,
and deliberately not the reference's code, with which these candidates are compared.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.impl import AttentionLayer
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.attention.params import AttentionParams


@dataclass(frozen=True)
class UnpagedRequest:
    """One request of a step, without paging: its rows, and the keys at positions ``first_key`` and following.

    rows: where the request's rows lie in query and output.
    first_position: the position of the first row; negative if the request has more rows than keys.
    key, value: ``[n, num_kv_heads, head size]``; n may be 0.
    tree: bool ``[rows, rows]``, which of the last keys each row may see; None if there is no tree.
    doc_ranges: its image spans, as first and last position. first_keys: how many it sees beyond a window.
    chosen: bool ``[rows, n]``, the keys that an indexer chose for each row; None without an indexer.
    """

    rows: slice
    first_position: int
    first_key: int
    key: Tensor
    value: Tensor
    tree: Tensor | None = None
    doc_ranges: Sequence[tuple[int, int]] = ()
    first_keys: int = 0
    chosen: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows of the request; at least 1."""
        return int(self.rows.stop - self.rows.start)

    def query_positions(self) -> Tensor:
        """Return the positions of the rows, ``[rows]`` int64, on the keys' device."""
        return torch.arange(self.first_position, self.first_position + self.num_rows, device=self.key.device)

    def key_positions(self) -> Tensor:
        """Return the positions of the keys, ``[n]`` int64, on the keys' device."""
        return torch.arange(self.first_key, self.first_key + len(self.key), device=self.key.device)


def write_pages(
    layer: AttentionLayer, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write row ``t`` of key and value to slot ``slot_mapping[t]``; skip negative slots and extra rows.

    The caches are logical views ``[blocks, block size, num_kv_heads, head size]`` of any strides. Only float8 caches
    hold codes; the layer's scales encode them.
    """
    rows = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[rows]
    block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, layer._k_scale), (value, value_cache, layer._v_scale)):
        if cache.itemsize == 1:
            cache.view(torch.uint8)[block, offset] = encode_fp8(new[rows], scale, cache.dtype).view(torch.uint8)
        else:
            cache[block, offset] = new[rows].to(cache.dtype)


def unpaged_requests(
    params: AttentionParams,
    metadata: PagedMetadata,
    layer: AttentionLayer,
    key: Tensor | None,
    value: Tensor | None,
    caches: tuple[Tensor, Tensor] | None,
    dtype: torch.dtype,
) -> Iterator[UnpagedRequest]:
    """Yield every request that has rows.

    Keys come from ``caches`` through the block table, converted to ``dtype``, or row by row from ``key`` and ``value``.
    """
    scales = layer._k_scale, layer._v_scale
    all_ranges = metadata.common.mm_req_doc_ranges or {}
    prefix_lens = metadata.common.rswa_prefix_lens
    for request, start, end, seq_len in metadata.requests():
        first_position = seq_len - (end - start)
        doc_ranges = all_ranges.get(request, ())
        first_keys = 0 if prefix_lens is None else int(prefix_lens[request])
        lo, hi = key_range(params, first_position, seq_len)
        lo = min([0 if first_keys else lo, *(start for start, end in doc_ranges if end >= first_position)])
        if caches is not None:
            place = token_places(metadata.common.block_table_tensor[request], lo, hi, caches[0])
            found_key, found_value = (
                stored_values(cache[place], scale, dtype) for cache, scale in zip(caches, scales, strict=True)
            )
        elif key is not None and value is not None:
            found_key, found_value = key[start:end], value[start:end]  # an encoder: rows and keys are the same tokens
        else:
            raise RuntimeError("neither a cache nor keys and values to attend to")
        tree = metadata.tree if metadata.tree is not None and len(metadata.tree) == end - start else None
        chosen = None
        if metadata.topk_indices is not None:
            chosen = chosen_keys(metadata.topk_indices[start:end], seq_len)[:, lo:hi]
            found_key, found_value = without_unchosen(found_key, chosen), without_unchosen(found_value, chosen)
        yield UnpagedRequest(
            slice(start, end), first_position, lo, found_key, found_value, tree, doc_ranges, first_keys, chosen
        )


def chosen_keys(topk_indices: Tensor, num_keys: int) -> Tensor:
    """Return which of ``num_keys`` keys each row of ``topk_indices [..., K]`` names, bool ``[..., num_keys]``."""
    exists = (topk_indices >= 0) & (topk_indices < num_keys)
    index = torch.where(exists, topk_indices, num_keys).long()
    named = torch.zeros(*index.shape[:-1], num_keys + 1, dtype=torch.bool, device=index.device)
    return named.scatter_(-1, index, True)[..., :num_keys]


def without_unchosen(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return keys or values ``[..., n, heads, size]`` with zeros where no row of ``chosen [..., rows, n]`` sees them.

    Their contents must not matter, and a weight of 0 does not hide NaN.
    """
    return rows.masked_fill(~chosen.any(dim=-2)[..., None, None], 0)


def grouped_requests(found: Iterable[UnpagedRequest], limit: int | None) -> Iterator[list[UnpagedRequest]]:
    """Yield groups of consecutive requests with rows x keys within ``limit`` (None: no limit); trees are kept apart."""
    group: list[UnpagedRequest] = []
    for piece in found:
        together = [*group, piece]
        scores = sum(one.num_rows for one in together) * sum(len(one.key) for one in together)
        is_other = bool(group) and (group[0].tree is None) != (piece.tree is None)
        if is_other or (group and limit is not None and scores > limit):
            yield group
            together = [piece]
        group = together
    if group:
        yield group


def stored_values(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the contents of a cache in ``dtype``; only FP8 codes are scaled."""
    return decode_fp8(stored, scale, dtype) if stored.itemsize == 1 else stored.to(dtype)


def key_range(params: AttentionParams, first_position: int, seq_len: int) -> tuple[int, int]:
    """Return the range ``lo <= j < hi`` of positions with every key that some row sees; rows end at ``seq_len - 1``.

    >>> key_range(AttentionParams(1, 1, 8, window=(3, 0)), first_position=7, seq_len=9)
    (4, 9)
    """
    left, _ = params.window
    lo = max(0, first_position - left) if left >= 0 else 0
    if params.attn_chunk_size is not None:
        lo = max(lo, first_position // params.attn_chunk_size * params.attn_chunk_size)
    return min(lo, seq_len), seq_len


def token_places(table_row: Tensor, lo: int, hi: int, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return block and offset of positions ``lo <= j < hi`` in a cache ``[blocks, size, ...]``, int64 each."""
    positions = torch.arange(lo, hi, device=cache.device)
    blocks = table_row[positions // cache.shape[1]].to(device=cache.device, dtype=torch.int64)
    return blocks, positions % cache.shape[1]


def encode_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of ``x`` (``[..., heads, size]``) in ``dtype``: rounded to nearest, saturating, NaN kept."""
    limit = torch.finfo(dtype).max
    return (x.to(torch.float32) / scale.reshape(-1, 1)).clamp(-limit, limit).to(dtype)


def decode_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of codes (``[..., heads, size]``), rounded to ``dtype``."""
    return (codes.to(torch.float32) * scale.reshape(-1, 1)).to(dtype)
