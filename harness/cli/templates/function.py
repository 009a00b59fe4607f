# mine.py
import torch
from torch import Tensor

from attncheck import KernelParams, kernel_backend
from attncheck.backends.contract import CommonAttentionMetadata


def attend(
    query: Tensor,  # [rows, heads, head size]; padding rows come last
    key_cache: Tensor,  # [pages, page size, KV heads, head size]; the new keys are in it
    value_cache: Tensor,
    metadata: CommonAttentionMetadata,
    params: KernelParams,
    out: Tensor,  # [rows, heads, head size]
) -> None:
    """Causal attention, a request at a time."""
    starts, page_size = metadata.query_start_loc.tolist(), key_cache.shape[1]
    for request, seq_len in enumerate(metadata.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:  # a padding request
            continue
        context = seq_len - (rows.stop - rows.start)
        pages = metadata.block_table_tensor[request, : -(-seq_len // page_size)].long()
        key, value = (cache[pages].flatten(0, 1)[:seq_len].float() for cache in (key_cache, value_cache))
        grouped = query[rows].float().reshape(-1, params.num_kv_heads, params.group_size, params.head_size)
        scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * params.softmax_scale
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=out.device).tril(context)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2).to(out.dtype)


Mine = kernel_backend(attend, name="mine", supported_layouts=("NHD", "HND"))
