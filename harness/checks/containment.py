"""``containment``: memory that the batch does not own never influences the output.

NaN, Inf and huge finite values are written to every slot that must not influence a row. If an indexer chooses the keys,
old keys of the batch that no row names get a large number instead: an engine wrote them, so they are finite. The real
rows must be bitwise unchanged, or within the budget if the backend is not deterministic even on clean input. A
difference counts only if the clean step reproduces and the poisoned step differs again in the same rows. Padding rows
of the inputs must not matter, guard zones around the output must stay intact, and padding rows of the output must be
finite, also with poison. Cannot see: reads whose result is discarded. Needs further runs of the backend.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.again import Repeats
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.checks.interface import Check, CheckedCase
from attncheck.harness.checks.numerics import differing_rows, output_shares, rows_in_words, summarize
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.observation import Observation
from attncheck.harness.driver.outputs import CANARY
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import UNCHOSEN, Problem
from attncheck.harness.problem.storage import key_storage
from attncheck.reports.run_file.graph_levels import PADDING_EFFECT, PADDING_FAULTS, PaddingRows

_LARGE = 256.0
"""Content of keys that no row chose. An FP8 cache may hold its own largest number instead."""

_TAIL, _LEFT_BEHIND = "the unused tail of a last page", "pages the window has left behind"


def check_containment(case: CheckedCase) -> Finding:
    """Judge the first step and several more, each with other poison in memory that must not be read.

    Raise FindingError if equal steps contradict each other.
    """
    problem, truth, (session, seen) = case.problem, case.truth, case.first_step()
    fills = list(_fills(problem, session))
    if not fills:
        return NotExamined(("no cache and no padding: the batch owns all it is given",), "attncheck")
    if seen.breaches:
        return Broken(breach(seen))
    padding_faults = [_padding_fault(session, seen, None)]

    def run(fill: Fill | None) -> Observation:
        again = session.run(fill or Fill(), images=False)
        padding_faults.append(_padding_fault(session, again, fill))
        return again

    # A backend that declares deterministic=False is never compared bit for bit: poisoned steps may differ by chance.
    repeats: Repeats[Observation, Fill] = Repeats(
        seen,
        run,
        partial(_moved_rows, problem),
        partial(output_shares, truth),
        partial(summarize, problem),
        bitwise=session.backend.conventions.deterministic,
    )
    leaks: list[Broken] = []
    for fill in fills:
        if leaks and fill.poison is not None and fill.regions is None:
            continue  # tracing the first poison already covers leaks from foreign slots
        rows = repeats.reached(fill)
        if bool(rows.any()):
            leaks.append(_trace(session, repeats, fill, rows_in_words(problem, rows)))
    if leaks:
        *earlier, last = leaks
        return replace(last, details=(*last.details, *(leak.summary for leak in earlier)))
    fault = next((fault for fault in padding_faults if fault is not None), None)
    if fault is not None:
        return fault
    notes = repeats.notes
    has_foreign_slots = session.pool is not None and bool(session.pool.poisonable)
    if has_foreign_slots and session.backend.conventions.needs_finite_pool:
        effect = _effect(repeats, Fill(poison=math.nan))
        if effect is False:
            notes += ("needs_finite_pool is declared, and NaN in foreign slots does not reach the output here",)
    figures = {"rows": len(truth.out), "poisonings": len(fills), "bitwise": int(repeats.bitwise)}
    if session.pool is not None:
        figures["slots_poisoned"] = sum(map(len, session.pool.poisonable.values()))
    return Holds(figures, notes)


def _effect(repeats: Repeats[Observation, Fill], fill: Fill) -> StageError | bool:
    """Return whether one step with ``fill`` differs from the clean one, or what the step raised."""
    try:
        return repeats.moves(fill)
    except StageError as failure:
        return failure


def _padding_fault(session: Session, seen: Observation, fill: Fill | None) -> Broken | None:
    problem = session.problem
    state, count = padding_rows(problem, seen, session.backend.conventions)
    if state not in PADDING_FAULTS:
        return None
    poison = None if fill is None else fill.poison
    where = "" if poison is None else f", with {_poison_name(poison)} in slots that no request owns"
    num_padding = len(seen.output) - len(problem.query)
    summary = f"{count} of {num_padding} {PADDING_FAULTS[state]}{where}"
    return Broken(summary, details=(PADDING_EFFECT,), finding=PADDING_FAULTS[state])


def _fills(problem: Problem, session: Session) -> Iterator[Fill]:
    if session.pool is not None and session.pool.poisonable:
        storage = key_storage(problem.layer, problem.cache)
        poisons = (math.nan, math.inf, -math.inf, _huge(problem)) if session.pool.regions else ()
        for value in poisons:
            # A format without infinities stores its largest number for Inf, which the last kind covers.
            # A row with a scale of its own holds NaN instead, which the first kind covers.
            has_infinities = storage.held != torch.float8_e4m3fn and storage.coded_rows is None
            is_held = has_infinities or not math.isinf(value)
            if is_held and (math.isfinite(value) or not session.backend.conventions.needs_finite_pool):
                yield Fill(poison=value)
        if UNCHOSEN in session.pool.poisonable:
            yield Fill(poison=_LARGE, regions=(UNCHOSEN,))
    if problem.case.batch.padding.query_rows or problem.case.batch.padding.key_rows:
        yield Fill(padding=0.0)


def _poison_name(poison: float) -> str:
    names = {"nan": "NaN", "inf": "Inf", "-inf": "-Inf"}
    figure = f"{poison:.2g}" if poison != _LARGE else f"{poison:g}"
    return names.get(figure, figure)


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


def _moved_rows(problem: Problem, a: Observation, b: Observation) -> Tensor:
    """Return bool ``[T]``: real rows whose output or LSE differs in any bit. Two NaN count as equal."""
    real = len(problem.query)
    moved = differing_rows(a.output[:real], b.output[:real])
    if a.lse is not None and b.lse is not None:
        moved |= differing_rows(a.lse[:real], b.lse[:real])
    return moved


def _trace(session: Session, repeats: Repeats[Observation, Fill], fill: Fill, moved: str) -> Broken:
    """Return the finding of a leak: poison one region at a time to find its source."""
    if fill.poison is None:
        return Broken(
            f"the output depends on padding rows of the inputs: with zeros instead of NaN, it changes in {moved}"
        )
    leaks = {}
    for region in fill.regions or (session.pool.regions if session.pool is not None else ()):
        effect = _effect(repeats, Fill(poison=fill.poison, regions=(region,)))
        if isinstance(effect, StageError):
            leaks[region] = f"{region} (raises {effect.raised.error_type})"
        elif effect:
            leaks[region] = region
    source = ", ".join(leaks.values()) or "foreign slots, several together"
    meaning = _meaning_of(leaks)
    if not math.isfinite(fill.poison) and _effect(repeats, replace(fill, poison=_huge(session.problem))) is False:
        meaning += (
            "; only NaN and Inf leak, a large finite value does not: a weight of 0 is multiplied by the value there "
            "(a backend may declare needs_finite_pool)"
        )
    return Broken(f"{_poison_name(fill.poison)} in {source} reaches {moved}", {"regions_leaking": len(leaks)}, meaning)


def _meaning_of(leaks: Iterable[str]) -> str:
    regions = set(leaks)
    parts = []
    if regions == {_TAIL}:
        parts.append("slots behind the last key of a request are read")
    elif regions - {_LEFT_BEHIND, UNCHOSEN}:
        parts.append("memory that no request owns is read")
    if UNCHOSEN in regions:
        parts.append("keys that no row chose are read")
    if _LEFT_BEHIND in regions:
        parts.append(
            "keys before the windows of all rows are read: a cache manager may have given their pages to other requests"
        )
    return "; ".join(parts)


def _huge(problem: Problem) -> float:
    return torch.finfo(problem.dtype).max / 4


CHECKS = {"containment": Check(check_containment)}
