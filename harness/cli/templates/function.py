# mine.py
import torch

from attncheck import kernel_backend


def attend(query, key_cache, value_cache, metadata, params, out):
    """Causal attention, a request at a time; both caches are [pages, page size, KV heads, head size]."""
    starts, page_size = metadata.query_start_loc.tolist(), key_cache.shape[1]
    for request, seq_len in enumerate(metadata.seq_lens.tolist()):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:  # a padding request
            continue
        context = seq_len - (rows.stop - rows.start)
        pages = metadata.block_table_tensor[request, : -(-seq_len // page_size)].long()
        key, value = (cache[pages].flatten(0, 1)[:seq_len].float() for cache in (key_cache, value_cache))
        grouped = query[rows].float().unflatten(1, (params.num_kv_heads, -1))  # [rows, KV heads, group, head size]
        scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * params.softmax_scale
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=out.device).tril(context)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, value).flatten(1, 2).to(out.dtype)


Mine = kernel_backend(attend, name="mine", supported_layouts=("NHD", "HND"))
