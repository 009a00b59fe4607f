"""``reshape_and_cache`` by a Triton kernel, as one torch operator."""

import torch
import triton
from torch import Tensor

from attncheck.backends.candidates.triton_unified.kernels.cache import write_cache_kernel
from attncheck.backends.candidates.triton_unified.kernels.shared import CODE_FORMATS, FLOATS
from attncheck.backends.interpreter import is_interpreted

_ROWS, _INTERPRETED_ROWS = 8, 256
"""Rows per program: few, so that a decode step has enough programs for a GPU.

Interpreted, the cost of a program depends on the number of its operations, not on their sizes.
"""


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write new K/V into the caches in place: row ``t`` to slot ``slot_mapping[t]``; negative slots are skipped.

    The definition is :func:`attncheck.reference.reshape_and_cache`, except that slots are not read on the host, and so
    are not refused. A slot beyond the caches is skipped. Of two equal slots, either row may remain.

    key, value: ``[T', Hkv, D]``, ``[T', Hkv, Dv]``, float16, bfloat16 or float32, any strides; rows beyond
        ``slot_mapping`` are padding.
    key_cache, value_cache: ``[NB, BS, Hkv, D]``, ``[NB, BS, Hkv, Dv]``, any strides, one dtype for both: one of those
        three, or float8 (e4m3fn, e5m2) for codes.
    slot_mapping: ``[T]`` int32 or int64, ``T <= T'``.
    k_scale, v_scale: for codes; a number, one element, ``[Hkv]`` or ``[NB, BS, Hkv]``. None: 1.

    Raise ``ValueError`` before anything is written.
    """
    _refuse(key, value, key_cache, value_cache, slot_mapping)
    is_coded = key_cache.dtype in CODE_FORMATS
    scales = [
        _scale_of_slots(name, scale, key_cache) if is_coded else None
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale))
    ]
    _reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *scales)


@torch.library.custom_op("attncheck::reshape_and_cache", mutates_args=("key_cache", "value_cache"))
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Launch the kernel; scales are expanded to ``[NB, BS, Hkv]``, or None if the caches hold no codes."""
    num_blocks, block_size, num_heads, head_size = key_cache.shape
    head_size_v = value_cache.shape[3]
    num_rows = len(slot_mapping) * num_heads
    if num_rows == 0:
        return
    code_format = CODE_FORMATS.get(key_cache.dtype, 0)
    if code_format:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    interpreted = is_interpreted()
    rows = _INTERPRETED_ROWS if interpreted else _ROWS
    with torch.cuda.device_of(key):
        write_cache_kernel[(triton.cdiv(num_rows, rows),)](
            p_key=key,
            p_value=value,
            p_key_cache=key_cache,
            p_value_cache=value_cache,
            p_slots=slot_mapping,
            p_k_scale=key if k_scale is None else k_scale,
            p_v_scale=key if v_scale is None else v_scale,
            num_rows=num_rows,
            num_slots=num_blocks * block_size,
            num_heads=num_heads,
            block_size=block_size,
            stride_key_token=key.stride(0),
            stride_key_head=key.stride(1),
            stride_key_dim=key.stride(2),
            stride_value_token=value.stride(0),
            stride_value_head=value.stride(1),
            stride_value_dim=value.stride(2),
            stride_kc_block=key_cache.stride(0),
            stride_kc_slot=key_cache.stride(1),
            stride_kc_head=key_cache.stride(2),
            stride_kc_dim=key_cache.stride(3),
            stride_vc_block=value_cache.stride(0),
            stride_vc_slot=value_cache.stride(1),
            stride_vc_head=value_cache.stride(2),
            stride_vc_dim=value_cache.stride(3),
            stride_slots=slot_mapping.stride(0),
            stride_ks_block=0 if k_scale is None else k_scale.stride(0),
            stride_ks_slot=0 if k_scale is None else k_scale.stride(1),
            stride_ks_head=0 if k_scale is None else k_scale.stride(2),
            stride_vs_block=0 if v_scale is None else v_scale.stride(0),
            stride_vs_slot=0 if v_scale is None else v_scale.stride(1),
            stride_vs_head=0 if v_scale is None else v_scale.stride(2),
            HEAD_SIZE=head_size,
            HEAD_SIZE_V=head_size_v,
            FORMAT=code_format,
            INTERPRETED=interpreted,
            BLOCK_R=rows,
            BLOCK_D=triton.next_power_of_2(max(1, head_size)),
            BLOCK_V=triton.next_power_of_2(max(1, head_size_v)),
        )


@_reshape_and_cache.register_fake
def _(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Return nothing: the operator only mutates its arguments."""


def _scale_of_slots(name: str, scale: float | Tensor | None, cache: Tensor) -> Tensor:
    """Return a scale for every slot and head, ``[NB, BS, Hkv]``, as an expanded view."""
    if not isinstance(scale, Tensor):
        # Filled on the device, because a copy from the host cannot be part of a CUDA graph.
        scale = torch.full((), 1.0 if scale is None else scale, dtype=torch.float32, device=cache.device)
    shape = cache.shape[:3]
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1).expand(shape)
    if scale.shape not in (shape, shape[2:]):
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}: neither 1 element, {list(shape[2:])} nor {list(shape)}"
        )
    return scale.expand(shape)


def _refuse(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    wrong = []
    if key_cache.dim() != 4 or value_cache.shape[:3] != key_cache.shape[:3] or value_cache.dim() != 4:
        wrong.append(
            f"caches have shapes {tuple(key_cache.shape)} and {tuple(value_cache.shape)}, not [NB, BS, Hkv, D]"
        )
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in (torch.int32, torch.int64):
        wrong.append(f"slot_mapping is {slot_mapping.dtype} {tuple(slot_mapping.shape)}, not int32 or int64 [T]")
    if key_cache.dtype != value_cache.dtype or key_cache.dtype not in (*FLOATS, *CODE_FORMATS):
        wrong.append(f"caches have dtypes {key_cache.dtype} and {value_cache.dtype}")
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if rows.dim() != 3 or rows.shape[1:] != cache.shape[2:] or len(rows) < len(slot_mapping):
            wanted = f"[{len(slot_mapping)}+, {', '.join(map(str, cache.shape[2:]))}]"
            wrong.append(f"{name} has shape {tuple(rows.shape)}, not {wanted}")
        if rows.dtype not in FLOATS:
            wrong.append(f"{name} has dtype {rows.dtype}")
    if wrong:
        raise ValueError("reshape_and_cache: " + "; ".join(wrong))
