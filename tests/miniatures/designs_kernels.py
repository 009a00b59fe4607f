"""Correct kernels of unusual designs: each rounds, orders, splits, pads or reuses memory in its own way.

``test_designs.py`` examines them with every check. None may fail.
"""

import math
import random

import torch

from attncheck import kernel_backend
from attncheck.backends.conventions import Conventions

FEATURES = ("sliding_window", "logits_soft_cap", "alibi", "sinks", "lse", "short_keys", "head_size_v")
MODIFIED = (*FEATURES, "non_causal", "local")


def requests_of(metadata):
    """Return ``(number, rows, sequence length)`` of each request that has rows."""
    starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    spans = [(number, slice(starts[number], starts[number + 1]), lens[number]) for number in range(len(lens))]
    return [span for span in spans if span[1].start < span[1].stop]


def keys_of(cache, metadata, request, seq_len):
    """Return the cached rows of a request as float32: ``[seq_len, KV heads, head size]``."""
    pages = metadata.block_table_tensor[request, : -(-seq_len // cache.shape[1])].long()
    return cache[pages].flatten(0, 1)[:seq_len].float()


def scores_of(query, key, params, positions, first=0):
    """Return masked scores ``[KV heads, group, rows, keys]`` in float32; key 0 has position ``first``."""
    grouped = query.float().unflatten(1, (params.num_kv_heads, -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, key) * params.softmax_scale
    if params.logits_soft_cap:
        scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
    at = torch.arange(first, first + len(key), device=key.device)
    ahead = at - positions[:, None]
    if params.alibi_slopes is not None:
        scores = scores + per_head(params.alibi_slopes, scores) * ahead
    left, right = params.window
    hidden = (ahead > 0) if params.causal else torch.zeros_like(ahead, dtype=torch.bool)
    hidden = hidden | ((ahead < -left) if left >= 0 else hidden) | ((ahead > right) if right >= 0 else hidden)
    if params.attn_chunk_size:
        own = torch.div(positions, params.attn_chunk_size, rounding_mode="floor")[:, None]
        hidden = hidden | (at // params.attn_chunk_size < own - params.attn_chunk_lookback)
    return scores.masked_fill(hidden, -math.inf)


def per_head(numbers, scores):
    return numbers.float().view(*scores.shape[:2], 1, 1)


def seen(value, scores):
    """Return the values, with zeros where no row sees the key: a weight of 0 does not keep NaN out."""
    unseen = (scores == -math.inf).flatten(0, 2).all(0)
    return value.masked_fill(unseen[:, None, None], 0.0)


def merged(scores, value, params, rounded=None):
    """Return ``(output, lse)``; ``rounded``: the dtype of the weights before they meet the values."""
    lse = scores.logsumexp(-1)
    if params.sinks is not None:
        lse = torch.logaddexp(lse, per_head(params.sinks, scores)[..., 0])
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    weights = (scores - finite[..., None]).exp()
    if rounded is not None:
        weights = weights.to(rounded).float()
    return torch.einsum("hgqk,khd->qhgd", weights, seen(value, scores)).flatten(1, 2), lse.flatten(0, 1).T


def positions_of(rows, seq_len, device):
    count = rows.stop - rows.start
    return torch.arange(seq_len - count, seq_len, device=device)


def each_request(order=list, rounded=None, base=1.0):
    """Return a kernel that computes one request after the other, in ``order``."""

    def attend(query, key_cache, value_cache, metadata, params, out, *, output_lse):
        for request, rows, seq_len in order(requests_of(metadata)):
            key, value = (keys_of(cache, metadata, request, seq_len) for cache in (key_cache, value_cache))
            positions = positions_of(rows, seq_len, out.device)
            result, lse = merged(scores_of(query[rows], key, params, positions), value, params, rounded)
            out[rows], output_lse[rows] = result.to(out.dtype), lse / base

    return attend


def in_place(query, key_cache, value_cache, metadata, params, out, *, output_lse):
    """Keep the running maximum and sum in ``output_lse`` and the running output in float32, a page at a time."""
    for request, rows, seq_len in requests_of(metadata):
        key, value = (keys_of(cache, metadata, request, seq_len) for cache in (key_cache, value_cache))
        positions, size = positions_of(rows, seq_len, out.device), key_cache.shape[1]
        shape = (params.num_kv_heads, query.shape[1] // params.num_kv_heads, rows.stop - rows.start)
        most = query.new_full(shape, -math.inf, dtype=torch.float32)
        if params.sinks is not None:
            most = per_head(params.sinks, most[..., None])[..., 0].expand(shape)
        total = (most > -math.inf).float()
        running = query.new_zeros((*shape, value.shape[-1]), dtype=torch.float32)
        for first in range(0, seq_len, size):
            scores = scores_of(query[rows], key[first : first + size], params, positions, first)
            higher = torch.maximum(most, scores.amax(-1))
            finite = higher.masked_fill(higher == -math.inf, 0.0)
            weights, kept = (scores - finite[..., None]).exp(), (most - finite).exp()
            total = total * kept + weights.sum(-1)
            running = running * kept[..., None] + torch.einsum(
                "hgqk,khd->hgqd", weights, seen(value[first : first + size], scores)
            )
            most = higher
        result = running / total.masked_fill(total == 0, 1.0)[..., None]
        out[rows] = result.permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
        output_lse[rows] = (most + total.log()).flatten(0, 1).T


def splits(count_of, order=reversed):
    """Return a kernel that adds up the results of ``count_of(requests)`` splits of the keys, in ``order``."""

    def attend(query, key_cache, value_cache, metadata, params, out, *, output_lse):
        live = requests_of(metadata)
        for request, rows, seq_len in live:
            key, value = (keys_of(cache, metadata, request, seq_len) for cache in (key_cache, value_cache))
            scores = scores_of(query[rows], key, params, positions_of(rows, seq_len, out.device))
            value = seen(value, scores)
            if params.sinks is not None:  # one more key with a value of zero
                sink = per_head(params.sinks, scores).expand(*scores.shape[:3], 1)
                scores, value = torch.cat([scores, sink], -1), torch.cat([value, value.new_zeros(1, *value.shape[1:])])
            size = max(1, -(-scores.shape[-1] // count_of(live)))
            parts = list(zip(scores.split(size, -1), value.split(size), strict=True))
            lse = scores.logsumexp(-1)
            finite = lse.masked_fill(lse == -math.inf, 0.0)[..., None]
            partial = [torch.einsum("hgqk,khd->qhgd", (some - finite).exp(), held) for some, held in parts]
            out[rows] = sum(order(partial)).flatten(1, 2).to(out.dtype)
            output_lse[rows] = lse.flatten(0, 1).T

    return attend


def padded(query, key_cache, value_cache, metadata, params, out, *, output_lse):
    """Compute each request in tiles of 16 rows and write the padding rows of the step as well."""
    tile = 16
    for request, rows, seq_len in requests_of(metadata):
        key, value = (keys_of(cache, metadata, request, seq_len) for cache in (key_cache, value_cache))
        count = rows.stop - rows.start
        for first in range(0, count, tile):
            some = slice(rows.start + first, min(rows.start + first + tile, rows.stop))
            queries = torch.cat([query[some], query[some][:1].expand(tile - (some.stop - some.start), -1, -1)])
            positions = seq_len - count + first + torch.arange(tile, device=out.device)
            result, lse = merged(scores_of(queries, key, params, positions), value, params)
            out[some], output_lse[some] = result[: some.stop - some.start].to(out.dtype), lse[: some.stop - some.start]
    last = metadata.query_start_loc.tolist()[-1]
    out[last:], output_lse[last:] = 1.0, 0.0


def whole_table(query, key_cache, value_cache, metadata, params, out, *, output_lse):
    """Gather every page of the table's row, replace what lies behind the request, and mask it."""
    size = key_cache.shape[1]
    for request, rows, seq_len in requests_of(metadata):
        pages = metadata.block_table_tensor[request].long().clamp(0, len(key_cache) - 1)
        behind = torch.arange(len(pages) * size, device=out.device) >= seq_len
        key, value = (cache[pages].flatten(0, 1).float() for cache in (key_cache, value_cache))
        key, value = (rows_.masked_fill(behind[:, None, None], 0.0) for rows_ in (key, value))
        scores = scores_of(query[rows], key, params, positions_of(rows, seq_len, out.device))
        result, lse = merged(scores.masked_fill(behind, -math.inf), value, params)
        out[rows], output_lse[rows] = result.to(out.dtype), lse


def drawn_order(parts):
    return random.sample(parts, len(parts))


def _design(fn, name, **others):
    return kernel_backend(fn, name=name, **{"features": MODIFIED, "supported_layouts": ("NHD", "HND"), **others})


InPlace = _design(in_place, "in_place")
Reordering = _design(each_request(lambda spans: sorted(spans, key=lambda span: span[2])), "reordering")
DecodesFirst = _design(
    each_request(lambda spans: sorted(spans, key=lambda span: span[1].stop - span[1].start)), "decodes_first"
)
DrawnOrder = _design(splits(lambda live: 5, drawn_order), "drawn_order", conventions=Conventions(deterministic=False))
RoundedWeights = _design(each_request(rounded=torch.bfloat16), "rounded_weights", supported_dtypes=(torch.bfloat16,))
BaseTwo = _design(each_request(base=math.log(2)), "base_two", conventions=Conventions(lse_base="2"))
BatchVariant = _design(splits(lambda live: 1 + 8 // len(live)), "batch_variant")
FixedSplits = _design(splits(lambda live: 3), "fixed_splits", conventions=Conventions(batch_invariant=True))
PaddedRows = _design(padded, "padded_rows", conventions=Conventions(padded_rows="finite"))
WholeTable = _design(whole_table, "whole_table")
