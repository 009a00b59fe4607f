"""Attention in plain torch with the functions of flash-attn 2.8, as a kernel folder for a CPU."""

import torch


def _scores(query, key, softmax_scale, causal, window_size, softcap, alibi_slopes):
    """Return scores [heads, rows, keys] of one request; -inf where a row does not see a key."""
    rows, keys = len(query), len(key)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    if alibi_slopes is not None:
        bias = torch.arange(keys).expand(rows, keys) if causal else -distance.abs()
        scores = scores + alibi_slopes.double()[:, None, None] * bias
    left, right = window_size
    if causal:
        right = 0
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= distance < -right
    return scores.masked_fill(hidden, -torch.inf)


def _attend(query, key, value, **options):
    scores = _scores(query, key, **options)
    lse = scores.logsumexp(-1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).double()
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    is_seen = scores.gt(-torch.inf).any(0).any(0)  # slots that no row sees may hold NaN
    value = value.masked_fill(~is_seen[:, None, None], 0.0)
    out = torch.einsum("hqk,khd->qhd", weights, value)
    return out.to(query.dtype), lse.float().masked_fill(lse.isneginf(), torch.inf)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    block_table=None,
):
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap}
    out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), torch.inf)
    starts, ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(starts) - 1):
        rows, count = slice(starts[request], starts[request + 1]), ends[request + 1] - ends[request]
        if block_table is None:
            keys = k[ends[request] : ends[request + 1]], v[ends[request] : ends[request + 1]]
        else:
            pages = block_table[request, : -(-count // k.shape[1])].long()
            keys = k[pages].flatten(0, 1)[:count], v[pages].flatten(0, 1)[:count]
        out[rows], lse[:, rows] = _attend(q[rows], *keys, alibi_slopes=alibi_slopes, **options)
    return out, lse, None


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    count, rows = q.shape[:2]
    starts = torch.arange(count + 1) * rows
    ends = torch.cat([cache_seqlens.new_zeros(1), cache_seqlens.cumsum(0)])
    out, lse, _ = flash_attn_varlen_func(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        starts,
        ends,
        rows,
        0,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    return out.view(q.shape), lse.t().view(count, rows, -1).transpose(1, 2)
