"""The path ``merge``: merge two attention states with ``merge_attn_states`` of a backend.

``numerics``: the merged output is within the budget, also with the two states swapped, and no argument changes.
``lse``: so is the log-sum-exp, in natural logarithm, and it is -inf exactly where both states are empty.
``containment``: the output values of an empty state do not influence the result; NaN and Inf are tried only if the
backend declares ``merge_nan``. Cannot see: in-place merges, which the signature does not offer, and merges inside
attention kernels.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.function_calls import FormError, Function, Poisoning, as_tensor, call, is_answer
from attncheck.harness.checks.functions.merge_problem import RUBBISH, build_merge, merge_truth
from attncheck.harness.checks.lse import lse_shares
from attncheck.harness.checks.numerics import summarize
from attncheck.harness.truth.tolerance import share_of_budget
from attncheck.reference import merge_attn_states

NAME = "merge_attn_states"


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

        poisoning = Poisoning(merge, self._first, _moved, self._wrong)
        fills = self._fills()
        for name, value in fills.items():
            rows = poisoning.reached(value).nonzero().flatten()
            if len(rows):
                first = int(rows[0])
                return Broken(
                    f"{name} instead of {RUBBISH:g} behind an LSE of -inf reaches {len(rows)} of "
                    f"{len(self._truth.out)} rows, the first is row {first} ({self._problem.row_name(first)})",
                    meaning=None if math.isfinite(value) else "a weight of 0 is multiplied by the value there",
                )
        figures = {"rows": len(self._truth.out), "poisonings": len(fills), "bitwise": int(poisoning.bitwise)}
        return Holds(figures, poisoning.notes)

    @cached_property
    def _first(self) -> _Merged:
        return self._merge()

    def _merge(self, *, swapped: bool = False, rubbish: float = RUBBISH) -> _Merged:
        """Run one call. Raise FormError if it does not return a pair of tensors."""
        arguments = self._problem.arguments(self._device, rubbish, swapped=swapped)
        returned, changed = call(NAME, self._function, arguments, {})
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            kind = type(returned).__name__
            raise FormError(Broken(f"{NAME} returned a {kind}; the contract requires a pair (out, lse)"))
        out = as_tensor("the output", returned[0], self._truth.out, self._problem.dtype)
        return _Merged(out, as_tensor("the LSE", returned[1], self._truth.lse, torch.float32), changed)

    def _fills(self) -> dict[str, float]:
        huge = torch.finfo(self._problem.dtype).max / 4
        fills = {"0": 0.0, f"{huge:.2g}": huge}
        return fills | {"NaN": math.nan, "Inf": math.inf} if "merge_nan" in self._backend.features else fills

    def _wrong(self, merged: _Merged) -> Tensor:
        """Return bool ``[T]``: True for rows outside the budget."""
        shares = share_of_budget(merged.out - self._truth.out, self._truth.budget)
        lse = lse_shares(merged.lse, self._truth.lse, self._truth.budget.lse)
        return ((shares > 1) | (lse > 1)).any(dim=1)

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
