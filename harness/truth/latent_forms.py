"""The two forms in which kernels answer a question of latent attention, what each loses, and faults that are theirs.

The truth is the naive form in float64. A kernel may up-project keys and values and keep them in its dtype, as is usual
for prompts, or move the query into the latent space and attend over the cache rows themselves, as is usual for decodes;
what is rounded on the way differs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from attncheck.harness.problem.latent import UpProjections
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage, value_storage
from attncheck.harness.truth.hypotheses import Hypothesis
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, Precision, merge_attn_states, mla_params

LATENT_ROUNDINGS = 4
"""Roundings of the output that are always allowed: two as everywhere, one of the values, one of what is merged."""

_OTHER_GRID = 1.3
"""Rounded to the dtype's numbers divided by this, just as dense, a kernel is as good, and its errors are others."""

Answer = tuple[Tensor, Tensor]
"""Output ``[T, H, Dv]`` and LSE ``[T, H]``."""

Attend = Callable[[UnpagedAttention, AttentionParams], Answer]


@dataclass(frozen=True)
class CacheRows:
    """What stands in the cache, float64: latent rows ``[N, 1, L]`` and rotated parts ``[N, 1, E]``."""

    latent: Tensor
    rotary: Tensor


def cache_rows(problem: Problem, device: torch.device) -> CacheRows:
    """The cache's rows in exact numbers."""
    layer, cache = problem.layer, problem.cache
    latent = key_storage(layer, cache).exact(problem.keys.to(device))
    return CacheRows(latent.double(), value_storage(layer, cache).exact(problem.values.to(device)).double())


def naive_rows(problem: Problem, weights: UpProjections, cached: CacheRows) -> UnpagedAttention:
    """The question as ordinary attention over float64 keys and values: exact."""
    device = cached.latent.device
    weights = weights.to(device)
    keys, values = weights.keys(cached.latent, cached.rotary), weights.values(cached.latent)
    return UnpagedAttention(
        problem.query.double(), keys, values, problem.cu_seqlens_q, problem.cu_seqlens_k, problem.tree
    ).to(device)


def absorbed_rows(weights: UpProjections, cached: CacheRows, rows: UnpagedAttention) -> UnpagedAttention:
    """The same over cache rows: float64 queries ``[T, H, L + E]``, one KV head whose values are the latent part."""
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
    """What low-precision runs of both forms answer; all that a kernel keeps is rounded to the dtype.

    ``attend``: a low-precision run of an ordinary question. ``cached``: the cache's rows as a kernel reads them.
    ``rows`` and ``params`` are those of the naive form, which is answered a second time with the context apart, as
    engines do with prompts that have one, and with roundings of its own, since what these cost a row is a matter of
    luck.
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
    """What a kernel keeps of up-projected keys (their first ``nope`` channels) and values."""
    keys = torch.cat([_through(rows.keys[..., :nope], dtype, grid), rows.keys[..., nope:]], dim=-1)
    return replace(rows, keys=keys, values=_through(rows.values, dtype, grid))


def _in_pieces(rows: UnpagedAttention, params: AttentionParams, workspace: int | None, precision: Precision) -> Answer:
    """New keys first, then the context in pieces that every row sees; each result and each merge is rounded."""
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
        return (part if how is params else replace(part, tree=None)).attend(how, precision)

    answer = state(context, length, params)
    for begin in range(0, longest, size):
        piece = state(context.clamp(max=begin), context.clamp(max=begin + size), replace(params, causal=False))
        answer = merge_attn_states(*answer, *piece, precision=precision)
    return answer


def _with_zero(ends: Tensor) -> Tensor:
    return torch.cat([ends.new_zeros(1), ends])


def latent_explanations(problem: Problem, params: AttentionParams, rows: UnpagedAttention) -> Iterator[Hypothesis]:
    """Faults that only layers with a latent cache can have; ``params`` and ``rows``: those of the naive form."""
    mla, weights = problem.layer.mla, problem.up_projections
    if mla is None or weights is None:
        return
    cached = replace(params, scale=(mla.kv_lora_rank + mla.qk_rope_head_dim) ** -0.5)
    if cached.softmax_scale != params.softmax_scale:
        meaning = "the scale is made of the size of a cache row, kv_lora_rank + qk_rope_head_dim"
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
    """Yield faults of a context taken in pieces of ``size`` keys, in requests of several rows."""
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
    """What becomes of the weights when the fused ones are not cut head by head."""
    sizes, heads = (weights.w_uk.shape[2], weights.w_uv.shape[2]), weights.w_uk.shape[1]
    halves = weights.fused().split([heads * size for size in sizes])
    w_uk, w_uv = (half.unflatten(0, (heads, size)).permute(2, 0, 1) for half, size in zip(halves, sizes, strict=True))
    return UpProjections(w_uk, w_uv)


def _through(x: Tensor, dtype: torch.dtype, grid: float = 1.0) -> Tensor:
    """``x`` rounded to ``dtype``, or to the numbers of ``dtype`` times ``1 / grid``."""
    return (x * grid).to(dtype).to(x.dtype) / grid
