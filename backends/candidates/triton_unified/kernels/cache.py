"""Kernels that write new keys and values into a paged cache."""

import triton
import triton.language as tl

from attncheck.backends.candidates.triton_unified.kernels.shared import encode_codes, rounded


# Triton specialises integers that are 1 or multiples of 16, which gains nothing for these.
@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_slots",
        "num_heads",
        "block_size",
        "stride_slots",
        "stride_ks_block",
        "stride_ks_slot",
        "stride_ks_head",
        "stride_vs_block",
        "stride_vs_slot",
        "stride_vs_head",
    ],
    do_not_specialize_on_alignment=["p_slots"],
)
def write_cache_kernel(
    p_key,  # [T', Hkv, D]
    p_value,  # [T', Hkv, Dv]
    p_key_cache,  # [NB, BS, Hkv, D]
    p_value_cache,  # [NB, BS, Hkv, Dv]
    p_slots,  # [T]
    p_k_scale,  # [NB, BS, Hkv], strides of 0 where it is constant; read only if FORMAT is not 0
    p_v_scale,
    num_rows,  # T * Hkv
    num_slots,  # NB * BS
    num_heads,
    block_size,
    stride_key_token: tl.int64,
    stride_key_head: tl.int64,
    stride_key_dim,  # untyped, so that Triton specialises a stride of 1
    stride_value_token: tl.int64,
    stride_value_head: tl.int64,
    stride_value_dim,
    stride_kc_block: tl.int64,
    stride_kc_slot: tl.int64,
    stride_kc_head: tl.int64,
    stride_kc_dim,
    stride_vc_block: tl.int64,
    stride_vc_slot: tl.int64,
    stride_vc_head: tl.int64,
    stride_vc_dim,
    stride_slots: tl.int64,
    stride_ks_block: tl.int64,
    stride_ks_slot: tl.int64,
    stride_ks_head: tl.int64,
    stride_vs_block: tl.int64,
    stride_vs_slot: tl.int64,
    stride_vs_head: tl.int64,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    FORMAT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write ``BLOCK_R`` rows per program; a row is one head of one token. ``FORMAT``: that of the codes, 0 if none."""
    # The product of a token or block number and a stride needs 64 bits.
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_row = o_row < num_rows
    o_token, o_head = o_row // num_heads, o_row % num_heads
    b_slot = tl.load(p_slots + o_token * stride_slots, mask=m_row, other=-1).to(tl.int64)  # [R]
    m_row = m_row & (b_slot >= 0) & (b_slot < num_slots)
    # Integer division rounds towards zero on a GPU, so a negative slot must not become an offset.
    b_slot = tl.where(m_row, b_slot, 0)
    o_block, o_slot = b_slot // block_size, b_slot % block_size

    o_scale = o_block * stride_ks_block + o_slot * stride_ks_slot + o_head * stride_ks_head
    _write_rows(
        p_key + o_token * stride_key_token + o_head * stride_key_head,
        p_key_cache + o_block * stride_kc_block + o_slot * stride_kc_slot + o_head * stride_kc_head,
        p_k_scale + o_scale,
        m_row,
        stride_key_dim,
        stride_kc_dim,
        HEAD_SIZE,
        FORMAT,
        INTERPRETED,
        BLOCK_D,
    )
    o_scale = o_block * stride_vs_block + o_slot * stride_vs_slot + o_head * stride_vs_head
    _write_rows(
        p_value + o_token * stride_value_token + o_head * stride_value_head,
        p_value_cache + o_block * stride_vc_block + o_slot * stride_vc_slot + o_head * stride_vc_head,
        p_v_scale + o_scale,
        m_row,
        stride_value_dim,
        stride_vc_dim,
        HEAD_SIZE_V,
        FORMAT,
        INTERPRETED,
        BLOCK_V,
    )


@triton.jit
def _write_rows(
    p_from,  # [R], pointers to the beginnings of rows
    p_to,  # [R]
    p_scale,  # [R]
    m_row,
    stride_from,
    stride_to,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    o_dim = tl.arange(0, BLOCK).to(tl.int64)
    m_tile = m_row[:, None] & (o_dim < SIZE)[None, :]
    b_row = tl.load(p_from[:, None] + o_dim[None, :] * stride_from, mask=m_tile, other=0.0)  # [R, BLOCK]
    p_tile = p_to[:, None] + o_dim[None, :] * stride_to
    if FORMAT != 0:
        b_scale = tl.load(p_scale, mask=m_row, other=1.0).to(tl.float32)
        # IEEE division: the default division of a GPU is inexact, and could give the neighbouring code.
        b_scaled = tl.div_rn(b_row.to(tl.float32), tl.broadcast_to(b_scale[:, None], (b_row.shape[0], BLOCK)))
        tl.store(p_tile, encode_codes(b_scaled, FORMAT), mask=m_tile)
    elif p_to.dtype.element_ty == p_from.dtype.element_ty:
        tl.store(p_tile, b_row, mask=m_tile)
    else:
        tl.store(p_tile, rounded(b_row.to(tl.float32), p_to.dtype.element_ty, INTERPRETED), mask=m_tile)
