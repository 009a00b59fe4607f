"""Decode over a paged cache by the library's operator, as one custom operator of torch.

The wrapping is what makes an interpreted launch visible to whoever records calls, such as the emulation of graphs. All
that a replay may find changed is a tensor argument; the numbers follow from shapes. Must not know: layers, metadata.
"""

import torch
from torch import Tensor

from attncheck.backends.candidates.xformers.availability import quiet_import
from attncheck.backends.candidates.xformers.operator import operator_for, single_token_bias

with quiet_import():
    from xformers.ops import fmha


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
    """Row ``i`` attends to the first ``seq_lens[i]`` keys of the pages in row ``i`` of the table.

    query, output: ``[n, num_heads, head size]``, the rows contiguous. key_cache, value_cache: ``[blocks, page size,
    num_kv_heads, head size]``, viewable as one run of tokens (``RuntimeError`` where heads lie before tokens).
    block_table: int32 ``[n, pages]``. seq_lens: int32 ``[n]``, none beyond the table; 0 gives zeros. output_lse:
    float32 ``[n, num_heads]``, natural; -inf where a row sees nothing.

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
    """Nothing comes back."""
