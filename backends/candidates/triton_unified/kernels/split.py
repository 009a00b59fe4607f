"""The kernel that merges the results of several key segments."""

import triton
import triton.language as tl

from attncheck.backends.candidates.triton_unified.kernels.codes import encode_codes, rounded


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
