"""Compare a wrong output with the outputs of known faults, and return the likely cause."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from attncheck.harness.diagnosis.coded_rows import coded_row_explanations
from attncheck.harness.diagnosis.fitted import (
    FACTOR,
    WINDOW_START,
    fitted_numbers,
    fitted_sinks,
    misplaced,
    other_factors,
    other_heads,
    other_spans,
)
from attncheck.harness.diagnosis.operands import (
    common_explanations,
    equal_row_counts,
    imprecisions,
    latent_explanations,
    packed_queries,
    query_explanations,
    scale_explanations,
)
from attncheck.harness.diagnosis.paging import paging_explanations, path_explanations
from attncheck.harness.diagnosis.patterns import key_pattern, lost_keys, pattern, shared_by, which_heads
from attncheck.harness.diagnosis.prefixes import prefix_explanations
from attncheck.harness.diagnosis.scores import (
    merging_explanations,
    modifier_explanations,
    other_sinks,
    overflowing_caps,
    rescaling_explanations,
    score_explanations,
)
from attncheck.harness.diagnosis.sparse import sparse_explanations
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import output_error, output_values
from attncheck.harness.truth.faults import Hypothesis
from attncheck.harness.truth.truth import Truth
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reports.run_file.causes import (
    ALTERNATIVE,
    EVIDENCE,
    ON_EARLIER,
    SIZE,
    UNKNOWN,
    likely_causes,
    without_figures,
)

# A fault is named only if its output is far from the truth where `output` is wrong, and `output` is far nearer to it
# than to the truth: on some batches a fault leaves the output right, and would "explain" any error. This runs only
# after a failure, so it may be slow. It names no fault rather than the wrong one.

_APART = 3.0
"""Budgets between an answer and the truth from which on an output can distinguish them."""

_NEARER = 4.0
"""How many times nearer than the truth an answer must be to the wrong rows, in the 2-norm over all of them."""

_BEYOND_DOUBT = 1000.0
"""An answer this many times nearer than the truth fits even beyond its slack.

Where scores are capped, the budget of the truth is too small for the answer.
"""

_AS_NEAR, _NEAR = 2.0, 0.1
"""Answers fit equally well up to this factor of the smallest error, plus ``_NEAR`` budgets a row and head (2-norm)."""

_PARTIAL = 4
"""Rank from which on an answer fits the wrong rows alone, and would show in others: several such exclude none."""

ZEROS = "the output is all zeros"
"""The meaning of an output of zeros where it is wrong."""

_MOST_NAMED = 3
"""Maximum number of answers named if several fit equally well."""


@dataclass(frozen=True)
class Misfit:
    """Distances of an answer from the observed output and from the truth, float64 ``[T, H]`` in budgets.

    ``against``: from the observed output. ``apart``: from the truth. ``slack``: how far ``against`` may be for a fit.
    ``fitted``: what was chosen to come near the output: nothing, one number for all rows, or something in each row. The
    more was fitted, the less a fit means.
    """

    meaning: str
    against: Tensor
    apart: Tensor
    slack: Tensor
    fitted: Literal["", "number", "rows"] = ""

    def fits(self, shares: Tensor) -> Tensor:
        """Return where the output agrees with this answer. ``shares``: the output's distance from the truth."""
        return self.against <= torch.maximum(self.slack, shares / _BEYOND_DOUBT)

    def explains(self, shares: Tensor, wrong: Tensor) -> bool:
        """Return whether all rows and heads in ``wrong`` (bool ``[T, H]``) fit this answer, and not the truth."""
        if not bool((self.fits(shares) & (self.against < shares))[wrong].all()):
            return False
        far = bool((self.apart[wrong] >= _APART).any())
        return far and _NEARER * _size(self.against[wrong]) <= _size(shares[wrong])


@dataclass(frozen=True)
class _Fit:
    """An answer that fits all wrong rows: ``where`` it fits, in words, and its total error ``off`` in budgets."""

    meaning: str
    where: str
    off: float


def best_fit(
    problem: Problem, misfits: Iterable[Misfit], shares: Tensor, of: Literal["output", "LSE"] = "output"
) -> str | None:
    """Return the best answer that fits all wrong rows, with others that fit as well, or None.

    Answers rank by how little was fitted, and by where they fit: in all rows, or only in rows with a common property.
    ``of``: what is compared.
    """
    wrong = shares > 1
    ranked: dict[int, list[_Fit]] = {}
    tried = list(misfits)
    for misfit in tried:
        if misfit.explains(shares, wrong):
            where, is_separated = _where(problem, misfit, shares)
            if where == _EVERYWHERE:
                rank = {"": 0, "number": 1, "rows": 3}[misfit.fitted]
            else:
                rank = _PARTIAL + 1 if misfit.fitted else _PARTIAL - 2 * is_separated
            ranked.setdefault(rank, []).append(_Fit(misfit.meaning, where, _size(misfit.against[wrong])))
    if not ranked:
        return _by_kind(problem, tried, shares, of)
    best = ranked[min(ranked)]
    most = _AS_NEAR * min(fit.off for fit in best) + _NEAR * math.sqrt(int(wrong.sum()))
    near = [fit for fit in best if fit.off <= most][:_MOST_NAMED]
    # The zeros are seen, and exclude no fault that leaves nothing to see: such faults are not named.
    first, *others = [fit for fit in near if fit.meaning == ZEROS] or near
    if others and min(ranked) >= _PARTIAL:
        return None
    return f"{first.meaning}{EVIDENCE.format(of)} {first.where}" + "".join(
        f"{ALTERNATIVE}{fit.meaning}" for fit in others
    )


_EVERYWHERE = "all rows"


def _where(problem: Problem, misfit: Misfit, shares: Tensor) -> tuple[str, bool]:
    """Return the rows that an answer fits, in words.

    The flag states whether the words separate them from rows in which the fault would show.
    """
    if bool(misfit.fits(shares).all()):
        return _EVERYWHERE, True
    wrong = (shares > 1).cpu()
    would_show = (misfit.apart >= _APART).cpu()
    rows = wrong.any(dim=1)
    heads = wrong.any(dim=0)
    count = int(rows.sum())
    text = "the one wrong row" if count == 1 else f"the {count} wrong rows"
    spared_rows = would_show.any(dim=1) & ~rows
    spared_heads = would_show[rows].any(dim=0) & ~heads
    is_separated = not bool(spared_rows.any())
    phrase = None if is_separated else shared_by(problem, rows, spared_rows)
    if phrase is not None:
        text = f"{text}, {phrase}" if count == 1 else f"{text}, all {phrase}"
        is_separated = True
    return (f"{text}, {which_heads(problem, heads)}", False) if bool(spared_heads.any()) else (text, is_separated)


def _by_kind(problem: Problem, misfits: list[Misfit], shares: Tensor, of: str) -> str | None:
    """Return one answer for each kind of request with wrong rows, if different answers fit different kinds."""
    wrong, found = shares > 1, []
    kinds: dict[str, list[int]] = {}
    for request in problem.requests:
        kind = "query_len 1" if request.query_len == 1 else "context" if request.cached else "no context"
        kinds.setdefault(kind, []).extend(range(request.first_row, request.first_row + request.rows))
    for kind, rows in kinds.items():
        part = torch.zeros_like(wrong)
        part[rows] = wrong[rows]
        if bool(part.any()):
            fixed = (each for each in misfits if not each.fitted and each.explains(shares, part))
            found.append((kind, next(fixed, None)))
    if len(found) < 2:
        return None
    named = [f"{each.meaning} in rows with {kind}" for kind, each in found if each is not None]
    return f"{'; '.join(named)}{EVIDENCE.format(of)} all wrong rows" if len(named) == len(found) else None


def _size(shares: Tensor) -> float:
    return float(torch.linalg.vector_norm(shares.clamp(max=1e100)))


_FEW_WORK = 2**31
"""Rows x keys x head size above which faults are not tried, because that would take longer than the run."""

_SLACK = 1.25
"""Budgets by which an output may differ from that of a fault; with more, a lost key fits what only weakens it."""

_LSE_SLACK = 4.0
"""Budgets by which an LSE may differ from that of a fault."""

_SAME, _AKIN = 2, 4
"""Earlier cases with a cause from which on it is tried first: with the same figures, and with any figures.

From ``_SAME`` cases with any figures on, the figures of a fitted cause are fitted first.
"""

_ALIKE, _MOST = 4.0, 0.75
"""A coarser arithmetic is named if errors agree within the factor ``_ALIKE`` in a share ``_MOST`` of rows and heads."""

_ROUNDED = 0.5
"""Share of an error (2-norm) that one factor on all wrong rows must leave unexplained for rounding to be named."""

OutputAndLse = tuple[Tensor, Tensor]

_SOURCES = (
    coded_row_explanations,
    scale_explanations,  # first, because leaving out a k_scale of 1/8 equals leaving out a softmax scale of 1/8
    latent_explanations,
    common_explanations,
    prefix_explanations,
    sparse_explanations,
    modifier_explanations,
    path_explanations,
    paging_explanations,
    rescaling_explanations,
    merging_explanations,
    score_explanations,
    query_explanations,
    equal_row_counts,
)
"""Functions that yield the faults a case allows, in the order in which these are tried."""


def known_faults(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    """Yield every fault of output and LSE that nothing is fitted for."""
    return chain.from_iterable(faults(problem, truth) for faults in _SOURCES)


def explain(
    problem: Problem,
    truth: Truth,
    output: Tensor,
    shares: Tensor,
    *,
    earlier: Sequence[str] = (),
    among: Collection[str] | None = None,
) -> str | None:
    """Return one line that explains ``output``, or None.

    ``output``: ``[T, H, Dv]``, as codes if the layer quantises it. ``shares``: its errors in budgets, ``[T, H]``. If
    some rows and heads hold NaN or Inf, and others are wrong, the line is about the others. ``earlier``: the cause of
    each earlier case. If one fits that occurs twice with these figures, or four times with any, or twice and was
    fitted, no other is tried. ``among``: the only other faults to try, as :func:`faults_tried` returns them; None for
    all.
    """
    values = output_values(output, truth.codes)
    is_finite = torch.isfinite(values).all(dim=-1)
    if not bool(is_finite.all()):
        if not bool((shares > 1)[is_finite].any()):
            return _not_finite(problem, truth, values)
        shares = shares.masked_fill(~is_finite, 0.0)
        values = torch.where(is_finite[..., None], values, truth.out)
    if bool(torch.isneginf(truth.lse)[shares > 1].all()):
        return "a row that sees nothing must be 0"
    if _too_much_work(truth):
        return _described(problem, truth, values, shares)

    def loss(out: Tensor) -> Tensor:
        return share_of_budget(out - truth.out, truth.budget)

    def misfits(answers: Iterable[tuple[str, Tensor]], fitted: Literal["", "number", "rows"] = "") -> Iterator[Misfit]:
        for meaning, out in answers:
            against = share_of_budget(output_error(output, out, truth.codes), truth.budget)
            apart = share_of_budget(truth.out - out, truth.budget)
            against, apart = (each.masked_fill(~is_finite, 0.0) for each in (against, apart))
            yield Misfit(meaning, against, apart, _slack(out, truth.out), fitted)

    def fixed() -> Iterator[tuple[str, Tensor]]:
        yield from _requantised(truth, output)
        yield ZEROS, torch.zeros_like(truth.out)
        yield from ((h.meaning, h.compute()[0]) for h in _standing(problem, truth, output, shares, among))
        yield from ((h.meaning, h.compute()[0]) for h in packed_queries(truth))
        yield from other_sinks(truth)

    def fitted_by_row() -> Iterator[tuple[str, Tensor]]:
        for nearest in (fitted_sinks, other_heads, other_spans, misplaced):
            yield from nearest(problem, truth, values, shares)

    def repeated() -> Iterator[Misfit]:
        again = [cause for cause in earlier if without_figures(cause) in wanted]
        yield from misfits(other_factors(problem, truth, values, shares, again), "number")
        fitted = {cause for cause in wanted if not cause.endswith(FACTOR)}
        for hypothesis in known_faults(problem, truth):
            words = without_figures(hypothesis.meaning)
            fitted.discard(words)
            if counts[hypothesis.meaning] >= _SAME or families[words] >= _AKIN:
                yield from misfits([(hypothesis.meaning, hypothesis.compute()[0])])
        if fitted:
            yield from misfits(fitted_by_row(), "rows")
            yield from misfits(lost_keys(problem, truth, values, shares), "rows")

    counts, families = Counter(earlier), Counter(map(without_figures, earlier))
    if wanted := {words for words, cases in families.items() if cases >= _SAME}:
        known = (each for each in repeated() if not each.fitted or without_figures(each.meaning) in wanted)
        found = next((each for each in known if each.explains(shares, shares > 1)), None)
        if found is not None:
            return best_fit(problem, [found], shares)
    if among is None or among:
        factors = misfits(other_factors(problem, truth, values, shares, among=among), "number")
        by_row = misfits(fitted_by_row(), "rows") if among is None else ()
        if cause := best_fit(problem, chain(misfits(fixed()), factors, by_row), shares):
            return cause
    if among is not None:
        described = (_described(problem, truth, values, shares) or UNKNOWN).removeprefix(UNKNOWN)
        return f"{UNKNOWN}{'; '.join(filter(None, [described, ON_EARLIER]))}"
    if cause := best_fit(problem, misfits(lost_keys(problem, truth, values, shares), "rows"), shares):
        return cause
    coarse = _imprecision(problem, truth, shares, values - truth.out, lambda answer: loss(answer[0].double()))
    return coarse or _described(problem, truth, values, shares)


def faults_tried(problem: Problem, truth: Truth) -> frozenset[str]:
    """Return the faults that :func:`explain` tries on a case, in words without figures."""
    if _too_much_work(truth):
        return frozenset()
    fixed = (without_figures(each.meaning) for each in known_faults(problem, truth))
    return frozenset(fixed) | frozenset(fitted_numbers(truth.params))


def _described(problem: Problem, truth: Truth, values: Tensor, shares: Tensor) -> str | None:
    keys = None if _too_much_work(truth) else key_pattern(problem, truth, values, shares)
    words = [each for each in (keys, pattern(problem, truth, values - truth.out, shares)) if each]
    return f"{UNKNOWN}{'; '.join(words)}" if words else None


def explain_lse(
    problem: Problem,
    truth: Truth,
    got: Tensor,
    others: Iterable[tuple[str, Tensor]] = (),
    *,
    output_holds: bool,
    tries_faults: bool = True,
) -> str | None:
    """Return one line that explains a wrong LSE, or None.

    ``got``: natural LSE, float64 ``[T, H]``. ``others``: (meaning, LSE) of faults of the LSE alone, which are tried
    first. ``output_holds``: whether the output is right. Then the line names no fault of the output. If the output is
    wrong, and several faults of it give this LSE, only the output can decide: the line names none.
    ``tries_faults``: whether faults of both are tried, too.
    """
    shares = _lse_error(got, truth.lse, truth)

    def best(answers: Iterable[tuple[str, Tensor]]) -> str | None:
        slack = torch.full_like(got, _LSE_SLACK)
        misfits = (
            Misfit(meaning, _lse_error(got, lse, truth), _lse_error(truth.lse, lse, truth), slack)
            for meaning, lse in answers
        )
        return best_fit(problem, misfits, shares, "LSE")

    def in_lse(hypothesis: Hypothesis) -> tuple[str, Tensor]:
        out, lse = hypothesis.compute()
        is_alone = output_holds and bool((share_of_budget(out - truth.out, truth.budget) > 1).any())
        return f"in the LSE alone: {hypothesis.meaning}" if is_alone else hypothesis.meaning, lse

    where = pattern(problem, truth, torch.full_like(truth.out, math.inf), shares)
    described = f"{UNKNOWN}{where}" if where else None
    if (meaning := best(others)) or not tries_faults or _too_much_work(truth):
        return meaning or described
    meaning = best(map(in_lse, known_faults(problem, truth)))
    if meaning and ALTERNATIVE in meaning and not output_holds:
        return described

    def loss(answer: OutputAndLse) -> Tensor:
        return _lse_error(answer[1].double(), truth.lse, truth)

    return meaning or _imprecision(problem, truth, shares, got - truth.lse, loss) or described


def concerned_features(problem: Problem, truth: Truth, meaning: str | None) -> tuple[str, ...]:
    """Return the declared features that a cause returned by :func:`explain` concerns; empty if none."""
    (words, *_) = likely_causes(meaning) or ("",)
    if not words or _too_much_work(truth):
        return ()
    if words.startswith(WINDOW_START):
        return ("sliding_window",)
    if words.startswith("output_scale"):
        return ("output_quant",)
    return next((each.features for each in known_faults(problem, truth) if each.meaning == words), ())


def _standing(
    problem: Problem, truth: Truth, output: Tensor, shares: Tensor, among: Collection[str] | None
) -> Iterator[Hypothesis]:
    """Yield the hypotheses ``among`` those given that fit the smallest request with wrong rows of some kind.

    Requests are of one kind if they agree in having one new token, and in having a context. The other hypotheses are
    skipped, since trying them on all rows would take most of the time.
    """
    smallest: dict[tuple[bool, bool], int] = {}
    work = [request.rows * request.num_keys for request in problem.requests]
    is_wrong = (shares > 1).any(dim=1)
    for index in sorted(range(len(work)), key=work.__getitem__):
        request = problem.requests[index]
        if bool(is_wrong[request.first_row : request.first_row + request.rows].any()):
            smallest.setdefault((request.query_len == 1, request.cached > 0), index)

    def faults(part: Truth) -> Iterator[Hypothesis]:
        every = known_faults(problem, part)
        return (each for each in every if among is None or without_figures(each.meaning) in among)

    is_whole = problem.layer.mla is not None or problem.topk_indices is not None  # faults of other rows need these
    if is_whole or len(smallest) == len(problem.requests):
        yield from faults(truth)
        return
    kept = torch.tensor([r in smallest.values() for r in range(len(work))], device=shares.device)
    own = kept.repeat_interleave(truth.rows.num_rows)
    starts = torch.cat([kept.new_zeros(1, dtype=torch.int64), (truth.rows.num_rows * kept).cumsum(0)])
    kind = torch.arange(len(work), device=shares.device).repeat_interleave(truth.rows.num_rows)[own]
    part = replace(truth, rows=replace(truth.rows, query=truth.rows.query[own], cu_seqlens_q=starts))
    budget = truth.budget.of_rows(own)
    right = truth.out[own]
    got = output[own]
    off = shares[own]
    tried, standing = set(), set()
    for hypothesis in faults(part):
        out = hypothesis.compute()[0]
        against = share_of_budget(output_error(got, out, truth.codes), budget)
        misfit = Misfit(hypothesis.meaning, against, against, _slack(out, right))
        holds = (misfit.fits(off) & (against < off)) | (off <= 1)
        tried.add(hypothesis.meaning)
        if any(bool(holds[kind == index].all()) for index in smallest.values()):
            standing.add(hypothesis.meaning)
    for hypothesis in faults(truth):
        if hypothesis.meaning in standing or hypothesis.meaning not in tried:
            yield hypothesis


def _requantised(truth: Truth, output: Tensor) -> list[tuple[str, Tensor]]:
    """Return (meaning, output) of faults in the scale of a quantised output, the nearest first."""
    codes = truth.codes
    if codes is None:
        return []
    faults = {
        "output_scale is ignored": truth.out * codes.scale,
        "output_scale multiplies the output instead of dividing it": truth.out * codes.scale**2,
    }
    return sorted(faults.items(), key=lambda fault: float(codes.error(output, fault[1]).norm()))


def _too_much_work(truth: Truth) -> bool:
    return len(truth.rows.query) * len(truth.rows.keys) * truth.rows.keys.shape[-1] > _FEW_WORK


def _slack(out: Tensor, right: Tensor) -> Tensor:
    """Return the budgets by which the output of a fault may be missed: more if it is larger than the truth."""
    size = torch.linalg.vector_norm(out, dim=-1)
    usual = torch.linalg.vector_norm(right, dim=-1)
    # The budget was computed for an output of the size of the truth.
    slack: Tensor = _SLACK * (size / usual.clamp(min=1e-30)).clamp(min=1.0)
    return slack


def _lse_error(a: Tensor, b: Tensor, truth: Truth) -> Tensor:
    """Return the error in budgets; infinite where only one of the two is -inf, or one is NaN."""
    error = torch.where(a == b, torch.zeros_like(a), (a - b).abs() / truth.budget.lse)
    return torch.nan_to_num(error, nan=float("inf"), posinf=float("inf"))


def _not_finite(problem: Problem, truth: Truth, output: Tensor) -> str:
    # Reading a foreign slot is not a likely reason, because in this step foreign slots hold finite numbers.
    rows_and_heads = (~torch.isfinite(output)).any(dim=-1)
    rows = rows_and_heads.any(dim=1)
    empty = torch.isneginf(truth.lse).all(dim=1)
    if bool(empty[rows].all()):
        return "NaN or Inf in rows that see nothing, and in no others: 0 divided by 0; they must be 0"
    if not bool(torch.isnan(output).any()):
        return "Inf in the output, and no NaN: something overflows"
    caps = None if truth.params.soft_cap is None else overflowing_caps(truth.params, truth.rows, rows_and_heads)
    if caps is not None:
        return f"NaN or Inf just where a score is {caps:.3g} soft caps or more: exp overflows inside of tanh"
    padding = ", or a padding row of the inputs holds" if problem.case.batch.padding.query_rows else ""
    return (
        "NaN or Inf in the output. Possible causes: NaN that the output held before the call"
        f"{padding}; scores that overflow; a tile of keys in which a row sees nothing (-inf minus -inf)"
    )


def _imprecision(
    problem: Problem, truth: Truth, shares: Tensor, error: Tensor, measure: Callable[[OutputAndLse], Tensor]
) -> str | None:
    """Return the coarser arithmetic whose error is about as large wherever either exceeds the budget, or None.

    ``error``: of the output ``[T, H, Dv]`` or the LSE ``[T, H]``. ``measure``: returns the error, in budgets, of the
    result of such an arithmetic.
    """
    wrong = error[shares > 1]
    right = truth.out[shares > 1] if error.dim() == 3 else torch.ones_like(wrong)
    rest = wrong - right * (wrong * right).sum() / (right * right).sum().clamp(min=1e-300)
    if not float(rest.norm()) > _ROUNDED * float(wrong.norm()):
        return None  # one factor on every output, or the same term in every LSE, is no rounding
    found: list[tuple[float, str]] = []
    for hypothesis in imprecisions(problem, truth):
        loss = measure(hypothesis.compute())
        concerned = torch.maximum(shares, loss) > 1
        seen, own = (x[concerned].clamp(min=1e-9, max=1e100).log2() for x in (shares, loss))
        if float(((seen - own).abs() <= math.log2(_ALIKE)).double().mean()) >= _MOST:
            found.append((float((seen - own).abs().mean()), hypothesis.meaning))
    return f"the precision is too low{SIZE} {min(found)[1]}, for example" if found else None
