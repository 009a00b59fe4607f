"""The host side of the latent kernel: the custom operator ``attncheck::latent_attention``, grids and tiles.

Tracing, fake tensors and graphs see one call that writes its declared outputs. Nothing is read from the device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_mla.kernels.latent import attend_latent
from attncheck.backends.candidates.triton_unified.kernels.shared import CODE_FORMATS, FLOATS
from attncheck.backends.candidates.triton_unified.launch import UNLIMITED, launch_merge, page_argument, shared_memory_of
from attncheck.backends.candidates.triton_unified.tiling import SplitScratch, choose_segments, power_of_two, tile_width
from attncheck.backends.interpreter import is_interpreted

_LOG2_E = 1.4426950408889634

_LARGE_TILES = 128 * 1024
"""Bytes of shared memory from which tiles of more than 16 lines are chosen for every dtype."""


@dataclass(frozen=True)
class LatentTiling:
    """Tile sizes of one launch.

    A tile has ``block_m`` lines: ``block_q`` rows times ``block_h`` heads, and a remainder. It has ``block_n`` keys.
    one_block: no request has more rows than ``block_q``, so blocks are numbered by request.
    """

    block_m: int
    block_h: int
    block_q: int
    block_n: int
    one_block: bool
    num_warps: int
    num_stages: int

    def num_programs(self, num_rows: int, num_reqs: int, num_heads: int) -> int:
        """Return the number of programs for ``num_reqs`` requests with ``num_rows`` rows in all; some may have none."""
        blocks = num_reqs if self.one_block else num_rows // self.block_q + num_reqs
        return blocks * -(-num_heads // self.block_h)


def choose_latent_tiling(
    *,
    max_query_len: int,
    num_heads: int,
    kv_lora_rank: int,
    itemsize: int,
    is_coded: bool,
    shared_memory: int,
    interpreted: bool,
) -> LatentTiling:
    """Return the tiles for requests of up to ``max_query_len`` rows.

    itemsize: bytes per multiplied element. is_coded: whether the elements are decoded from FP8 codes. shared_memory:
    bytes of shared memory available to a program.

    A tile is limited by the accumulator, ``block_m`` times the latent rank in float32, in registers. Queries and
    ``num_stages`` tiles of keys are in shared memory. A program has 99 KiB (compute capabilities 8.6 and 8.9), 163
    (8.0) or 227 (9.0). Compiled for rank 512 and 64 rotated elements of two bytes, 64 lines and 32 keys fill the
    registers of 8 warps and 112 KiB (8.0) or 148 (9.0). 16 lines and 32 keys take 4 warps and 55 KiB; of codes, 32
    lines and 16 keys take 8 warps and 49 KiB. Of four bytes, 16 lines and 16 keys take 8 warps and 72 KiB. Twice as
    many lines or keys spill.
    """
    if itemsize > 2:
        most, block_n, num_stages = 16, 16, 1
    elif kv_lora_rank > 512:
        most, block_n, num_stages = 16, 16, 2
    else:
        most, block_n, num_stages = 32 if is_coded else 64, 32, 2
        if shared_memory < _LARGE_TILES:
            most = 16
    block_m = max(16, min(most, power_of_two(max_query_len * num_heads)))
    if is_coded and block_m > 16:
        block_n = 16
    if interpreted:
        # Interpreted, the cost of a tile depends on the number of its operations, not on their sizes.
        block_n, num_stages = 64, 1
    block_h = min(block_m, power_of_two(num_heads))
    block_q = min(block_m // block_h, power_of_two(max_query_len))
    return LatentTiling(
        block_m=block_m,
        block_h=block_h,
        block_q=block_q,
        block_n=block_n,
        one_block=max_query_len <= block_q,
        num_warps=4 if block_m == 16 and itemsize <= 2 else 8,
        num_stages=num_stages,
    )


def latent_attention(
    latent: Tensor,
    rotary: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool,
    k_scale: Tensor | None = None,
    output_lse: Tensor | None = None,
    scratch: SplitScratch | None = None,
) -> None:
    """Compute attention of ``H`` heads to one key per token, whose first ``L`` elements are also its value.

    For each row, over the keys ``j`` it sees (causal: those up to its own position; the rows of a request are the last
    of its keys)::

        score_j = scale * (latent . cache_j[:L] + rotary . cache_j[L:])      output = sum_j softmax(score)_j cache_j[:L]

    Rows of a request that see no key get 0 and -inf. Rows of no request, after ``query_start_loc[R]``, are left
    unchanged.

    latent: ``[T, H, L]``, rotary: ``[T, H, E]`` (E may be 0), both float16, bfloat16 or float32, any strides.
    kv_cache: ``[blocks, block size, L + E]``, any strides; float8 for codes, which ``k_scale`` (float32, one element)
        scales.
    output: ``[T, H, L]``, any strides. output_lse: float32 ``[T, H]``, natural logarithms.
    block_table: int32 ``[R, pages]``. seq_lens: int32 ``[R]``. query_start_loc: int32 ``[R + 1]``.
    max_query_len: an upper bound of the rows of a request.
    scratch: memory for the results of segments, or None if keys are not split into segments.

    Raise ``ValueError`` for shapes or dtypes that do not match, or that the kernel does not support.
    """
    num_rows, num_heads, rank = latent.shape
    num_reqs = len(seq_lens)
    wanted: tuple[tuple[str, Tensor | None, tuple[int, ...]], ...] = (
        ("rotary", rotary, (num_rows, num_heads, rotary.shape[-1])),
        ("kv_cache", kv_cache, (*kv_cache.shape[:2], rank + rotary.shape[-1])),
        ("output", output, tuple(latent.shape)),
        ("output_lse", output_lse, (num_rows, num_heads)),
        ("block_table", block_table, (num_reqs, block_table.shape[-1])),
        ("query_start_loc", query_start_loc, (num_reqs + 1,)),
    )
    wrong = [
        f"{name} has shape {tuple(given.shape)}, not {shape}"
        for name, given, shape in wanted
        if given is not None and given.shape != shape
    ]
    if not {latent.dtype, output.dtype} <= {*FLOATS} or rotary.dtype != latent.dtype:
        wrong.append(f"latent is {latent.dtype}, rotary {rotary.dtype}, output {output.dtype}")
    if kv_cache.dtype not in (*FLOATS, *CODE_FORMATS):
        wrong.append(f"kv_cache is {kv_cache.dtype}")
    if not (query_start_loc.is_contiguous() and seq_lens.is_contiguous()):
        wrong.append("query_start_loc or seq_lens has gaps between its entries")
    if kv_cache.dtype in CODE_FORMATS and (k_scale is None or k_scale.numel() != 1):
        wrong.append("a cache of codes needs a k_scale of one element")
    if block_table.stride(-1) != 1:
        wrong.append(f"block_table has strides {block_table.stride()}")
    if wrong:
        raise ValueError(f"latent attention: {'; '.join(wrong)}")
    latent_attention_op(
        latent,
        rotary,
        kv_cache,
        output,
        output_lse,
        None if scratch is None else scratch.out,
        None if scratch is None else scratch.lse,
        block_table,
        seq_lens,
        query_start_loc,
        k_scale,
        max_query_len,
        scale,
        causal,
        0 if scratch is None else scratch.programs,
        0 if scratch is None else scratch.most,
    )


@torch.library.custom_op(
    "attncheck::latent_attention", mutates_args=("output", "output_lse", "scratch_out", "scratch_lse")
)
def latent_attention_op(
    latent: Tensor,
    rotary: Tensor,
    kv_cache: Tensor,
    output: Tensor,
    output_lse: Tensor | None,
    scratch_out: Tensor | None,
    scratch_lse: Tensor | None,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    k_scale: Tensor | None,
    max_query_len: int,
    scale: float,
    causal: bool,
    programs: int,
    most_segments: int,
) -> None:
    """Launch the kernel; arguments are already checked.

    ``programs`` is the wanted number of programs. With fewer, keys are split into up to ``most_segments`` segments.
    """
    num_reqs, (num_rows, num_heads, rank) = len(seq_lens), latent.shape
    if not num_reqs or not num_rows:
        return
    interpreted = is_interpreted()
    code_format = CODE_FORMATS.get(kv_cache.dtype, 0)
    cache = kv_cache.view(torch.uint8) if code_format else kv_cache
    tiling = choose_latent_tiling(
        max_query_len=max_query_len,
        num_heads=num_heads,
        kv_lora_rank=rank,
        itemsize=latent.itemsize if code_format or latent.dtype == kv_cache.dtype else 4,
        is_coded=code_format != 0,
        shared_memory=shared_memory_of(latent.device),
        interpreted=interpreted,
    )
    page_size, is_shift = page_argument(kv_cache.shape[1])
    num_programs = tiling.num_programs(num_rows, num_reqs, num_heads)
    segments = 1
    if scratch_out is not None and scratch_lse is not None:
        segments = choose_segments(
            programs=num_programs,
            wanted=programs,
            results=num_rows * num_heads,
            room=min(scratch_lse.numel(), scratch_out.numel() // rank),
            keys=block_table.shape[1] * kv_cache.shape[1],
            block_n=1 if interpreted else tiling.block_n,  # interpreted, splitting gains no speed but is examined
            most=most_segments,
        )
    lse_strides = (0, 0) if output_lse is None else output_lse.stride()
    with torch.cuda.device_of(latent):
        attend_latent[(num_programs, segments)](
            p_latent=latent,
            p_rotary=rotary,
            p_cache=cache,
            p_out=output,
            p_lse=output_lse,
            p_segment_out=scratch_out,
            p_segment_lse=scratch_lse,
            p_block_table=block_table,
            p_seq_lens=seq_lens,
            p_query_start_loc=query_start_loc,
            p_k_scale=k_scale,
            num_reqs=num_reqs,
            score_factor=scale * _LOG2_E,
            num_heads=num_heads,
            page_size=page_size,
            right=0 if causal else UNLIMITED,
            block_h=tiling.block_h,
            block_q=tiling.block_q,
            num_segments=segments,
            stride_latent_row=latent.stride(0),
            stride_latent_head=latent.stride(1),
            stride_latent_size=latent.stride(2),
            stride_rotary_row=rotary.stride(0),
            stride_rotary_head=rotary.stride(1),
            stride_rotary_size=rotary.stride(2),
            stride_cache_block=cache.stride(0),
            stride_cache_slot=cache.stride(1),
            stride_cache_size=cache.stride(2),
            stride_out_row=output.stride(0),
            stride_out_head=output.stride(1),
            stride_out_size=output.stride(2),
            stride_lse_row=lse_strides[0],
            stride_lse_head=lse_strides[1],
            stride_table_row=block_table.stride(0),
            RANK=rank,
            ROTARY=rotary.shape[2],
            IS_SHIFT=is_shift,
            HAS_LSE=output_lse is not None,
            KV_FORMAT=code_format,
            ONE_BLOCK=tiling.one_block,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_L=tile_width(rank),
            BLOCK_E=tile_width(rotary.shape[2]),
            INTERPRETED=interpreted,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if scratch_out is not None and scratch_lse is not None and segments > 1:
            launch_merge(
                scratch_out,
                scratch_lse,
                output,
                output_lse,
                query_start_loc,
                segments=segments,
                most=most_segments,
            )


@latent_attention_op.register_fake
def _latent_attention_fake(*args: object) -> None:
    """Return nothing: the operator only mutates its arguments."""
