"""Faults of what a kernel reads: hidden keys, scales, heads, queries, latent parts; and of its precision."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import Storage, UpProjections, key_storage, value_storage
from attncheck.harness.truth.faults import (
    Hypothesis,
    altered,
    cache_rows,
    is_before,
    is_behind,
    left_out,
    naive_rows,
    of_parts,
    query_scale,
    scale_toggles,
    scaled,
    toggles,
    window_feature,
)
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import HiddenKeys, UnpagedAttention
from attncheck.reference import AttentionParams, Precision, visible
from attncheck.reference.step_spec import REGISTERED

_HEAD_SIZES = (16, 32, 64, 80, 96, 112, 128, 192, 256)
"""Head sizes whose default scale a kernel may hard-code, or derive from padded tensors."""

_WIDTHS = (8, 16, 32, 64, 128, 256)
"""Numbers of channels that a kernel may assume for a head, or for a tile of a head."""


def common_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield common faults in the order in which they are tried; on some batches, some of them equal the truth."""
    params, rows = truth.params, truth.rows
    for toggle in toggles(params, rows):
        yield toggle.hypothesis
    yield from _several_left_out(params, rows)
    if rows.tree is not None:
        yield from _tree_explanations(params, rows, rows.tree)
    if min(params.window) >= 0 and not params.causal:
        unlimited = replace(params, window=(-1, -1))
        yield altered("the window is ignored on both sides", rows, unlimited, "sliding_window")
    yield from _softmax_scales(params, rows)
    if params.causal:
        yield altered("the causal mask is missing", rows, replace(params, causal=False))
    else:
        yield altered("a causal mask is applied", rows, replace(params, causal=True), "non_causal")
    if rows.tree is None and rows.is_plain and (params.causal or max(params.window) >= 0):
        every = replace(params, causal=False, window=(-1, -1), attn_chunk_size=None)
        for row, shift in (("the next row: a key too late", 1), ("the row before: a key too early", -1)):
            yield altered(f"the mask is that of {row}", rows, every, hidden=partial(_is_hidden_from, params, shift))
    if rows.is_plain:
        yield from _windows_of_other_rows(params, rows, problem.cache.block_size)
    lost = _lost_keys(rows, problem.cache.block_size)
    for meaning, hidden in lost if params.causal else chain(lost, _lengths_of_others(rows)):
        yield altered(meaning, rows, params, hidden=hidden)
    if 1 < params.num_kv_heads < params.num_heads:
        heads = torch.arange(params.num_heads, device=rows.keys.device)
        own = heads // params.group_size
        other = heads % params.num_kv_heads
        expanded = replace(rows, keys=rows.keys[:, own], values=rows.values[:, own])
        for part, swapped in of_parts(expanded, rows.keys[:, other], rows.values[:, other]):
            what = f"{part} of " if part else ""
            meaning = f"query head h reads {what}KV head h % num_kv_heads instead of h // group size"
            yield altered(meaning, swapped, replace(params, num_kv_heads=params.num_heads))
    if rows.keys.shape == rows.values.shape:
        yield altered("values are read instead of keys", replace(rows, keys=rows.values), params)
        yield altered("keys are read instead of values", replace(rows, values=rows.keys), params)
        exchanged = replace(rows, keys=rows.values, values=rows.keys)
        yield altered("keys and values are exchanged", exchanged, params)
    yield altered("all visible keys weigh the same: the scores are lost", rows, replace(params, scale=0.0))


def _several_left_out(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    off = {modifier.feature: change for modifier, change in left_out(params)}
    if max(params.window) >= 0:
        off[window_feature(rows)] = {"window": (-1, 0) if params.window[1] == 0 else (-1, -1)}
    for count in range(2, len(off) + 1):
        for features in combinations(sorted(off), count):
            changes = {field: value for feature in features for field, value in off[feature].items()}
            meaning = f"{', '.join(features[:-1])} and {features[-1]} are ignored"
            yield altered(meaning, rows, replace(params, **changes), *features)


def _tree_explanations(params: AttentionParams, rows: UnpagedAttention, tree: Tensor) -> Iterator[Hypothesis]:
    size = len(tree)
    alone = replace(rows, tree=torch.eye(size, dtype=torch.bool, device=tree.device))
    yield altered("a row of the tree sees the context and itself, and no ancestor", alone, params, "tree")
    wide = 1 << (size - 1).bit_length()
    if wide != size:
        index = (torch.arange(size)[:, None] * wide + torch.arange(size)).clamp(max=size * size - 1)
        padded = replace(rows, tree=tree.flatten()[index.to(tree.device)])
        yield altered(f"the rows of the tree are read as if they were {wide} long", padded, params, "tree")
    context = (rows.num_keys - rows.num_rows).tolist()

    def by_position(r: int, q: Tensor, k: Tensor) -> Tensor:
        row = q - context[r]
        return (k < size) & ~tree[row.clamp(0, size - 1), k.clamp(max=size - 1)]

    meaning = "the tree is read by the position of a key, not by its place behind the context"
    yield altered(meaning, replace(rows, tree=None), params, hidden=by_position)
    left, right = params.window
    depth = tree.sum(1) - 1

    def by_depth(r: int, q: Tensor, k: Tensor) -> Tensor:
        first = context[r]
        query_at, key_at = (torch.where(p < first, p, first + depth[(p - first).clamp(0, size - 1)]) for p in (q, k))
        return query_at - key_at > left

    if left >= 0 and int(depth[-1]) < size - 1:
        meaning = "the window counts from the depth of a row in the tree, not from its position"
        yield altered(meaning, rows, replace(params, window=(-1, right)), "sliding_window", hidden=by_depth)


def _softmax_scales(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    default, own = params.head_size**-0.5, params.softmax_scale
    others = {}
    if own != default:
        others["the default scale is used instead of the layer's"] = default
    if own != 1.0:
        others |= {"the scale is left out": 1.0, "the scale is applied twice": own**2}
    for size in _HEAD_SIZES:
        if size**-0.5 not in (default, own):
            others[f"the scale is that of head size {size}, not of {params.head_size}"] = size**-0.5
    for meaning, scale in others.items():
        yield altered(meaning, rows, replace(params, scale=scale))


def _is_hidden_from(params: AttentionParams, shift: int, _request: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Return where the row ``shift`` positions later does not see keys."""
    return ~visible(params, rows + shift, keys)


def _windows_of_other_rows(params: AttentionParams, rows: UnpagedAttention, block_size: int) -> Iterator[Hypothesis]:
    """Yield the faults of using one row's window for a whole tile of rows."""
    left, right = params.window
    num_rows, num_keys = rows.num_rows.tolist(), rows.num_keys.tolist()
    if left < 0 or max(num_rows) < 2:
        return
    every = replace(params, window=(-1, right))
    first = [max(keys - own - left, 0) for keys, own in zip(num_keys, num_rows, strict=True)]
    last = [max(keys - 1 - left, 0) for keys in num_keys]
    # A kernel that skips whole pages masks each row as well.
    pages = [key // block_size * block_size for key in last]
    for where, how, starts in (
        ("where that of its first row does", every, first),
        ("where that of its last row does", every, last),
        ("at the page where that of its last row does", params, pages),
    ):
        meaning = f"the window of all rows of a request begins {where}"
        yield altered(meaning, rows, how, hidden=partial(is_before, starts))


def _lost_keys(rows: UnpagedAttention, block_size: int) -> Iterator[tuple[str, HiddenKeys]]:
    query_lens = (rows.cu_seqlens_q[1:] - rows.cu_seqlens_q[:-1]).tolist()
    key_lens = (rows.cu_seqlens_k[1:] - rows.cu_seqlens_k[:-1]).tolist()
    context = [k - q for q, k in zip(query_lens, key_lens, strict=True)]
    is_causal_alone = rows.is_plain  # with image spans, rows would lose more than the fault names
    if is_causal_alone:
        yield "the causal mask is aligned to the first key (top left)", lambda r, q, k: k > q - context[r]
    yield "the keys of this step are missing", lambda r, _q, k: k >= context[r]
    yield "the keys of the context are missing", lambda r, _q, k: k < context[r]
    if is_causal_alone:
        yield "the key of the row itself is missing", lambda _r, q, k: k >= q
    yield "the last key is missing", lambda r, _q, k: k >= key_lens[r] - 1
    yield "the first key is missing", lambda _r, _q, k: k < 1
    yield "the last, partly filled page is missing", lambda r, _q, k: k >= key_lens[r] // block_size * block_size


def _lengths_of_others(rows: UnpagedAttention) -> Iterator[tuple[str, HiddenKeys]]:
    """Yield (meaning, predicate that hides a key) of using the length of another request.

    For layers without a causal mask, which a wrong length would move.
    """
    lengths = rows.num_keys.tolist()
    others = {
        "request 0": [lengths[0]] * len(lengths),
        "the request before": [lengths[0], *lengths[:-1]],
        "the next request": [*lengths[1:], lengths[-1]],
    }
    for name, ends in others.items():
        yield f"keys are missing behind the length of {name}", partial(is_behind, ends)


def imprecisions(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the right problem in coarser arithmetic than a good kernel uses, to compare sizes of errors.

    TF32 and float16 have equally many significant bits, so their errors look alike.
    """
    params = truth.params
    rows = truth.rows
    own = torch.finfo(problem.dtype).eps
    for name, coarse in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        if torch.finfo(coarse).eps > own:
            either = "TF32 or float16" if coarse == torch.float16 else name
            parts: dict[str, Any] = {
                part: _rounded(getattr(rows, part), coarse) for part in ("query", "keys", "values")
            }
            inputs = replace(rows, **parts)
            scores = replace(inputs, values=rows.values)
            for meaning, read, precision in (
                (f"products of query and key in {either}", scores, Precision(torch.float32)),
                (f"softmax weights rounded to {either}", rows, Precision(torch.float32, coarse)),
                (f"inputs rounded to {either}", inputs, Precision(torch.float32)),
                (f"arithmetic in {either}", inputs, Precision.kernel(coarse)),
            ):
                yield altered(meaning, read, params, precision=precision)
        if torch.finfo(coarse).eps >= own:
            yield altered(f"scores and sums kept in {name}", rows, params, precision=Precision(coarse, coarse, coarse))


def _rounded(x: Tensor, coarse: torch.dtype) -> Tensor:
    """Return ``x`` rounded to the precision of ``coarse``, with the exponent range of its own dtype."""
    fraction, exponent = torch.frexp(x.double())
    grid = 2 / torch.finfo(coarse).eps
    return torch.ldexp(torch.round(fraction * grid) / grid, exponent).to(x.dtype)


def scale_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield faults of scales: left out, applied twice, exchanged, or applied where there are no codes."""
    params, rows = truth.params, truth.rows
    storages = key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)
    key, value = (storage.scale.double() for storage in storages)
    is_fp8 = storages[0].is_fp8
    is_latent = problem.layer.mla is not None
    if is_fp8:
        yield from (toggle.hypothesis for toggle in scale_toggles(problem, params, rows))
    factors: dict[str, tuple[Tensor | None, Tensor | None]]  # of keys, and of values
    if is_fp8 and is_latent:  # keys and values come from the same codes
        other = torch.tensor(problem.cache.v_scale, dtype=torch.float64).reshape(-1, 1) / key
        factors = {"k_scale is applied twice": (key, key), "v_scale is used for the latent cache": (other, other)}
    elif is_fp8:
        factors = {
            "k_scale and v_scale are left out": (1 / key, 1 / value),
            "the scales of KV head 0 are used for all heads": (key[:1] / key, value[:1] / value),
            "k_scale is applied twice": (key, None),
            "v_scale is applied twice": (None, value),
            "k_scale and v_scale are applied twice": (key, value),
            "k_scale and v_scale are exchanged": (value / key, key / value),
            "k_scale divides the codes": (key**-2, None),
            "v_scale divides the codes": (None, value**-2),
            "k_scale and v_scale divide the codes": (key**-2, value**-2),
            "k_scale is used for values, instead of v_scale": (None, key / value),
            "v_scale is used for keys, instead of k_scale": (value / key, None),
        }
    elif storages[0].coded_rows is not None:
        factors = {
            "k_scale multiplies keys whose rows have scales of their own": (key, None),
            "v_scale multiplies values whose rows have scales of their own": (None, value),
            "k_scale and v_scale multiply keys and values whose rows have scales of their own": (key, value),
        }
        # Scales of groups are stored in units of the layer's, and those of a registered cache may be the layer's.
        if storages[0].coded_rows.row_format.group is not None or problem.cache.kv_cache_dtype == REGISTERED:
            factors = {
                "k_scale is left out": (1 / key, None),
                "v_scale is left out": (None, 1 / value),
                "k_scale and v_scale are left out": (1 / key, 1 / value),
            }
    else:
        factors = {
            "k_scale multiplies keys that are no codes": (key, None),
            "v_scale multiplies values that are no codes": (None, value),
            "k_scale and v_scale multiply keys and values that are no codes": (key, value),
        }
    for meaning, (of_keys, of_values) in factors.items():
        features = ("fp8_per_head",) if "for all heads" in meaning else ()
        yield scaled(meaning, params, rows, of_keys, of_values, features=features)
    if is_fp8 and not is_latent:
        for part, made in of_parts(rows, *map(_without_subnormals, (rows.keys, rows.values), storages)):
            yield altered(f"subnormal codes {f'of {part} ' if part else ''}are read as 0", made, params)
        for how, shift in (("in reversed order of heads", 0), ("of the next head", -1), ("of the head before", 1)):
            of_keys, of_values = (each.roll(shift, 0) if shift else each.flip(0) for each in (key, value))
            if len(key) > 1 or len(value) > 1:
                meaning, factor = f"the scales are used {how}", (of_keys / key, of_values / value)
                yield scaled(meaning, params, rows, *factor, features=("fp8_per_head",))
    if problem.layer.query_quant:
        yield from _query_scale_explanations(problem, truth, key)
    else:
        yield scaled("q_scale multiplies a query that is no codes", params, rows, of_query=query_scale(problem))


def _query_scale_explanations(problem: Problem, truth: Truth, key_scale: Tensor) -> Iterator[Hypothesis]:
    """Yield faults of ``q_scale`` for a query of codes; ``key_scale`` is float64 ``[1 or Hkv, 1]``."""
    params, own = truth.params, query_scale(problem)
    used = {
        "q_scale is applied twice": own**2,
        "q_scale divides the codes": 1 / own,
        "k_scale is used for the query, instead of q_scale": key_scale,
    }
    if len(own) > 1:
        used |= {
            "the q_scales are used in reversed order of heads": own.flip(0),
            "the q_scale of the next KV head is used": own.roll(-1, 0),
            "the q_scale of the KV head before is used": own.roll(1, 0),
        }
    for meaning, scale in used.items():
        yield scaled(meaning, params, truth.rows, of_query=scale / own, features=("fp8_query",))
    if 1 < len(own) < params.num_heads:
        of_heads = own.repeat_interleave(params.group_size, 0)
        alternating = own.repeat(params.group_size, 1)
        meaning = "query head h has the q_scale of KV head h % num_kv_heads; the heads of a group share one"
        yield scaled(meaning, params, truth.rows, of_query=alternating / of_heads, features=("fp8_query",))


def _without_subnormals(part: Tensor, storage: Storage) -> Tensor:
    smallest = torch.finfo(storage.held).tiny * storage.scale.double().to(part.device)
    return part.masked_fill(part.abs() < smallest, 0.0)


def latent_explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield faults that only layers with a latent cache can have."""
    params, rows = truth.params, truth.rows
    mla, weights = problem.layer.mla, problem.up_projections
    if mla is None or weights is None:
        return
    cached = replace(params, scale=(mla.kv_lora_rank + mla.qk_rope_head_dim) ** -0.5)
    if cached.softmax_scale != params.softmax_scale:
        yield altered("the scale follows from the size of a cache row, kv_lora_rank + qk_rope_head_dim", rows, cached)
    nope = mla.qk_nope_head_dim
    for name, part in (("rotated", slice(nope, None)), ("latent", slice(0, nope))):
        keys = rows.keys.clone()
        keys[..., part] = 0.0
        yield altered(f"the {name} part of the keys is missing", replace(rows, keys=keys), params)
    query = rows.query.clone()
    query[..., nope:] = rows.query[:, :1, nope:]
    yield altered("every query head has the rotated part of head 0", replace(rows, query=query), params)
    if mla.workspace is not None and rows.tree is None and not problem.parts:
        for meaning, hidden in _lost_pieces(problem, mla.workspace):
            yield altered(meaning, rows, params, hidden=hidden)
    cut = naive_rows(problem, _cut_in_halves(weights), cache_rows(problem, rows.keys.device))
    yield altered("the rows of kv_b_proj are taken for all keys, then all values; they alternate by head", cut, params)


def _lost_pieces(problem: Problem, size: int) -> Iterator[tuple[str, HiddenKeys]]:
    """Yield (meaning, predicate that hides a key) of pieces of the context, of ``size`` keys each."""
    cached = [request.cached for request in problem.requests]
    starts = [request.first_position for request in problem.requests]
    pieces: dict[str, HiddenKeys] = {
        "the last, partly filled piece of the context is missing": lambda r, _q, k: k >= cached[r] // size * size,
        "the last piece of the context is missing": lambda r, _q, k: k >= (cached[r] - 1) // size * size,
        "only the first piece of the context is read": lambda _r, _q, k: k >= size,
        "the causal mask is applied to pieces of the context, by their own positions": lambda r, q, k: (
            k % size > q - starts[r]
        ),
    }
    for meaning, hides in pieces.items():
        yield meaning, partial(_hides_in_context, cached, hides)


def _hides_in_context(cached: Sequence[int], hides: HiddenKeys, request: int, rows: Tensor, keys: Tensor) -> Tensor:
    return (keys < cached[request]) & hides(request, rows, keys)


def _cut_in_halves(weights: UpProjections) -> UpProjections:
    """Return the weights that result if the fused ones are split into all keys and all values, and not head by head."""
    sizes = (weights.w_uk.shape[2], weights.w_uv.shape[2])
    heads = weights.w_uk.shape[1]
    halves = weights.fused().split([heads * size for size in sizes])
    w_uk, w_uv = (half.unflatten(0, (heads, size)).permute(2, 0, 1) for half, size in zip(halves, sizes, strict=True))
    return UpProjections(w_uk, w_uv)


def query_explanations(_problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of using queries of other rows or heads, and of products over some of the channels."""
    for meaning, query in chain(_queries_of_others(truth), _queries_of_channels(truth)):
        yield altered(meaning, replace(truth.rows, query=query), truth.params)


def _queries_of_others(truth: Truth) -> Iterator[tuple[str, Tensor]]:
    rows, num_heads = truth.rows, truth.params.num_heads
    starts, number = rows.cu_seqlens_q[:-1], rows.num_rows
    first, length = (each.repeat_interleave(number) for each in (starts, number))
    nth = rows.places.node
    if bool((number > 1).any()):
        for meaning, place in {
            "the query of a row is that of the row before in its request": (nth - 1) % length,
            "the query of a row is that of the next row of its request": (nth + 1) % length,
            "every row of a request has the query of its first row": torch.zeros_like(nth),
            "every row of a request has the query of its last row": length - 1,
        }.items():
            yield meaning, rows.query[first + place]
    if num_heads > 1:
        yield "query head h has the query of head h - 1", rows.query.roll(1, dims=1)
        yield "query head h has the query of head num_heads - 1 - h", rows.query.flip(1)
    if num_heads > 2:
        yield "query head h has the query of head h + 1", rows.query.roll(-1, dims=1)


def _queries_of_channels(truth: Truth) -> Iterator[tuple[str, Tensor]]:
    """Yield (meaning, query) of products over some channels, or over channels that do not match."""
    query, size = truth.rows.query, truth.params.head_size
    channel = torch.arange(size, device=query.device)
    for width in dict.fromkeys((*(width for width in _WIDTHS if width < size), size // 2)):
        yield f"only channels 0 to {width - 1} count in the scores", query * (channel < width)
    yield "the last channel is missing in the scores", query * (channel < size - 1)
    words = "the channels of query and key do not match"
    yield f"{words}: in one of them the halves are exchanged", query.roll(size // 2, dims=-1)
    yield f"{words}: in one of them they are in reversed order", query.flip(-1)
    if size % 2 == 0:
        halves = torch.cat([channel[::2], channel[1::2]])
        yield f"{words}: one has even and odd ones interleaved, the other in halves", query[..., halves]
        yield f"{words}: one has the halves interleaved, the other not", query[..., halves.argsort()]


def packed_queries(truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of reading the query as if every request had equally many rows."""
    rows = truth.rows
    place = torch.arange(len(rows.query), device=rows.query.device)
    request = torch.arange(len(rows.num_rows), device=place.device).repeat_interleave(rows.num_rows)
    longest = int(rows.num_rows.max())
    for width in dict.fromkeys((longest, 1 << (longest - 1).bit_length())):
        other = (request * width + rows.places.node).clamp(max=len(place) - 1)
        if not torch.equal(other, place):
            packed = replace(rows, query=rows.query[other])
            yield altered(f"queries are read as if every request had {width} rows", packed, truth.params)


def equal_row_counts(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield the faults of dividing the rows among the requests as if all had as many as the longest, or the average."""
    rows, params, padding = truth.rows, truth.params, problem.case.batch.padding
    total, requests = len(rows.query), len(rows.num_rows)
    longest, average = int(rows.num_rows.max()), (total + padding.tokens) // (requests + padding.requests)
    for count in dict.fromkeys((longest, average)):
        missing = count * requests - total
        has_rows_of_its_own = rows.tree is not None or rows.topk_indices is not None
        if missing < 0 or has_rows_of_its_own or bool((rows.num_rows == count).all()):
            continue
        query = torch.cat([rows.query, rows.query.new_zeros(missing, *rows.query.shape[1:])])
        equal = replace(rows, query=query, cu_seqlens_q=torch.arange(requests + 1, device=query.device) * count)
        yield Hypothesis(f"every request is taken to have {count} rows", partial(_first_rows, equal, params, total))


def _first_rows(rows: UnpagedAttention, params: AttentionParams, count: int) -> tuple[Tensor, Tensor]:
    out, lse = rows.attend(params)
    return out[:count], lse[:count]
