"""What a problem means in exact numbers: the question without pages, its parameters, and how honest kernels answer it.

A backend may hold keys in another form than the truth uses: as codes, as latent rows, in parts whose results are
merged. Here stands what such a form means exactly, and what a good kernel of the layer's dtype loses on it. Must not
know: backends, observations.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from attncheck.harness.problem.latent import naive_layer
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage, value_storage
from attncheck.harness.truth.latent_forms import (
    LATENT_ROUNDINGS,
    CacheRows,
    absorbed_rows,
    cache_rows,
    latent_answers,
    naive_rows,
)
from attncheck.harness.truth.tolerance import ROUNDINGS
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, Precision, layer_params, merge_many, mla_params

Answer = tuple[Tensor, Tensor]
"""Output ``[T, H, Dv]`` and LSE ``[T, H]``."""


def params_of(problem: Problem) -> AttentionParams:
    """The parameters of the attention that :func:`rows_of` asks."""
    return layer_params(naive_layer(problem.layer))


def rows_of(problem: Problem, device: torch.device) -> UnpagedAttention:
    """The question in exact numbers."""
    if problem.up_projections is not None:
        return naive_rows(problem, problem.up_projections, cache_rows(problem, device))
    layer, cache = problem.layer, problem.cache
    return UnpagedAttention(
        problem.query.to(device),
        key_storage(layer, cache).exact(problem.keys).to(device),
        value_storage(layer, cache).exact(problem.values).to(device),
        problem.cu_seqlens_q.to(device),
        problem.cu_seqlens_k.to(device),
        None if problem.tree is None else problem.tree.to(device),
    )


def other_forms(problem: Problem, rows: UnpagedAttention) -> tuple[tuple[UnpagedAttention, AttentionParams], ...]:
    """The question as kernels may put it to themselves besides :func:`rows_of`: the scores are the same.

    What float32 may lose of a score of products ``a_i b_i`` is bounded by roundings of ``sum |a_i b_i| <= |a| |b|``. A
    latent query and a cache row are longer than query and key, by about ``sqrt(L / P)``, though their product is the
    same: the bound of the absorbed form is the larger one.
    """
    if problem.up_projections is None:
        return ()
    absorbed = absorbed_rows(problem.up_projections, cache_rows(problem, rows.query.device), rows)
    return ((absorbed, mla_params(problem.layer).latent),)


def roundings_of(problem: Problem) -> int:
    """How many roundings of the output are allowed in any case."""
    return ROUNDINGS if problem.up_projections is None else LATENT_ROUNDINGS


def honest_answers(problem: Problem, rows: UnpagedAttention, params: AttentionParams) -> Iterator[Answer]:
    """What low-precision runs answer, one for each way in which a good kernel may go about it."""
    precision = Precision.kernel(problem.dtype)

    def attend(asked: UnpagedAttention, how: AttentionParams) -> Answer:
        if problem.layout.part_of_key is None:
            return asked.attend(how, precision)
        return _merged(problem, asked, how, precision)

    if problem.up_projections is None:
        for read in _readings(problem, rows):
            yield attend(read, params)
    else:
        weights, device = problem.up_projections, rows.query.device
        yield from latent_answers(problem, weights, cache_rows(problem, device), rows, params, attend)
        if key_storage(problem.layer, problem.cache).is_fp8:  # read rounded to the dtype
            cached = CacheRows(problem.keys.to(device).double(), problem.values.to(device).double())
            read = naive_rows(problem, weights, cached)
            yield from latent_answers(problem, weights, cached, read, params, attend)


def _readings(problem: Problem, rows: UnpagedAttention) -> Iterator[UnpagedAttention]:
    """The rows as kernels may take them out of the cache: exactly, or where codes are held, rounded to the dtype."""
    yield rows
    if key_storage(problem.layer, problem.cache).is_fp8:
        device = rows.keys.device
        yield replace(rows, keys=problem.keys.to(device), values=problem.values.to(device))


def _merged(problem: Problem, rows: UnpagedAttention, params: AttentionParams, precision: Precision) -> Answer:
    """Each part attended on its own, its output rounded to the dtype, and the results merged without further loss."""
    part_of_key = problem.layout.part_of_key
    if part_of_key is None:
        raise ValueError("the problem is not split into parts")
    by_request = part_of_key.to(rows.keys.device).split(rows.num_keys.tolist())
    bare = replace(params, sinks=None)  # of several parts, one carries the sinks

    def state(part: int) -> Answer:
        return rows.attend(params if part == 0 else bare, precision, lambda r, _q, k: by_request[r][k] != part)

    states = [state(part) for part in range(len(problem.parts))]
    return merge_many([out for out, _ in states], [lse for _, lse in states])
