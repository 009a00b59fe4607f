"""The host side of the unified kernel: checks typed arguments, and calls one custom operator.

Nothing is read from the device.
"""

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_unified.kernels.shared import CODE_FORMATS, FLOATS
from attncheck.backends.candidates.triton_unified.launch import unified_attention_op
from attncheck.backends.candidates.triton_unified.tiling import SplitScratch
from attncheck.reference.attention.params import AttentionParams

_FAR = 2**30
"""Positions are smaller, so that a sum of two fits 32 bits. A window or chunk of this size or more is no limit."""


def unified_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    params: AttentionParams,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_lse: Tensor | None = None,
    output_scale: Tensor | None = None,
    tree: Tensor | None = None,
    scratch: SplitScratch | None = None,
) -> None:
    """Compute attention of a mixed batch over a paged cache, as defined by :func:`attncheck.reference.paged_attention`.

    ``T`` rows, ``H`` query heads, ``R`` requests. Rows of a request that see no key get 0 and -inf (with sinks, the
    sink). Rows of no request, after ``query_start_loc[R]``, are left unchanged.

    query: ``[T, H, head_size]``, float16, bfloat16 or float32.
    key_cache, value_cache: ``[blocks, block size, KV heads, size]``, of any strides; float8 if they hold codes, which
        ``k_scale`` and ``v_scale`` scale (float32, one element or one per KV head; None: 1; ignored for other caches).
    output: ``[T, H, head_size_v]``, of any strides; float8 if ``output_scale`` (float32, one element) is given: then
        codes of ``x / output_scale``.
    block_table: int32 ``[R, pages]``. seq_lens: int32 ``[R]``. query_start_loc: int32 ``[R + 1]``.
    max_query_len: an upper bound of the rows of a request.
    params: the layer's parameters; its slopes and sinks are not read, but must be passed as device tensors:
    alibi_slopes, sinks: float32 ``[H]``.
    output_lse: float32 ``[T, H]``, written with the natural log-sum-exp, sinks included.
    tree: bool ``[Q, Q]``: which new key a row of a request of ``Q`` rows sees; requests of other sizes have no tree.
    scratch: memory for the results of segments, or None if keys are not split into segments.

    Raises:
        ValueError: shapes or dtypes that do not match, or that the kernel does not support.
        NotImplementedError: ALiBi's square-root form; chunks with a lookback.
    """
    wrong = _wrong_tensors(query, key_cache, value_cache, output, params, 4)
    if block_table.shape[0] != seq_lens.shape[0] or block_table.stride(-1) != 1:
        wrong.append(f"block_table has shape {tuple(block_table.shape)} and strides {block_table.stride()}")
    _attend(
        query,
        key_cache,
        value_cache,
        output,
        wrong,
        block_table=block_table,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        params=params,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        output_lse=output_lse,
        output_scale=output_scale,
        tree=tree,
        scratch=scratch,
    )


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    query_start_loc: Tensor,
    max_query_len: int,
    params: AttentionParams,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    output_lse: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> None:
    """Compute attention where keys and values are rows of the step, ``[T, KV heads, size]``, split like the queries.

    Arguments and errors are those of :func:`unified_attention`.
    """
    wrong = _wrong_tensors(query, key, value, output, params, 3)
    _attend(
        query,
        key,
        value,
        output,
        wrong,
        block_table=None,
        seq_lens=query_start_loc[1:],  # only its length is used: the number of requests
        query_start_loc=query_start_loc,
        max_query_len=max_query_len,
        params=params,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        output_lse=output_lse,
        output_scale=output_scale,
    )


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    wrong: list[str],
    *,
    block_table: Tensor | None,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    params: AttentionParams,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    output_lse: Tensor | None,
    output_scale: Tensor | None,
    tree: Tensor | None = None,
    scratch: SplitScratch | None = None,
) -> None:
    """Check the arguments that both forms share, and call the operator; ``wrong`` holds the caller's findings."""
    if len(query_start_loc) != len(seq_lens) + 1:
        wrong.append(f"query_start_loc has {len(query_start_loc)} entries for {len(seq_lens)} requests")
    if not (query_start_loc.is_contiguous() and seq_lens.is_contiguous()):
        wrong.append("query_start_loc or seq_lens has gaps between its entries")
    if tree is not None and not (tree.dtype == torch.bool and tree.is_contiguous() and tree.shape == (len(tree),) * 2):
        wrong.append(f"tree is {tree.dtype} {tuple(tree.shape)}, not a square of bools")
    for name, given in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if (getattr(params, name) is not None) != (given is not None):
            wrong.append(f"params and {name} differ in whether there are any")
    for name, given, size in (
        ("alibi_slopes", alibi_slopes, params.num_heads),
        ("sinks", sinks, params.num_heads),
        ("k_scale", k_scale, params.num_kv_heads),
        ("v_scale", v_scale, params.num_kv_heads),
    ):
        is_one = name.endswith("_scale") and given is not None and given.numel() == 1
        if given is not None and not is_one and (given.shape != (size,) or given.stride(0) != 1):
            wrong.append(f"{name} has shape {tuple(given.shape)}, not [{size}]")
    if output_lse is not None and output_lse.shape != query.shape[:2]:
        wrong.append(f"output_lse has shape {tuple(output_lse.shape)}, not {list(query.shape[:2])}")
    if (output.dtype in CODE_FORMATS) != (output_scale is not None):
        stated = "None" if output_scale is None else "given"
        wrong.append(f"output has dtype {output.dtype}, and output_scale is {stated}")
    if wrong:
        raise ValueError(f"unified attention: {'; '.join(wrong)}")
    if params.alibi_sqrt and params.alibi_slopes is not None:
        raise NotImplementedError("unified attention: ALiBi's square-root form is not supported")
    if params.attn_chunk_size is not None and params.attn_chunk_lookback:
        raise NotImplementedError("unified attention: chunks with a lookback are not supported")
    is_coded = key.dtype in CODE_FORMATS
    left, right = (distance if 0 <= distance < _FAR else -1 for distance in params.window)
    unified_attention_op(
        query,
        key,
        value,
        output,
        output_lse,
        None if scratch is None else scratch.out,
        None if scratch is None else scratch.lse,
        block_table,
        seq_lens,
        query_start_loc,
        alibi_slopes,
        sinks,
        k_scale if is_coded else None,
        v_scale if is_coded else None,
        output_scale,
        tree,
        max_query_len,
        params.softmax_scale,
        params.soft_cap or 0.0,
        params.causal,
        left,
        right,
        min(params.attn_chunk_size or 0, _FAR),
        0 if scratch is None else scratch.programs,
        0 if scratch is None else scratch.most,
    )


def _wrong_tensors(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, params: AttentionParams, dimensions: int
) -> list[str]:
    wrong = []
    if query.dim() != 3 or query.shape[1:] != (params.num_heads, params.head_size):
        wrong.append(f"query has shape {tuple(query.shape)}, not [rows, {params.num_heads}, {params.head_size}]")
    for name, given, size in (("keys", key, params.head_size), ("values", value, params.value_head_size)):
        if given.dim() != dimensions or given.shape[-2:] != (params.num_kv_heads, size):
            wrong.append(f"{name} have shape {tuple(given.shape)}, not [..., {params.num_kv_heads}, {size}]")
    if query.dtype not in FLOATS or key.dtype not in (*FLOATS, *CODE_FORMATS):
        wrong.append(f"query is {query.dtype}, keys are {key.dtype}")
    if key.shape[:-1] != value.shape[:-1] or key.dtype != value.dtype:
        wrong.append(f"keys are {key.dtype} {tuple(key.shape)}, values {value.dtype} {tuple(value.shape)}")
    if output.dtype not in (*FLOATS, *CODE_FORMATS):
        wrong.append(f"output is {output.dtype}")
    if output.shape != (*query.shape[:2], params.value_head_size):
        wrong.append(f"output has shape {tuple(output.shape)} for a query of {tuple(query.shape)}")
    return wrong
