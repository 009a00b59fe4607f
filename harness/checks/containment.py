"""``containment``: what the batch does not own never reaches the output.

NaN, Inf and huge finite values are written over every slot no row may be influenced by; the real rows must come out bit
for bit as before (within the budget, for a backend that does not repeat itself even on the clean input). Padding rows
of the inputs must not matter, zones around the output must stay intact, padding rows of the output finite. Cannot see:
reads whose result is discarded. Needs further runs of the backend.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from attncheck.harness.checks.numerics import output_shares, summarize
from attncheck.harness.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.observation import CANARY, Observation, Raised
from attncheck.harness.problem import Problem
from attncheck.harness.runner import Fill, Session
from attncheck.harness.truth import Truth


def examine(problem: Problem, truth: Truth, session: Session, seen: Observation) -> Finding:
    """Judge ``seen`` and several more steps, each with other rubbish where nobody should look."""
    fills = list(_fills(problem, session))
    if not fills:
        return NotExamined(("no cache and no padding: the batch owns all it is given",), "attncheck")
    outside = _outside(problem, session, seen)
    if outside is not None:
        return outside
    again = session.run()
    if isinstance(again, Raised):
        return again
    repeats = _same_bits(problem, seen, again)
    for name, fill in fills:
        poisoned = session.run(fill)
        if isinstance(poisoned, Raised):
            return poisoned
        moved = _moved(problem, truth, seen, poisoned, bitwise=repeats)
        if moved is not None:
            return _trace(problem, truth, session, seen, name, fill, moved, repeats)
    notes = () if repeats else ("compared within the budget: the backend does not repeat itself on equal input",)
    figures = {"rows": len(truth.out), "poisonings": len(fills), "bitwise": int(repeats)}
    if session.pool is not None:
        figures["slots_poisoned"] = sum(map(len, session.pool.regions.values()))
    return Holds(figures, notes)


def _fills(problem: Problem, session: Session) -> Iterator[tuple[str, Fill]]:
    """(what it is called, what to fill) for each poisoning."""
    if session.pool is not None and session.pool.regions:
        huge = torch.finfo(problem.dtype).max / 4
        kinds = [("NaN", float("nan")), ("Inf", float("inf")), ("-Inf", float("-inf")), (f"{huge:.2g}", huge)]
        for name, value in kinds[3:] if session.backend.conventions.needs_finite_pool else kinds:
            yield name, Fill(poison=value)
    if problem.case.batch.padding.tokens:
        yield "zeros in place of NaN", Fill(padding=0.0)


def _outside(problem: Problem, session: Session, seen: Observation) -> Broken | None:
    """Zones around the outputs, and the padding rows of the output."""
    if seen.breaches:
        return Broken(f"rows outside of the {' and the '.join(seen.breaches)} buffer were written")
    padding = seen.output[len(problem.query) :].flatten(1)
    untouched = session.backend.conventions.padded_rows == "untouched"
    bad = (padding != CANARY) if untouched else ~torch.isfinite(padding)
    if not bool(bad.any()):
        return None
    count = int(bad.any(dim=1).sum())
    wrong = "were written, although declared untouched" if untouched else "hold NaN or Inf"
    return Broken(f"{count} of {len(padding)} padding rows of the output {wrong}")


def _moved(problem: Problem, truth: Truth, clean: Observation, poisoned: Observation, *, bitwise: bool) -> str | None:
    """Where a poisoned run differs from the clean one, in a line; None: nowhere."""
    if bitwise:
        rows = _differing_rows(problem, clean, poisoned)
        if not len(rows):
            return None
        first = int(rows[0])
        return f"{len(rows)} of {len(truth.out)} rows, first: row {first} ({problem.row_name(first)})"
    shares = output_shares(truth, poisoned)
    return summarize(problem, shares) if bool((shares > 1).any()) else None


def _differing_rows(problem: Problem, a: Observation, b: Observation) -> Tensor:
    """Real rows whose output or LSE differ in any bit (NaN equals NaN)."""
    real = len(problem.query)
    differs = _unequal(a.output[:real], b.output[:real])
    if a.lse is not None and b.lse is not None:
        differs |= _unequal(a.lse[:real], b.lse[:real])
    return differs.nonzero().flatten()


def _same_bits(problem: Problem, a: Observation, b: Observation) -> bool:
    return not len(_differing_rows(problem, a, b))


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    both_nan = torch.isnan(a) & torch.isnan(b)
    return ((a != b) & ~both_nan).flatten(1).any(dim=1)


def _trace(
    problem: Problem,
    truth: Truth,
    session: Session,
    clean: Observation,
    name: str,
    fill: Fill,
    moved: str,
    repeats: bool,
) -> Broken:
    """Which region the poison leaked from, found by poisoning one at a time."""
    if fill.poison is None:
        return Broken(f"padding rows of the inputs matter: with {name}, the output changes in {moved}")
    leaks = []
    for region in session.pool.regions if session.pool is not None else ():
        run = session.run(Fill(poison=fill.poison, regions=(region,)))
        if isinstance(run, Raised):
            leaks.append(f"{region} (raises {type(run.error).__name__})")
        elif _moved(problem, truth, clean, run, bitwise=repeats) is not None:
            leaks.append(region)
    source = ", ".join(leaks) or "foreign slots, several together"
    figures = {"regions_leaking": len(leaks)}
    return Broken(f"{name} in {source} reaches {moved}", figures, "memory that no request owns is read")
