"""One result of several segments of the keys. Must not know: how the segments were cut."""

import triton
import triton.language as tl

from attncheck.backends.triton_unified.kernels.codes import encode_codes, rounded


@triton.jit
def merge_segments(
    segment_out,
    segment_lse,
    out,
    lse,
    query_start_loc,
    output_scale,
    num_reqs,
    stride_out_row,
    stride_out_head,
    stride_out_size,
    stride_lse_row,
    stride_lse_head,
    HEAD_SIZE_V: tl.constexpr,
    HAS_LSE: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    NUM_SEGMENTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: (rows, heads). Arguments as those of ``attend_blocks``; rows of no request are left alone.

    A segment in which a row sees nothing has an LSE of -inf, and whatever stands in its ``segment_out`` is not read.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    if token >= tl.load(query_start_loc + num_reqs):
        return
    first = (token * tl.num_programs(1) + head) * NUM_SEGMENTS
    segment = tl.arange(0, NUM_SEGMENTS)
    v = tl.arange(0, BLOCK_V)
    is_v = v < HEAD_SIZE_V
    logs = tl.load(segment_lse + first + segment)  # [NUM_SEGMENTS], base 2
    pivot = tl.max(logs, 0)
    shift = tl.where(pivot == float("-inf"), 0.0, pivot)
    weights = tl.exp2(logs - shift)
    total = tl.sum(weights, 0)
    divisor = tl.where(total > 0, total, 1.0)
    pointers = segment_out + (first + segment)[:, None] * HEAD_SIZE_V + v[None, :]
    parts = tl.load(pointers, mask=(logs > float("-inf"))[:, None] & is_v[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / divisor  # [V]
    if HAS_LSE:
        log_total = tl.where(total > 0, pivot + tl.log2(divisor), float("-inf"))
        tl.store(lse + token * stride_lse_row + head * stride_lse_head, log_total * 0.6931471805599453)
    if OUT_FORMAT > 0:
        result = encode_codes(tl.div_rn(result, tl.load(output_scale)), OUT_FORMAT)
    else:
        result = rounded(result, out.dtype.element_ty, INTERPRETED)
    o_out = token * stride_out_row + head * stride_out_head + v * stride_out_size
    tl.store(out + o_out, result, mask=is_v)
