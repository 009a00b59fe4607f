"""A comparison as a person reads it in a terminal: what differs, what changed, what cannot be told, the verdict.

No colours unless asked for, and none for a difference that could be luck. Lines keep to 100 columns; what is left out
stands in the Markdown report.
"""

from collections.abc import Iterable, Sequence

from attncheck.reports.analysis.phrases import cut, one_line, plural
from attncheck.reports.comparison import summary
from attncheck.reports.comparison.compare import OneSidedCases, RunComparison, SpeedChange
from attncheck.reports.comparison.speed_changes import VERDICTS, SpeedVerdict
from attncheck.reports.comparison.summary import OutcomeGroup
from attncheck.reports.terminal.columns import WIDTH, table, wrap

SHOWN_CHANGES = 15
"""Times of one verdict, and groups of outcomes, that are shown."""

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


def render_comparison(comparison: RunComparison, *, color: bool = False) -> str:
    """The whole comparison, ending with its verdict; without a newline at its end."""
    sections = [
        "\n".join(
            wrap(f"{side} {one_line(summary.run_in_words(run))}")
            for side, run in (("BASE", comparison.base), ("NEW ", comparison.new))
        ),
        "\n".join(wrap(f"warning: {one_line(text)}") for text in comparison.warnings),
        _environments(comparison),
        _asked(comparison),
        _outcomes(comparison, color),
        *(_speeds(comparison, verdict, color) for verdict in summary.CHANGED),
        _unclear(comparison),
        _counts(comparison),
        _power(comparison),
        "\n".join(wrap(one_line(text)) for text in summary.suite_speeds(comparison)),
        _closing(comparison, color),
    ]
    return "\n\n".join(section for section in sections if section)


def _environments(comparison: RunComparison) -> str:
    if not comparison.environments:
        return ""
    rows = [
        [cut(one_line(text), VALUE_WIDTH) for text in (each.field, each.base, each.new)]
        for each in comparison.environments
    ]
    return table([["what differs", "BASE", "NEW"], *rows])


def _asked(comparison: RunComparison) -> str:
    lines = [*_one_sided("BASE", comparison.only_base), *_one_sided("NEW", comparison.only_new)]
    if changed := comparison.changed_cases:
        lines.append(f"rewritten, not compared: {summary.named(changed, shown=SHOWN_CASES)}")
    return "\n".join(wrap(one_line(line)) for line in lines)


def _one_sided(side: str, items: Iterable[OneSidedCases]) -> list[str]:
    return [f"in {side} only: {summary.one_sided(item, shown=SHOWN_CASES)}" for item in items]


def _outcomes(comparison: RunComparison, color: bool) -> str:
    groups = summary.grouped_outcomes(comparison.outcomes)
    if not groups:
        return ""
    told = [_outcome(group, color) for group in groups[:SHOWN_CHANGES]]
    return "\n".join(["outcomes that changed", *told, *_more(groups)])


def _outcome(group: OutcomeGroup, color: bool) -> str:
    further = len(group.cases) - 1
    more = f" and {plural(further, 'more case')}" if further else ""
    first = group.first
    heading = wrap(one_line(f"{first.kind}  {first.backend}, {first.case}{more}: {', '.join(group.checks)}"), "  ")
    story = wrap(one_line(f"{group.step}: {first.what}" if first.what else group.step), "    ")
    return "\n".join([_painted(heading, first.kind, color), story])


def _speeds(comparison: RunComparison, verdict: SpeedVerdict, color: bool) -> str:
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
    if max(map(len, lines)) > WIDTH - len(INDENT):  # the case has a line of its own
        heading, *figures = table([headings[:-1], *(row[:-1] for row in rows)]).splitlines()
        lines = [heading, *(f"{line}\n{INDENT * 2}{row[-1]}" for line, row in zip(figures, rows, strict=True))]
    return "\n".join([_painted(verdict, verdict, color), *(f"{INDENT}{line}" for line in lines), *_more(changes)])


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


def _unclear(comparison: RunComparison) -> str:
    lines = []
    for members in summary.unclear(comparison.speeds)[:SHOWN_CHANGES]:
        first = members[0]
        which = f"{first.backend}, {first.case}, {first.part}"
        such = f", such as {which}" if len(members) > 1 else f", {which}"
        lines.append(wrap(one_line(f"{plural(len(members), 'time')}{such}: {first.reason}"), "  "))
    return "\n".join(["cannot tell", *lines]) if lines else ""


def _counts(comparison: RunComparison) -> str:
    counts = summary.counts_by_part(comparison.speeds)
    if not counts:
        return ""
    rows = [[part, *(str(of_part[verdict]) for verdict in VERDICTS)] for part, of_part in counts.items()]
    return table([["times of", *VERDICTS], *rows])


def _power(comparison: RunComparison) -> str:
    power = summary.power_of(comparison)
    return "" if power is None else wrap(power.in_words)


def _closing(comparison: RunComparison, color: bool) -> str:
    return _painted(wrap(one_line(summary.closing(comparison))), comparison.verdict, color)


def _painted(text: str, word: str, color: bool) -> str:
    """``text`` with the colour of ``word`` on the first place where it stands."""
    code = _COLORS.get(word)
    return text.replace(word, f"\033[{code}m{word}\033[0m", 1) if color and code else text
