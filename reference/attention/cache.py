"""The paged KV cache: float8 codes, slot mapping, writes, block copies, and views of packed K/V.

A cache is a logical ``[NB, BS, Hkv, D]`` tensor of any strides. NHD memory ``[NB, BS, Hkv, D]``, HND memory
``[NB, Hkv, BS, D]``, and K and V in one tensor are only different views. A slot is ``block * BS + offset``, in 64 bits
because pools beyond 2**31 elements exist. The value of a float8 code is ``code * scale``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    FLOAT8_DTYPES,
    host_ints,
    is_float8,
    require_broadcast,
    require_float,
    require_float_dtype,
    require_index,
    require_positive_int,
    require_same_device,
    require_scale,
    require_shape,
    require_shard,
)


@torch.no_grad()
def quantize_fp8(x: Tensor, scale: float | Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return the codes ``round_fp8(clamp(float32(x) / float32(scale), -max, max))``: new, of the shape of ``x``.

    Rounding is to nearest, ties to even. Values saturate, infinities too; NaN stays NaN. ``scale`` is the
    dequantisation factor, a number or a tensor that broadcasts to ``x``. ``x`` is divided by it, as in vLLM:
    multiplying by the reciprocal could differ by one code. ``max`` is the largest finite number of ``dtype``: 448 for
    ``float8_e4m3fn``, 57344 for ``float8_e5m2``, 240 for ``float8_e4m3fnuz``.

    >>> quantize_fp8(torch.tensor([1.0, 3.3, 1e9, -1e9]), 2.0).float()
    tensor([   0.5000,    1.6250,  448.0000, -448.0000])
    """
    require_float("x", x)
    _check_scale(scale, x)
    _require_float8_dtype(dtype)
    return fp8_codes(x, scale, dtype)


@torch.no_grad()
def dequantize_fp8(codes: Tensor, scale: float | Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return ``code * scale`` in ``dtype``: new, of the shape of ``codes``.

    ``scale`` is a number (used exactly, not through float32) or a tensor that broadcasts to ``codes``.

    >>> dequantize_fp8(torch.tensor([0.5, 1.625]).to(torch.float8_e4m3fn), 2.0)
    tensor([1.0000, 3.2500], dtype=torch.float64)
    """
    if not is_float8(codes):
        raise ReferenceArgumentError("codes.dtype", codes.dtype, "a float8 dtype")
    _check_scale(scale, codes)
    require_float_dtype("dtype", dtype)
    return fp8_values(codes, scale, dtype)


@torch.no_grad()
def quantize_fp8_group(x: Tensor, group: int, *, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Return ``(codes [T, N], scales [T, N // group])``, with one scale per ``group`` consecutive numbers of a row.

    Per group, in float32: ``scale = amax / max`` and ``codes = quantize_fp8(x, scale)``. The scale is 1 if
    ``amax / max`` is 0, because the group is all zeros or underflows. The largest number of a group gets the largest
    code. Groups are independent. If a group holds a NaN or an infinity, that becomes its scale.

    x: ``[T, N]``, any float dtype but float8; ``group`` divides ``N``. dtype: a float8 dtype.

    >>> codes, scales = quantize_fp8_group(torch.tensor([[448.0, -224.0, 0.0, 0.0], [1.0, 2.0, 896.0, 3.0]]), 2)
    >>> codes.float().tolist()
    [[448.0, -224.0, 0.0, 0.0], [224.0, 448.0, 448.0, 1.5]]
    >>> [round(scale, 6) for scale in scales.flatten().tolist()]
    [1.0, 1.0, 0.004464, 2.0]
    """
    require_float("x", x)
    require_shape("x", x, None, None, legend="rows, numbers")
    require_positive_int("group", group)
    if x.shape[1] % group:
        raise ReferenceArgumentError("group", group, f"a divisor of {x.shape[1]}, the width of x")
    _require_float8_dtype(dtype)
    groups = x.float().reshape(len(x), x.shape[1] // group, group)
    scales = groups.abs().amax(-1) / torch.finfo(dtype).max
    scales.masked_fill_(scales == 0, 1.0)
    return fp8_codes(groups, scales.unsqueeze(-1), dtype).reshape(x.shape), scales


def fp8_codes(x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return :func:`quantize_fp8` of checked arguments."""
    divisor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    limit = torch.finfo(dtype).max
    return x.float().div(divisor).clamp_(-limit, limit).to(dtype)


def fp8_values(codes: Tensor, scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Return :func:`dequantize_fp8` of checked arguments."""
    return codes.to(dtype).mul_(scale.to(codes.device, dtype) if isinstance(scale, Tensor) else scale)


def _require_float8_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOAT8_DTYPES:
        raise ReferenceArgumentError("dtype", dtype, "a float8 dtype")


def _check_scale(scale: float | Tensor, x: Tensor) -> None:
    if not isinstance(scale, Tensor):
        require_scale("scale", scale)
    else:
        require_float("scale", scale)
        require_broadcast("scale", scale, x.shape)
        if not (scale > 0).all():
            raise ReferenceArgumentError("scale", scale.min().item(), "positive everywhere")


@torch.no_grad()
def compute_slot_mapping(
    positions: Tensor,
    req_indices: Tensor,
    block_table: Tensor,
    block_size: int,
    *,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
) -> Tensor:
    """Return the slot of every token: int64 ``[T]`` on the device of ``positions``, -1 for tokens another rank holds.

    positions, req_indices: ``[T]`` int32 or int64: the token's position in its request, and its request.
    block_table: ``[R, M]`` int32 or int64, of this rank. Only the entries of this rank's tokens are read.
    dcp_size, dcp_rank, cp_kv_cache_interleave_size: decode context parallelism. Ranks take turns at this many
        consecutive positions, and each rank numbers its own positions densely. The default is one rank.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for a negative position, a request or a page outside the
    table, a negative block, or an interleave that does not divide ``block_size``.

    >>> positions, requests = torch.tensor([2, 3, 4, 9]), torch.tensor([0, 0, 0, 1])
    >>> table = torch.tensor([[7, 5, 0], [6, 3, 8]])
    >>> slots = []
    >>> for position, request in zip(positions.tolist(), requests.tolist()):
    ...     slots.append(int(table[request, position // 4]) * 4 + position % 4)
    >>> slots == compute_slot_mapping(positions, requests, table, block_size=4).tolist() == [30, 31, 20, 33]
    True
    >>> compute_slot_mapping(positions, requests, table, block_size=4, dcp_size=2, dcp_rank=1).tolist()
    [-1, 29, -1, 12]
    """
    for name, tensor in (("positions", positions), ("req_indices", req_indices), ("block_table", block_table)):
        require_index(name, tensor)
    require_shape("positions", positions, None)
    require_shape("req_indices", req_indices, len(positions), legend="one a token")
    require_shape("block_table", block_table, None, None, legend="requests, pages")
    require_positive_int("block_size", block_size)
    interleave = cp_kv_cache_interleave_size
    require_shard(block_size, dcp_size, dcp_rank, interleave)

    position, request = positions.to(torch.int64), req_indices.to(positions.device, torch.int64)
    capacity = block_table.shape[1] * block_size
    _require_range("positions", position, 0, capacity if dcp_size == 1 else None)
    _require_range("req_indices", request, 0, len(block_table))
    table = block_table.to(positions.device)
    if dcp_size == 1:
        return _slots(position, request, table, block_size)
    mine = position.div(interleave, rounding_mode="floor") % dcp_size == dcp_rank
    slots = torch.full_like(position, -1)
    local = position.div(interleave * dcp_size, rounding_mode="floor") * interleave + position % interleave
    local, request = local[mine], request[mine]
    _require_range("positions on this rank", local, 0, capacity)
    slots[mine] = _slots(local, request, table, block_size)
    return slots


@torch.no_grad()
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
) -> None:
    """Write new K/V into the caches in place: row ``t`` to slot ``slot_mapping[t]``, negative slots skipped.

    key, value: ``[T', Hkv, D]``, ``[T', Hkv, Dv]``, any float dtype but float8. Rows beyond the mapping are padding.
    key_cache, value_cache: ``[NB, BS, Hkv, D]``, ``[NB, BS, Hkv, Dv]``, views of any strides. Only the named slots
        change. Float8 caches receive codes (:func:`~attncheck.reference.attention.cache.quantize_fp8`). Other caches
        receive converted values, and the scales are ignored.
    slot_mapping: ``[T]`` int32 or int64, ``T <= T'``; no slot twice.
    k_scale, v_scale: a number, one element, ``[Hkv]`` or ``[NB, BS, Hkv]``.

    All arguments are checked before the first write. Raise :class:`~attncheck.errors.ReferenceArgumentError` if one is
    invalid.

    >>> key, cache = torch.arange(1.0, 4.0).view(3, 1, 1), torch.zeros(2, 4, 1, 1)
    >>> reshape_and_cache(key, key, cache, cache.clone(), torch.tensor([6, -1]))
    >>> cache.view(2, 4)
    tensor([[0., 0., 0., 0.],
            [0., 0., 1., 0.]])
    """
    legend = "blocks, block_size, num_kv_heads, head_size"
    check_cache("key_cache", key_cache, None, None, None, None, legend=legend, scale=k_scale)
    check_cache("value_cache", value_cache, *key_cache.shape[:3], None, legend="as the key cache", scale=v_scale)
    halves = (("key", key, key_cache, k_scale), ("value", value, value_cache, v_scale))
    slots = host_ints("slot_mapping", slot_mapping)
    for name, rows, cache, _ in halves:
        require_float(name, rows)
        require_shape(name, rows, None, *cache.shape[2:], legend="rows, num_kv_heads, head_size")
        require_same_device("key", key, **{name: rows, f"{name}_cache": cache})
        if len(rows) < len(slots):
            raise ReferenceArgumentError(f"{name}.shape", tuple(rows.shape), f"at least {len(slots)} rows, one a slot")
    num_blocks, block_size = key_cache.shape[:2]
    live = [slot for slot in slots if slot >= 0]
    if live and max(live) >= num_blocks * block_size:
        raise ReferenceArgumentError("slot_mapping", max(live), f"a slot below {num_blocks * block_size}, or negative")
    if (twice := _first_repeated(live)) is not None:
        raise ReferenceArgumentError("slot_mapping", twice, "a slot named once: two writes have no order")

    slot = slot_mapping.to(key.device, torch.int64)
    tokens = (slot >= 0).nonzero().squeeze(-1)
    blocks, offsets = slot[tokens] // block_size, slot[tokens] % block_size
    for _, rows, cache, scale in halves:
        if is_float8(cache):
            codes = fp8_codes(rows[tokens], _scale_of_rows(scale, blocks, offsets), cache.dtype)
            cache.view(torch.uint8)[blocks, offsets] = codes.view(torch.uint8)
        else:
            cache[blocks, offsets] = rows[tokens].to(cache.dtype)


@torch.no_grad()
def copy_blocks(caches: Sequence[Tensor], mapping: Tensor) -> None:
    """Copy block ``s`` to block ``d`` in every cache, in place, for each row ``(s, d)`` of ``mapping``.

    caches: block axis first, of any further shape, strides and dtype.
    mapping: ``[n, 2]`` int32 or int64. All sources are read before the first write, so a chain copies the old contents.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` if a destination occurs twice.

    >>> cache = torch.tensor([[1.0], [2.0], [3.0]])
    >>> copy_blocks([cache], torch.tensor([[0, 1], [1, 2]]))
    >>> cache.flatten().tolist()
    [1.0, 1.0, 2.0]
    """
    pairs = _block_pairs(mapping)
    for index, cache in enumerate(caches):
        _check_blocks(f"caches[{index}]", cache, pairs, 0)
        _check_blocks(f"caches[{index}]", cache, pairs, 1)
    for cache in caches:
        _copy(cache, cache, pairs)


@torch.no_grad()
def swap_blocks(src: Tensor, dst: Tensor, mapping: Tensor) -> None:
    """Copy ``src[s]`` to ``dst[d]``, in place on ``dst``, for each row ``(s, d)`` of ``mapping``; devices may differ.

    Blocks of both tensors have the same shape and dtype. Raise :class:`~attncheck.errors.ReferenceArgumentError` if a
    destination occurs twice.
    """
    pairs = _block_pairs(mapping)
    require_shape("dst", dst, None, *src.shape[1:], legend="blocks as in src")
    if src.dtype != dst.dtype:
        raise ReferenceArgumentError("dst.dtype", dst.dtype, f"{src.dtype}, as src")
    _check_blocks("src", src, pairs, 0)
    _check_blocks("dst", dst, pairs, 1)
    _copy(src, dst, pairs)


def kv_cache_views(cache: Tensor, packing: str, head_size: int) -> tuple[Tensor, Tensor]:
    """Return logical views ``(key [NB, BS, Hkv, D], value [NB, BS, Hkv, Dv])`` that share memory with ``cache``.

    ======================  ==========================  ========================================
    packing                 shape of ``cache``          position of K and V
    ======================  ==========================  ========================================
    ``"split_first"``       ``[2, NB, BS, Hkv, D]``     two halves of the pool
    ``"split_second"``      ``[NB, 2, BS, Hkv, D]``     two halves of each block
    ``"content"``           ``[NB, Hkv, BS, D + Dv]``   K then V in each token's row
    ``"plane"``             ``[NB, Hkv, 2 * BS, D]``    per block and head, a K plane then a V plane
    ======================  ==========================  ========================================

    ``head_size``: ``D``. Raise :class:`~attncheck.errors.ReferenceArgumentError` if the shape does not fit.

    >>> key, value = kv_cache_views(torch.arange(12.0).view(1, 2, 2, 3), "content", head_size=2)
    >>> key.shape, value.shape, value[0, 1].flatten().tolist()
    (torch.Size([1, 2, 2, 2]), torch.Size([1, 2, 2, 1]), [5.0, 11.0])
    """
    require_positive_int("head_size", head_size)
    if packing == "split_first":
        require_shape("cache", cache, 2, None, None, None, head_size)
        return cache[0], cache[1]
    if packing == "split_second":
        require_shape("cache", cache, None, 2, None, None, head_size)
        return cache[:, 0], cache[:, 1]
    if packing == "content":
        require_shape("cache", cache, None, None, None, None)
        if cache.shape[3] <= head_size:
            raise ReferenceArgumentError("cache.shape", tuple(cache.shape), f"wider than head_size {head_size}")
        rows = cache.transpose(1, 2)
        return rows[..., :head_size], rows[..., head_size:]
    if packing == "plane":
        require_shape("cache", cache, None, None, None, head_size)
        if cache.shape[2] % 2:
            raise ReferenceArgumentError("cache.shape", tuple(cache.shape), "even in axis 2: a K plane and a V plane")
        rows, block_size = cache.transpose(1, 2), cache.shape[2] // 2
        return rows[:, :block_size], rows[:, block_size:]
    raise ReferenceArgumentError("packing", packing, "split_first, split_second, content or plane")


def check_cache(name: str, cache: Tensor, *sizes: int | None, legend: str, scale: float | Tensor) -> None:
    """Raise if a cache has another dtype or shape, no token a block, or float8 codes without a valid scale.

    sizes: of all axes, None for any. scale: called ``k_scale`` or ``v_scale``, by the first letter of ``name``. If the
    cache has a head axis, it may have one scale per head or per slot.
    """
    require_float(name, cache, float8=True)
    require_shape(name, cache, *sizes, legend=legend)
    if cache.shape[1] == 0:
        raise ReferenceArgumentError(f"{name}.shape", tuple(cache.shape), "at least one token a block")
    if is_float8(cache):
        several = [cache.shape[2:3], cache.shape[:3]] if cache.dim() == 4 else []
        require_scale(f"{name[0]}_scale", scale, *several)


def _slots(position: Tensor, request: Tensor, table: Tensor, block_size: int) -> Tensor:
    """``table[request, position // block_size] * block_size + position % block_size``, in few passes."""
    width = table.shape[1]
    page = position.div(block_size, rounding_mode="floor")
    block = table.flatten().index_select(0, torch.add(page, request, alpha=width)).to(torch.int64)
    _require_range("block_table", block, 0, None)
    return torch.add(position, block - page, alpha=block_size)


def _scale_of_rows(scale: float | Tensor, blocks: Tensor, offsets: Tensor) -> float | Tensor:
    """Return the scale in a shape that broadcasts to the rows ``[n, Hkv, size]`` written to the given slots."""
    if not isinstance(scale, Tensor):
        return scale
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() > 1:
        scale = scale[blocks.to(scale.device), offsets.to(scale.device)]
    return scale.unsqueeze(-1)


def _first_repeated(numbers: Sequence[int]) -> int | None:
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            return number
        seen.add(number)
    return None


def _block_pairs(mapping: Tensor) -> Tensor:
    require_index("mapping", mapping)
    require_shape("mapping", mapping, None, 2, legend="pairs (source, destination)")
    if (twice := _first_repeated(mapping[:, 1].tolist())) is not None:
        raise ReferenceArgumentError("mapping[:, 1]", twice, "a destination named once: two writes have no order")
    return mapping.to(torch.int64)


def _check_blocks(name: str, cache: Tensor, pairs: Tensor, column: int) -> None:
    if cache.dim() == 0:
        raise ReferenceArgumentError(f"{name}.shape", (), "with the block axis first")
    _require_range(f"mapping[:, {column}]", pairs[:, column], 0, len(cache))


def _copy(src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    if is_float8(src):
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    blocks = src[pairs[:, 0].to(src.device)]
    dst[pairs[:, 1].to(dst.device)] = blocks.to(dst.device)


def _require_range(name: str, values: Tensor, low: int, end: int | None) -> None:
    """Raise unless ``low <= value < end`` for all values."""
    if not values.numel():
        return
    least, greatest = (int(value) for value in values.aminmax())
    if least < low or (end is not None and greatest >= end):
        allowed = f"at least {low}" if end is None else f"from {low} to {end - 1}"
        raise ReferenceArgumentError(name, least if least < low else greatest, allowed)
