"""References with one known fault each, computed like the truth."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attncheck.harness.problem.chosen_keys import times_named
from attncheck.harness.problem.pages import visible_span
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import UpProjections, key_storage, value_storage
from attncheck.harness.truth.unpaged import HiddenKeys, UnpagedAttention
from attncheck.reference import AttentionParams, Precision, PrefixMask, merge_attn_states
from attncheck.reference.spec import MODIFIERS, Modifier

# Outputs that a faulty backend may have computed instead of the right one.
#
# Each :class:`Hypothesis` is the problem with one change: a window one key longer, no soft cap, the last key lost. They
# have two uses. A case that does not notice those that concern its modifiers is blind. A wrong output that fits one of
# them can be explained: :mod:`attncheck.harness.diagnosis` has many more. A modifier that hides keys needs toggles that
# move its edge, here; those of scores are in `MODIFIERS`.


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


def toggles(params: AttentionParams, rows: UnpagedAttention) -> Iterator[Toggle]:
    """Yield the changes that a case with these parameters must notice."""
    seen = keys_seen(rows, params)
    for modifier, off in left_out(params):
        ignored = altered(modifier.ignored, rows, replace(params, **off), modifier.feature)
        yield Toggle(modifier.feature, ignored, seen >= modifier.fewest_keys, mostly=True)
    yield from _window_toggles(params, rows, seen)
    yield from _chunk_toggles(params, rows, seen)
    yield from _prefix_toggles(params, rows, seen)
    yield from _topk_toggles(params, rows, seen)
    if rows.tree is not None:
        flat = replace(rows, tree=None)
        ignored = altered("the tree is ignored: drafts see other branches", flat, params, "tree")
        yield Toggle("tree", ignored, keys_seen(flat, params) > seen, mostly=True)


def left_out(params: AttentionParams) -> Iterator[tuple[Modifier, dict[str, Any]]]:
    """Yield the modifiers of scores that are on, and the change of ``params`` that turns each off."""
    for modifier in MODIFIERS.values():
        field = modifier.argument
        if modifier.ignored and field and getattr(params, field) not in (None, 0):
            yield modifier, {field: None}


def causal_toggle(params: AttentionParams, rows: UnpagedAttention) -> Toggle:
    """Return the causal mask that decoder kernels have, which a decoder layer without one must notice."""
    causal = replace(params, causal=True)
    fewer = keys_seen(rows, causal) < keys_seen(rows, params)
    return Toggle("causal", altered("a causal mask is applied", rows, causal, "non_causal"), fewer, mostly=True)


def _chunk_toggles(params: AttentionParams, rows: UnpagedAttention, seen: Tensor) -> Iterator[Toggle]:
    chunk = params.attn_chunk_size
    if chunk is None:
        return
    whole = replace(params, attn_chunk_size=None)
    ignored = altered("the chunks are ignored", rows, whole, "local")
    yield Toggle("attn_chunk_size", ignored, keys_seen(rows, whole) > seen, mostly=True)
    for size, name in ((chunk + 1, "+ 1"), (chunk - 1, "- 1")):
        if size:
            other = replace(params, attn_chunk_size=size)
            acts = keys_seen(rows, other) != seen
            moved = altered(f"the chunks have {size} keys", rows, other, "local")
            yield Toggle(f"attn_chunk_size {name}", moved, acts, mostly=False)
    window = replace(whole, window=(chunk - 1, params.window[1]))
    slid = altered(f"a window of {chunk} keys instead of chunks", rows, window, "local")
    yield Toggle("attn_chunk_size, not a window", slid, keys_seen(rows, window) > seen, mostly=False)


def _prefix_toggles(params: AttentionParams, rows: UnpagedAttention, seen: Tensor) -> Iterator[Toggle]:
    def toggle(key: str, feature: str, meaning: str, change: ChangePrefix, *, mostly: bool = False) -> Toggle:
        other = with_prefixes(rows, change)
        acts = keys_seen(other, params) != seen
        return Toggle(key, altered(meaning, other, params, feature), acts, mostly)

    if any(own.mm_req_doc_ranges for own in rows.prefixes):
        key, feature = "mm_req_doc_ranges", "mm_prefix"
        yield toggle(key, feature, "the image spans are ignored", with_ends(None), mostly=True)
        yield toggle(f"{key}: last + 1", feature, "the image spans end one key too late", with_ends((0, 1)))
        yield toggle(f"{key}: last - 1", feature, "the image spans end one key too early", with_ends((0, -1)))
        yield toggle(f"{key}: first + 1", feature, "the image spans begin one key too late", with_ends((1, 0)))
        yield toggle(f"{key}: first - 1", feature, "the image spans begin one key too early", with_ends((-1, 0)))
    if rows.has_first_keys:
        key, feature = "rswa_prefix_len", "rswa"
        meaning = "the first keys are not visible beyond the window"
        yield toggle(key, feature, meaning, with_first_keys(lambda _: 0), mostly=True)
        meaning = "one first key too many is visible beyond the window"
        yield toggle(f"{key} + 1", feature, meaning, with_first_keys(lambda own: own + 1))
        meaning = "one first key too few is visible beyond the window"
        yield toggle(f"{key} - 1", feature, meaning, with_first_keys(lambda own: max(own - 1, 0)))


def _topk_toggles(params: AttentionParams, rows: UnpagedAttention, seen: Tensor) -> Iterator[Toggle]:
    own = rows.topk_indices
    if own is None:
        return
    every = replace(rows, topk_indices=None)
    ignored = altered("topk_indices are ignored: rows see all keys of the causal mask", every, params, "sparse")
    yield Toggle("index_topk", ignored, keys_seen(every, params) > seen, mostly=True)
    one_by_one = {
        "-1 in topk_indices is read as key 0": ("-1", own.clamp(min=0)),
        "keys that topk_indices name twice count twice": ("repetitions", own),
    }
    for meaning, (subject, entries) in one_by_one.items():
        times = times_named(entries, int(rows.num_keys.max()))
        is_uneven = times.amax(dim=1) > torch.where(times > 0, times, own.shape[1]).amin(dim=1)
        counted = Hypothesis(meaning, partial(attend_named, rows, params, entries), ("sparse",))
        if bool(is_uneven.any()):
            yield Toggle(f"topk_indices: {subject}", counted, is_uneven, mostly=False)


def attend_named(
    rows: UnpagedAttention,
    params: AttentionParams,
    topk_indices: Tensor,
    keys: Tensor | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return output and LSE, float64, if each row sums over its entries of ``topk_indices [T, K]`` one by one.

    A key that is named twice counts twice. There is no causal mask. keys, values: what the entries index, ``[n, Hkv,
    size]``; None for the keys of the row's request. A row that names no key gets output 0.
    """
    is_named = topk_indices >= 0
    place = topk_indices.long().clamp(min=0)
    if keys is None or values is None:
        keys, values = rows.keys.double(), rows.values.double()
        place = (place + rows.places.first_key[:, None]).clamp(max=len(keys) - 1)
    outs, lses = [], []
    for head in range(params.num_heads):
        kv_head = head // params.group_size
        scores = params.softmax_scale * torch.einsum("td,tkd->tk", rows.query[:, head].double(), keys[place, kv_head])
        if params.soft_cap:
            scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
        scores = scores.masked_fill(~is_named, -torch.inf)
        if params.sinks is not None:
            scores = torch.cat([scores, scores.new_full((len(scores), 1), params.sinks[head])], dim=1)
        weights = torch.softmax(scores, dim=1).nan_to_num()[:, : place.shape[1]]
        outs.append(torch.einsum("tk,tkd->td", weights, values[place, kv_head]))
        lses.append(scores.logsumexp(dim=1))
    return torch.stack(outs, dim=1), torch.stack(lses, dim=1)


ChangePrefix = Callable[[PrefixMask], PrefixMask]


def with_prefixes(rows: UnpagedAttention, change: ChangePrefix) -> UnpagedAttention:
    """Return the rows with the changed prefix of each request."""
    return replace(rows, prefixes=tuple(map(change, rows.prefixes)))


def with_ends(moves: tuple[int, int] | None) -> ChangePrefix:
    """Return the change that moves first and last position of every image span; None removes the spans."""

    def change(own: PrefixMask) -> PrefixMask:
        if moves is None:
            return replace(own, mm_req_doc_ranges=())
        first, last = moves
        return replace(own, mm_req_doc_ranges=tuple((lo + first, hi + last) for lo, hi in own.mm_req_doc_ranges))

    return change


def with_first_keys(change: Callable[[int], int]) -> ChangePrefix:
    """Return the change of the number of first keys."""
    return lambda own: replace(own, rswa_prefix_len=change(own.rswa_prefix_len))


def _window_toggles(params: AttentionParams, rows: UnpagedAttention, seen: Tensor) -> Iterator[Toggle]:
    left, right = params.window
    feature = window_feature(rows)
    field = "rswa_window" if feature == "rswa" else feature
    for bound, side, value in (("left", 0, left), ("right", 1, right)):
        if value < 0 or (side == 1 and params.causal):
            continue

        def moved(to: int, side: int = side) -> AttentionParams:
            pair = (to, params.window[1]) if side == 0 else (params.window[0], to)
            return replace(params, window=pair)

        size = value + 1
        where = "" if params.causal else f" on the {bound}"
        name = field if params.causal else f"{field} ({bound} bound)"
        acts = keys_seen(rows, moved(-1)) > seen
        yield Toggle(name, altered(f"the window{where} is ignored", rows, moved(-1), feature), acts, True)
        longer = f"the window is one key too long{where} ({field}={size + 1})"
        yield Toggle(f"{name} + 1", altered(longer, rows, moved(value + 1), feature), acts, False)
        if value > 0:
            shorter = f"the window is one key too short{where} ({field}={size - 1})"
            yield Toggle(f"{name} - 1", altered(shorter, rows, moved(value - 1), feature), acts, False)


def window_feature(rows: UnpagedAttention) -> str:
    """Return the feature that a backend declares to support the window of these rows."""
    return "rswa" if rows.has_first_keys else "sliding_window"


def altered(
    meaning: str,
    rows: UnpagedAttention,
    params: AttentionParams,
    *features: str,
    hidden: HiddenKeys | None = None,
    precision: Precision | None = None,
) -> Hypothesis:
    """Return the fault of attending over these rows, in this way, without the ``hidden`` keys."""
    return Hypothesis(meaning, lambda: rows.attend(params, precision, hidden), features)


def of_parts(rows: UnpagedAttention, keys: Tensor, values: Tensor) -> Iterator[tuple[str, UnpagedAttention]]:
    """Yield the rows with other keys and values, then with either alone; with the name of the part, "" for both."""
    yield "", replace(rows, keys=keys, values=values)
    yield "keys", replace(rows, keys=keys)
    yield "values", replace(rows, values=values)


def is_before(starts: Sequence[int], request: int, _rows: Tensor, keys: Tensor) -> Tensor:
    """Return where keys have positions below ``starts[request]``."""
    return keys < starts[request]


def is_behind(ends: Sequence[int], request: int, _rows: Tensor, keys: Tensor) -> Tensor:
    """Return where keys have positions of at least ``ends[request]``."""
    return keys >= ends[request]


def keys_seen(rows: UnpagedAttention, params: AttentionParams) -> Tensor:
    """Return int64 ``[T]``: how many keys each row sees."""
    if rows.prefixes or rows.topk_indices is not None:
        return rows.count_seen(params)
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
    key = key_storage(problem.layer, problem.cache)
    value = value_storage(problem.layer, problem.cache)
    if not key.is_fp8:
        return
    seen = keys_seen(rows, params)
    key_scale, value_scale = key.scale.double(), value.scale.double()
    if problem.layer.mla is not None:  # keys and values come from the same codes
        if bool((key_scale != 1).any()):
            unscaled = scaled("k_scale is left out", params, rows, 1 / key_scale, 1 / key_scale)
            yield Toggle("k_scale", unscaled, seen > 0, True)
        return
    rivals = seen > (0 if params.sinks is not None else 1)
    parts = [("k_scale", "of_keys", key_scale, rivals), ("v_scale", "of_values", value_scale, seen > 0)]
    if problem.layer.query_quant:
        parts.append(("q_scale", "of_query", query_scale(problem), rivals))
    for name, part, scale, acts in parts:
        if bool((scale != 1).any()):
            own = ("fp8_query",) if name == "q_scale" else ()
            unscaled = scaled(f"{name} is left out", params, rows, **{part: 1 / scale}, features=own)
            yield Toggle(name, unscaled, acts, True)
        if bool((scale != scale[0]).any()):
            meaning = f"the {name} of KV head 0 is used for all heads"
            of_first = scaled(meaning, params, rows, **{part: scale[:1] / scale}, features=("fp8_per_head",))
            yield Toggle(f"{name} per head", of_first, acts, False)


def query_scale(problem: Problem) -> Tensor:
    """Return ``q_scale`` as float64 ``[1 or Hkv, 1]``, with the float32 value that a backend gets."""
    return torch.tensor(problem.cache.q_scale, dtype=torch.float32).double().reshape(-1, 1)


def scaled(
    meaning: str,
    params: AttentionParams,
    rows: UnpagedAttention,
    of_keys: Tensor | None = None,
    of_values: Tensor | None = None,
    of_query: Tensor | None = None,
    features: tuple[str, ...] = (),
) -> Hypothesis:
    """Return the fault of multiplying keys, values or query by such factors.

    They are ``[1 or Hkv, 1]`` each; ``of_query`` may also be ``[H, 1]``. ``features``: those of the hypothesis.
    """
    if of_query is not None and len(of_query) == params.num_kv_heads:
        of_query = of_query.repeat_interleave(params.group_size, 0)
    factors = {"keys": of_keys, "values": of_values, "query": of_query}

    def compute() -> tuple[Tensor, Tensor]:
        made: dict[str, Any] = {}
        for part, factor in factors.items():
            if factor is not None:
                made[part] = getattr(rows, part).double() * factor.to(rows.keys.device)
        return replace(rows, **made).attend(params)

    return Hypothesis(meaning, compute, features)


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
    keys = weights.keys(cached.latent, cached.rotary)
    values = weights.values(cached.latent)
    return UnpagedAttention(
        problem.query.double(),
        keys,
        values,
        problem.cu_seqlens_q,
        problem.cu_seqlens_k,
        problem.tree,
        topk_indices=problem.topk_indices,
    ).to(device)


def absorbed_rows(weights: UpProjections, cached: CacheRows, rows: UnpagedAttention) -> UnpagedAttention:
    """Return the problem over cache rows: float64 queries ``[T, H, L + E]``, and one KV head with latent values."""
    w_uk = weights.w_uk.to(rows.query)
    nope, rope = rows.query.split([w_uk.shape[2], cached.rotary.shape[2]], dim=-1)
    query = torch.cat([torch.einsum("thp,lhp->thl", nope, w_uk), rope], dim=-1)
    return replace(rows, query=query, keys=torch.cat([cached.latent, cached.rotary], dim=-1), values=cached.latent)


def latent_answers(
    weights: UpProjections,
    cached: CacheRows,
    rows: UnpagedAttention,
    forms: tuple[AttentionParams, AttentionParams],
    dtype: torch.dtype,
    attend: Attend,
    *,
    workspace: int | None = None,
    merges_context: bool = True,
) -> Iterator[Answer]:
    """Yield outputs and LSEs of low-precision runs of both forms; all that a kernel keeps is rounded to ``dtype``.

    ``attend``: a low-precision run of ordinary attention. ``cached``: the cache's rows as a kernel reads them. ``rows``
    belong to the naive form; ``forms``: the parameters of the naive and the absorbed form. With ``merges_context``, the
    naive form is run a second time as engines run prompts that have a context: with the context attended separately, in
    pieces of ``workspace`` keys. The second run rounds to another grid, since the loss of a row in one run is random.
    """
    nope, (naive, latent) = weights.w_uk.shape[2], forms
    yield attend(_kept(rows, nope, dtype), naive)
    if merges_context:
        other = _kept(rows, nope, dtype, _OTHER_GRID)
        yield _in_pieces(other, naive, workspace, Precision.kernel(dtype))
    absorbed = absorbed_rows(weights, cached, rows)
    absorbed = replace(absorbed, query=_through(absorbed.query, dtype))
    latent_out, lse = attend(absorbed, latent)
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


def _through(x: Tensor, dtype: torch.dtype, grid: float = 1.0) -> Tensor:
    """Return ``x`` rounded to ``dtype``, or to the numbers of ``dtype`` divided by ``grid``."""
    return (x * grid).to(dtype).to(x.dtype) / grid
