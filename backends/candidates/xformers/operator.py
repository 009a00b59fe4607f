"""Decode over a paged cache by the library's split-K operator: one subclass per tile size, and the call.

The operator walks a page in tiles of ``BLOCK_N`` keys. Its check refuses a page size that is no multiple of that;
without the check it would read out of bounds. So the largest tile that divides the page is chosen, the operator is
named explicitly, and every call goes through the library's public function, which checks.

The call is a custom operator of torch, so that call recorders, such as the emulation of graphs, see an interpreted
launch. Imports xformers, and so is imported lazily.
"""

from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.xformers.availability import quiet_import
from attncheck.backends.interpreter import is_interpreted

with quiet_import():
    from xformers.ops import fmha
    from xformers.ops.fmha import attn_bias, triton_splitk

NO_EXTENSION = "xFormers wasn't build with CUDA support"
"""Reason that every operator of the library gives for GPU tensors if its compiled extension could not be loaded."""

TILES = (64, 32, 16)
"""Keys that a program reads at once, the operator's default first."""


class PagedSplitK(triton_splitk.FwOp):  # type: ignore[misc] # the library is untyped
    """The library's operator; if its kernel is interpreted, also for CPU and float32.

    The library chooses the number of key splits from the number of requests and the width of the table, not from
    lengths.
    """

    if is_interpreted():
        SUPPORTED_DEVICES = frozenset({"cuda", "cpu"})
        SUPPORTED_DTYPES = frozenset({*triton_splitk.FwOp.SUPPORTED_DTYPES, torch.float32})

    @classmethod
    def not_supported_reasons(cls, d: Any) -> list[str]:
        """Return the library's reasons except its missing extension, which this Triton operator does not use."""
        return [reason for reason in super().not_supported_reasons(d) if reason != NO_EXTENSION]

    @classmethod
    def get_extra_args(cls, **arguments: Any) -> dict[str, Any]:
        """Return tile, warps and stages; without a GPU the class's own, since the library would query the GPU model."""
        if torch.cuda.is_available():
            launch: dict[str, Any] = super().get_extra_args(**arguments)
            return launch
        return {
            "BLOCK_M": cls.BLOCK_M,
            "BLOCK_N": cls.BLOCK_N,
            "num_warps": cls.NUM_WARPS,
            "num_stages": cls.NUM_STAGES,
        }


_OPERATORS: dict[int, type[PagedSplitK]] = {
    tile: type(f"PagedSplitK{tile}", (PagedSplitK,), {"BLOCK_N": tile, "NAME": f"paged_triton_splitK_n{tile}"})
    for tile in TILES
}


def operator_for(page_size: int) -> type[PagedSplitK]:
    """Return the operator with the largest tile that divides the page; raise ``ValueError`` if none does."""
    for tile in TILES:
        if page_size % tile == 0:
            return _OPERATORS[tile]
    raise ValueError(f"page size {page_size} is no multiple of {TILES[-1]}")


def supported_head_sizes() -> list[int]:
    """Return, ascending, the sizes that the operator accepts, checked one by one up to its largest."""
    sizes = range(1, int(PagedSplitK.SUPPORTED_MAX_K) + 1)
    return [size for size in sizes if not PagedSplitK.shape_not_supported_reasons(1, 1, size, size)]


def single_token_bias(seq_lens: Tensor, block_table: Tensor, page_size: int) -> Any:
    """Return the library's bias for one query row per request, which refers to the tensors of the step.

    seq_lens: int32 ``[n]``; 0 is a row that sees nothing, whose output is 0. block_table: int32 ``[n, pages]``. Nothing
    is read from the device: the numbers on the host are bounds, and no length exceeds the table. Refilling the two
    tensors therefore changes the bias, also of a call in a CUDA graph.
    """
    requests, capacity = len(seq_lens), block_table.shape[1] * page_size
    starts = torch.arange(requests + 1, device=seq_lens.device)
    return attn_bias.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(
        q_seqinfo=attn_bias._SeqLenInfo(
            seqstart=starts, max_seqlen=1, min_seqlen=1, seqstart_py=list(range(requests + 1))
        ),
        k_seqinfo=attn_bias._PaddedSeqLenInfo(
            seqstart=starts * capacity,
            max_seqlen=capacity,
            min_seqlen=0,
            seqstart_py=[request * capacity for request in range(requests + 1)],
            seqlen=seq_lens.contiguous(),
            seqlen_py=[capacity] * requests,
            padding=capacity,
        ),
        block_tables=block_table,
        page_size=page_size,
    )


@torch.library.custom_op("attncheck::xformers_paged_decode", mutates_args=("output", "output_lse"))
def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    output: Tensor,
    output_lse: Tensor | None,
) -> None:
    """Attend, for each row ``i``, to the first ``seq_lens[i]`` keys of the pages in row ``i`` of the table.

    query, output: ``[n, num_heads, head size]``, the rows contiguous. key_cache, value_cache: ``[blocks, page size,
    num_kv_heads, head size]``, viewable as one run of tokens (``RuntimeError`` if heads precede tokens). block_table:
    int32 ``[n, pages]``. seq_lens: int32 ``[n]``, none beyond the table; 0 gives zeros. output_lse: float32 ``[n,
    num_heads]``, natural; -inf if a row sees nothing.

    Raises:
        ValueError: the operator's own check refuses dtypes, sizes or strides, with its reasons.
    """
    rows, num_heads, head_size = query.shape
    page_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    query_grouped = query.view(1, rows, num_kv_heads, group, head_size)
    key, value = (
        cache.view(1, -1, num_kv_heads, 1, head_size).expand(-1, -1, -1, group, -1)
        for cache in (key_cache, value_cache)
    )
    bias, operator = single_token_bias(seq_lens, block_table, page_size), operator_for(page_size)
    with torch.cuda.device_of(query):
        if output_lse is None:
            out = fmha.memory_efficient_attention_forward(query_grouped, key, value, bias, scale=scale, op=operator)
        else:
            out, lse = fmha.memory_efficient_attention_forward_requires_grad(
                query_grouped, key, value, bias, scale=scale, op=operator
            )
            # [1, num_kv_heads, group, n], float64 for float32
            output_lse.copy_(lse[0].permute(2, 0, 1).reshape(rows, num_heads))
    output.copy_(out.view(rows, num_heads, head_size))


@paged_decode.register_fake
def _(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    output: Tensor,
    output_lse: Tensor | None,
) -> None:
    """Return nothing: the operator only mutates its arguments."""
