"""The path ``merge``: two attention states through ``merge_attn_states`` of a backend.

``numerics``: the merged output lies within the budget, with the two states swapped as well, and no argument changed.
``lse``: so does the log-sum-exp, natural, -inf exactly where both states are empty. ``containment``: what stands in the
output of an empty state reaches nothing; NaN and Inf only where the backend declares ``merge_nan``. Cannot see: merges
into one of the arguments, which the signature does not offer, and those inside of attention kernels.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionBackend
from attncheck.cases.model import Case
from attncheck.harness.checks.lse import lse_shares
from attncheck.harness.checks.numerics import summarize
from attncheck.harness.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.functions.calls import Function, call, dtypes_from, is_answer, misfit
from attncheck.harness.functions.merge_problem import build_merge, merge_truth
from attncheck.harness.tolerance import share_of_budget
from attncheck.reference import merge_attn_states

NAME = "merge_attn_states"


@dataclass(frozen=True)
class _Merged:
    """What a call returned: float64 ``out [T, H, Dv]`` and ``lse [T, H]``; the arguments it changed."""

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
        """The question and its answer, for a dump."""
        budget = self._truth.budget
        right = {"truth": self._truth.out, "truth_lse": self._truth.lse}
        allowed = {"budget_norm": budget.norm, "budget_peak": budget.peak, "budget_lse": budget.lse}
        return self._problem.arguments(self._device) | right | allowed

    def run(self) -> None:
        """The first call, whose answer the checks share; StageError where it raises."""
        _ = self._first

    def numerics(self) -> Finding:
        """Judge the output, and that of the states in the other order."""
        for swapped in (False, True):
            merged = self._merge(swapped=True) if swapped else self._first
            if isinstance(merged, Broken):
                return merged
            prefix = "with the two states swapped: " if swapped else ""
            shares = share_of_budget(merged.out - self._truth.out, self._truth.budget)
            if bool((shares > 1).any()):
                summary = prefix + summarize(self._problem, shares)
                return Broken(summary, self._figures(shares), self._meaning(merged, swapped), merged.changed)
            if merged.changed:
                return Broken(f"{prefix}arguments were changed: {', '.join(merged.changed)}", self._figures(shares))
        return Holds(self._figures(shares))

    def lse(self) -> Finding:
        """Judge the log-sum-exp."""
        merged = self._first
        if isinstance(merged, Broken):
            return merged
        shares = lse_shares(merged.lse, self._truth.lse, self._truth.budget.lse)
        if not bool((shares > 1).any()):
            return Holds(self._figures(shares))
        return Broken(summarize(self._problem, shares), self._figures(shares), self._meaning_of_lse(merged.lse))

    def cache_write(self) -> Finding:
        """There is no cache; that arguments stay as they are is judged with the output."""
        return NotExamined(("merging states touches no cache",), "attncheck")

    def containment(self) -> Finding:
        """Judge calls with other rubbish in the outputs of empty states."""
        if not self._problem.has_empty:
            return NotExamined(("no state is empty: all of every output counts",), "attncheck")
        first, again = self._first, self._merge()
        if isinstance(first, Broken):
            return first
        if isinstance(again, Broken):
            return again
        bitwise = not bool(_differs(first, again).any())
        fills = list(self._fills())
        for name, value in fills:
            littered = self._merge(rubbish=value)
            if isinstance(littered, Broken):
                return littered
            moved = _differs(first, littered).any(dim=1) if bitwise else self._wrong(littered)
            if bool(moved.any()):
                row = int(moved.nonzero()[0])
                return Broken(
                    f"{name} in the output of an empty state reaches {int(moved.sum())} of {len(moved)} rows, "
                    f"first: row {row} ({self._problem.row_name(row)})",
                    meaning=None if math.isfinite(value) else "a weight of 0 is multiplied by what stands there",
                )
        notes = () if bitwise else ("compared within the budget: the function does not repeat itself on equal input",)
        return Holds({"rows": len(self._truth.out), "poisonings": len(fills), "bitwise": int(bitwise)}, notes)

    @cached_property
    def _first(self) -> _Merged | Broken:
        return self._merge()

    def _merge(self, *, swapped: bool = False, rubbish: float | None = None) -> _Merged | Broken:
        options = {} if rubbish is None else {"rubbish": rubbish}
        arguments = self._problem.arguments(self._device, swapped=swapped, **options)
        returned, changed = call(NAME, self._function, arguments, {})
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            return Broken(f"{NAME} returned a {type(returned).__name__}; the contract says a pair (out, lse)")
        for name, value, like, dtypes in (
            ("out", returned[0], self._truth.out, dtypes_from(self._problem.dtype)),
            ("lse", returned[1], self._truth.lse, dtypes_from(torch.float32)),
        ):
            wrong = misfit(name, value, like, dtypes)
            if wrong is not None:
                return Broken(f"of the answer, {wrong}")
        return _Merged(returned[0].double(), returned[1].double(), changed)

    def _fills(self) -> Iterator[tuple[str, float]]:
        huge = torch.finfo(self._problem.dtype).max / 4
        yield "0", 0.0
        yield f"{huge:.2g}", huge
        if "merge_nan" in self._backend.features:
            yield "NaN", math.nan
            yield "Inf", math.inf

    def _wrong(self, merged: _Merged) -> Tensor:
        """Rows outside of the budget."""
        shares = share_of_budget(merged.out - self._truth.out, self._truth.budget)
        lse = lse_shares(merged.lse, self._truth.lse, self._truth.budget.lse)
        return ((shares > 1) | (lse > 1)).any(dim=1)

    def _figures(self, shares: Tensor) -> dict[str, float | int]:
        worst = float(shares.max()) if shares.numel() else 0.0
        return {"rows": shares.shape[0], "heads": shares.shape[1], "budget_share": worst}

    def _meaning(self, merged: _Merged, swapped: bool) -> str | None:
        """The usual mistake whose answer this is, if there is one."""
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


def _differs(one: _Merged, other: _Merged) -> Tensor:
    """Bool ``[T, H]``: what is not equal bit for bit; NaN equals NaN."""
    differs = torch.zeros_like(one.lse, dtype=torch.bool)
    for a, b in ((one.out, other.out), (one.lse[..., None], other.lse[..., None])):
        differs |= ((a != b) & ~(torch.isnan(a) & torch.isnan(b))).any(dim=-1)
    return differs
