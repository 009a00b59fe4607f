"""Which changes of a step keep the bits of its rows, by backend."""

from collections.abc import Mapping, Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.document.blocks import Block, Heading, Item, Items, Paragraph, table
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.bits import RUNGS, Bits, Rung, RungResult
from attncheck.reports.run_file.records import bits_of

LEGEND = (
    "cases with equal bits / cases examined, and the largest difference in units in the last place; "
    "batch_invariant promises the changes up to graph"
)

_Results = Mapping[Rung, Sequence[RungResult]]
"""What each change did to the cases of a backend, without those where it was not examined."""


def bits(run: RunValues, *, whole: bool) -> list[Block]:
    """Return a table of changes by backends, or in brief a line for each backend; [] if no bits were compared."""
    found: dict[str, list[Bits]] = {}
    for record in run.records:
        if (of_case := bits_of(record)) is not None:
            found.setdefault(phrases.one_line(record.backend), []).append(of_case)
    if not found:
        return []
    results = {backend: _by_rung(cases) for backend, cases in found.items()}
    if not whole:
        return [Items(tuple(Item(f"{name}: {_in_brief(of)}") for name, of in results.items()), "Equal bits")]
    rows = [[rung, *(_cell(of[rung]) for of in results.values())] for rung in RUNGS]
    return [Heading(2, "Equal bits"), Paragraph(f"{phrases.sentence(LEGEND)}."), table(["change", *results], rows)]


def _by_rung(cases: Sequence[Bits]) -> _Results:
    rungs = [rung for case in cases for rung in case.rungs if rung.outcome != "not examined"]
    return {name: [rung for rung in rungs if rung.name == name] for name in RUNGS}


def _differing(results: Sequence[RungResult]) -> list[RungResult]:
    return [rung for rung in results if rung.outcome == "differs"]


def _in_brief(results: _Results) -> str:
    """Return up to which change the bits of all cases are equal, and the first change that they differ by."""
    level, lacking, broken = "no level", list[str](), ""
    for rung in RUNGS:
        if differing := _differing(results[rung]):
            broken = f"; bits depend on {rung} in {len(differing)} of {phrases.plural(len(results[rung]), 'case')}"
            break
        if results[rung]:
            level = f"equal up to {rung}"
        else:
            lacking.append(rung)
    unknown = f" (not examined: {', '.join(lacking)})" if lacking else ""
    return f"{level}{unknown}{broken}"


def _cell(results: Sequence[RungResult]) -> str:
    if not results:
        return "-"
    sizes = [rung.ulps for rung in _differing(results)]
    size = "NaN" if None in sizes else f"up to {max((size or 0 for size in sizes), default=0)}"
    return f"{len(results) - len(sizes)}/{len(results)}" + (f", {size}" if sizes else "")
