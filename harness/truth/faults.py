"""References with one known fault each, computed like the truth."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.problem.pages import visible_span
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import Storage, UpProjections, key_storage, value_storage
from attncheck.harness.truth.unpaged import HiddenKeys, UnpagedAttention
from attncheck.reference import AttentionParams, Precision, merge_attn_states, mla_params, visible
from attncheck.reference.spec import MODIFIERS, Modifier

# Outputs that a faulty backend may have computed instead of the right one.
#
# Each :class:`Hypothesis` is the problem with one change: a window one key longer, no soft cap, the last key lost. They
# have two uses. A case that does not notice those that concern its modifiers is blind. A wrong output that fits one of
# them can be explained. Coarser arithmetic is among them. A modifier
# that hides keys needs toggles that move its edge, here; those of scores are in `MODIFIERS`.


@dataclass(frozen=True)
class Hypothesis:
    """A fault of a backend: ``meaning`` names it, ``compute`` returns the output and LSE it produces.

    ``features``: the declared features that a backend with this fault lacks.
    """

    meaning: str
    compute: Callable[[], tuple[Tensor, Tensor]]
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class Toggle:
    """A modifier of the layer changed by the smallest step, or turned off.

    ``acts`` (bool ``[T]``): rows whose output it can change. ``mostly``: whether more than half of these must notice
    the change for the case not to be blind, or only one.
    """

    subject: str
    hypothesis: Hypothesis
    acts: Tensor
    mostly: bool


_HEAD_SIZES = (16, 32, 64, 80, 96, 112, 128, 192, 256)
"""Head sizes whose default scale a kernel may hard-code, or derive from padded tensors."""


def toggles(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Toggle]:
    """Yield the changes that a case with these parameters must notice."""
    seen = keys_seen(rows, params)
    for modifier, off in _left_out(params):
        ignored = _altered(modifier.ignored, rows, replace(params, **off), modifier.feature)
        yield Toggle(modifier.feature, ignored, seen >= modifier.fewest_keys, mostly=True)
    yield from _window_toggles(params, rows, seen)
    yield from _chunk_toggles(params, rows, seen)
    if rows.tree is not None:
        flat = replace(rows, tree=None)
        ignored = _altered("the tree is ignored: drafts see other branches", flat, params, "tree")
        yield Toggle("tree", ignored, keys_seen(flat, params) > seen, mostly=True)


def _left_out(params: AttentionParams) -> Iterator[tuple[Modifier, dict[str, Any]]]:
    """Yield the modifiers of scores that are on, and the change of ``params`` that turns each off."""
    for modifier in MODIFIERS.values():
        field = modifier.argument
        if modifier.ignored and field and getattr(params, field) not in (None, 0):
            yield modifier, {field: None}


def causal_toggle(params: AttentionParams, rows: UnpagedAttention) -> Toggle:
    """Return the causal mask that decoder kernels have, which a decoder layer without one must notice."""
    causal = replace(params, causal=True)
    fewer = keys_seen(rows, causal) < keys_seen(rows, params)
    return Toggle("causal", _altered("a causal mask is applied", rows, causal, "non_causal"), fewer, mostly=True)


def _chunk_toggles(params: AttentionParams, rows: UnpagedAttention, seen: Tensor) -> Iterator[Toggle]:
    chunk = params.attn_chunk_size
    if chunk is None:
        return
    whole = replace(params, attn_chunk_size=None)
    ignored = _altered("the chunks are ignored", rows, whole, "local")
    yield Toggle("attn_chunk_size", ignored, keys_seen(rows, whole) > seen, mostly=True)
    for size, name in ((chunk + 1, "+ 1"), (chunk - 1, "- 1")):
        if size:
            other = replace(params, attn_chunk_size=size)
            acts = keys_seen(rows, other) != seen
            moved = _altered(f"the chunks have {size} keys", rows, other, "local")
            yield Toggle(f"attn_chunk_size {name}", moved, acts, mostly=False)
    window = replace(whole, window=(chunk - 1, params.window[1]))
    slid = _altered(f"a window of {chunk} keys instead of chunks", rows, window, "local")
    yield Toggle("attn_chunk_size, not a window", slid, keys_seen(rows, window) > seen, mostly=False)


def _window_toggles(params: AttentionParams, rows: UnpagedAttention, seen: Tensor) -> Iterator[Toggle]:
    left, right = params.window
    for bound, side, value in (("left", 0, left), ("right", 1, right)):
        if value < 0 or (side == 1 and params.causal):
            continue

        def moved(to: int, side: int = side) -> AttentionParams:
            pair = (to, params.window[1]) if side == 0 else (params.window[0], to)
            return replace(params, window=pair)

        size, where = value + 1, "" if params.causal else f" on the {bound}"
        name = "sliding_window" if params.causal else f"sliding_window ({bound} bound)"
        acts = keys_seen(rows, moved(-1)) > seen
        yield Toggle(name, _altered(f"the window{where} is ignored", rows, moved(-1), "sliding_window"), acts, True)
        longer = f"the window is one key too long{where} (sliding_window={size + 1})"
        yield Toggle(f"{name} + 1", _altered(longer, rows, moved(value + 1), "sliding_window"), acts, False)
        if value > 0:
            shorter = f"the window is one key too short{where} (sliding_window={size - 1})"
            yield Toggle(f"{name} - 1", _altered(shorter, rows, moved(value - 1), "sliding_window"), acts, False)


def explanations(params: AttentionParams, rows: UnpagedAttention, block_size: int) -> Iterator[Hypothesis]:
    """Yield common faults in the order in which they are tried; on some batches, some of them equal the truth."""
    for toggle in toggles(params, rows):
        yield toggle.hypothesis
    yield from _several_left_out(params, rows)
    if rows.tree is not None:
        alone = replace(rows, tree=torch.eye(len(rows.tree), dtype=torch.bool, device=rows.tree.device))
        yield _altered("a row of the tree sees the context and itself, and no ancestor", alone, params, "tree")
        size = len(rows.tree)
        wide = 1 << (size - 1).bit_length()
        if wide != size:
            index = (torch.arange(size)[:, None] * wide + torch.arange(size)).clamp(max=size * size - 1)
            padded = replace(rows, tree=rows.tree.flatten()[index.to(rows.tree.device)])
            yield _altered(f"the rows of the tree are read as if they were {wide} long", padded, params, "tree")
        context = (rows.num_keys - rows.num_rows).tolist()
        tree = rows.tree

        def by_position(r: int, q: Tensor, k: Tensor) -> Tensor:
            row, inside = q - context[r], k < size
            return inside & ~tree[row.clamp(0, size - 1), k.clamp(max=size - 1)]

        flat = replace(rows, tree=None)
        yield masked(
            "the tree is read by the position of a key, not by its place behind the context", flat, params, by_position
        )
    if min(params.window) >= 0 and not params.causal:
        unlimited = replace(params, window=(-1, -1))
        yield _altered("the window is ignored on both sides", rows, unlimited, "sliding_window")
    default = params.head_size**-0.5
    if params.softmax_scale != default:
        yield _altered("the default scale is used instead of the layer's", rows, replace(params, scale=default))
    if params.softmax_scale != 1.0:
        yield _altered("the scale is left out", rows, replace(params, scale=1.0))
        yield _altered("the scale is applied twice", rows, replace(params, scale=params.softmax_scale**2))
    for size in _HEAD_SIZES:
        if size**-0.5 not in (default, params.softmax_scale):
            meaning = f"the scale is that of head size {size}, not of {params.head_size}"
            yield _altered(meaning, rows, replace(params, scale=size**-0.5))
    if params.causal:
        yield _altered("the causal mask is missing", rows, replace(params, causal=False))
    else:
        yield _altered("a causal mask is applied", rows, replace(params, causal=True), "non_causal")
    if rows.tree is None and (params.causal or max(params.window) >= 0):
        yield _moved_mask("the mask is that of the next row: a key too late", rows, params, 1)
        yield _moved_mask("the mask is that of the row before: a key too early", rows, params, -1)
    yield from _windows_of_other_rows(params, rows, block_size)
    lost = (
        _lost_keys(rows, block_size) if params.causal else chain(_lost_keys(rows, block_size), _lengths_of_others(rows))
    )
    for meaning, hidden in lost:
        yield masked(meaning, rows, params, hidden)
    if 1 < params.num_kv_heads < params.num_heads:
        heads = torch.arange(params.num_heads, device=rows.keys.device)
        own, other = heads // params.group_size, heads % params.num_kv_heads
        meaning = "query head h reads {}KV head h % num_kv_heads instead of h // group size"
        for what, of_keys, of_values in (("", other, other), ("keys of ", other, own), ("values of ", own, other)):
            swapped = replace(rows, keys=rows.keys[:, of_keys], values=rows.values[:, of_values])
            yield _altered(meaning.format(what), swapped, replace(params, num_kv_heads=params.num_heads))
    if rows.keys.shape == rows.values.shape:
        yield _altered("values are read instead of keys", replace(rows, keys=rows.values), params)
        yield _altered("keys are read instead of values", replace(rows, values=rows.keys), params)
        exchanged = replace(rows, keys=rows.values, values=rows.keys)
        yield _altered("keys and values are exchanged", exchanged, params)
    yield _altered("all visible keys weigh the same: the scores are lost", rows, replace(params, scale=0.0))


def imprecisions(params: AttentionParams, rows: UnpagedAttention, dtype: torch.dtype) -> Iterator[Hypothesis]:
    """Yield the right problem in coarser arithmetic than a good kernel of ``dtype`` uses, to compare sizes of errors.

    TF32 and float16 have equally many significant bits, so their errors look alike.
    """
    for name, coarse in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        if torch.finfo(coarse).eps > torch.finfo(dtype).eps:
            either = "TF32 or float16" if coarse == torch.float16 else name
            parts = {part: _rounded(getattr(rows, part), coarse) for part in ("query", "keys", "values")}
            inputs = replace(rows, **parts)
            scores = replace(inputs, values=rows.values)
            yield _coarse(f"products of query and key in {either}", scores, params, Precision(torch.float32))
            yield _coarse(f"softmax weights rounded to {either}", rows, params, Precision(torch.float32, coarse))
            yield _coarse(f"inputs rounded to {either}", inputs, params, Precision(torch.float32))
            yield _coarse(f"arithmetic in {either}", inputs, params, Precision.kernel(coarse))
        if torch.finfo(coarse).eps >= torch.finfo(dtype).eps:
            yield _coarse(f"scores and sums kept in {name}", rows, params, Precision(coarse, coarse, coarse))


def _coarse(meaning: str, rows: UnpagedAttention, params: AttentionParams, precision: Precision) -> Hypothesis:
    return Hypothesis(meaning, lambda: rows.attend(params, precision))


def _rounded(x: Tensor, coarse: torch.dtype) -> Tensor:
    """Return ``x`` rounded to the precision of ``coarse``, with the exponent range of its own dtype."""
    fraction, exponent = torch.frexp(x.double())
    grid = 2 / torch.finfo(coarse).eps
    return torch.ldexp(torch.round(fraction * grid) / grid, exponent).to(x.dtype)


def _altered(meaning: str, rows: UnpagedAttention, params: AttentionParams, *features: str) -> Hypothesis:
    return Hypothesis(meaning, lambda: rows.attend(params), features)


def _several_left_out(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    off = {modifier.feature: change for modifier, change in _left_out(params)}
    if max(params.window) >= 0:
        off["sliding_window"] = {"window": (-1, 0) if params.window[1] == 0 else (-1, -1)}
    for count in range(2, len(off) + 1):
        for features in combinations(sorted(off), count):
            changes = {field: value for feature in features for field, value in off[feature].items()}
            meaning = f"{', '.join(features[:-1])} and {features[-1]} are ignored"
            yield _altered(meaning, rows, replace(params, **changes), *features)


def _lost_keys(rows: UnpagedAttention, block_size: int) -> Iterator[tuple[str, HiddenKeys]]:
    """Yield (meaning, predicate that hides a key) of keys that faulty kernels lose."""
    query_lens = (rows.cu_seqlens_q[1:] - rows.cu_seqlens_q[:-1]).tolist()
    key_lens = (rows.cu_seqlens_k[1:] - rows.cu_seqlens_k[:-1]).tolist()
    context = [k - q for q, k in zip(query_lens, key_lens, strict=True)]
    yield "the causal mask is aligned to the first key (top left)", lambda r, q, k: k > q - context[r]
    yield "the keys of this step are missing", lambda r, _q, k: k >= context[r]
    yield "the keys of the context are missing", lambda r, _q, k: k < context[r]
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


def is_before(starts: Sequence[int], request: int, _rows: Tensor, keys: Tensor) -> Tensor:
    """Return where keys have positions below ``starts[request]``."""
    return keys < starts[request]


def is_behind(ends: Sequence[int], request: int, _rows: Tensor, keys: Tensor) -> Tensor:
    """Return where keys have positions of at least ``ends[request]``."""
    return keys >= ends[request]


def masked(meaning: str, rows: UnpagedAttention, params: AttentionParams, hidden: HiddenKeys) -> Hypothesis:
    """Return the fault of losing the keys for which ``hidden`` is true."""
    return Hypothesis(meaning, lambda: rows.attend(params, hidden=hidden))


def _moved_mask(meaning: str, rows: UnpagedAttention, params: AttentionParams, shift: int) -> Hypothesis:
    """Return the fault of using the mask of the row ``shift`` positions later, over the same keys."""
    every = replace(params, causal=False, window=(-1, -1), attn_chunk_size=None)
    return masked(meaning, rows, every, lambda _r, q, k: ~visible(params, q + shift, k))


def _windows_of_other_rows(params: AttentionParams, rows: UnpagedAttention, block_size: int) -> Iterator[Hypothesis]:
    """Yield the faults of using one row's window for a whole tile of rows."""
    left, right = params.window
    if left < 0:
        return
    num_rows, num_keys = rows.num_rows.tolist(), rows.num_keys.tolist()
    if max(num_rows) < 2:
        return
    every = replace(params, window=(-1, right))
    first = [max(keys - own - left, 0) for keys, own in zip(num_keys, num_rows, strict=True)]
    last = [max(keys - 1 - left, 0) for keys in num_keys]
    begins = "the window of all rows of a request begins"
    yield masked(f"{begins} where that of its first row does", rows, every, partial(is_before, first))
    yield masked(f"{begins} where that of its last row does", rows, every, partial(is_before, last))
    # A kernel that skips whole pages masks each row as well.
    pages = [key // block_size * block_size for key in last]
    yield masked(f"{begins} at the page where that of its last row does", rows, params, partial(is_before, pages))


def keys_seen(rows: UnpagedAttention, params: AttentionParams) -> Tensor:
    """Return int64 ``[T]``: how many keys each row sees."""
    num_keys, _, node, context_len = rows.places
    first, last = visible_span(params, context_len + node, num_keys)
    count = (last - first + 1).clamp(min=0)
    if rows.tree is None:
        return count
    other = torch.arange(len(rows.tree), device=node.device)
    position = context_len[:, None] + other
    in_span = (position >= first[:, None]) & (position <= last[:, None])
    return count - (~rows.tree[node] & in_span).sum(dim=1)


# Faults of scales: left out, applied twice, exchanged, that of one head for all, or applied where there are no codes.
#
# The keys and values of the rows are numbers, `code * scale`, so each fault is a factor per head on them.


def scale_toggles(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Toggle]:
    """Yield the changes that a case with an FP8 cache must notice: each scale left out, and one scale for all heads."""
    key, value = key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)
    if not key.is_fp8:
        return
    seen = keys_seen(rows, params)
    if problem.layer.mla is not None:  # keys and values come from the same codes
        if bool((key.scale != 1).any()):
            unscaled = 1 / key.scale.double()
            yield Toggle("k_scale", _both("k_scale is left out", params, rows, unscaled, unscaled), seen > 0, True)
        return
    rivals = seen > (0 if params.sinks is not None else 1)
    parts = (("k_scale", key.scale.double(), rivals), ("v_scale", value.scale.double(), seen > 0))
    for name, scale, acts in parts:
        if bool((scale != 1).any()):
            yield Toggle(name, _scaled(f"{name} is left out", params, rows, name, 1 / scale), acts, True)
        if bool((scale != scale[0]).any()):
            yield Toggle(f"{name} per head", _of_first_head(params, rows, name, scale), acts, False)


def scale_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield faults of scales, for explaining a wrong output."""
    storages = key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)
    key, value = (storage.scale.double() for storage in storages)
    if storages[0].is_fp8 and problem.layer.mla is not None:
        yield from (toggle.hypothesis for toggle in scale_toggles(problem, params, rows))
        yield _both("k_scale is applied twice", params, rows, key, key)
        other = torch.tensor(problem.cache.v_scale, dtype=torch.float64).reshape(-1, 1) / key
        yield _both("v_scale is used for the latent cache", params, rows, other, other)
    elif storages[0].is_fp8:
        yield from (toggle.hypothesis for toggle in scale_toggles(problem, params, rows))
        yield _both("k_scale and v_scale are left out", params, rows, 1 / key, 1 / value)
        yield _both("the scales of KV head 0 are used for all heads", params, rows, key[:1] / key, value[:1] / value)
        yield _scaled("k_scale is applied twice", params, rows, "k_scale", key)
        yield _scaled("v_scale is applied twice", params, rows, "v_scale", value)
        yield _both("k_scale and v_scale are applied twice", params, rows, key, value)
        yield _both("k_scale and v_scale are exchanged", params, rows, value / key, key / value)
        yield _scaled("k_scale divides the codes", params, rows, "k_scale", key**-2)
        yield _scaled("v_scale divides the codes", params, rows, "v_scale", value**-2)
        yield _both("k_scale and v_scale divide the codes", params, rows, key**-2, value**-2)
        yield _scaled("k_scale is used for values, instead of v_scale", params, rows, "v_scale", key / value)
        yield _scaled("v_scale is used for keys, instead of k_scale", params, rows, "k_scale", value / key)
        yield from _lost_subnormals(params, rows, storages)
        for how, shift in (("in reversed order of heads", 0), ("of the next head", -1), ("of the head before", 1)):
            k_other, v_other = (each.roll(shift, 0) if shift else each.flip(0) for each in (key, value))
            if len(key) > 1 or len(value) > 1:
                yield _both(f"the scales are used {how}", params, rows, k_other / key, v_other / value)
    else:
        yield _scaled("k_scale multiplies keys that are no codes", params, rows, "k_scale", key)
        yield _scaled("v_scale multiplies values that are no codes", params, rows, "v_scale", value)
        yield _both("k_scale and v_scale multiply keys and values that are no codes", params, rows, key, value)
    q_scale = problem.cache.q_scale
    factor = torch.tensor(q_scale if isinstance(q_scale, tuple) else (q_scale,), dtype=torch.float64)[:, None]
    yield _scaled("q_scale multiplies a query that is no codes", params, rows, "q_scale", factor)


def _lost_subnormals(
    params: AttentionParams, rows: UnpagedAttention, storages: tuple[Storage, Storage]
) -> Iterator[Hypothesis]:
    """Yield the faults of reading codes below the smallest normal number as 0."""
    flushed = [
        part.masked_fill(
            part.abs() < float(torch.finfo(storage.held).tiny) * storage.scale.double().to(part.device), 0.0
        )
        for part, storage in zip((rows.keys, rows.values), storages, strict=True)
    ]
    for which, keys, values in (
        ("", flushed[0], flushed[1]),
        ("of keys ", flushed[0], rows.values),
        ("of values ", rows.keys, flushed[1]),
    ):
        made = replace(rows, keys=keys, values=values)
        yield Hypothesis(f"subnormal codes {which}are read as 0", partial(made.attend, params))


def _scaled(meaning: str, params: AttentionParams, rows: UnpagedAttention, name: str, factor: Tensor) -> Hypothesis:
    """Return the fault of multiplying keys, values or query by ``factor`` (``[1 or Hkv, 1]``)."""
    part = {"k_scale": "keys", "v_scale": "values", "q_scale": "query"}[name]
    per_head = factor.repeat_interleave(params.group_size, 0) if name == "q_scale" and len(factor) > 1 else factor

    def compute() -> tuple[Tensor, Tensor]:
        was: Tensor = getattr(rows, part)
        return replace(rows, **{part: was.double() * per_head.to(was.device)}).attend(params)

    return Hypothesis(meaning, compute)


def _both(meaning: str, params: AttentionParams, rows: UnpagedAttention, key: Tensor, value: Tensor) -> Hypothesis:

    def compute() -> tuple[Tensor, Tensor]:
        device = rows.keys.device
        keys, values = rows.keys.double() * key.to(device), rows.values.double() * value.to(device)
        return replace(rows, keys=keys, values=values).attend(params)

    return Hypothesis(meaning, compute)


def _of_first_head(params: AttentionParams, rows: UnpagedAttention, name: str, scale: Tensor) -> Hypothesis:
    return _scaled(f"the {name} of KV head 0 is used for all heads", params, rows, name, scale[:1] / scale)


# The two forms in which kernels compute latent attention, what each loses to rounding, and faults specific to them.
#
# The truth is the naive form in float64. A kernel may up-project keys and values and keep them in its dtype, as is
# usual for prompts. It may also project the query into the latent space and attend over the cache rows themselves, as
# is usual for decodes. The two forms round different intermediate results.

LATENT_ROUNDINGS = 4
"""Roundings of the output that are always allowed: two as for any layer, one of the values, one of merged results."""

_OTHER_GRID = 1.3
"""Divisor of the dtype's numbers for a second rounding grid, which is as dense but gives other rounding errors."""

Answer = tuple[Tensor, Tensor]
"""Output ``[T, H, Dv]`` and LSE ``[T, H]``."""

Attend = Callable[[UnpagedAttention, AttentionParams], Answer]


@dataclass(frozen=True)
class CacheRows:
    """The contents of the cache in float64: latent rows ``[N, 1, L]`` and rotary parts ``[N, 1, E]``."""

    latent: Tensor
    rotary: Tensor


def cache_rows(problem: Problem, device: torch.device) -> CacheRows:
    """Return the exact values of the cache's rows."""
    layer, cache = problem.layer, problem.cache
    latent = key_storage(layer, cache).exact(problem.keys.to(device))
    return CacheRows(latent.double(), value_storage(layer, cache).exact(problem.values.to(device)).double())


def naive_rows(problem: Problem, weights: UpProjections, cached: CacheRows) -> UnpagedAttention:
    """Return the problem as ordinary attention over exact float64 keys and values."""
    device = cached.latent.device
    weights = weights.to(device)
    keys, values = weights.keys(cached.latent, cached.rotary), weights.values(cached.latent)
    return UnpagedAttention(
        problem.query.double(), keys, values, problem.cu_seqlens_q, problem.cu_seqlens_k, problem.tree
    ).to(device)


def absorbed_rows(weights: UpProjections, cached: CacheRows, rows: UnpagedAttention) -> UnpagedAttention:
    """Return the problem over cache rows: float64 queries ``[T, H, L + E]``, and one KV head with latent values."""
    w_uk = weights.w_uk.to(rows.query)
    nope, rope = rows.query.split([w_uk.shape[2], cached.rotary.shape[2]], dim=-1)
    query = torch.cat([torch.einsum("thp,lhp->thl", nope, w_uk), rope], dim=-1)
    return replace(rows, query=query, keys=torch.cat([cached.latent, cached.rotary], dim=-1), values=cached.latent)


def latent_answers(
    problem: Problem,
    weights: UpProjections,
    cached: CacheRows,
    rows: UnpagedAttention,
    params: AttentionParams,
    attend: Attend,
) -> Iterator[Answer]:
    """Yield outputs and LSEs of low-precision runs of both forms; all that a kernel keeps is rounded to the dtype.

    ``attend``: a low-precision run of ordinary attention. ``cached``: the cache's rows as a kernel reads them. ``rows``
    and ``params`` belong to the naive form. That form is run a second time as engines run prompts that have a context:
    with the context attended separately. The second run rounds to another grid, since the loss of a row in one run is
    random.
    """
    dtype, nope = problem.dtype, weights.w_uk.shape[2]
    yield attend(_kept(rows, nope, dtype), params)
    if not problem.parts and problem.layer.mla is not None:
        other = _kept(rows, nope, dtype, _OTHER_GRID)
        yield _in_pieces(other, params, problem.layer.mla.workspace, Precision.kernel(dtype))
    absorbed = absorbed_rows(weights, cached, rows)
    absorbed = replace(absorbed, query=_through(absorbed.query, dtype))
    latent_out, lse = attend(absorbed, mla_params(problem.layer).latent)
    w_uv = weights.w_uv.to(latent_out)
    yield _through(torch.einsum("thl,lhv->thv", latent_out, w_uv), dtype), lse


def _kept(rows: UnpagedAttention, nope: int, dtype: torch.dtype, grid: float = 1.0) -> UnpagedAttention:
    """Return the rows with up-projected keys (the first ``nope`` channels) and values rounded to ``dtype``."""
    keys = torch.cat([_through(rows.keys[..., :nope], dtype, grid), rows.keys[..., nope:]], dim=-1)
    return replace(rows, keys=keys, values=_through(rows.values, dtype, grid))


def _in_pieces(rows: UnpagedAttention, params: AttentionParams, workspace: int | None, precision: Precision) -> Answer:
    """Attend over the new keys, then merge the context piece by piece; each result and each merge is rounded."""
    length, starts = rows.num_keys, rows.cu_seqlens_k[:-1]
    context = (length - rows.num_rows).clamp(min=0)
    longest = int(context.max())
    size = workspace or max(longest, 1)

    def state(first: Tensor, end: Tensor, how: AttentionParams) -> Answer:
        counts = end - first
        ends = counts.cumsum(0)
        index = torch.arange(int(ends[-1]), device=counts.device)
        index = index + (starts + first - ends + counts).repeat_interleave(counts)
        part = replace(rows, keys=rows.keys[index], values=rows.values[index], cu_seqlens_k=_with_zero(ends))
        # A piece of the context has no causal mask and no tree: every row sees all of it.
        return (part if how is params else replace(part, tree=None)).attend(how, precision)

    answer = state(context, length, params)
    for begin in range(0, longest, size):
        piece = state(context.clamp(max=begin), context.clamp(max=begin + size), replace(params, causal=False))
        answer = merge_attn_states(*answer, *piece, precision=precision)
    return answer


def _with_zero(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends])


def latent_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Yield faults that only layers with a latent cache can have. ``params`` and ``rows`` belong to the naive form."""
    mla, weights = problem.layer.mla, problem.up_projections
    if mla is None or weights is None:
        return
    cached = replace(params, scale=(mla.kv_lora_rank + mla.qk_rope_head_dim) ** -0.5)
    if cached.softmax_scale != params.softmax_scale:
        meaning = "the scale follows from the size of a cache row, kv_lora_rank + qk_rope_head_dim"
        yield Hypothesis(meaning, lambda: rows.attend(cached))
    nope = mla.qk_nope_head_dim
    for name, part in (("rotated", slice(nope, None)), ("latent", slice(0, nope))):
        keys = rows.keys.clone()
        keys[..., part] = 0.0
        lost = replace(rows, keys=keys)
        yield Hypothesis(f"the {name} part of the keys is missing", partial(lost.attend, params))
    query = rows.query.clone()
    query[..., nope:] = rows.query[:, :1, nope:]
    meaning = "every query head has the rotated part of head 0"
    yield Hypothesis(meaning, partial(replace(rows, query=query).attend, params))
    if mla.workspace is not None and rows.tree is None and not problem.parts:
        yield from _piece_explanations(problem, params, rows, mla.workspace)
    cut = naive_rows(problem, _cut_in_halves(weights), cache_rows(problem, rows.keys.device))
    meaning = "the rows of kv_b_proj are taken for all keys, then all values; they alternate by head"
    yield Hypothesis(meaning, partial(cut.attend, params))


def _piece_explanations(
    problem: Problem, params: AttentionParams, rows: UnpagedAttention, size: int
) -> Iterator[Hypothesis]:
    cached = [request.cached for request in problem.requests]
    starts = [request.first_position for request in problem.requests]

    def is_piece(r: int, k: Tensor) -> Tensor:
        end: int = cached[r]
        return k < end

    def partial_piece(r: int, _q: Tensor, k: Tensor) -> Tensor:
        return is_piece(r, k) & (k >= cached[r] // size * size)

    def last_piece(r: int, _q: Tensor, k: Tensor) -> Tensor:
        return is_piece(r, k) & (k >= (cached[r] - 1) // size * size)

    def later_pieces(r: int, _q: Tensor, k: Tensor) -> Tensor:
        return is_piece(r, k) & (k >= size)

    def by_local_index(r: int, q: Tensor, k: Tensor) -> Tensor:
        return is_piece(r, k) & (k % size > q - starts[r])

    faults = {
        "the last, partly filled piece of the context is missing": partial_piece,
        "the last piece of the context is missing": last_piece,
        "only the first piece of the context is read": later_pieces,
        "the causal mask is applied to pieces of the context, by their own positions": by_local_index,
    }
    for meaning, hidden in faults.items():
        yield Hypothesis(meaning, partial(rows.attend, params, hidden=hidden))


def _cut_in_halves(weights: UpProjections) -> UpProjections:
    """Return the weights that result if the fused ones are split into all keys and all values, and not head by head."""
    sizes, heads = (weights.w_uk.shape[2], weights.w_uv.shape[2]), weights.w_uk.shape[1]
    halves = weights.fused().split([heads * size for size in sizes])
    w_uk, w_uv = (half.unflatten(0, (heads, size)).permute(2, 0, 1) for half, size in zip(halves, sizes, strict=True))
    return UpProjections(w_uk, w_uv)


def _through(x: Tensor, dtype: torch.dtype, grid: float = 1.0) -> Tensor:
    """Return ``x`` rounded to ``dtype``, or to the numbers of ``dtype`` divided by ``grid``."""
    return (x * grid).to(dtype).to(x.dtype) / grid
