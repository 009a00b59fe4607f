"""The kernels that merge results: those of several key segments, and two attention states."""

import triton
import triton.language as tl

from attncheck.backends.candidates.triton_unified.kernels.shared import encode_codes, rounded


@triton.jit(do_not_specialize=["num_reqs", "num_heads", "num_segments", "stride_lse_row", "stride_lse_head"])
def merge_segments(
    segment_out,
    segment_lse,
    out,
    lse,
    query_start_loc,
    output_scale,
    num_reqs,
    num_heads,
    num_segments,
    stride_out_row,
    stride_out_head,
    stride_out_size,
    stride_lse_row,
    stride_lse_head,
    HEAD_SIZE_V: tl.constexpr,
    HAS_LSE: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: blocks of BLOCK_R results, one per row and head. Arguments are those of ``attend_blocks``.

    Rows of no request are left unchanged. A segment in which a row sees nothing has an LSE of -inf, and its
    ``segment_out`` is not read. BLOCK_S: a power of two, at least num_segments.
    """
    end = tl.load(query_start_loc + num_reqs)
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    if first >= end.to(tl.int64) * num_heads:
        return
    result = first + tl.arange(0, BLOCK_R)  # [R]
    token = result // num_heads
    head = result % num_heads
    is_result = token < end
    v = tl.arange(0, BLOCK_V)
    is_v = v < HEAD_SIZE_V
    segment = tl.arange(0, BLOCK_S)[None, :]
    o_segment = result[:, None] * num_segments + segment
    is_segment = is_result[:, None] & (segment < num_segments)
    logs = tl.load(segment_lse + o_segment, mask=is_segment, other=float("-inf"))  # [R, segments], base 2
    pivot = tl.max(logs, 1)
    shift = tl.where(pivot == float("-inf"), 0.0, pivot)
    weights = tl.exp2(logs - shift[:, None])
    total = tl.sum(weights, 1)
    # Not "above 0", so that NaN stays NaN.
    divisor = tl.where(total != 0, total, 1.0)
    has_seen = logs > float("-inf")
    p_parts = segment_out + o_segment[:, :, None] * HEAD_SIZE_V + v[None, None, :]
    b_parts = tl.load(p_parts, mask=has_seen[:, :, None] & is_v[None, None, :], other=0.0)  # [R, segments, V]
    merged = tl.sum(b_parts * weights[:, :, None], 1) / divisor[:, None]  # [R, V]
    if HAS_LSE:
        log_total = tl.where(total != 0, pivot + tl.log2(divisor), float("-inf"))
        tl.store(lse + token * stride_lse_row + head * stride_lse_head, log_total * 0.6931471805599453, mask=is_result)
    if OUT_FORMAT > 0:
        merged = encode_codes(tl.div_rn(merged, tl.load(output_scale)), OUT_FORMAT)
    else:
        merged = rounded(merged, out.dtype.element_ty, INTERPRETED)
    p_out = out + (token * stride_out_row + head * stride_out_head)[:, None] + v[None, :] * stride_out_size
    tl.store(p_out, merged, mask=is_result[:, None] & is_v[None, :])


@triton.jit
def merge_states_kernel(
    p_out_a,  # [T, H, Dv]
    p_lse_a,  # [T, H]
    p_out_b,
    p_lse_b,
    p_out,  # [T, H, Dv]
    p_lse,  # [T, H]
    num_rows,  # T * H
    stride_a_token: tl.int64,
    stride_a_head: tl.int64,
    stride_a_dim,  # untyped, so that Triton specialises a stride of 1
    stride_lse_a_token: tl.int64,
    stride_lse_a_head: tl.int64,
    stride_b_token: tl.int64,
    stride_b_head: tl.int64,
    stride_b_dim,
    stride_lse_b_token: tl.int64,
    stride_lse_b_head: tl.int64,
    stride_out_token: tl.int64,
    stride_out_head: tl.int64,
    stride_out_dim,
    stride_lse_token: tl.int64,
    stride_lse_head: tl.int64,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge ``BLOCK_R`` rows per program; a row is one head of one token."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_row = o_row < num_rows
    o_token, o_head = o_row // NUM_HEADS, o_row % NUM_HEADS

    b_lse_a = _read_lse(p_lse_a + o_token * stride_lse_a_token + o_head * stride_lse_a_head, m_row)  # [R]
    b_lse_b = _read_lse(p_lse_b + o_token * stride_lse_b_token + o_head * stride_lse_b_head, m_row)  # [R]
    b_top = tl.maximum(b_lse_a, b_lse_b)
    # If neither side has a key, the top is -inf, and the difference to it would be NaN.
    b_pivot = tl.where(b_top == float("-inf"), 0.0, b_top)
    b_weight_a, b_weight_b = tl.exp(b_lse_a - b_pivot), tl.exp(b_lse_b - b_pivot)
    b_total = b_weight_a + b_weight_b
    # Avoid the logarithm of 0 and the division by 0 if there is no key. A NaN stays NaN.
    b_divisor = tl.where(b_total == 0.0, 1.0, b_total)
    b_log = tl.where(b_total == 0.0, float("-inf"), b_pivot + tl.log(b_divisor))
    tl.store(p_lse + o_token * stride_lse_token + o_head * stride_lse_head, b_log, mask=m_row)

    o_dim = tl.arange(0, BLOCK_V).to(tl.int64)
    m_dim = (o_dim < HEAD_SIZE_V)[None, :]
    # The out of an empty state may hold anything, NaN included, and is not read.
    m_a = (m_row & (b_lse_a != float("-inf")))[:, None] & m_dim
    m_b = (m_row & (b_lse_b != float("-inf")))[:, None] & m_dim
    p_a = p_out_a + (o_token * stride_a_token + o_head * stride_a_head)[:, None] + o_dim[None, :] * stride_a_dim
    p_b = p_out_b + (o_token * stride_b_token + o_head * stride_b_head)[:, None] + o_dim[None, :] * stride_b_dim
    b_out = tl.load(p_a, mask=m_a, other=0.0).to(tl.float32) * (b_weight_a / b_divisor)[:, None]  # [R, V]
    b_out += tl.load(p_b, mask=m_b, other=0.0).to(tl.float32) * (b_weight_b / b_divisor)[:, None]
    o_out = (o_token * stride_out_token + o_head * stride_out_head)[:, None] + o_dim[None, :] * stride_out_dim
    tl.store(p_out + o_out, rounded(b_out, p_out.dtype.element_ty, INTERPRETED), mask=m_row[:, None] & m_dim)


@triton.jit
def _read_lse(p_lse, m_row):
    """Return log-sum-exps as float32, with +inf replaced by -inf: either marks a state without keys."""
    b_lse = tl.load(p_lse, mask=m_row, other=0.0).to(tl.float32)
    return tl.where(b_lse == float("inf"), float("-inf"), b_lse)
