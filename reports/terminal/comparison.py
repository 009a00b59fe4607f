"""A comparison for a terminal: differences of the environment, changes, undecided pairs, the verdict.

Colours are optional, and never used for a difference that could be chance. Lines keep to the width; the Markdown report
has what is left out here.
"""

from collections.abc import Iterable, Sequence

from attncheck.reports.analysis.phrases import cut, one_line, plural
from attncheck.reports.comparison import summary
from attncheck.reports.comparison.compare import OneSidedCases, RunComparison, SpeedChange
from attncheck.reports.comparison.speed_changes import VERDICTS, SpeedVerdict
from attncheck.reports.comparison.summary import OutcomeGroup
from attncheck.reports.terminal.columns import WIDTH, Style, table

SHOWN_CHANGES = 15
"""Maximum times of one verdict, and maximum groups of outcomes."""

SHOWN_CASES = 3
INDENT = "  "
VALUE_WIDTH = 36

_COLORS = {
    "worse": "31",
    "slower": "31",
    "regression": "31",
    "incomplete": "31",
    "better": "32",
    "faster": "32",
    "no regression": "32",
}


def render_comparison(comparison: RunComparison, *, color: bool = False, width: int = WIDTH) -> str:
    """Return the whole comparison, ending with its verdict, without a final newline."""
    style = Style(width, color)
    sections = [
        "\n".join(
            style.wrap(f"{side} {one_line(summary.run_in_words(run))}")
            for side, run in (("BASE", comparison.base), ("NEW ", comparison.new))
        ),
        "\n".join(style.wrap(f"warning: {one_line(text)}") for text in comparison.warnings),
        _environments(comparison, style),
        _asked(comparison, style),
        _outcomes(comparison, style),
        *(_speeds(comparison, verdict, style) for verdict in summary.CHANGED),
        _unclear(comparison, style),
        _counts(comparison, style),
        _power(comparison, style),
        "\n".join(style.wrap(one_line(text)) for text in summary.suite_speeds(comparison)),
        _closing(comparison, style),
    ]
    return style.printable("\n\n".join(section for section in sections if section))


def _environments(comparison: RunComparison, style: Style) -> str:
    if not comparison.environments:
        return ""
    rows = [
        [cut(one_line(text), VALUE_WIDTH) for text in (each.field, each.base, each.new)]
        for each in comparison.environments
    ]
    return style.table([["what differs", "BASE", "NEW"], *rows])


def _asked(comparison: RunComparison, style: Style) -> str:
    lines = [*_one_sided("BASE", comparison.only_base), *_one_sided("NEW", comparison.only_new)]
    if changed := comparison.changed_cases:
        lines.append(f"rewritten, not compared: {summary.named(changed, shown=SHOWN_CASES)}")
    return "\n".join(style.wrap(one_line(line)) for line in lines)


def _one_sided(side: str, items: Iterable[OneSidedCases]) -> list[str]:
    return [f"in {side} only: {summary.one_sided(item, shown=SHOWN_CASES)}" for item in items]


def _outcomes(comparison: RunComparison, style: Style) -> str:
    groups = summary.grouped_outcomes(comparison.outcomes)
    if not groups:
        return ""
    told = [_outcome(group, style) for group in groups[:SHOWN_CHANGES]]
    return "\n".join(["outcomes that changed", *told, *_more(groups)])


def _outcome(group: OutcomeGroup, style: Style) -> str:
    further = len(group.cases) - 1
    more = f" and {plural(further, 'more case')}" if further else ""
    first = group.first
    heading = style.wrap(
        one_line(f"{first.kind}  {first.backend}, {first.case}{more}: {', '.join(group.checks)}"), "  "
    )
    story = style.wrap(one_line(f"{group.step}: {first.what}" if first.what else group.step), "    ")
    return "\n".join([_painted(heading, first.kind, style), story])


def _speeds(comparison: RunComparison, verdict: SpeedVerdict, style: Style) -> str:
    changes = summary.with_verdict(comparison.speeds, verdict)
    if not changes:
        return ""
    shown = changes[:SHOWN_CHANGES]
    headings = ["time", "interval", "BASE", "NEW", "part", "backend", "case"]
    rows = [_row(change) for change in shown]
    if comparison.terms.thresholds.members and verdict == "slower":
        headings.insert(0, "fails")
        rows = [["yes" if change.is_regression else "-", *row] for change, row in zip(shown, rows, strict=True)]
    lines = table([headings, *rows]).splitlines()
    if max(map(len, lines)) > style.width - len(INDENT):  # too wide, so the case gets its own line
        heading, *figures = table([headings[:-1], *(row[:-1] for row in rows)]).splitlines()
        lines = [heading, *(f"{line}\n{INDENT * 2}{row[-1]}" for line, row in zip(figures, rows, strict=True))]
    return "\n".join([_painted(verdict, verdict, style), *(f"{INDENT}{line}" for line in lines), *_more(changes)])


def _row(change: SpeedChange) -> list[str]:
    return [
        summary.change_text(change.ratio),
        summary.interval_text(change),
        *summary.times_text(change),
        change.part,
        one_line(change.backend),
        one_line(change.case),
    ]


def _more(items: Sequence[object]) -> list[str]:
    more = len(items) - SHOWN_CHANGES
    return [f"  and {more} more (`--format markdown` tells them all)"] if more > 0 else []


def _unclear(comparison: RunComparison, style: Style) -> str:
    lines = []
    for members in summary.unclear(comparison.speeds)[:SHOWN_CHANGES]:
        first = members[0]
        which = f"{first.backend}, {first.case}, {first.part}"
        such = f", such as {which}" if len(members) > 1 else f", {which}"
        lines.append(style.wrap(one_line(f"{plural(len(members), 'time')}{such}: {first.reason}"), "  "))
    return "\n".join(["cannot tell", *lines]) if lines else ""


def _counts(comparison: RunComparison, style: Style) -> str:
    counts = summary.counts_by_part(comparison.speeds)
    if not counts:
        return ""
    rows = [[part, *(str(of_part[verdict]) for verdict in VERDICTS)] for part, of_part in counts.items()]
    return style.table([["times of", *VERDICTS], *rows])


def _power(comparison: RunComparison, style: Style) -> str:
    power = summary.power_of(comparison)
    return "" if power is None else style.wrap(power.in_words)


def _closing(comparison: RunComparison, style: Style) -> str:
    return _painted(style.wrap(one_line(summary.closing(comparison))), comparison.verdict, style)


def _painted(text: str, word: str, style: Style) -> str:
    code = _COLORS.get(word)
    return text.replace(word, f"\033[{code}m{word}\033[0m", 1) if style.color and code else text
