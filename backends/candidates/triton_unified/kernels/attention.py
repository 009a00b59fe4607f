"""Attention of a mixed batch over pages in one launch: prompts, extends and decodes alike.

A program handles consecutive rows of one request, all query heads of one KV head, and one segment of the keys that
these rows see. Rows and heads are packed into one tile: line ``m`` is row ``m // G`` of the block, head ``m % G`` of
the group. Scores have base 2. Letters: M lines of a tile, N keys of a tile, D head size, V value head size.
"""

import triton
import triton.language as tl

from attncheck.backends.candidates.triton_unified.kernels.shared import (
    decode_codes,
    encode_codes,
    find_request,
    find_slot,
    rounded,
    row_span,
    tanh,
)


# A kernel is compiled for each value of a constexpr, and for integers that are 1 or multiples of 16. So numbers that
# differ between layers or steps are arguments, and only strides are specialised.
@triton.jit(
    do_not_specialize=[
        "num_reqs",
        "group",
        "block_q",
        "page_size",
        "left",
        "right",
        "chunk",
        "tree_size",
        "num_segments",
        "k_scale_step",
        "v_scale_step",
        "stride_lse_row",
        "stride_lse_head",
        "stride_table_row",
    ],
    do_not_specialize_on_alignment=["block_table", "seq_lens", "query_start_loc", "lse"],
)
def attend_blocks(
    query,
    key,
    value,
    out,
    lse,
    segment_out,
    segment_lse,
    block_table,
    seq_lens,
    query_start_loc,
    alibi_slopes,
    sinks,
    k_scale,
    v_scale,
    output_scale,
    tree,
    num_reqs,
    score_factor,
    soft_cap,
    group,
    block_q,
    page_size,
    left,
    right,
    chunk,
    tree_size,
    num_segments,
    k_scale_step,
    v_scale_step,
    stride_query_row,
    stride_query_head,
    stride_query_size,
    stride_key_block,
    stride_key_slot,
    stride_key_head,
    stride_key_size,
    stride_value_block,
    stride_value_slot,
    stride_value_head,
    stride_value_size,
    stride_out_row,
    stride_out_head,
    stride_out_size,
    stride_lse_row,
    stride_lse_head,
    stride_table_row,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_V: tl.constexpr,
    IS_SHIFT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: (blocks of rows, KV heads, segments).

    query ``[rows, heads, D]``, out ``[rows, heads, V]``, lse ``[rows, heads]``. group: query heads per KV head.
    block_q: rows per block. With a block_table, key and value are ``[blocks, page size, KV heads, size]``, page_size as
    in ``find_slot``; otherwise ``[1, rows, KV heads, size]``, with rows like those of queries. left, right, chunk: as
    in ``row_span``. KV_FORMAT: 0 if key and value are floats; otherwise uint8 codes, whose scales have one element
    (step 0), one per KV head (step 1), or are None. OUT_FORMAT: 0 if ``out`` takes floats; otherwise codes of ``x /
    output_scale``. tree: bytes ``[tree_size, tree_size]``, for requests of that many rows. ONE_BLOCK: no request has
    more rows than a block. score_factor: the scale, times log2(e) without soft cap. With two or more segments, results
    go to ``segment_out`` ``[rows, heads, segments, V]`` and ``segment_lse`` ``[rows, heads, segments]`` (base 2).
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    LN_2: tl.constexpr = 0.6931471805599453
    if ONE_BLOCK:
        request = tl.program_id(0)
        block = request * 0
    else:
        # Later blocks see more keys under a causal mask, so they start first.
        request, block = find_request(tl.num_programs(0) - 1 - tl.program_id(0), query_start_loc, num_reqs, block_q)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    # Positions fit 32 bits. The interpreter checks 32-bit sums for overflow, which costs more than the sums.
    POSITION: tl.constexpr = tl.int64 if INTERPRETED else tl.int32
    request_start = tl.load(query_start_loc + request).to(tl.int64)
    query_len = (tl.load(query_start_loc + request + 1) - request_start).to(POSITION)
    first_row = block.to(POSITION) * block_q
    if first_row >= query_len:
        return
    if block_table is not None:
        seq_len = tl.load(seq_lens + request).to(POSITION)
    else:
        seq_len = query_len
    context_len = seq_len - query_len

    line = tl.arange(0, BLOCK_M)
    row = first_row + line // group  # [M]
    head = kv_head * group + line % group  # [M]
    wide_head = head.to(tl.int64)
    is_line = (line // group < block_q) & (row < query_len)
    query_position = context_len + row  # [M]
    token = request_start + row  # [M] int64
    o_result = token * (tl.num_programs(1) * group) + head  # [M]
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    v = tl.arange(0, BLOCK_V)
    is_d = d < HEAD_SIZE
    is_v = v < HEAD_SIZE_V

    # No row of the block sees keys outside [begin, end); all rows see keys inside [full_begin, full_end).
    last_row = tl.minimum(first_row + block_q, query_len) - 1
    begin, full_end = row_span(context_len + first_row, seq_len, left, right, chunk, HAS_LEFT, HAS_CHUNK)
    full_begin, end = row_span(context_len + last_row, seq_len, left, right, chunk, HAS_LEFT, HAS_CHUNK)
    lo, hi = row_span(query_position, seq_len, left, right, chunk, HAS_LEFT, HAS_CHUNK)  # [M]
    if tree is not None:
        full_end = tl.minimum(full_end, context_len)
    # The tiles that need no mask are in [full_from, full_to).
    HAS_EDGE_BEFORE: tl.constexpr = HAS_LEFT or HAS_CHUNK
    full_from = begin
    if HAS_EDGE_BEFORE:
        full_from = begin + (tl.maximum(full_begin - begin, 0) + (BLOCK_N - 1)) // BLOCK_N * BLOCK_N
    full_to = tl.maximum(begin + tl.maximum(full_end - begin, 0) // BLOCK_N * BLOCK_N, full_from)
    segment_begin = begin
    segment_end = end
    if segment_out is not None:
        step = num_segments * BLOCK_N
        length = (tl.maximum(end - begin, 0) + (step - 1)) // step * BLOCK_N
        segment_begin = begin + segment * length
        segment_end = tl.minimum(segment_begin + length, end)
        if (segment > 0) & (segment_begin >= segment_end):
            nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
            tl.store(segment_lse + o_result * num_segments + segment, nothing, mask=is_line)
            return

    # The interpreter cannot multiply bfloat16, and tensor cores cannot mix dtypes: in both cases use float32.
    IS_MIXED: tl.constexpr = KV_FORMAT == 0 and key.dtype.element_ty != query.dtype.element_ty
    IS_WIDE: tl.constexpr = INTERPRETED or IS_MIXED
    STORED: tl.constexpr = query.dtype.element_ty if KV_FORMAT > 0 else key.dtype.element_ty
    WEIGHTS: tl.constexpr = tl.float32 if IS_MIXED else query.dtype.element_ty
    p_query = (
        query + (token * stride_query_row + wide_head * stride_query_head)[:, None] + d[None, :] * stride_query_size
    )
    b_query = tl.load(p_query, mask=is_line[:, None] & is_d[None, :], other=0)  # [M, D]
    if IS_WIDE:
        b_query = b_query.to(tl.float32)
    p_keys = key + kv_head.to(tl.int64) * stride_key_head + d[None, :] * stride_key_size  # [1, D]
    p_values = value + kv_head.to(tl.int64) * stride_value_head + v[None, :] * stride_value_size  # [1, V]
    p_pages = block_table
    if block_table is not None:
        p_pages = block_table + request.to(tl.int64) * stride_table_row
    # The last factor of a score: a soft cap needs natural scores; later steps use base 2.
    factor = score_factor
    if k_scale is not None:
        factor = factor * tl.load(k_scale + kv_head * k_scale_step)
    if HAS_ALIBI:
        slope = tl.load(alibi_slopes + head, mask=is_line, other=0.0) * LOG2_E  # [M]

    pivot = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if HAS_SINKS:
        if segment == 0:
            # A sink acts as one more key without value. Only the first segment counts it.
            pivot = tl.load(sinks + head, mask=is_line, other=float("-inf")).to(tl.float32) * LOG2_E
    total = tl.where(pivot == float("-inf"), 0.0, 1.0)  # [M]
    acc = tl.full([BLOCK_M, BLOCK_V], 0.0, tl.float32)
    for part in tl.static_range(0 if HAS_EDGE_BEFORE else 1, 3):
        # Tiles before those that every row sees completely, then these (1: no masks), then those after them.
        loop_begin = segment_begin
        loop_end = segment_end
        if part == 0:
            loop_end = tl.minimum(full_from, segment_end)
        elif part == 1:
            loop_begin = tl.maximum(full_from, segment_begin)
            loop_end = tl.minimum(full_to, segment_end)
        else:
            loop_begin = tl.maximum(full_to, segment_begin)
        for start in range(loop_begin, loop_end, BLOCK_N):
            key_position = start + n  # [N]
            # Memory of keys that no row sees may hold NaN; it is not read, since 0 * NaN is NaN.
            is_key = key_position < end
            if block_table is not None:
                number, slot = find_slot(key_position, page_size, IS_SHIFT)
                if part != 1:
                    page = tl.load(p_pages + number, mask=is_key, other=0).to(tl.int64)
                else:
                    page = tl.load(p_pages + number).to(tl.int64)
                o_key = page * stride_key_block + slot.to(tl.int64) * stride_key_slot
                o_value = page * stride_value_block + slot.to(tl.int64) * stride_value_slot
            else:
                o_key = (request_start + key_position) * stride_key_slot
                o_value = (request_start + key_position) * stride_value_slot
            if part != 1:
                b_key = tl.load(p_keys + o_key[:, None], mask=is_key[:, None] & is_d[None, :], other=0)  # [N, D]
                b_value = tl.load(p_values + o_value[:, None], mask=is_key[:, None] & is_v[None, :], other=0)  # [N, V]
            elif BLOCK_D != HEAD_SIZE or BLOCK_V != HEAD_SIZE_V:
                b_key = tl.load(p_keys + o_key[:, None], mask=is_d[None, :], other=0)
                b_value = tl.load(p_values + o_value[:, None], mask=is_v[None, :], other=0)
            else:
                b_key = tl.load(p_keys + o_key[:, None])
                b_value = tl.load(p_values + o_value[:, None])
            if KV_FORMAT > 0:
                # A code is exact in every dtype of a query.
                b_key = decode_codes(b_key, KV_FORMAT).to(STORED)
                b_value = decode_codes(b_value, KV_FORMAT).to(STORED)
            if IS_WIDE:
                b_key = b_key.to(tl.float32)
                b_value = b_value.to(tl.float32)

            scores = tl.dot(b_query, tl.trans(b_key), input_precision="ieee") * factor  # [M, N]
            if HAS_SOFT_CAP:
                scores = tanh(scores / soft_cap) * (soft_cap * LOG2_E)
            if HAS_ALIBI:
                scores += slope[:, None] * (key_position[None, :] - query_position[:, None]).to(tl.float32)
            if part != 1:
                sees = (key_position[None, :] >= lo[:, None]) & (key_position[None, :] < hi[:, None])
                if tree is not None:
                    # Not an `if` of the kernel: Triton 3.6 and 3.7 cannot compile that around operands of float32.
                    node = key_position - context_len  # [N]
                    is_new = is_line[:, None] & ((node >= 0) & is_key & (query_len == tree_size))[None, :]
                    branch = tl.load(tree + row[:, None] * tree_size + node[None, :], mask=is_new, other=1)
                    sees = sees & (branch != 0)
                scores = tl.where(sees, scores, float("-inf"))

            new_pivot = tl.maximum(pivot, tl.max(scores, 1))
            # For a row that has seen no key yet, -inf - -inf would be NaN.
            shift = tl.where(new_pivot == float("-inf"), 0.0, new_pivot)
            weights = tl.exp2(scores - shift[:, None])  # [M, N]
            fade = tl.exp2(pivot - shift)  # [M]
            total = total * fade + tl.sum(weights, 1)
            weights = rounded(weights, WEIGHTS, INTERPRETED)
            if INTERPRETED:
                weights = weights.to(tl.float32)
            acc = tl.dot(weights, b_value, acc * fade[:, None], input_precision="ieee")
            pivot = new_pivot

    # Not "above 0", so that NaN stays NaN.
    has_seen = total != 0
    result = acc / tl.where(has_seen, total, 1.0)[:, None]  # [M, V]
    if v_scale is not None:
        result = result * tl.load(v_scale + kv_head * v_scale_step)
    log_total = tl.where(has_seen, pivot + tl.log2(tl.where(has_seen, total, 1.0)), float("-inf"))
    is_result = is_line[:, None] & is_v[None, :]
    is_whole = True
    if segment_out is not None:
        is_whole = num_segments == 1
        if num_segments > 1:
            o_segment = o_result * num_segments + segment  # [M]
            tl.store(segment_lse + o_segment, log_total, mask=is_line)
            o_part = o_segment[:, None] * HEAD_SIZE_V + v[None, :]
            tl.store(segment_out + o_part, result, mask=is_result & has_seen[:, None])
    if is_whole:
        if HAS_LSE:
            tl.store(lse + token * stride_lse_row + wide_head * stride_lse_head, log_total * LN_2, mask=is_line)
        o_out = (token * stride_out_row + wide_head * stride_out_head)[:, None] + v[None, :] * stride_out_size
        if OUT_FORMAT > 0:
            stored = encode_codes(tl.div_rn(result, tl.load(output_scale)), OUT_FORMAT)
        else:
            stored = rounded(result, out.dtype.element_ty, INTERPRETED)
        tl.store(out + o_out, stored, mask=is_result)
