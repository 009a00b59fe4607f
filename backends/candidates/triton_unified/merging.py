"""``merge_attn_states`` by a Triton kernel, as one torch operator."""

import torch
import triton
from torch import Tensor

from attncheck.backends.candidates.triton_unified.kernels.merging import merge_states_kernel
from attncheck.backends.candidates.triton_unified.kernels.shared import FLOATS
from attncheck.backends.interpreter import is_interpreted

_ROWS, _INTERPRETED_ROWS = 8, 256
"""Rows per program: few, so that a GPU has enough programs.

Interpreted, the cost of a program depends on the number of its operations, not on their sizes.
"""


def merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the attention ``(out, lse)`` over the union of two disjoint key sets, from the state of each.

    The definition is :func:`attncheck.reference.merge_attn_states`: per row and head, ``lse = ln(exp(lse_a) +
    exp(lse_b))``, and the outs weighted by ``exp(lse_i - lse)``. A state with an infinite LSE, of either sign, is
    empty, and its out is ignored. Two empty states give 0 and -inf.

    out_a, out_b: ``[T, H, Dv]``, float16, bfloat16 or float32, any strides. lse_a, lse_b: ``[T, H]``, natural
    logarithms of one of these dtypes. The results are new: ``out`` in the wider dtype of the two, computed in float32,
    and ``lse`` in float32. Raise ``ValueError`` for other shapes or dtypes.
    """
    _refuse(out_a, lse_a, out_b, lse_b)
    merged: tuple[Tensor, Tensor] = _merge_attn_states(out_a, lse_a, out_b, lse_b)
    return merged


@torch.library.custom_op("attncheck::merge_attn_states", mutates_args=())
def _merge_attn_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _results(out_a, out_b)
    num_tokens, num_heads, head_size_v = out.shape
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return out, lse
    interpreted = is_interpreted()
    rows = _INTERPRETED_ROWS if interpreted else _ROWS
    with torch.cuda.device_of(out):
        merge_states_kernel[(triton.cdiv(num_rows, rows),)](
            p_out_a=out_a,
            p_lse_a=lse_a,
            p_out_b=out_b,
            p_lse_b=lse_b,
            p_out=out,
            p_lse=lse,
            num_rows=num_rows,
            stride_a_token=out_a.stride(0),
            stride_a_head=out_a.stride(1),
            stride_a_dim=out_a.stride(2),
            stride_lse_a_token=lse_a.stride(0),
            stride_lse_a_head=lse_a.stride(1),
            stride_b_token=out_b.stride(0),
            stride_b_head=out_b.stride(1),
            stride_b_dim=out_b.stride(2),
            stride_lse_b_token=lse_b.stride(0),
            stride_lse_b_head=lse_b.stride(1),
            stride_out_token=out.stride(0),
            stride_out_head=out.stride(1),
            stride_out_dim=out.stride(2),
            stride_lse_token=lse.stride(0),
            stride_lse_head=lse.stride(1),
            NUM_HEADS=num_heads,
            HEAD_SIZE_V=head_size_v,
            INTERPRETED=interpreted,
            BLOCK_R=rows,
            BLOCK_V=triton.next_power_of_2(head_size_v),
        )
    return out, lse


@_merge_attn_states.register_fake
def _(
    out_a: Tensor,
    lse_a: Tensor,  # noqa: ARG001 (the operator's own arguments)
    out_b: Tensor,
    lse_b: Tensor,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    return _results(out_a, out_b)


def _results(out_a: Tensor, out_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors for ``out`` and ``lse``."""
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    out = torch.empty(out_a.shape, dtype=dtype, device=out_a.device)
    return out, torch.empty(out_a.shape[:2], dtype=torch.float32, device=out_a.device)


def _refuse(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    wrong = []
    if out_a.dim() != 3:
        wrong.append(f"out_a has shape {tuple(out_a.shape)}, not [T, H, Dv]")
    for name, given, shape in (
        ("lse_a", lse_a, out_a.shape[:2]),
        ("out_b", out_b, out_a.shape),
        ("lse_b", lse_b, out_a.shape[:2]),
    ):
        if given.shape != shape:
            wrong.append(f"{name} has shape {tuple(given.shape)}, not {tuple(shape)}")
    for name, given in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if given.dtype not in FLOATS:
            wrong.append(f"{name} has dtype {given.dtype}")
    if wrong:
        raise ValueError("merge_attn_states: " + "; ".join(wrong))
