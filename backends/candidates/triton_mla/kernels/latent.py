"""Attention of a mixed batch over pages of latent rows, in one launch: decodes, extends and prompts alike.

All query heads share the keys, so a tile packs rows and heads of one request: line ``m`` is row ``m // BLOCK_H`` of the
block, head ``m % BLOCK_H`` of the group. A key is a cache row; its first RANK elements are also the value, and are
loaded once for both products. The rotated rest is a separate tile, because padding both together to a power of two
would nearly double the usual sizes. Scores have base 2.
"""

import triton
import triton.language as tl

from attncheck.backends.candidates.triton_unified.kernels.shared import (
    decode_codes,
    dot,
    find_request,
    find_slot,
    rounded,
    row_span,
)


# A kernel is compiled for each value of a constexpr, and for integers that are 1 or multiples of 16. So numbers that
# differ between layers or steps are arguments, and only strides are specialised.
@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "num_heads",
        "page_size",
        "right",
        "block_h",
        "block_q",
        "num_segments",
        "stride_lse_row",
        "stride_lse_head",
        "stride_table_row",
    ],
    do_not_specialize_on_alignment=["p_block_table", "p_seq_lens", "p_query_start_loc", "p_lse"],
)
def attend_latent(
    p_latent,  # [T, H, RANK], the queries in the latent space
    p_rotary,  # [T, H, ROTARY]
    p_cache,  # [NB, PAGE, RANK + ROTARY]
    p_out,  # [T, H, RANK]
    p_lse,  # [T, H]
    p_segment_out,
    p_segment_lse,
    p_block_table,  # [R, W]
    p_seq_lens,  # [R]
    p_query_start_loc,  # [R + 1]
    p_k_scale,
    num_reqs,
    score_factor,
    num_heads,
    page_size,
    right,
    block_h,
    block_q,
    num_segments,
    stride_latent_row: tl.int64,
    stride_latent_head: tl.int64,
    stride_latent_size,  # untyped, so that Triton specialises a stride of 1
    stride_rotary_row: tl.int64,
    stride_rotary_head: tl.int64,
    stride_rotary_size,
    stride_cache_block: tl.int64,
    stride_cache_slot: tl.int64,
    stride_cache_size,
    stride_out_row: tl.int64,
    stride_out_head: tl.int64,
    stride_out_size,
    stride_lse_row: tl.int64,
    stride_lse_head: tl.int64,
    stride_table_row: tl.int64,
    RANK: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_SHIFT: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_E: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: (blocks of rows times groups of heads, segments).

    KV_FORMAT: 0 if the cache holds floats; otherwise it holds uint8 codes, which ``p_k_scale`` scales.
    ONE_BLOCK: no request has more rows than a block, which holds ``block_q`` rows of ``block_h`` heads.
    score_factor: the scale times log2(e).
    page_size: as in ``find_slot``. right: as in ``row_span``.

    With two or more segments, results go to ``p_segment_out`` ``[T, H, segments, RANK]`` and ``p_segment_lse`` ``[T, H,
    segments]`` (base 2).
    """
    LN_2: tl.constexpr = 0.6931471805599453
    head_groups = (num_heads + block_h - 1) // block_h
    # Groups of heads of the same rows have adjacent programs, because they read the same keys.
    o_block, group = tl.program_id(0) // head_groups, tl.program_id(0) % head_groups
    segment = tl.program_id(1)
    if ONE_BLOCK:
        request = o_block
        block = o_block * 0
    else:
        # Later blocks see more keys under a causal mask, so they start first.
        last_block = tl.num_programs(0) // head_groups - 1
        request, block = find_request(last_block - o_block, p_query_start_loc, num_reqs, block_q)
    request_start = tl.load(p_query_start_loc + request).to(tl.int64)
    query_len = (tl.load(p_query_start_loc + request + 1) - request_start).to(tl.int32)
    first_row = block * block_q
    if first_row >= query_len:
        return
    seq_len = tl.load(p_seq_lens + request).to(tl.int32)
    context_len = seq_len - query_len

    line = tl.arange(0, BLOCK_M)
    row = first_row + line // block_h  # [M]
    head = group * block_h + line % block_h  # [M]
    m_line = (line // block_h < block_q) & (row < query_len) & (head < num_heads)
    token = request_start + row  # [M] int64
    o_key = tl.arange(0, BLOCK_N)
    o_rank = tl.arange(0, BLOCK_L).to(tl.int64)
    m_rank = o_rank < RANK
    o_rotary = tl.arange(0, BLOCK_E).to(tl.int64)
    m_rotary = o_rotary < ROTARY

    p_rows = p_latent + (token * stride_latent_row + head * stride_latent_head)[:, None]
    m_latent = m_line[:, None] & m_rank[None, :]
    b_latent = tl.load(p_rows + o_rank[None, :] * stride_latent_size, mask=m_latent, other=0.0)  # [M, L]
    if ROTARY > 0:
        p_rows = p_rotary + (token * stride_rotary_row + head * stride_rotary_head)[:, None]
        m_query = m_line[:, None] & m_rotary[None, :]
        b_rotary = tl.load(p_rows + o_rotary[None, :] * stride_rotary_size, mask=m_query, other=0.0)  # [M, E]
    IS_MIXED: tl.constexpr = KV_FORMAT == 0 and p_cache.dtype.element_ty != p_latent.dtype.element_ty
    if IS_MIXED:
        b_latent = b_latent.to(tl.float32)
        if ROTARY > 0:
            b_rotary = b_rotary.to(tl.float32)
    factor = score_factor
    if KV_FORMAT > 0:
        factor = factor * tl.load(p_k_scale)

    # No row of the block sees keys from ``end`` on.
    last_row = tl.minimum(first_row + block_q, query_len) - 1
    _, end = row_span(context_len + last_row, seq_len, 0, right, 0, False, False)
    _, row_end = row_span(context_len + row, seq_len, 0, right, 0, False, False)  # [M]
    num_tiles = (tl.maximum(end, 0) + BLOCK_N - 1) // BLOCK_N
    per_segment = (num_tiles + num_segments - 1) // num_segments
    tile_begin = tl.minimum(segment * per_segment, num_tiles)
    tile_end = tl.minimum(tile_begin + per_segment, num_tiles)

    pivot = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    for tile in range(tile_begin, tile_end):
        position = tile * BLOCK_N + o_key  # [N]
        # Memory of keys that no row sees may hold NaN; it is not read, since 0 * NaN is NaN.
        m_key = position < end
        number, slot = find_slot(position, page_size, IS_SHIFT)
        p_entry = p_block_table + request.to(tl.int64) * stride_table_row + number
        page = tl.load(p_entry, mask=m_key, other=0).to(tl.int64)
        p_keys = p_cache + (page * stride_cache_block + slot * stride_cache_slot)[:, None]
        m_tile = m_key[:, None] & m_rank[None, :]
        b_key = tl.load(p_keys + o_rank[None, :] * stride_cache_size, mask=m_tile, other=0)  # [N, L]
        if KV_FORMAT > 0:
            # A code is exact in every dtype of a query.
            b_key = decode_codes(b_key, KV_FORMAT).to(p_latent.dtype.element_ty)
        elif IS_MIXED:
            b_key = b_key.to(tl.float32)
        scores = dot(b_latent, tl.trans(b_key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), INTERPRETED)
        if ROTARY > 0:
            p_rest = p_keys + (RANK + o_rotary)[None, :] * stride_cache_size
            b_rest = tl.load(p_rest, mask=m_key[:, None] & m_rotary[None, :], other=0)  # [N, E]
            if KV_FORMAT > 0:
                b_rest = decode_codes(b_rest, KV_FORMAT).to(p_latent.dtype.element_ty)
            elif IS_MIXED:
                b_rest = b_rest.to(tl.float32)
            scores = dot(b_rotary, tl.trans(b_rest), scores, INTERPRETED)
        scores = tl.where(position[None, :] < row_end[:, None], scores * factor, float("-inf"))

        new_pivot = tl.maximum(pivot, tl.max(scores, 1))
        # For a row that has seen no key yet, -inf - -inf would be NaN.
        shift = tl.where(new_pivot == float("-inf"), 0.0, new_pivot)
        weights = tl.exp2(scores - shift[:, None])  # [M, N]
        fade = tl.exp2(pivot - shift)  # [M]
        total = total * fade + tl.sum(weights, 1)
        acc = dot(rounded(weights, b_key.dtype, INTERPRETED), b_key, acc * fade[:, None], INTERPRETED)
        pivot = new_pivot

    # Not "above 0", so that NaN stays NaN.
    has_seen = total != 0
    result = acc / tl.where(has_seen, total, 1.0)[:, None]  # [M, L]
    if KV_FORMAT > 0:
        result = result * tl.load(p_k_scale)
    log_total = tl.where(has_seen, pivot + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
    is_whole = True
    if p_segment_out is not None:
        is_whole = num_segments == 1
        if num_segments > 1:
            o_segment = (token * num_heads + head) * num_segments + segment  # [M]
            tl.store(p_segment_lse + o_segment, log_total, mask=m_line)
            o_part = o_segment[:, None] * RANK + o_rank[None, :]
            tl.store(p_segment_out + o_part, result, mask=m_latent & has_seen[:, None])
    if is_whole:
        if HAS_LSE:
            tl.store(p_lse + token * stride_lse_row + head * stride_lse_head, log_total * LN_2, mask=m_line)
        o_out = (token * stride_out_row + head * stride_out_head)[:, None] + o_rank[None, :] * stride_out_size
        tl.store(p_out + o_out, rounded(result, p_out.dtype.element_ty, INTERPRETED), mask=m_latent)
