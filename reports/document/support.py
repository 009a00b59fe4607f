"""Measured support: a table of features, and one of sizes and forms with values by verdict."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attncheck.reports.analysis.phrases import one_line
from attncheck.reports.analysis.support import ANSWERS, SupportRow, SupportVerdict, by_size
from attncheck.reports.document.blocks import Block, Heading, Paragraph, Sign, Span, Table, Text, listed, table
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.header import RunHeader

SIGNS: Mapping[SupportVerdict | Literal["declared"], Sign] = {
    "right": Sign("\u2713", "good", "right"),
    "short": Sign("\u2717", "bad", "declared, and wrong"),
    "unproven": Sign("?", "warn", "every case fails for another reason"),
    "wrong": Sign("!", "bad", "not declared, but accepted, and the output is wrong"),
    "died": Sign("\u2020", "bad", "not declared, and the process died"),
    "answered": Sign("+", "warn", "not declared, right all the same"),
    "unclear": Sign("~", "warn", "not declared, refused unclearly"),
    "refused": Sign("\u2013", "calm", "not declared, refused"),
    "declared": Sign("\u25cb", "none", "declared, not examined"),
    "left": Sign("\u00b7", "none", "not declared, not examined"),
}

_WORDS: dict[SupportVerdict, Span] = {
    "right": Span("", sign=SIGNS["right"]),
    "short": Span("wrong", is_bold=True, sign=SIGNS["short"]),
    "unproven": Span("not known, all fail for other reasons", sign=SIGNS["unproven"]),
    "wrong": Span("not declared, but accepted, and the output is wrong", is_bold=True, sign=SIGNS["wrong"]),
    "died": Span("not declared, and the process died", is_bold=True, sign=SIGNS["died"]),
    "answered": Span("not declared, and right all the same", sign=SIGNS["answered"]),
    "refused": Span("refused", sign=SIGNS["refused"]),
    "unclear": Span("refused unclearly", sign=SIGNS["unclear"]),
    "left": Span("not examined", sign=SIGNS["left"]),
}
"""Words before the values of a verdict, in this order."""


def support(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the declared features of each backend, then the measured features, sizes and forms; [] in brief."""
    backends = run.summary.backends
    if not whole or (run.summary.providers and not backends):
        return []
    return support_blocks(run.header, backends, run.found.support)


def support_blocks(header: RunHeader, backends: Sequence[str], rows: Sequence[SupportRow]) -> list[Block]:
    """Return what ``backends`` declare, and the tables of ``rows``."""
    none = "no optional feature"
    blocks = listed(
        [
            f"{backend.name} declares: {', '.join(sorted(backend.features)) or none}"
            for backend in header.backends
            if backend.name in backends
        ]
    )
    features = [row for row in rows if not row.is_form]
    forms = [row for row in rows if row.is_form]
    if features:
        about = f"Measured by the cases that need a feature ({', '.join(ANSWERS)}). A number counts cases."
        cells = {(row.feature, row.backend): _feature(row) for row in features}
        blocks += [
            Heading(2, "Features"),
            Paragraph(about),
            _by_backend("feature", sorted({row.feature for row in features}), cells, backends),
        ]
    if forms:
        about = "The values that the cases had, each with how many cases were right. A word precedes other values."
        values = _values(forms)
        keys = list(dict.fromkeys(key for key, _ in values))
        form_cells = {place: tuple(_cell(by_verdict)) for place, by_verdict in values.items()}
        blocks += [Heading(2, "Sizes and forms"), Paragraph(about), _by_backend("", keys, form_cells, backends)]
    return blocks


def sign_of(row: SupportRow) -> Sign:
    """Return the sign of a row."""
    return SIGNS["declared" if row.verdict == "left" and row.is_declared else row.verdict]


def _feature(row: SupportRow) -> Span:
    declared = row.right + row.short
    if row.verdict == "short":
        count = f"{row.short}/{declared}"
    else:
        count = str(declared or row.wrong or row.died or row.answered or row.unclear or row.refused or "")
    return Span(row.in_words, sign=sign_of(row), count=count)


def _by_backend(
    heading: str, names: Sequence[str], cells: Mapping[tuple[str, str], Text], backends: Sequence[str]
) -> Table:
    rows = [[Span(name, is_code=True), *(cells.get((name, backend), "-") for backend in backends)] for name in names]
    return table([heading, *map(one_line, backends)], rows)


def _values(rows: Sequence[SupportRow]) -> dict[tuple[str, str], dict[SupportVerdict, list[SupportRow]]]:
    """Return, by key and backend, the rows of each verdict."""
    values: dict[tuple[str, str], dict[SupportVerdict, list[SupportRow]]] = {}
    for row in rows:
        key = row.feature.partition("=")[0]
        values.setdefault((key, row.backend), {}).setdefault(row.verdict, []).append(row)
    return values


def _cell(values: Mapping[SupportVerdict, Sequence[SupportRow]]) -> Iterator[Span | str]:
    """Yield the values of each verdict, with how many cases were right."""
    verdicts = [verdict for verdict in _WORDS if verdict in values]
    for verdict in verdicts:
        yield "; " if verdict is not verdicts[0] else ""
        word, rows = _WORDS[verdict], sorted(values[verdict], key=lambda row: by_size(row.value))
        text = ", ".join(map(_counted, rows))
        yield from (word, f": {text}") if word.text else (word, text)


def _counted(row: SupportRow) -> str:
    examined = row.right + row.short
    if row.short:
        return f"{row.value} ({row.right} of {examined} right)"
    return f"{row.value} ({examined})" if examined else row.value
