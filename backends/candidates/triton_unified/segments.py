"""The second launch of attention whose keys are cut into segments: one result a row and head of those of its segments.

Must not know: how the segments were cut, layers, metadata.
"""

from torch import Tensor

from attncheck.backends.candidates.triton_unified.kernels.split import merge_segments
from attncheck.backends.candidates.triton_unified.tiling import tile_width
from attncheck.backends.interpreter import is_interpreted

_INTERPRETED_RESULTS = 32
"""Merged by one program where programs cost what their operations cost, whatever the sizes; a GPU has one for each."""


def launch_merge(
    scratch_out: Tensor,
    scratch_lse: Tensor,
    output: Tensor,
    output_lse: Tensor | None,
    query_start_loc: Tensor,
    *,
    segments: int,
    output_scale: Tensor | None = None,
    out_format: int = 0,
) -> None:
    """Merges into ``output`` and ``output_lse`` what ``segments`` programs a row and head left in scratch.

    scratch_out: float32 ``[T, H, segments, size]`` and more, scratch_lse: ``[T, H, segments]`` (base 2) and more.
    output: ``[T, H, size]``, any strides; uint8 where ``out_format``, a code of ``kernels.codes``, is not 0: then codes
    of ``x / output_scale``. query_start_loc: ``[R + 1]``; rows behind its last entry are left alone. The caller has
    chosen the device.
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
        stride_out_row=output.stride(0),
        stride_out_head=output.stride(1),
        stride_out_size=output.stride(2),
        stride_lse_row=lse_strides[0],
        stride_lse_head=lse_strides[1],
        NUM_HEADS=num_heads,
        HEAD_SIZE_V=head_size_v,
        HAS_LSE=output_lse is not None,
        OUT_FORMAT=out_format,
        NUM_SEGMENTS=segments,
        BLOCK_R=results,
        BLOCK_V=tile_width(head_size_v),
        INTERPRETED=interpreted,
        num_warps=1 if head_size_v <= 64 else 4,
    )
