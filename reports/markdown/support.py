"""Measured support as Markdown: a table of features, and one of sizes and forms with values by verdict."""

from collections.abc import Sequence

from attncheck.reports.analysis.support import ANSWERS, SupportRow, SupportVerdict
from attncheck.reports.markdown import markup
from attncheck.reports.run_file.store import Run

_VERDICTS: dict[SupportVerdict, str] = {
    "right": "",
    "short": "**wrong**",
    "unproven": "not known, all fail for other reasons",
    "wrong": "**not declared, accepted and wrong**",
    "died": "**not declared, and the process died**",
    "answered": "not declared, and right all the same",
    "refused": "refused",
    "unclear": "refused unclearly",
    "left": "not examined",
}
"""Words before the values of a verdict, in this order."""


def support(run: Run, backends: Sequence[str], rows: Sequence[SupportRow]) -> list[str]:
    """Return the declared features of each backend, then the measured features, sizes and forms."""
    none = "no optional feature"
    declared = [
        f"- {markup.escaped(backend.name)} declares: {markup.escaped(', '.join(sorted(backend.features)) or none)}"
        for backend in run.header.backends
        if backend.name in backends
    ]
    features, forms = [row for row in rows if not row.is_form], [row for row in rows if row.is_form]
    sections = ["\n".join(declared)] if declared else []
    if features:
        sections += [
            "## Features",
            f"Measured by the cases that need a feature ({', '.join(ANSWERS)}). A number counts cases.",
            _feature_table(features, backends),
        ]
    if forms:
        sections += [
            "## Sizes and forms",
            "The values that the cases had, each with how many cases were right. A word precedes other values.",
            _form_table(forms, backends),
        ]
    return sections


def _feature_table(rows: Sequence[SupportRow], backends: Sequence[str]) -> str:
    cells = {(row.feature, row.backend): row.in_words for row in rows}
    names = sorted({row.feature for row in rows})
    lines = [[markup.code_cell(name), *(cells.get((name, backend), "-") for backend in backends)] for name in names]
    return markup.table(["feature", *map(markup.escaped, backends)], lines)


def _form_table(rows: Sequence[SupportRow], backends: Sequence[str]) -> str:
    values: dict[tuple[str, str], dict[SupportVerdict, list[str]]] = {}
    for row in rows:
        key, _, value = row.feature.partition("=")
        asked = row.right + row.short
        shown = f"{value} ({row.right} of {asked} right)" if row.short else f"{value} ({asked})" if asked else value
        values.setdefault((key, row.backend), {}).setdefault(row.verdict, []).append(shown)
    cells = {
        place: "; ".join(_values(told, words[verdict]) for verdict, told in _VERDICTS.items() if verdict in words)
        for place, words in values.items()
    }
    keys = dict.fromkeys(key for key, _ in values)
    lines = [[markup.code_cell(key), *(cells.get((key, backend), "-") for backend in backends)] for key in keys]
    return markup.table(["", *map(markup.escaped, backends)], lines)


def _values(told: str, values: Sequence[str]) -> str:
    def size(value: str) -> tuple[bool, int, str]:
        digits = value.partition(" ")[0]
        is_size = digits.isdecimal() and len(digits) < 20
        return (not is_size, int(digits) if is_size else 0, value)

    ordered = sorted(values, key=size)
    text = markup.escaped(", ".join(ordered))
    return f"{told}: {text}" if told else text
