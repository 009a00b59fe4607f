"""Explains why an output is wrong: which fault produces this answer, and which key does not belong.

Runs only after a failure, so it may be slow; names no fault rather than the wrong one. A fault is named only if its
answer is far from the truth where the output is wrong, and the output is far nearer to it than to the truth: on some
batches a fault leaves the answer right, and would "explain" any error.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attncheck.harness.problem.output_quantisation import output_error, output_values
from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.head_map import other_heads
from attncheck.harness.truth.hypotheses import Hypothesis, explanations, imprecisions
from attncheck.harness.truth.key_spans import WINDOW_START, other_spans
from attncheck.harness.truth.latent_forms import latent_explanations
from attncheck.harness.truth.paging_hypotheses import paging_explanations
from attncheck.harness.truth.partial_results import merged_wrongly
from attncheck.harness.truth.path_hypotheses import path_explanations
from attncheck.harness.truth.scale_hypotheses import scale_explanations
from attncheck.harness.truth.softmax_hypotheses import rescaling_explanations
from attncheck.harness.truth.tolerance import share_of_budget
from attncheck.harness.truth.truth import Truth
from attncheck.reports.run_file.causes import EVIDENCE

_FEW_WORK = 2**31
"""Rows x keys x head size above which explaining would take longer than the run."""

_APART = 3.0
"""Budgets between an answer and the truth from which on an output tells them apart."""

_NEARER = 4.0
"""How many times nearer than the truth an answer has to be to the wrong rows, all together."""

_BEYOND_DOUBT = 1000.0
"""How many times nearer an answer may be further off than its budget: the truth's is small where scores are capped."""

_LSE_SLACK = 4.0
"""Budgets allowed around another log-sum-exp."""

_ALIKE, _MOST = 4.0, 0.75
"""An arithmetic is as inexact as an output if in most rows and heads their errors are within this factor."""

Asked = tuple[Tensor, Tensor]


def explain(problem: Problem, truth: Truth, output: Tensor, shares: Tensor) -> str | None:
    """One line that explains ``output`` (``[T, H, Dv]``, codes perhaps), whose errors in budgets are ``shares``."""
    values = output_values(output, truth.codes)
    if not bool(torch.isfinite(values).all()):
        return _not_finite(problem, truth, values)
    if bool(torch.isneginf(truth.lse)[shares > 1].all()):
        return "a row that sees nothing must be 0"
    if _too_much_work(truth):
        return None

    def loss(out: Tensor) -> Tensor:
        return share_of_budget(out - truth.out, truth.budget)

    def misfits(answers: Iterable[tuple[str, Tensor]]) -> Iterator[_Misfit]:
        for meaning, out in answers:
            against = share_of_budget(output_error(output, out, truth.codes), truth.budget)
            apart = share_of_budget(truth.out - out, truth.budget)
            yield _Misfit(meaning, against, apart, _slack(out, truth))

    def answers() -> Iterator[tuple[str, Tensor]]:
        yield from _requantised(truth, output)
        yield from ((h.meaning, h.compute()[0]) for h in _explanations(problem, truth))
        for nearest in (other_heads, other_spans):
            yield from nearest(problem, truth, values, shares)

    factor = _common_factor(truth, values, shares)
    scaled = (f"the output is the right one times {factor:.3g}", truth.out * factor)
    return (
        _best_fit(problem, misfits(answers()), shares)
        or _best_fit(problem, misfits([scaled]), shares)
        or _best_fit(problem, misfits(merged_wrongly(problem, truth, values, shares)), shares)
        or _imprecision(truth, problem.dtype, shares, lambda asked: loss(asked[0].double()))
        or _stranger(problem, truth, values, shares)
    )


def explain_lse(problem: Problem, truth: Truth, got: Tensor, others: Iterable[tuple[str, Tensor]] = ()) -> str | None:
    """One line that explains a natural log-sum-exp ``got`` (float64 ``[T, H]``), or None.

    ``others``: (meaning, LSE) of faults that concern the LSE alone; they are tried first.
    """

    def misfits() -> Iterator[_Misfit]:
        answers = list(others)
        if not _too_much_work(truth):
            answers += ((h.meaning, h.compute()[1]) for h in _explanations(problem, truth))
        for meaning, lse in answers:
            against, apart = (_lse_error(x, lse, truth) for x in (got, truth.lse))
            yield _Misfit(meaning, against, apart, torch.full_like(lse, _LSE_SLACK))

    shares = _lse_error(got, truth.lse, truth)
    meaning = _best_fit(problem, misfits(), shares)
    if meaning is not None or _too_much_work(truth):
        return meaning
    return _imprecision(truth, problem.dtype, shares, lambda asked: _lse_error(asked[1].double(), truth.lse, truth))


def concerned_features(problem: Problem, truth: Truth, meaning: str | None) -> tuple[str, ...]:
    """Return the declared features that a likely cause, as :func:`explain` words it, is about; empty: none."""
    words = (meaning or "").partition(EVIDENCE)[0]
    if not words or _too_much_work(truth):
        return ()
    if words.startswith(WINDOW_START):
        return ("sliding_window",)
    return next((each.features for each in _explanations(problem, truth) if each.meaning == words), ())


@dataclass(frozen=True)
class _Misfit:
    """How far an answer is from what was seen, and from the truth; float64 ``[T, H]`` in budgets."""

    meaning: str
    against: Tensor
    apart: Tensor
    slack: Tensor

    def fits(self, shares: Tensor) -> Tensor:
        """Where what was seen may be this answer; ``shares``: how far it is from the truth."""
        return self.against <= torch.maximum(self.slack, shares / _BEYOND_DOUBT)

    def explains(self, shares: Tensor) -> bool:
        """Whether this answer, and not the truth, stands wherever the output is wrong."""
        wrong = shares > 1
        if not bool((self.fits(shares) & (self.against < shares))[wrong].all()):
            return False
        far = bool((self.apart[wrong] >= _APART).any())
        return far and _NEARER * _size(self.against[wrong]) <= _size(shares[wrong])


def _best_fit(problem: Problem, misfits: Iterable[_Misfit], shares: Tensor) -> str | None:
    """The first answer that stands in all rows, or else the first that stands in all wrong ones."""
    partly = None
    for misfit in misfits:
        if not misfit.explains(shares):
            continue
        if bool(misfit.fits(shares).all()):
            return f"{misfit.meaning}{EVIDENCE} all rows"
        if partly is None:
            partly = misfit
    if partly is None:
        return None
    return f"{partly.meaning}{EVIDENCE} {_which(problem, shares > 1, partly.apart >= _APART)}"


def _which(problem: Problem, wrong: Tensor, telling: Tensor) -> str:
    """The wrong rows in words; ``telling``: where the fault would be seen if it were everywhere."""
    wrong, telling = wrong.cpu(), telling.cpu()
    rows, heads = wrong.any(dim=1), wrong.any(dim=0)
    count = int(rows.sum())
    text = "the one wrong row" if count == 1 else f"the {count} wrong rows"
    spared_rows, spared_heads = telling.any(dim=1) & ~rows, telling[rows].any(dim=0) & ~heads
    if bool(spared_rows.any()):
        for phrase, has in _properties(problem, rows):
            if bool(has[rows].all()) and not bool(has[spared_rows].any()):
                text += f", {phrase}" if count == 1 else f", all {phrase}"
                break
    return f"{text}, {_heads(problem, heads)}" if bool(spared_heads.any()) else text


def _properties(problem: Problem, rows: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What rows may share: (in words, bool ``[T]``); ``rows``: the wrong ones."""

    def each(values: list[int]) -> Tensor:
        return torch.tensor([v for v, r in zip(values, problem.requests, strict=True) for _ in range(r.rows)])

    query_len, num_keys = each([r.rows for r in problem.requests]), each([r.num_keys for r in problem.requests])
    request, cached = each(list(range(len(problem.requests)))), each([r.cached for r in problem.requests])
    nth = torch.cat([torch.arange(r.rows) for r in problem.requests])
    yield "with query_len 1", query_len == 1
    yield "with query_len > 1", query_len > 1
    yield "without context", cached == 0
    yield "with context", cached > 0
    first = int(request[rows][0])
    yield f"of request {first}", request == first
    yield "first of their requests", nth == 0
    yield "last of their requests", nth == query_len - 1
    yield "where the last page is full", num_keys % problem.cache.block_size == 0
    yield "where the last page is not full", num_keys % problem.cache.block_size != 0
    for name, value in (("seq_len", num_keys), ("query_len", query_len), ("row of the request", nth)):
        least, most = int(value[rows].min()), int(value[rows].max())
        yield f"with {name} >= {least}", value >= least
        yield f"with {name} <= {most}", value <= most


def _heads(problem: Problem, heads: Tensor) -> str:
    group = problem.layer.num_heads // problem.layer.num_kv_heads
    indices = heads.nonzero().flatten().tolist()
    names = ", ".join(map(str, indices))
    if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
        names = f"{indices[0]} to {indices[-1]}"
    text = f"only head {names}" if len(indices) == 1 else f"only heads {names}"
    if group > 1 and len(indices) == group and indices[0] % group == 0 and indices[-1] < indices[0] + group:
        text += f" (those of KV head {indices[0] // group})"
    return text


def _explanations(problem: Problem, truth: Truth) -> Iterator[Hypothesis]:
    # Of scales first: a k_scale of 1/8 left out is a softmax scale of 1/8 left out.
    yield from scale_explanations(problem, truth.params, truth.rows)
    yield from explanations(truth.params, truth.rows, problem.cache.block_size)
    yield from latent_explanations(problem, truth.params, truth.rows)
    yield from path_explanations(problem, truth.params, truth.rows)
    yield from paging_explanations(problem, truth.params, truth.rows)
    yield from rescaling_explanations(truth.params, truth.rows, problem.cache.block_size)


def _requantised(truth: Truth, output: Tensor) -> list[tuple[str, Tensor]]:
    """(meaning, output) of what goes wrong with the scale of a quantised output, the likelier first."""
    codes = truth.codes
    if codes is None:
        return []
    faults = {
        "output_scale is ignored": truth.out * codes.scale,
        "output_scale multiplies the output in place of dividing it": truth.out * codes.scale**2,
    }
    return sorted(faults.items(), key=lambda fault: float(codes.error(output, fault[1]).norm()))


def _too_much_work(truth: Truth) -> bool:
    return len(truth.rows.query) * len(truth.rows.keys) * truth.rows.keys.shape[-1] > _FEW_WORK


def _slack(out: Tensor, truth: Truth) -> Tensor:
    """Budgets allowed around another answer: more where it is larger than the truth the budget was made for."""
    size, usual = torch.linalg.vector_norm(out, dim=-1), torch.linalg.vector_norm(truth.out, dim=-1)
    slack: Tensor = 2 * (size / usual.clamp(min=1e-30)).clamp(min=1.0)
    return slack


def _size(shares: Tensor) -> float:
    return float(torch.linalg.vector_norm(shares.clamp(max=1e100)))


def _lse_error(a: Tensor, b: Tensor, truth: Truth) -> Tensor:
    """In budgets; infinite where only one of the two is -inf, and where one is NaN."""
    error = torch.where(a == b, torch.zeros_like(a), (a - b).abs() / truth.budget.lse)
    return torch.nan_to_num(error, nan=float("inf"), posinf=float("inf"))


def _common_factor(truth: Truth, output: Tensor, shares: Tensor) -> float:
    """By how much the wrong rows are too large."""
    wrong = shares > 1
    own = (truth.out[wrong] ** 2).sum(dim=-1).clamp(min=1e-300)
    return float(((output[wrong] * truth.out[wrong]).sum(dim=-1) / own).median())


def _not_finite(problem: Problem, truth: Truth, output: Tensor) -> str:
    """NaN or Inf, and what it could be. It is not a slot that nobody owns: in this step these hold finite numbers."""
    rows = (~torch.isfinite(output)).flatten(1).any(dim=1)
    empty = torch.isneginf(truth.lse).all(dim=1)
    if bool(empty[rows].all()):
        return "NaN or Inf in rows that see nothing, and in no others: 0 divided by 0; they must be 0"
    if not bool(torch.isnan(output).any()):
        return "Inf in the output, and no NaN: something overflows"
    padding = ", or a padding row of the inputs" if problem.case.batch.padding.tokens else ""
    return (
        "NaN or Inf in the output. It could be: what stood in the output before the call (NaN)"
        f"{padding}; scores that overflow; a tile of keys in which a row sees nothing (-inf minus -inf)"
    )


def _imprecision(truth: Truth, dtype: torch.dtype, shares: Tensor, measure: Callable[[Asked], Tensor]) -> str | None:
    """The coarser arithmetic that is off by about as much wherever either is outside the budget, if there is one.

    ``measure``: how far in budgets the answer of such an arithmetic is from the truth.
    """
    found: list[tuple[float, str]] = []
    for hypothesis in imprecisions(truth.params, truth.rows, dtype):
        loss = measure(hypothesis.compute())
        concerned = torch.maximum(shares, loss) > 1
        seen, own = (x[concerned].clamp(min=1e-9, max=1e100).log2() for x in (shares, loss))
        if float(((seen - own).abs() <= math.log2(_ALIKE)).double().mean()) >= _MOST:
            found.append((float((seen - own).abs().mean()), hypothesis.meaning))
    return f"as inexact as {min(found)[1]}" if found else None


def _stranger(problem: Problem, truth: Truth, output: Tensor, shares: Tensor) -> str | None:
    """Which key's value stands out in the error of the worst row, if one does."""
    row, head = divmod(int(shares.argmax()), shares.shape[1])
    error = output[row, head] - truth.out[row, head]
    values = truth.rows.values[:, head // truth.params.group_size].double()
    lengths = torch.linalg.vector_norm(values, dim=-1) * torch.linalg.vector_norm(error)
    likeness = (values @ error) / lengths.clamp(min=1e-30)
    best = int(likeness.abs().argmax())
    if float(likeness[best].abs()) < 0.8:
        return None
    request = int(torch.searchsorted(truth.rows.cu_seqlens_k, best, right=True)) - 1
    place = f"request {request}, position {best - problem.requests[request].base}"
    weight = "too much" if float(likeness[best]) > 0 else "too little"
    return f"at row {row} ({problem.row_name(row)}), head {head}: the key of {place} weighs {weight}"
