"""Select the answers that fit a wrong output: those that agree wherever it is wrong, far better than the truth does.

On some batches a fault leaves the output right, and would "explain" any error. Such an answer is not named.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from attncheck.harness.problem.problem import Problem
from attncheck.harness.truth.wrong_rows import shared_by, which_heads
from attncheck.reports.run_file.causes import ALTERNATIVE, EVIDENCE

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
    wrong, would_show = (shares > 1).cpu(), (misfit.apart >= _APART).cpu()
    rows, heads = wrong.any(dim=1), wrong.any(dim=0)
    count = int(rows.sum())
    text = "the one wrong row" if count == 1 else f"the {count} wrong rows"
    spared_rows, spared_heads = would_show.any(dim=1) & ~rows, would_show[rows].any(dim=0) & ~heads
    is_separated = not bool(spared_rows.any())
    phrase = None if is_separated else shared_by(problem, rows, spared_rows)
    if phrase is not None:
        text, is_separated = f"{text}, {phrase}" if count == 1 else f"{text}, all {phrase}", True
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
