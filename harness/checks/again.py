"""Run a case again with changes, and compare the rows that were right in the first step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.findings import Broken, FindingError
from attncheck.harness.checks.numerics import comparable_lse, differing_rows, lse_shares, output_shares, summarize
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.pool import same_bytes
from attncheck.harness.problem.problem import Arrangement, Problem
from attncheck.harness.truth.truth import Truth

T = TypeVar("T")

_KEPT = "something is kept from an earlier step, of other requests"

_SUMS = "the order in which keys are summed changes, for example with the number of splits"

_STATE = "something is kept from an earlier call, or the backend is not deterministic"


def _failure_of(run: Callable[[Sequence[T]], Broken | None], parts: Sequence[T]) -> Broken | Raised | None:
    try:
        return run(parts)
    except StageError as failure:
        return failure.raised


def least_failing(
    parts: Sequence[T], run: Callable[[Sequence[T]], Broken | None]
) -> tuple[Broken | Raised, Sequence[T]] | None:
    """Return what is wrong in steps with ``parts``, and the smallest set of them with which something is wrong.

    Return None if nothing is wrong. The set is empty if steps are wrong without any part. ``run`` returns what is wrong
    with some of the parts, or raises StageError. Parts are left out one after another, the first one first.
    """
    wrong = _failure_of(run, parts)
    if wrong is None:
        return None
    if isinstance(wrong, Raised) and wrong.may_end_the_device:  # a further step could hide this one
        return wrong, parts
    unchanged = _failure_of(run, ())
    if unchanged is not None:
        return unchanged, ()
    needed = parts
    for part in parts:
        fewer = tuple(each for each in needed if each is not part)
        still = _failure_of(run, fewer) if fewer else None
        if still is not None:
            wrong, needed = still, fewer
    return wrong, needed


def later_fault(wrong: Broken, how: str, meaning: str | None) -> Broken:
    """Return the finding of a later step that is ``wrong``. ``how``: the step in words, such as "when repeated".

    ``meaning``: the cause if ``wrong`` has none; None if it is not known.
    """
    summary = f"right at first, wrong {how}: {wrong.summary}"
    return replace(wrong, summary=summary, meaning=wrong.meaning or meaning)


@dataclass(frozen=True)
class Change(Generic[T]):
    """One change to how a step is passed. ``what``: the change in words. ``meaning``: the fault that it reveals."""

    what: str
    meaning: str
    alter: Callable[[T], T]


@dataclass(frozen=True)
class Variation:
    """The rows of a case in further steps, whose difference must not matter. ``what``: these steps in words.

    ``wrong``: runs them, and returns what is wrong, or raises StageError. ``instead``: the variation to try if it
    raises.
    """

    what: str
    wrong: Callable[[], Broken | None]
    instead: "Variation | None" = None


@dataclass(frozen=True)
class Unchanged:
    """A step without any change. ``what``: how it differs from the first step. ``meaning``: what a fault means."""

    what: str = "when it is repeated unchanged"
    meaning: str = _STATE


def changed_step(
    plain: T,
    changes: Sequence[Change[T]],
    judge: Callable[[T], Broken | None],
    *,
    instead: Variation | None = None,
    afresh: Callable[[T], Broken | None] | None = None,
    unchanged: Unchanged = Unchanged(),
) -> Variation:
    """Return the variation of one step, ``plain``, that is passed with ``changes``.

    Its finding names the smallest set of changes that causes it. ``judge``: runs a step, and returns what is wrong with
    it. ``afresh``: the same with an impl and a builder that have seen no other step. ``unchanged``: the step without
    changes.
    """

    def judged(by: Callable[[T], Broken | None], some: Sequence[Change[T]]) -> Broken | None:
        step = plain
        for change in some:
            step = change.alter(step)
        return by(step)

    def wrong() -> Broken | None:
        found = least_failing(changes, partial(judged, judge))
        if found is None:
            return None
        fault, needed = found
        how = f"with {_listed(needed)}" if needed else unchanged.what
        if isinstance(fault, Raised):
            raise StageError(replace(fault, stage=f"{fault.stage} of the step {how}"))
        meaning = "; ".join(dict.fromkeys(change.meaning for change in needed)) or unchanged.meaning
        if needed and afresh is not None and _failure_of(partial(judged, afresh), needed) is None:
            meaning = _KEPT
        return later_fault(fault, how, meaning)

    return Variation(_listed(changes) or f"the same step {unchanged.what}", wrong, instead)


def _listed(changes: Sequence[Change[T]]) -> str:
    return " and ".join(change.what for change in changes)


Seen = TypeVar("Seen")
Fill = TypeVar("Fill")

_ROOM = 4.0
"""Tolerance where clean runs are wrong by amounts that vary, as a multiple of their largest error."""


class Repeats(Generic[Seen, Fill]):
    """Runs of one input, with and without a fill, compared with ``first``, a clean run.

    ``run``: returns the result with a fill, or with None of a clean run. ``moved``: returns bool ``[T]``: the rows in
    which two results differ in any bit. ``shares``: returns the errors of a result in budgets, ``[T, H]``.
    ``in_words``: returns in words which errors exceed the budget. ``bitwise``: whether results are compared bit for
    bit; it becomes False once equal input gives different bits.
    """

    def __init__(
        self,
        first: Seen,
        run: Callable[[Fill | None], Seen],
        moved: Callable[[Seen, Seen], Tensor],
        shares: Callable[[Seen], Tensor],
        in_words: Callable[[Tensor], str],
        *,
        bitwise: bool = True,
    ) -> None:
        self._first = first
        self._run = run
        self._moved = moved
        self._shares = shares
        self._in_words = in_words
        self.bitwise = bitwise
        self._worst = _largest(shares(first))
        self._is_second, self._is_settled = True, False

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on how results were compared. Empty if bit for bit."""
        if self.bitwise:
            return ()
        within = "the allowed error"
        if self._limit != 1:
            within = f"{self._limit:.3g} times the allowed error ({_ROOM:g} times its clean error)"
        return (f"compared within {within}: equal input gives different bits",)

    def moves(self, fill: Fill) -> bool:
        """Return whether one run with ``fill`` differs from the clean one."""
        return bool(self._differing(self._run(fill)).any())

    def reached(self, fill: Fill) -> Tensor:
        """Return bool ``[T]``: the rows that ``fill`` changes twice, while a clean run gives the first result again.

        Raise FindingError if exactly one of two clean runs is right.
        """
        filled = self._run(fill)
        before, is_second = self._differing(filled), self._is_second
        self._is_second = False
        if not bool(before.any()):
            return before
        # The first two clean runs follow one another, since an alternating result would otherwise look like an effect.
        for _ in range(1 if self._is_settled else 2):
            self._run_clean()
        self._is_settled = True
        rows = self._differing(self._run(fill)) & before
        if not bool(rows.any()):  # the fill was not the cause
            self.bitwise = False
            if is_second:
                self._refuse_contradiction(filled)
        return rows

    @property
    def _limit(self) -> float:
        """The error allowed if runs are not compared bit for bit, in budgets."""
        # It exceeds 1 only if clean runs are wrong, so that errors with other causes are not attributed to a fill.
        return 1.0 if self._worst <= 1 else _ROOM * self._worst

    def _differing(self, seen: Seen) -> Tensor:
        if self.bitwise:
            return self._moved(self._first, seen)
        return (self._shares(seen) > self._limit).any(dim=1)

    def _run_clean(self) -> None:
        again = self._run(None)
        self._refuse_contradiction(again)
        if bool(self._moved(self._first, again).any()):
            self.bitwise = False
            self._worst = max(self._worst, _largest(self._shares(again)))

    def _refuse_contradiction(self, again: Seen) -> None:
        shares = self._shares(again)
        is_right = not bool((shares > 1).any())
        if not is_right and self._worst <= 1:
            summary = f"a second, identical call is wrong: {self._in_words(shares)}"
            raise FindingError(Broken(summary, meaning=_STATE))
        if is_right and self._worst > 1:
            summary = "the first call is wrong, a second, identical one is right"
            raise FindingError(Broken(summary, meaning=_STATE))


def _largest(shares: Tensor) -> float:
    return float(shares.max()) if shares.numel() else 0.0


@dataclass(frozen=True)
class ComparedRows:
    """Rows of a later step beside those of the first: each has the same bits, is within the budget, or is wrong.

    ``rows``: int64 ``[t]``, the problem's row of each. ``shares``, ``lse_shares``: errors in budgets, ``[t, H]``.
    """

    rows: Tensor
    first: Observation
    seen: Observation
    shares: Tensor
    lse_shares: Tensor | None

    @property
    def moved(self) -> Tensor:
        """Bool ``[t]``: the rows whose output differs in any bit."""
        return differing_rows(self.first.output[self.rows], self.seen.output[: len(self.rows)])


@dataclass(frozen=True)
class RightRows:
    """The rows of a problem that were right in the first step. ``is_right``, ``lse_is_right``: bool ``[T, H]``."""

    problem: Problem
    truth: Truth
    conventions: Conventions
    first: Observation
    is_right: Tensor
    lse_is_right: Tensor

    @classmethod
    def of(cls, problem: Problem, truth: Truth, first: Observation, conventions: Conventions) -> "RightRows":
        """Return the rows of the first step that are within the budgets."""
        first = first.judged_on(truth.out.device)
        output, lse = _shares(problem, truth, first, conventions)
        lse_is_right = torch.ones_like(output, dtype=torch.bool) if lse is None else lse <= 1
        return cls(problem, truth, conventions, first, output <= 1, lse_is_right)

    def compare(self, seen: Observation, how: Arrangement | None = None) -> ComparedRows:
        """Return the rows of a later step beside those of the first. ``how``: as for :meth:`wrong_in`."""
        truth, place = self.truth, self.truth.out.device
        seen, rows = seen.judged_on(place), torch.arange(len(truth.out), device=place)
        if how is not None:
            rows = how.rows_of(self.problem).to(place)
            truth = truth.of_rows(rows)
        return ComparedRows(rows, self.first, seen, *_shares(self.problem, truth, seen, self.conventions))

    def wrong_in(self, seen: Observation, how: Arrangement | None = None) -> Broken | None:
        """Return what is wrong with a later step, or None if these rows are right in it too.

        ``how``: how the step's batch is arranged from the problem's requests; None for the problem's own batch.
        """
        compared = self.compare(seen, how)
        for shares, is_right, name in (
            (compared.shares, self.is_right, ""),
            (compared.lse_shares, self.lse_is_right, "LSE: "),
        ):
            if shares is None:
                continue
            judged = shares
            if how is not None:
                index = compared.rows[:, None].expand_as(shares)
                judged = torch.zeros_like(self.truth.lse).scatter_reduce_(0, index, shares, "amax")
            judged = judged.masked_fill(~is_right, 0.0)
            if bool((judged > 1).any()):
                figures = {"budget_share": float(judged.max()), "rows_wrong": int((judged > 1).any(dim=1).sum())}
                return Broken(f"{name}{summarize(self.problem, judged)}", figures, details=seen.protocol)
        was, now = self.first.pool_after, seen.pool_after
        if how is None and was is not None and now is not None and not same_bytes(was, now):
            return Broken("the cache holds other bytes than after the first step")
        exact = self.conventions.batch_invariant and self.conventions.deterministic
        return self._other_bits(compared) if exact else None

    def _other_bits(self, compared: ComparedRows) -> Broken | None:
        wrong = compared.rows[compared.moved]
        if not len(wrong):
            return None
        first = int(wrong[0])
        return Broken(
            f"{len(wrong)} of {len(compared.rows)} rows have other bits, the first is row {first} "
            f"({self.problem.row_name(first)}); the backend declares batch_invariant",
            {"rows_wrong": len(wrong)},
            _SUMS,
        )


def _shares(
    problem: Problem, truth: Truth, seen: Observation, conventions: Conventions
) -> tuple[Tensor, Tensor | None]:
    """Return the errors of output and LSE in budgets, ``[t, H]``; infinite in rows that were not written.

    ``truth``: that of the rows of ``seen``, on the same device.
    """
    count = len(truth.out)
    output = output_shares(truth, seen).masked_fill(seen.unwritten[:count, None], torch.inf)
    lse = comparable_lse(problem, seen, conventions)
    return output, None if lse is None else lse_shares(lse[:count], truth.lse, truth.budget.lse)
