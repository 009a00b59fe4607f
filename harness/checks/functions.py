"""Checks of single functions that a backend offers: to merge states, to convolve, and to choose keys."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.backends.dtypes import DTYPES
from attncheck.cases.model import Case
from attncheck.harness.checks.again import Repeats
from attncheck.harness.checks.convolution import CONVOLUTION, Convolution
from attncheck.harness.checks.findings import Broken, Finding, FindingError, Holds, NotExamined
from attncheck.harness.checks.indexer import INDEXER, Indexing
from attncheck.harness.checks.interface import Function, as_tensor, call, dump_tensors, is_answer
from attncheck.harness.checks.numerics import lse_shares, rows_in_words, summarize
from attncheck.harness.checks.refusals import check_declared
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.problem.pages import RandomStream
from attncheck.harness.problem.problem import planted_inputs
from attncheck.harness.truth.unpaged import Budget, K, allowed_errors, float32_bracket, share_of_budget
from attncheck.reference import Precision, merge_attn_states

# Two attention states to merge, as split KV, cascade and chunked context produce them, and the right result.
#
# The states result from a cut between each request's context and its new tokens. A row's log-sum-exp is about the
# logarithm of the number of keys that it sees on its side, and a side without keys is empty. Some rows and heads have
# states that merges often get wrong: equal weights, weights that underflow, log-sum-exps at the limits of `exp` in
# float32, one empty side, or two.

RUBBISH = 3072.0
"""Magnitude of the values in the output of an empty state, with alternating signs. Every dtype can represent it."""

_KINDS = (
    ("cut", None),
    ("equal", "equal_scores"),
    ("no a", None),
    ("far below a", "large_scores"),
    ("cut", None),
    ("high", "large_scores"),
    ("no b", None),
    ("neither", None),
    ("needle in a", "needles"),
    ("low", "large_scores"),
    ("far below b", "large_scores"),
    ("cut", None),
    ("needle in b", "needles"),
    ("over", "large_scores"),
    ("opposite", "large_scores"),
    ("under", "large_scores"),
)
"""Kinds of states, assigned to rows and heads in turn, each with the value of a case's ``inputs`` that enables it.

Without that value, the state is that of the cut.
"""

_EDGE, _BEYOND = 80.0, 95.0
"""float32 ``exp`` is finite up to 88 and keeps full precision down to -87."""

_SPARE_OUTPUT = 8
"""Columns of a wider output that a view omits."""


@dataclass(frozen=True)
class MergeProblem:
    """Two states, each with ``out`` ``[T, H, Dv]`` in the layer's dtype and float32 ``lse`` ``[T, H]``, on the CPU."""

    case: Case
    positions: tuple[tuple[int, int], ...]
    """(request, position) of each row."""
    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The layer's dtype."""
        return DTYPES[self.case.layer.dtype]

    @cached_property
    def has_empty(self) -> bool:
        """Whether at least one state of a row and head is empty."""
        return bool((torch.isinf(self.lse_a) | torch.isinf(self.lse_b)).any())

    def row_name(self, row: int) -> str:
        """Return a readable name for a row."""
        request, position = self.positions[row]
        return f"request {request}, position {position}"

    def arguments(self, device: torch.device, rubbish: float = RUBBISH, *, swapped: bool = False) -> dict[str, Tensor]:
        """Return the four arguments in order, as new tensors, with ``rubbish`` in the outputs of empty states.

        With the input ``views``, the second state consists of views: columns of a wider output, and a transposed LSE.
        """
        states = [(self.out_a, self.lse_a), (self.out_b, self.lse_b)]
        (out_a, lse_a), (out_b, lse_b) = (
            (_littered(out, lse, rubbish).to(device), lse.to(device, copy=True))
            for out, lse in (reversed(states) if swapped else states)
        )
        if "views" in planted_inputs(self.case):
            wide = torch.full(
                (*out_b.shape[:2], out_b.shape[2] + _SPARE_OUTPUT), RUBBISH, dtype=out_b.dtype, device=device
            )
            wide[:, :, : out_b.shape[2]] = out_b
            out_b = wide[:, :, : out_b.shape[2]]
            lse_b = lse_b.t().contiguous().t()
        return {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}


@dataclass(frozen=True)
class MergeTruth:
    """The merged state: ``out`` float64 ``[T, H, Dv]``, ``lse`` float64 ``[T, H]``, and the budget around them."""

    out: Tensor
    lse: Tensor
    budget: Budget


def build_merge(case: Case, seed: int) -> MergeProblem:
    """Return the states of ``case`` under ``seed``, with the same bits on every machine."""
    stream = RandomStream(seed, case.hash, "merge")
    layer = case.layer
    rows = [(r, i) for r, spec in enumerate(case.batch) for i in range(spec.query_len)]
    contexts = [spec.context_len for spec in case.batch]
    shape = (len(rows), layer.num_heads)
    before = torch.tensor([max(contexts[r], 0) for r, _ in rows])[:, None].expand(shape)
    new = torch.tensor([max(i + 1 + min(contexts[r], 0), 0) for r, i in rows])[:, None].expand(shape)
    noise_a = stream.uniform(*shape)
    noise_b = stream.uniform(*shape)
    lse_a = _log(before) + noise_a
    lse_b = _log(new) + noise_b
    inputs = planted_inputs(case)
    kind_of = (torch.arange(shape[0])[:, None] * 5 + torch.arange(shape[1])) % len(_KINDS)
    for number, (kind, needed) in enumerate(_KINDS):
        if needed is None or needed in inputs:
            here = kind_of == number
            a, b = _states_of(kind, noise_a[here], noise_b[here], lse_a[here], lse_b[here])
            lse_a[here], lse_b[here] = a, b
    dtype = DTYPES[layer.dtype]
    out_a, out_b = (stream.uniform(*shape, layer.value_head_size).to(dtype) for _ in range(2))
    positions = tuple((r, contexts[r] + i) for r, i in rows)
    return MergeProblem(case, positions, out_a, lse_a.float(), out_b, lse_b.float())


def merge_truth(problem: MergeProblem, device: torch.device) -> MergeTruth:
    """Return the merged state, and the error that a correct kernel may have.

    A correct kernel computes in float32 and rounds once. ``exp`` inherits the rounding of the largest log-sum-exp,
    because kernels that use powers of two first multiply it.
    """
    out_a, lse_a, out_b, lse_b = problem.arguments(device).values()
    out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
    honest = Precision(torch.float32, None, problem.dtype)
    low_out, low_lse = merge_attn_states(out_a, lse_a, out_b, lse_b, precision=honest)
    weighted, _ = merge_attn_states(out_a.abs(), lse_a, out_b.abs(), lse_b)
    reach = torch.maximum(_finite_size(lse_a), _finite_size(lse_b))
    bracket = float32_bracket(reach, terms=2)
    norm, peak = allowed_errors([low_out.double() - out], out, bracket, weighted, problem.dtype)
    lse_loss = torch.where(lse == low_lse, 0.0, (lse - low_lse).abs())
    budget = Budget(norm, peak, bracket + K * lse_loss)
    if problem.case.tolerance is not None:
        budget = budget.scaled(problem.case.tolerance.factor)
    return MergeTruth(out, lse, budget)


def _states_of(kind: str, noise_a: Tensor, noise_b: Tensor, lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return two log-sum-exps of the given kind, from those at the cut and from noise in [-2, 2)."""
    nothing = torch.full_like(noise_a, -torch.inf)
    needle = noise_a.abs() + 2
    match kind:
        case "equal":
            return noise_a, noise_a
        case "no a":
            return nothing, noise_b
        case "no b":
            return noise_a, nothing
        case "neither":
            return nothing, nothing
        case "far below a":
            return noise_a, noise_b - _BEYOND
        case "far below b":
            return noise_a - _BEYOND, noise_b
        case "high":
            return noise_a + _EDGE, noise_b + _EDGE
        case "low":
            return noise_a - _EDGE, noise_b - _EDGE
        case "over":
            return noise_a + _BEYOND, noise_b + _BEYOND
        case "under":
            return noise_a - _BEYOND, noise_b - _BEYOND
        case "opposite":
            return noise_a + _EDGE, noise_b - _EDGE
        case "needle in a":
            return noise_b + needle, noise_b
        case "needle in b":
            return noise_a, noise_a + needle
        case _:
            return lse_a, lse_b


def _littered(out: Tensor, lse: Tensor, rubbish: float) -> Tensor:
    signs = 1.0 - 2.0 * (torch.arange(out.shape[2]) % 2)
    litter = (signs * rubbish).to(out.dtype).expand_as(out)
    return torch.where(torch.isinf(lse)[:, :, None], litter, out)


def _log(counts: Tensor) -> Tensor:
    """Return logarithms in steps of 1/64, for equal bits on every machine; -inf for a count of 0."""
    logs = torch.log(counts.double().clamp(min=1))
    return torch.where(counts > 0, torch.round(logs * 64) / 64, -torch.inf)


def _finite_size(lse: Tensor) -> Tensor:
    return torch.where(torch.isinf(lse), 0.0, lse.double().abs())


# The path `merge`: merge two attention states with `merge_attn_states` of a backend.
#
# `numerics`: the merged output is within the budget, also with the two states swapped, and no argument changes. `lse`:
# so is the log-sum-exp, in natural logarithm, and it is -inf exactly where both states are empty. `containment`: the
# output values of an empty state do not influence the result; NaN and Inf are tried only if the backend declares
# `merge_nan`. Cannot see: in-place merges, which the signature does not offer, and merges inside attention kernels.

MERGE = "merge_attn_states"


@dataclass(frozen=True)
class _Merged:
    """The result of a call: float64 ``out [T, H, Dv]`` and ``lse [T, H]``, and the arguments it changed."""

    out: Tensor
    lse: Tensor
    changed: tuple[str, ...]


class Merging:
    """One backend's ``merge_attn_states`` on the states of one case."""

    def __init__(
        self, backend: type[AttentionBackend], function: Function, case: Case, seed: int, device: torch.device
    ) -> None:
        self._backend, self._function, self._device = backend, function, device
        self._problem = build_merge(case, seed)
        self._truth = merge_truth(self._problem, device)

    def tensors(self) -> dict[str, Tensor]:
        """Return the arguments, truth and budget, for a dump."""
        budget = self._truth.budget
        right = {"truth": self._truth.out, "truth_lse": self._truth.lse}
        allowed = {"budget_norm": budget.norm, "budget_peak": budget.peak, "budget_lse": budget.lse}
        return self._problem.arguments(self._device) | right | allowed

    def run(self) -> None:
        """Run the first call, whose result the checks share. Raise StageError if it raises."""
        _ = self._first

    def numerics(self) -> Finding:
        """Judge the output for the states in both orders."""
        for swapped in (False, True):
            merged = self._merge(swapped=True) if swapped else self._first
            prefix = "with the two states swapped: " if swapped else ""
            shares = share_of_budget(merged.out - self._truth.out, self._truth.budget)
            if bool((shares > 1).any()):
                summary = prefix + summarize(self._problem, shares)
                return Broken(summary, _figures(shares), self._meaning(merged, swapped), merged.changed)
            if merged.changed:
                return Broken(f"{prefix}arguments were changed: {', '.join(merged.changed)}", _figures(shares))
        return Holds(_figures(shares))

    def lse(self) -> Finding:
        """Judge the log-sum-exp."""
        merged = self._first
        shares = lse_shares(merged.lse, self._truth.lse, self._truth.budget.lse)
        if not bool((shares > 1).any()):
            return Holds(_figures(shares))
        return Broken(summarize(self._problem, shares), _figures(shares), self._meaning_of_lse(merged.lse))

    def cache_write(self) -> Finding:
        """Return NotExamined, because there is no cache. ``numerics`` judges whether arguments change."""
        return NotExamined(("merging states touches no cache",), "attncheck")

    def containment(self) -> Finding:
        """Judge calls with other values in the outputs of empty states."""
        if not self._problem.has_empty:
            return NotExamined(("no state is empty: all of every output counts",), "attncheck")

        def merge(rubbish: float | None) -> _Merged:
            return self._merge(rubbish=RUBBISH if rubbish is None else rubbish)

        in_words = partial(summarize, self._problem)
        repeats: Repeats[_Merged, float] = Repeats(self._first, merge, _moved, self._shares, in_words)
        fills = self._fills()
        for name, value in fills.items():
            rows = repeats.reached(value)
            if bool(rows.any()):
                where = rows_in_words(self._problem, rows)
                return Broken(
                    f"{name} instead of {RUBBISH:g} behind an LSE of -inf reaches {where}",
                    meaning=None if math.isfinite(value) else "a weight of 0 is multiplied by the value there",
                )
        figures = {"rows": len(self._truth.out), "poisonings": len(fills), "bitwise": int(repeats.bitwise)}
        return Holds(figures, repeats.notes)

    @cached_property
    def _first(self) -> _Merged:
        return self._merge()

    def _merge(self, *, swapped: bool = False, rubbish: float = RUBBISH) -> _Merged:
        """Run one call. Raise FindingError if it does not return a pair of tensors."""
        arguments = self._problem.arguments(self._device, rubbish, swapped=swapped)
        returned, changed = call(MERGE, self._function, arguments, {})
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            kind = type(returned).__name__
            raise FindingError(Broken(f"{MERGE} returned a {kind}; the contract requires a pair (out, lse)"))
        out = as_tensor("the output", returned[0], self._truth.out, self._problem.dtype)
        return _Merged(out, as_tensor("the LSE", returned[1], self._truth.lse, torch.float32), changed)

    def _fills(self) -> dict[str, float]:
        huge = torch.finfo(self._problem.dtype).max / 4
        fills = {"0": 0.0, f"{huge:.2g}": huge}
        return fills | {"NaN": math.nan, "Inf": math.inf} if "merge_nan" in self._backend.features else fills

    def _shares(self, merged: _Merged) -> Tensor:
        """Return the larger of the errors of output and LSE in budgets, ``[T, H]``."""
        shares = share_of_budget(merged.out - self._truth.out, self._truth.budget)
        return torch.maximum(shares, lse_shares(merged.lse, self._truth.lse, self._truth.budget.lse))

    def _meaning(self, merged: _Merged, swapped: bool) -> str | None:
        if bool(torch.isnan(merged.out).any()):
            return "NaN: where both states are empty, -inf - -inf is NaN; such rows must be 0"
        a, lse_a, b, lse_b = self._problem.arguments(self._device, swapped=swapped).values()
        for meaning, out in (
            ("the average of the two outputs, without weights", (a.double() + b.double()) / 2),
            ("the weights of the two states are swapped", merge_attn_states(a, lse_b, b, lse_a)[0]),
            (
                "the log-sum-exps were taken to base 2",
                merge_attn_states(a, lse_a * math.log(2), b, lse_b * math.log(2))[0],
            ),
        ):
            if is_answer(merged.out, out, self._truth.budget, self._problem.dtype):
                return meaning
        wrong = (share_of_budget(merged.out - self._truth.out, self._truth.budget) > 1).any(dim=-1)
        empty = (torch.isinf(lse_a) | torch.isinf(lse_b)).any(dim=-1)
        return "only rows with an empty state are wrong" if not bool((wrong & ~empty).any()) else None

    def _meaning_of_lse(self, got: Tensor) -> str | None:
        truth, allowed = self._truth.lse, self._truth.budget.lse
        if bool((torch.isneginf(truth) & ~torch.isneginf(got)).any()):
            return "where both states are empty, the log-sum-exp must be -inf"
        if not bool((lse_shares(got * math.log(2), truth, allowed) > 1).any()):
            return "the logarithm is to base 2"
        return None


def _moved(one: _Merged, other: _Merged) -> Tensor:
    """Return bool ``[T]``: True for rows that differ in any bit. Two NaN count as equal."""
    moved = torch.zeros(len(one.out), dtype=torch.bool, device=one.out.device)
    for a, b in ((one.out, other.out), (one.lse, other.lse)):
        moved |= ((a != b) & ~(torch.isnan(a) & torch.isnan(b))).flatten(1).any(dim=1)
    return moved


def _figures(shares: Tensor) -> dict[str, float | int]:
    worst = float(shares.max()) if shares.numel() else 0.0
    return {"rows": shares.shape[0], "heads": shares.shape[1], "budget_share": worst}


_ONLY_LATER = (
    "something is kept from an earlier call, the function is not deterministic, or the first numbers hide the fault"
)

EXAMINATIONS: Mapping[str, tuple[str, type[Merging | Convolution | Indexing]]] = {
    "merge": (MERGE, Merging),
    "causal_conv1d": (CONVOLUTION, Convolution),
    "indexer": (INDEXER, Indexing),
}
"""Maps a path to the name of its function in ``functions()``, and to the class that examines it."""


class FunctionChecks:
    """One case of one backend on a path that examines a function. ``reasons``: why the backend excludes the case."""

    def __init__(
        self, backend: type[AttentionBackend], case: Case, seed: int, device: torch.device, reasons: tuple[str, ...]
    ) -> None:
        self._case, self._seed = case, seed
        self._name, examination = EXAMINATIONS[case.batch.path.name]
        function = call_backend("functions", lambda: backend.functions().get(self._name))
        absent = () if function is not None else (f"functions() offers no {self._name}",)
        self._reasons = (*absent, *reasons)
        self._examination = self._later = None
        if function is not None and not reasons:
            self._examination = examination(backend, function, case, seed, device)
            self._later = partial(examination, backend, function, case, seed + 1, device)

    def find(self, check: str) -> Callable[[], Finding] | NotExamined:
        """Return the function that runs a check, or why it examines nothing."""
        first = self._examination
        if first is None:
            return NotExamined(self._reasons)
        examined: Mapping[str, Callable[[], Finding]] = {
            "numerics": partial(self._numerics, first),
            "lse": first.lse,
            "cache_write": first.cache_write,
            "containment": first.containment,
            "refusals": partial(check_declared, first.run),
        }
        reason = f"the path examines {self._name}, to which {check} does not apply"
        return examined.get(check, NotExamined((reason,), "attncheck"))

    def dump(self, folder: Path, backend: str) -> None:
        """Write arguments, truth and budget to one file."""
        if self._examination is not None:
            dump_tensors(folder, self._case, self._seed, backend, self._examination.tensors())

    def _numerics(self, examination: Merging | Convolution | Indexing) -> Finding:
        """Judge the first call, and a second one with other numbers in the same shapes."""
        first = examination.numerics()
        if self._later is None or not isinstance(first, Holds):
            return first
        second = self._later().numerics()
        if not isinstance(second, Broken):
            return first
        return Broken(
            f"right in the first call, wrong in the second: {second.summary}",
            second.figures,
            second.meaning or _ONLY_LATER,
            second.details,
            second.finding,
        )
