"""Launches of the attention kernel: maps tensors and numbers to grids, strides and arguments.

Attention is the custom operator ``attncheck::unified_attention``; tracing, fake tensors and graphs see one call that
writes its declared outputs. If keys are split into segments, a second launch merges their results. The caller checks
the arguments.
"""

import functools
import sys

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_unified.kernels.attention import attend_blocks
from attncheck.backends.candidates.triton_unified.kernels.merging import merge_segments
from attncheck.backends.candidates.triton_unified.kernels.shared import CODE_FORMATS
from attncheck.backends.candidates.triton_unified.tiling import choose_segments, choose_tiling, tile_width
from attncheck.backends.interpreter import is_interpreted

_LOG2_E = 1.4426950408889634

UNLIMITED = 2**30 - 1
"""Distance to the right that includes every key. Added to a position, which is below 2**30, it fits 32 bits."""

_INTERPRETED_RESULTS = 32
"""Results merged per program if interpreted, where only the number of operations counts; on a GPU it is 1."""


@torch.library.custom_op(
    "attncheck::unified_attention", mutates_args=("output", "output_lse", "scratch_out", "scratch_lse")
)
def unified_attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    output_lse: Tensor | None,
    scratch_out: Tensor | None,
    scratch_lse: Tensor | None,
    block_table: Tensor | None,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    output_scale: Tensor | None,
    tree: Tensor | None,
    max_query_len: int,
    scale: float,
    soft_cap: float,
    causal: bool,
    window_left: int,
    window_right: int,
    chunk: int,
    programs: int,
    most_segments: int,
) -> None:
    """Compute attention of all rows of all requests, into ``output`` and ``output_lse``.

    Without ``block_table``, key and value are rows like ``query``. soft_cap, chunk: 0 for none. programs: the wanted
    number of programs. With fewer, and with scratch, keys are split into up to ``most_segments`` segments.
    """
    num_reqs, (num_rows, num_heads, head_size) = seq_lens.shape[0], query.shape
    num_kv_heads, head_size_v = value.shape[-2:]
    if not num_reqs or not num_rows:
        return
    interpreted = is_interpreted()
    kv_format, out_format = CODE_FORMATS.get(key.dtype, 0), CODE_FORMATS.get(output.dtype, 0)
    page = 0 if block_table is None else key.shape[1]
    page_size, is_shift = page_argument(page)
    # Without pages, all rows form a single page.
    b_key, b_value = (x.view(torch.uint8) if kv_format else x for x in (key, value))
    if block_table is None:
        b_key, b_value = b_key[None], b_value[None]
    b_output = output.view(torch.uint8) if out_format else output
    group = num_heads // num_kv_heads
    tiling = choose_tiling(
        max_query_len=max_query_len,
        group=group,
        head_size=max(head_size, head_size_v),
        itemsize=query.itemsize if kv_format or key.dtype == query.dtype else 4,
        is_coded=kv_format > 0,
        shared_memory=shared_memory_of(query.device),
        interpreted=interpreted,
    )
    blocks = tiling.num_blocks(num_rows, num_reqs)
    segments = 1
    if scratch_out is not None and scratch_lse is not None:
        keys = num_rows if block_table is None else block_table.shape[1] * page
        if window_left >= 0 and (causal or window_right >= 0):
            keys = min(keys, window_left + max(0, window_right) + tiling.block_q)
        segments = choose_segments(
            programs=blocks * num_kv_heads,
            wanted=programs,
            results=num_rows * num_heads,
            room=min(scratch_lse.numel(), scratch_out.numel() // head_size_v),
            keys=keys,
            block_n=tiling.block_n,
            most=most_segments,
        )
    lse_strides = (0, 0) if output_lse is None else output_lse.stride()
    with torch.cuda.device_of(query):
        attend_blocks[(blocks, num_kv_heads, segments)](
            query=query,
            key=b_key,
            value=b_value,
            out=b_output,
            lse=output_lse,
            segment_out=scratch_out,
            segment_lse=scratch_lse,
            block_table=block_table,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            output_scale=output_scale,
            tree=None if tree is None else tree.view(torch.uint8),
            num_reqs=num_reqs,
            score_factor=scale if soft_cap else scale * _LOG2_E,
            soft_cap=soft_cap,
            group=group,
            block_q=tiling.block_q,
            page_size=page_size,
            left=window_left,
            right=0 if causal else window_right if window_right >= 0 else UNLIMITED,
            chunk=chunk,
            tree_size=0 if tree is None else tree.shape[0],
            num_segments=segments,
            k_scale_step=_scale_step(k_scale),
            v_scale_step=_scale_step(v_scale),
            stride_query_row=query.stride(0),
            stride_query_head=query.stride(1),
            stride_query_size=query.stride(2),
            stride_key_block=b_key.stride(0),
            stride_key_slot=b_key.stride(1),
            stride_key_head=b_key.stride(2),
            stride_key_size=b_key.stride(3),
            stride_value_block=b_value.stride(0),
            stride_value_slot=b_value.stride(1),
            stride_value_head=b_value.stride(2),
            stride_value_size=b_value.stride(3),
            stride_out_row=output.stride(0),
            stride_out_head=output.stride(1),
            stride_out_size=output.stride(2),
            stride_lse_row=lse_strides[0],
            stride_lse_head=lse_strides[1],
            stride_table_row=0 if block_table is None else block_table.stride(0),
            HEAD_SIZE=head_size,
            HEAD_SIZE_V=head_size_v,
            IS_SHIFT=is_shift,
            HAS_LEFT=window_left >= 0,
            HAS_CHUNK=chunk > 0,
            HAS_SOFT_CAP=soft_cap > 0,
            HAS_ALIBI=alibi_slopes is not None,
            HAS_SINKS=sinks is not None,
            HAS_LSE=output_lse is not None,
            KV_FORMAT=kv_format,
            OUT_FORMAT=out_format,
            ONE_BLOCK=tiling.one_block,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_D=tile_width(head_size),
            BLOCK_V=tile_width(head_size_v),
            INTERPRETED=interpreted,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if scratch_out is not None and scratch_lse is not None and segments > 1:
            launch_merge(
                scratch_out,
                scratch_lse,
                b_output,
                output_lse,
                query_start_loc,
                segments=segments,
                most=most_segments,
                output_scale=output_scale,
                out_format=out_format,
            )


@unified_attention_op.register_fake
def _unified_attention_fake(*args: object) -> None:
    """Return nothing: the operator only mutates its arguments."""


def _scale_step(scale: Tensor | None) -> int:
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def page_argument(page: int) -> tuple[int, bool]:
    """Return ``page_size`` and ``IS_SHIFT`` of ``kernels.places.find_slot`` for pages of ``page`` tokens.

    >>> page_argument(16), page_argument(48)
    ((4, True), (48, False))
    """
    is_shift = page.bit_count() == 1
    return (page.bit_length() - 1 if is_shift else page), is_shift


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory available to a program on ``device``; without a GPU, ``sys.maxsize``."""
    if device.type != "cuda":
        return sys.maxsize
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


def launch_merge(
    scratch_out: Tensor,
    scratch_lse: Tensor,
    output: Tensor,
    output_lse: Tensor | None,
    query_start_loc: Tensor,
    *,
    segments: int,
    most: int,
    output_scale: Tensor | None = None,
    out_format: int = 0,
) -> None:
    """Merge the results of ``segments`` programs per row and head from scratch into ``output`` and ``output_lse``.

    scratch_out: float32, at least ``[T, H, segments, size]``. scratch_lse: at least ``[T, H, segments]`` (base 2).
    output: ``[T, H, size]``, any strides; if ``out_format`` (of ``CODE_FORMATS``) is not 0, uint8 codes of ``x /
    output_scale``. query_start_loc: ``[R + 1]``; rows after its last entry are left unchanged. ``most``: a power of
    two, an upper bound of ``segments`` that is the same for all launches, since each value compiles a separate kernel.
    The caller has selected the device.
    """
    num_rows, num_heads, head_size_v = output.shape
    interpreted = is_interpreted()
    results = _INTERPRETED_RESULTS if interpreted else 1
    lse_strides = (0, 0) if output_lse is None else output_lse.stride()
    merge_segments[(-(-num_rows * num_heads // results),)](
        segment_out=scratch_out,
        segment_lse=scratch_lse,
        out=output,
        lse=output_lse,
        query_start_loc=query_start_loc,
        output_scale=output_scale,
        num_reqs=len(query_start_loc) - 1,
        num_heads=num_heads,
        num_segments=segments,
        stride_out_row=output.stride(0),
        stride_out_head=output.stride(1),
        stride_out_size=output.stride(2),
        stride_lse_row=lse_strides[0],
        stride_lse_head=lse_strides[1],
        HEAD_SIZE_V=head_size_v,
        HAS_LSE=output_lse is not None,
        OUT_FORMAT=out_format,
        BLOCK_S=most,
        BLOCK_R=results,
        BLOCK_V=tile_width(head_size_v),
        INTERPRETED=interpreted,
        num_warps=1 if head_size_v <= 64 else 4,
    )
