"""``containment``: memory that the batch does not own never influences the output.

NaN, Inf and huge finite values are written to every slot that must not influence a row. The real rows must be bitwise
unchanged, or within the budget if the backend is not deterministic even on clean input. A difference counts only if the
clean step reproduces and the poisoned step differs again in the same rows. Padding rows of the inputs must not matter,
guard zones around the output must stay intact, and padding rows of the output must be finite, also with poison. Cannot
see: reads whose result is discarded. Needs further runs of the backend.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import differing_rows, output_shares, summarize
from attncheck.harness.driver.observation import Observation, Raised
from attncheck.harness.driver.outputs import CANARY
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.storage import key_storage
from attncheck.harness.truth.truth import Truth
from attncheck.reports.run_file.graph_levels import PADDING_EFFECT, PADDING_FAULTS, PaddingRows

_STATE = "state is kept between calls, or the backend is not deterministic"

_ROOM = 4.0
"""Tolerance for a wrong backend whose errors vary from call to call, as a multiple of its error on clean input."""

_TAIL, _LEFT_BEHIND = "the unused tail of a last page", "pages the window has left behind"


def check_containment(problem: Problem, truth: Truth, session: Session, seen: Observation) -> Finding:
    """Judge ``seen`` and several more steps, each with other poison in memory that must not be read."""
    fills = list(_fills(problem, session))
    if not fills:
        return NotExamined(("no cache and no padding: the batch owns all it is given",), "attncheck")
    if seen.breaches:
        return Broken(breach(seen))
    repeats = _Repeats(problem, truth, session, seen)
    found: Broken | None = None
    for name, fill in fills:
        if found is not None and fill.poison is not None:
            continue  # tracing the first poison already covers leaks from foreign slots
        leak = repeats.leak(name, fill)
        if isinstance(leak, str):
            first, found = found, _trace(session, repeats, name, fill, leak)
            found = found if first is None else replace(found, details=(*found.details, first.summary))
        elif leak is not None:
            return leak
    if found is not None:
        return found
    if repeats.padding is not None:
        return repeats.padding
    notes: tuple[str, ...] = (
        () if repeats.bitwise else (f"compared {repeats.measure}: equal input gives different bits",)
    )
    if session.backend.conventions.needs_finite_pool and session.pool is not None and session.pool.regions:
        moved = repeats.is_moved_by(Fill(poison=math.nan))
        notes += (
            ("needs_finite_pool is declared, and NaN in foreign slots does not reach the output here",)
            if moved is False
            else ()
        )
    figures = {"rows": len(truth.out), "poisonings": len(fills), "bitwise": int(repeats.bitwise)}
    if session.pool is not None:
        figures["slots_poisoned"] = sum(map(len, session.pool.regions.values()))
    return Holds(figures, notes)


class _Repeats:
    """Steps of one session, compared with its first clean step bit for bit, or else by their distance to the truth.

    A backend that declares deterministic=False is never compared bit for bit: poisoned steps may differ by chance.

    ``limit``: the budgets within which a nondeterministic backend must stay. It exceeds 1 only if clean outputs are
    wrong, so that errors with other causes are not attributed to foreign memory. ``padding``: the first fault in the
    padding rows of the output.
    """

    def __init__(self, problem: Problem, truth: Truth, session: Session, clean: Observation) -> None:
        self._problem, self._truth, self._session, self._clean = problem, truth, session, clean
        self._worst_again = 0.0
        self._is_second, self._is_settled = True, False
        self.bitwise = session.backend.conventions.deterministic
        self.padding = self._padding_fault(clean)

    @cached_property
    def _worst_first(self) -> float:
        return _worst(self._truth, self._clean)

    @property
    def _worst(self) -> float:
        """The largest error of the clean steps so far, in budgets."""
        return max(self._worst_first, self._worst_again)

    @property
    def limit(self) -> float:
        """Error allowed in a poisoned step, in budgets, if steps are not compared bit for bit."""
        return 1.0 if self._worst <= 1 else _ROOM * self._worst

    @property
    def measure(self) -> str:
        """How steps are compared, in words."""
        within = (
            "the allowed error"
            if self.limit == 1
            else f"{self.limit:.3g} times the allowed error ({_ROOM:g} times its clean error)"
        )
        return "bit for bit" if self.bitwise else f"within {within}"

    def run_clean(self) -> Broken | Raised | None:
        """Repeat the first step; return what is wrong if only one of them is right. Record whether they are equal."""
        again = self._session.run(images=False)
        if isinstance(again, Raised):
            return again
        contradiction = self._contradiction(again)
        if contradiction is not None:
            return contradiction
        if len(_differing_rows(self._problem, self._clean, again)):
            self.bitwise = False
            self._worst_again = max(self._worst_again, _worst(self._truth, again))
        return None

    def _contradiction(self, again: Observation) -> Broken | None:
        """Return what is wrong if exactly one of the first step and ``again`` is right, else None."""
        shares = output_shares(self._truth, again)
        if bool((shares > 1).any()) and self._worst <= 1:
            return Broken(f"a second, identical call is wrong: {summarize(self._problem, shares)}", meaning=_STATE)
        if not bool((shares > 1).any()) and self._worst > 1:
            return Broken("the first call is wrong, a second, identical one is right", meaning=_STATE)
        return None

    def leak(self, name: str, fill: Fill) -> str | Broken | Raised | None:
        """Return which rows change with ``fill``, in one line, if they do so twice and the clean step reproduces.

        ``name``: the poison in words, for :attr:`padding`.
        Return None if no row changes, and a finding if clean steps contradict each other.
        """
        poisoned = self._session.run(fill, images=False)
        if isinstance(poisoned, Raised):
            return poisoned
        self.padding = self.padding or self._padding_fault(poisoned, "" if fill.poison is None else name)
        before, is_second = self._moved_rows(poisoned), self._is_second
        self._is_second = False
        if not len(before):
            return None
        # The first two clean steps run back to back, since an alternating output would otherwise look like a leak.
        for _ in range(1 if self._is_settled else 2):
            disturbed = self.run_clean()
            if disturbed is not None:
                return disturbed
        self._is_settled = True
        again = self._session.run(fill, images=False)
        if isinstance(again, Raised):
            return again
        rows = self._moved_rows(again)
        rows = rows[torch.isin(rows, before)]
        if not len(rows):  # the poison was not the cause
            self.bitwise = False
            return self._contradiction(poisoned) if is_second else None
        first = int(rows[0])
        count = f"{len(rows)} of {len(self._truth.out)} rows"
        return f"{count}, the first is row {first} ({self._problem.row_name(first)})"

    def is_moved_by(self, fill: Fill) -> bool | Raised:
        """Return whether one step with ``fill`` differs from the clean one."""
        run = self._session.run(fill, images=False)
        return run if isinstance(run, Raised) else bool(len(self._moved_rows(run)))

    def _padding_fault(self, run: Observation, poison: str = "") -> Broken | None:
        state, count = padding_rows(self._problem, run, self._session.backend.conventions)
        if state not in PADDING_FAULTS:
            return None
        where = f", with {poison} in slots that no request owns" if poison else ""
        num_padding = len(run.output) - len(self._problem.query)
        summary = f"{count} of {num_padding} {PADDING_FAULTS[state]}{where}"
        return Broken(summary, details=(PADDING_EFFECT,), finding=PADDING_FAULTS[state])

    def _moved_rows(self, run: Observation) -> Tensor:
        if self.bitwise:
            return _differing_rows(self._problem, self._clean, run)
        return (output_shares(self._truth, run) > self.limit).any(dim=1).nonzero().flatten()


def _fills(problem: Problem, session: Session) -> Iterator[tuple[str, Fill]]:
    """Yield (name, fill) of each poisoning."""
    if session.pool is not None and session.pool.regions:
        huge = _huge(problem)
        kinds = {"NaN": math.nan, "Inf": math.inf, "-Inf": -math.inf, f"{huge:.2g}": huge}
        held = key_storage(problem.layer, problem.cache).held
        for name, value in kinds.items():
            # A format without infinities stores its largest number for Inf, which the last kind covers.
            is_held = held != torch.float8_e4m3fn or not math.isinf(value)
            if is_held and (math.isfinite(value) or not session.backend.conventions.needs_finite_pool):
                yield name, Fill(poison=value)
    if problem.case.batch.padding.query_rows or problem.case.batch.padding.key_rows:
        yield "zeros instead of NaN", Fill(padding=0.0)


def breach(seen: Observation) -> str:
    """Return in words which guard zones around the outputs were written to; there must be one."""
    return f"rows outside of the {' and the '.join(seen.breaches)} buffer were written"


def padding_rows(problem: Problem, seen: Observation, conventions: Conventions) -> tuple[PaddingRows, int]:
    """Return the state of the padding rows of the output, and how many of them have it."""
    padding = seen.output[len(problem.query) :].flatten(1).double()
    spoilt = int((~torch.isfinite(padding)).any(dim=1).sum())
    written = int((padding != CANARY).any(dim=1).sum())
    if spoilt:
        return "NaN or Inf", spoilt
    if written and conventions.padded_rows == "untouched":
        return "written", written
    return (conventions.padded_rows if len(padding) else "not examined"), len(padding)


def _worst(truth: Truth, seen: Observation) -> float:
    shares = output_shares(truth, seen)
    return float(shares.max()) if shares.numel() else 0.0


def _differing_rows(problem: Problem, a: Observation, b: Observation) -> Tensor:
    """Return the indices of real rows whose output or LSE differs in any bit. Two NaN count as equal."""
    real = len(problem.query)
    differs = differing_rows(a.output[:real], b.output[:real])
    if a.lse is not None and b.lse is not None:
        differs |= differing_rows(a.lse[:real], b.lse[:real])
    return differs.nonzero().flatten()


def _trace(session: Session, repeats: _Repeats, name: str, fill: Fill, moved: str) -> Broken:
    """Return the finding of a leak: poison one region at a time to find its source."""
    if fill.poison is None:
        return Broken(f"the output depends on padding rows of the inputs: with {name}, it changes in {moved}")
    leaks = {}
    for region in session.pool.regions if session.pool is not None else ():
        leak = repeats.is_moved_by(Fill(poison=fill.poison, regions=(region,)))
        if isinstance(leak, Raised):
            leaks[region] = f"{region} (raises {leak.error_type})"
        elif leak:
            leaks[region] = region
    source = ", ".join(leaks.values()) or "foreign slots, several together"
    meaning = _meaning_of(leaks)
    if not math.isfinite(fill.poison) and repeats.is_moved_by(replace(fill, poison=_huge(session.problem))) is False:
        meaning += (
            "; only NaN and Inf leak, a large finite value does not: a weight of 0 is multiplied by the value there "
            "(a backend may declare needs_finite_pool)"
        )
    return Broken(f"{name} in {source} reaches {moved}", {"regions_leaking": len(leaks)}, meaning)


def _meaning_of(leaks: Iterable[str]) -> str:
    regions = set(leaks)
    parts = []
    if regions == {_TAIL}:
        parts.append("slots behind the last key of a request are read")
    elif regions != {_LEFT_BEHIND}:
        parts.append("memory that no request owns is read")
    if _LEFT_BEHIND in regions:
        parts.append(
            "keys before the windows of all rows are read: a cache manager may have given their pages to other requests"
        )
    return "; ".join(parts)


def _huge(problem: Problem) -> float:
    return torch.finfo(problem.dtype).max / 4


def _check(case: CheckedCase) -> Finding:
    return check_containment(case.problem, case.truth, *case.first_step())


CHECKS = {"containment": Check(_check)}
