"""The right answer to a problem, the error budget around it, and a check that the case can notice wrong answers.

The truth is computed without pages, from contiguous keys: a formulation independent of the paged one that backends are
driven through. A backend may hold keys in other forms: as codes, as latent rows, or in parts whose results are merged.
The functions below :func:`truth_of` return the exact meaning of such a form, and what a good kernel of the layer's
dtype loses on it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from attncheck.errors import BlindCaseError
from attncheck.harness.problem.layer_sizes import naive_layer
from attncheck.harness.problem.output_quantisation import OutputCodes, output_codes, output_error
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage, value_storage
from attncheck.harness.truth.hypotheses import causal_toggle, toggles
from attncheck.harness.truth.latent_forms import (
    LATENT_ROUNDINGS,
    Answer,
    CacheRows,
    absorbed_rows,
    cache_rows,
    latent_answers,
    naive_rows,
)
from attncheck.harness.truth.scale_hypotheses import scale_toggles
from attncheck.harness.truth.tolerance import ROUNDINGS, Budget, budget_of, share_of_budget
from attncheck.harness.truth.truth_device import all_cores, truth_device
from attncheck.harness.truth.unpaged import UnpagedAttention
from attncheck.reference import AttentionParams, Precision, layer_params, merge_many, mla_params
from attncheck.reference.spec import AttentionType

NOTICEABLE = 10.0
"""Budgets by which a change must move the truth to count as noticed."""


@dataclass(frozen=True)
class Truth:
    """The right answer: ``out`` float64 ``[T, H, Dv]``, ``lse`` float64 ``[T, H]``, and the budget around them."""

    params: AttentionParams
    rows: UnpagedAttention
    out: Tensor
    lse: Tensor
    budget: Budget
    codes: OutputCodes | None = None
    """How the output is quantised, or None; ``out`` itself is not quantised."""
    computed_s: float = 0.0
    """Seconds that computing it took; 0 if not measured."""

    def to(self, device: torch.device) -> "Truth":
        """Return the truth on ``device``."""
        return replace(
            self,
            rows=self.rows.to(device),
            out=self.out.to(device),
            lse=self.lse.to(device),
            budget=self.budget.to(device),
        )

    def of_requests(self, first: int, end: int) -> "Truth":
        """Return the truth of requests ``first .. end - 1``; the tensors share memory."""
        rows = slice(int(self.rows.cu_seqlens_q[first]), int(self.rows.cu_seqlens_q[end]))
        part = self.rows.of_requests(first, end)
        return replace(self, rows=part, out=self.out[rows], lse=self.lse[rows], budget=self.budget.of_rows(rows))


def truth_of(problem: Problem, device: torch.device, *, refuse_blindness: bool = True) -> Truth:
    """Return the truth of ``problem``, on ``device``. :func:`truth_device` chooses where it is computed.

    With ``refuse_blindness``, raises BlindCaseError if turning off a modifier of the layer, or moving a window's edge
    by one, hardly moves the truth. A pass would then prove nothing about the modifier. Always raises BlindCaseError if
    a good kernel overflows, because no output can then be expected.
    """
    place = truth_device(problem.case, device)
    if place == device:
        return _truth_on(problem, device, refuse_blindness)
    with all_cores():
        return _truth_on(problem, place, refuse_blindness).to(device)


def _truth_on(problem: Problem, device: torch.device, refuse_blindness: bool) -> Truth:
    params, rows = params_of(problem), rows_of(problem, device)
    out, lse, weighted = rows.attend_weighted(params)
    honest, forms = honest_answers(problem, rows, params), other_forms(problem, rows)
    budget = budget_of(rows, params, problem.dtype, out, lse, weighted, honest, forms, roundings_of(problem))
    if problem.case.tolerance is not None:
        budget = budget.scaled(problem.case.tolerance.factor)
    if not math.isfinite(float((budget.norm + budget.peak + budget.lse).sum())):
        raise BlindCaseError(
            problem.case.key,
            "any error",
            f"what a good kernel keeps in {problem.layer.dtype} overflows; raise layer.scale, which makes the queries "
            "smaller, or change layer.dtype",
        )
    truth = Truth(params, rows, out, lse, budget, output_codes(problem.layer))
    if refuse_blindness:
        _refuse_blindness(problem, truth)
    return truth


def _refuse_blindness(problem: Problem, truth: Truth) -> None:
    if "needles" not in problem.inputs:
        return  # the case chose plain inputs, which cannot show every fault
    _refuse_equal_codes(problem, truth)
    layer = problem.layer
    all_toggles = [toggles(truth.params, truth.rows), scale_toggles(problem, truth.params, truth.rows)]
    if layer.attn_type == AttentionType.DECODER and not layer.is_causal:
        all_toggles.append(iter([causal_toggle(truth.params, truth.rows)]))
    for toggle in chain.from_iterable(all_toggles):
        able = int(toggle.acts.sum())
        if not able:
            if toggle.mostly:
                raise BlindCaseError(
                    problem.case.key,
                    toggle.subject,
                    "no row of the batch has a key it could act on; lengthen a request",
                )
            continue
        out, _ = toggle.hypothesis.compute()
        seen = out if truth.codes is None else truth.codes.of(out)
        moved = share_of_budget(output_error(seen, truth.out, truth.codes), truth.budget).amax(dim=1)
        noticed = int(((moved >= NOTICEABLE) & toggle.acts).sum())
        if noticed < (able // 2 + 1 if toggle.mostly else 1):
            raise BlindCaseError(
                problem.case.key,
                toggle.subject,
                f"only {noticed} of {able} rows move by {NOTICEABLE:g} times the allowed error when it changes "
                f"(largest: {float(moved.max()):.3g}); use longer requests, larger scores, or a stronger modifier",
            )


def _refuse_equal_codes(problem: Problem, truth: Truth) -> None:
    if truth.codes is None or not bool(truth.out.any()):
        return
    twice = output_error(truth.codes.of(2 * truth.out), truth.out, truth.codes)
    if not bool((share_of_budget(twice, truth.budget) >= NOTICEABLE).any()):
        raise BlindCaseError(
            problem.case.key,
            "output_quant",
            "an answer twice as large has the same codes; give a scale that leaves outputs between the smallest code "
            "and the largest",
        )


def params_of(problem: Problem) -> AttentionParams:
    """Return the parameters of the attention over :func:`rows_of`."""
    return layer_params(naive_layer(problem.layer))


def rows_of(problem: Problem, device: torch.device) -> UnpagedAttention:
    """Return the problem's query, keys and values in exact numbers."""
    if problem.up_projections is not None:
        return naive_rows(problem, problem.up_projections, cache_rows(problem, device))
    layer, cache = problem.layer, problem.cache
    return UnpagedAttention(
        problem.query,
        key_storage(layer, cache).exact(problem.keys),
        value_storage(layer, cache).exact(problem.values),
        problem.cu_seqlens_q,
        problem.cu_seqlens_k,
        problem.tree,
    ).to(device)


def other_forms(problem: Problem, rows: UnpagedAttention) -> tuple[tuple[UnpagedAttention, AttentionParams], ...]:
    """Return formulations other than :func:`rows_of` that kernels may compute, with the same scores.

    The float32 rounding of a score of products ``a_i b_i`` is bounded by roundings of ``sum |a_i b_i| <= |a| |b|``. A
    latent query and a cache row are longer than query and key, by about ``sqrt(L / P)``, though their product is equal.
    The bound of the absorbed form is therefore larger.
    """
    if problem.up_projections is None:
        return ()
    absorbed = absorbed_rows(problem.up_projections, cache_rows(problem, rows.query.device), rows)
    return ((absorbed, mla_params(problem.layer).latent),)


def roundings_of(problem: Problem) -> int:
    """Return how many roundings of the output are always allowed."""
    return ROUNDINGS if problem.up_projections is None else LATENT_ROUNDINGS


def honest_answers(problem: Problem, rows: UnpagedAttention, params: AttentionParams) -> Iterator[Answer]:
    """Yield outputs and LSEs of low-precision runs, one for each way in which a good kernel may compute the problem."""
    precision = Precision.kernel(problem.dtype)

    def attend(reading: UnpagedAttention, how: AttentionParams) -> Answer:
        if problem.layout.part_of_key is None:
            return reading.attend(how, precision)
        return _merged(problem, reading, how, precision)

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
    """Yield the rows as kernels may read them from the cache: exactly, and for codes, also rounded to the dtype."""
    yield rows
    if key_storage(problem.layer, problem.cache).is_fp8:
        device = rows.keys.device
        yield replace(rows, keys=problem.keys.to(device), values=problem.values.to(device))


def _merged(problem: Problem, rows: UnpagedAttention, params: AttentionParams, precision: Precision) -> Answer:
    """Attend to each part separately, round its output to the dtype, and merge the results without further loss."""
    part_of_key = problem.layout.part_of_key
    if part_of_key is None:
        raise ValueError("the problem is not split into parts")
    by_request = part_of_key.to(rows.keys.device).split(rows.num_keys.tolist())
    bare = replace(params, sinks=None)  # only the first part counts the sinks

    def state(part: int) -> Answer:
        return rows.attend(params if part == 0 else bare, precision, lambda r, _q, k: by_request[r][k] != part)

    states = [state(part) for part in range(len(problem.parts))]
    return merge_many([out for out, _ in states], [lse for _, lse in states])
