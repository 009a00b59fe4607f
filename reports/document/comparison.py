"""A comparison of two runs: the runs, outcomes that changed, times by verdict, and what else differs.

Undecided pairs are counted by reason. In brief, :data:`SHOWN` changes of a kind and :data:`SHOWN_CASES` cases of a
change are shown.
"""

from collections.abc import Sequence

from attncheck.reports.analysis.phrases import budgets, plural, sentence
from attncheck.reports.analysis.reasons import named
from attncheck.reports.comparison import summary
from attncheck.reports.comparison.compare import RunComparison, SpeedChange
from attncheck.reports.comparison.speed_changes import VERDICTS, SpeedVerdict
from attncheck.reports.document.blocks import Block, Colour, Heading, Paragraph, Span, Table, Text, listed, table

SHOWN = 15
SHOWN_CASES = 3

_COLOURS: dict[str, Colour] = {
    "worse": "red",
    "slower": "red",
    "regression": "red",
    "incomplete": "red",
    "better": "green",
    "faster": "green",
    "no regression": "green",
}


def closing(comparison: RunComparison) -> Paragraph:
    """Return the verdict and the counts."""
    verdict, rest = comparison.verdict, summary.closing(comparison).removeprefix(comparison.verdict)
    return Paragraph((Span(verdict, is_bold=True, colour=_COLOURS.get(verdict, "")), Span(rest, is_bold=True)))


def compared(comparison: RunComparison, *, whole: bool) -> list[Block]:
    """Return all sections of a comparison but its verdict."""
    sides = (("BASE", comparison.base), ("NEW", comparison.new))
    return [
        *listed([f"{side}: {summary.run_in_words(run)}" for side, run in sides]),
        *listed([Span(f"warning: {text}" if not whole else text, is_bold=True) for text in comparison.warnings]),
        *listed([change.in_words for change in comparison.suite_speeds]),
        *_outcomes(comparison, whole=whole),
        *_bits(comparison, whole=whole),
        *_times(comparison, whole=whole),
        *_differences(comparison, whole=whole),
    ]


def _outcomes(comparison: RunComparison, *, whole: bool) -> list[Block]:
    groups = summary.grouped_outcomes(comparison.outcomes)
    if not groups:
        return []
    rows: list[tuple[Text, ...]] = [
        (
            Span(group.first.kind, is_bold=group.first.kind == "worse", colour=_COLOURS.get(group.first.kind, "")),
            group.first.backend,
            named(group.cases, None if whole else SHOWN_CASES),
            ", ".join(group.checks),
            group.step,
            group.what,
        )
        for group in groups[: None if whole else SHOWN]
    ]
    headings = ("", "backend", "cases", "checks", "BASE -> NEW", "what")
    changed = Table(headings, tuple(rows), is_named=False)
    return [Heading(2, "Outcomes that changed"), changed, *_more(groups, whole=whole)]


def _bits(comparison: RunComparison, *, whole: bool) -> list[Block]:
    """Return how many cases have equal bits in both runs, and those that differ."""
    pairs = comparison.bits
    if not pairs:
        return []
    differing = [pair for pair in pairs if pair.rows_moved != 0]
    equal = f"{len(pairs) - len(differing)} of {plural(len(pairs), 'case')} have equal bits in both runs."
    rows: list[list[Text]] = [
        [
            pair.backend,
            pair.case,
            f"{'some' if pair.rows_moved is None else pair.rows_moved} of {pair.rows}",
            *map(budgets, pair.shares),
        ]
        for pair in differing[: None if whole else SHOWN]
    ]
    shares = ["worst error / allowed\nBASE", "worst error / allowed\nNEW"]
    listing = [table(["backend", "case", "rows that differ", *shares], rows)] if rows else []
    return [Heading(2, "Equal bits"), Paragraph(equal), *listing, *_more(differing, whole=whole)]


def _times(comparison: RunComparison, *, whole: bool) -> list[Block]:
    counts = summary.counts_by_part(comparison.speeds)
    if not counts:
        return []
    rows = [[part, *(str(of_part[verdict]) for verdict in VERDICTS)] for part, of_part in counts.items()]
    blocks: list[Block] = [Heading(2, "Times"), table(["part", *VERDICTS], rows)]
    if (power := summary.power_of(comparison)) is not None:
        blocks.append(Paragraph(f"{sentence(power.in_words)}. Intervals hold for all pairs at once."))
    for verdict in summary.CHANGED:
        if changes := summary.with_verdict(comparison.speeds, verdict):
            blocks += _changes(verdict, changes, comparison, whole=whole)
    members = summary.unclear(comparison.speeds)
    unclear = [
        (str(len(each)), each[0].reason, f"{each[0].backend}, {each[0].case}, {each[0].part}")
        for each in members[: None if whole else SHOWN]
    ]
    if not unclear:
        return blocks
    reasons = Table(("times", "why, of one of them", "which"), tuple(unclear), is_named=False)
    return [*blocks, Heading(3, "Cannot tell"), reasons, *_more(members, whole=whole)]


def _changes(
    verdict: SpeedVerdict, changes: Sequence[SpeedChange], comparison: RunComparison, *, whole: bool
) -> list[Block]:
    marks = bool(comparison.terms.thresholds.members) and verdict == "slower"
    rows: list[list[Text]] = [
        [
            *(["yes" if change.is_regression else "-"] if marks else []),
            change.backend,
            change.case,
            change.part,
            Span(summary.change_text(change.ratio), is_bold=change.is_regression),
            summary.interval_text(change),
            *summary.times_text(change),
        ]
        for change in changes[: None if whole else SHOWN]
    ]
    headings = [*(["fails"] if marks else []), "backend", "case", "part", "time", "interval", "BASE", "NEW"]
    title = Heading(3, Span(verdict.capitalize(), colour=_COLOURS[verdict]))
    return [title, table(headings, rows), *_more(changes, whole=whole)]


def _more(items: Sequence[object], *, whole: bool) -> list[Block]:
    more = len(items) - SHOWN
    return [Paragraph(f"and {more} more (`--format markdown` lists all)")] if more > 0 and not whole else []


def _differences(comparison: RunComparison, *, whole: bool) -> list[Block]:
    blocks: list[Block] = []
    if comparison.environments:
        rows = [[each.field, each.base, each.new] for each in comparison.environments]
        blocks += [Heading(2, "What differs"), table(["", "BASE", "NEW"], rows)]
    shown = None if whole else SHOWN_CASES
    lines = [
        f"in {side} only: {summary.one_sided(item, shown=shown)}"
        for side, items in (("BASE", comparison.only_base), ("NEW", comparison.only_new))
        for item in items
    ]
    if changed := comparison.changed_cases:
        names = named(changed, shown)
        lines.append(f"{plural(len(changed), 'case')} rewritten, not compared: {names}")
    return [*blocks, Heading(2, "Not in both runs"), *listed(lines)] if lines else blocks
