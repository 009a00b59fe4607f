"""The two forms in which kernels compute latent attention, what each loses to rounding, and faults specific to them.

The truth is the naive form in float64. A kernel may up-project keys and values and keep them in its dtype, as is usual
for prompts. It may also project the query into the latent space and attend over the cache rows themselves, as is usual
for decodes. The two forms round different intermediate results.
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
    """Yield faults in attending over the context in pieces of ``size`` keys."""
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
