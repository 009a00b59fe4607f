"""The latent KV cache of multi-head latent attention: its rows, its writes, and argument checks.

A token has one row, shared by all heads: the latent part ``c`` (``L`` wide, already normalised), then the rotated part
``k_pe`` of the keys (``E`` wide). There is no value cache; values are computed from ``c``.
"""

import torch
from torch import Tensor

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.arguments import (
    host_ints,
    is_float8,
    require_float,
    require_positive_int,
    require_same_device,
    require_scale,
    require_shape,
)
from attncheck.reference.attention.cache import reshape_and_cache
from attncheck.reference.attention.mla_layer import MLAParams


@torch.no_grad()
def mla_write_cache(
    kv_c_normed: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor = 1.0,
) -> None:
    """Write new rows into a latent cache in place: row ``t`` to slot ``slot_mapping[t]``, negative slots skipped.

    kv_c_normed, k_pe: ``[T', L]``, ``[T', E]``, any float dtype but float8. Rows beyond the mapping are padding.
    kv_cache: ``[NB, BS, L + E]``, of any strides. Only the named slots change. A float8 cache receives codes, with the
        same ``k_scale`` for the latent and the rotated part. Other caches receive converted values, without the scale.
    slot_mapping: ``[T]`` int32 or int64, ``T <= T'``; no slot twice.
    k_scale: a number, or one element.

    All arguments are checked before the first write. Raise :class:`~attncheck.errors.ReferenceArgumentError` if one is
    invalid.

    >>> cache = torch.zeros(2, 2, 3)
    >>> mla_write_cache(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]]), cache, torch.tensor([2]))
    >>> cache.view(4, 3)[2]
    tensor([1., 2., 3.])
    """
    parts, slots = {"kv_c_normed": kv_c_normed, "k_pe": k_pe}, host_ints("slot_mapping", slot_mapping)
    for name, rows in parts.items():
        require_float(name, rows)
        require_shape(name, rows, None, None, legend="rows, size")
        if len(rows) < len(slots):
            raise ReferenceArgumentError(f"{name}.shape", tuple(rows.shape), f"at least {len(slots)} rows, one a slot")
    latent = kv_c_normed.shape[1]
    require_float("kv_cache", kv_cache, float8=True)
    require_shape("kv_cache", kv_cache, None, None, latent + k_pe.shape[1], legend="blocks, block_size, L + E")
    require_same_device("kv_cache", kv_cache, **parts)
    if is_float8(kv_cache):
        require_scale("k_scale", k_scale)
    heads = kv_cache.unsqueeze(2)
    reshape_and_cache(
        kv_c_normed.unsqueeze(1),
        k_pe.unsqueeze(1),
        heads[..., :latent],
        heads[..., latent:],
        slot_mapping,
        k_scale=k_scale,
        v_scale=k_scale,
    )


def check_latent(
    queries: dict[str, tuple[Tensor, int]],
    kv_cache: Tensor,
    params: MLAParams,
    k_scale: float | Tensor,
    tile_sizes: tuple[int, int],
) -> None:
    """Raise if tensors, scale or tiles do not fit each other or the layer; ``queries``: name to (tensor, width)."""
    rows = None
    for name, (query, size) in queries.items():
        require_float(name, query)
        require_shape(name, query, rows, params.num_heads, size, legend="rows, num_heads, size")
        rows = query.shape[0]
    require_float("kv_cache", kv_cache, float8=True)
    legend = "blocks, block_size, kv_lora_rank + qk_rope_head_dim"
    require_shape("kv_cache", kv_cache, None, None, params.latent_size, legend=legend)
    if kv_cache.shape[1] == 0:
        raise ReferenceArgumentError("kv_cache.shape", tuple(kv_cache.shape), "at least one token a block")
    require_same_device("kv_cache", kv_cache, **{name: query for name, (query, _) in queries.items()})
    if is_float8(kv_cache):
        require_scale("k_scale", k_scale)
    require_positive_int("q_tile", tile_sizes[0])
    require_positive_int("kv_tile", tile_sizes[1])


def check_weights(w_uk: Tensor, w_uv: Tensor, kv_cache: Tensor, params: MLAParams) -> None:
    """Raise if the up-projections do not fit the layer, or are not on the device of the cache."""
    for name, weight, size in (("w_uk", w_uk, params.qk_nope_head_dim), ("w_uv", w_uv, params.v_head_dim)):
        require_float(name, weight)
        require_shape(name, weight, params.kv_lora_rank, params.num_heads, size, legend="kv_lora_rank, num_heads, size")
        require_same_device("kv_cache", kv_cache, **{name: weight})
