"""A comparison as Markdown, for a step summary, a pull request or a file: every change, with nothing cut.

Undecided pairs are counted by reason. A backend's text is escaped, so that it cannot become markup.
"""

from collections.abc import Sequence

from attncheck.reports.analysis.phrases import plural, printable
from attncheck.reports.comparison import summary
from attncheck.reports.comparison.compare import RunComparison, SpeedChange
from attncheck.reports.comparison.speed_changes import VERDICTS
from attncheck.reports.markdown import markup


def render_comparison(comparison: RunComparison) -> str:
    """Return the whole comparison, its verdict first, ending in a newline."""
    sections = [
        "# attncheck comparison",
        f"**{markup.escaped(summary.closing(comparison))}**",
        "\n".join(
            f"- {side}: {markup.escaped(summary.run_in_words(run))}"
            for side, run in (("BASE", comparison.base), ("NEW", comparison.new))
        ),
        "\n".join(f"- **{markup.escaped(text)}**" for text in comparison.warnings),
        "\n".join(f"- {markup.escaped(text)}" for text in summary.suite_speeds(comparison)),
        *_outcomes(comparison),
        *_speeds(comparison),
        *_differences(comparison),
    ]
    return printable("\n\n".join(section for section in sections if section)) + "\n"


def _outcomes(comparison: RunComparison) -> list[str]:
    groups = summary.grouped_outcomes(comparison.outcomes)
    if not groups:
        return []
    rows = [
        [
            f"**{group.first.kind}**" if group.first.kind == "worse" else group.first.kind,
            markup.escaped(group.first.backend),
            markup.escaped(", ".join(group.cases)),
            markup.escaped(", ".join(group.checks)),
            group.step,
            markup.escaped(group.first.what),
        ]
        for group in groups
    ]
    return [
        "## Outcomes that changed",
        markup.table(["", "backend", "cases", "checks", "BASE -> NEW", "what"], rows),
    ]


def _speeds(comparison: RunComparison) -> list[str]:
    counts = summary.counts_by_part(comparison.speeds)
    if not counts:
        return []
    rows = [[part, *(str(of_part[verdict]) for verdict in VERDICTS)] for part, of_part in counts.items()]
    sections = ["## Times", markup.table(["part", *VERDICTS], rows)]
    power = summary.power_of(comparison)
    if power is not None:
        sections.append(f"{_sentence(power.in_words)}. Intervals hold for all pairs at once.")
    for verdict in summary.CHANGED:
        if changes := summary.with_verdict(comparison.speeds, verdict):
            sections += [f"### {verdict.capitalize()}", _table(changes, comparison)]
    unclear = [
        [
            str(len(members)),
            markup.escaped(members[0].reason),
            markup.escaped(f"{members[0].backend}, {members[0].case}, {members[0].part}"),
        ]
        for members in summary.unclear(comparison.speeds)
    ]
    return sections + (
        ["### Cannot tell", markup.table(["times", "why, of one of them", "which"], unclear)] if unclear else []
    )


def _table(changes: Sequence[SpeedChange], comparison: RunComparison) -> str:
    marks = bool(comparison.terms.thresholds.members) and changes[0].verdict == "slower"
    rows = [
        [
            *(["yes" if change.is_regression else "-"] if marks else []),
            markup.escaped(change.backend),
            markup.escaped(change.case),
            change.part,
            f"**{summary.change_text(change.ratio)}**" if change.is_regression else summary.change_text(change.ratio),
            summary.interval_text(change),
            *summary.times_text(change),
        ]
        for change in changes
    ]
    return markup.table(
        [*(["fails"] if marks else []), "backend", "case", "part", "time", "interval", "BASE", "NEW"], rows
    )


def _differences(comparison: RunComparison) -> list[str]:
    sections = []
    if comparison.environments:
        rows = [
            [markup.escaped(text) for text in (each.field, each.base, each.new)] for each in comparison.environments
        ]
        sections += ["## What differs", markup.table(["", "BASE", "NEW"], rows)]
    lines = [
        f"- in {side} only: {markup.escaped(summary.one_sided(item))}"
        for side, items in (("BASE", comparison.only_base), ("NEW", comparison.only_new))
        for item in items
    ]
    if changed := comparison.changed_cases:
        lines.append(f"- {plural(len(changed), 'case')} rewritten, not compared: {markup.escaped(', '.join(changed))}")
    return [*sections, *(["## Not in both runs", "\n".join(lines)] if lines else [])]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
