"""Measured support, as tables of features and of sizes and forms, and CUDA-graph levels with their probes."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.graph_levels import LevelRow, legend, level_notes, unmeasured_cases
from attncheck.reports.analysis.phrases import one_line
from attncheck.reports.analysis.reasons import joined, without_figures
from attncheck.reports.analysis.support import ANSWERS, SupportRow, SupportVerdict, by_size
from attncheck.reports.document.blocks import (
    Block,
    Heading,
    Item,
    Items,
    Paragraph,
    Sign,
    Span,
    Table,
    Text,
    listed,
    spans,
    table,
)
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.graph_levels import GraphProbe
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


SHOWN_REASONS = 5
"""Maximum reasons shown, those with most cases first; reasons that differ in more than figures are always shown."""

LEVEL_HEADINGS = ("backend", "declared", "measured", "cases", "recorder", "probes", "why no higher", "head-room")

Probes = tuple[GraphProbe, ...]


def graph_levels(run: RunValues, *, whole: bool) -> list[Block]:
    """Return declared and measured levels; [] if the run measured none. Cases without a level are counted."""
    rows = run.found.levels
    if not rows:
        return []
    unmeasured = unmeasured_cases(run.records)
    if not whole:
        return [_brief(rows, unmeasured)]
    backends = dict.fromkeys([*(row.backend for row in rows), *unmeasured])
    cells = [each for backend in backends for each in _level_rows(backend, rows, unmeasured.get(backend, {}))]
    alike: dict[tuple[object, ...], list[LevelRow]] = {}
    for row in rows:
        alike.setdefault((row.backend, row.graph.measured, row.graph.probes), []).append(row)
    return [
        Heading(2, "CUDA-graph levels"),
        Paragraph(f"{legend(rows)}."),
        table(LEVEL_HEADINGS, cells),
        *listed([f"{backend}: {'; '.join(notes)}." for backend, notes in level_notes(rows).items()]),
        *(block for members in alike.values() for block in _probes(members)),
    ]


def _brief(rows: Sequence[LevelRow], unmeasured: Mapping[str, Mapping[str, int]]) -> Items:
    """Return a line for each pair of a declared and a measured level, with the backends that have it."""
    levels: dict[tuple[Span, ...], dict[str, None]] = {}
    for row in rows:
        declared = () if row.graph.declared == row.graph.measured else (f"declared {row.graph.declared}, measured ",)
        levels.setdefault(spans((*declared, _measured(row))), {})[phrases.one_line(row.backend)] = None
    for backend, counts in unmeasured.items():
        for outcome, count in counts.items():
            text = spans(f"{outcome} in {phrases.plural(count, 'case')}")
            levels.setdefault(text, {})[phrases.one_line(backend)] = None
    lines = tuple(Item((*text, f": {', '.join(names)}")) for text, names in levels.items())
    recorders = ", ".join(dict.fromkeys(row.graph.recorder for row in rows))
    return Items(lines, f"CUDA-graph levels (recorder: {recorders})")


def _level_rows(backend: str, rows: Sequence[LevelRow], unmeasured: Mapping[str, int]) -> Iterator[list[Text]]:
    for row in rows:
        if row.backend == backend:
            others = f" ({phrases.other_reasons(row)})" if row.other_cases else ""
            yield [
                backend,
                row.graph.declared,
                _measured(row),
                str(row.cases),
                row.graph.recorder,
                row.probes,
                f"{phrases.why_no_higher(row)}{others}" or "-",
                f"could declare {row.head_room}" if row.head_room else "-",
            ]
    for outcome, count in unmeasured.items():
        yield [backend, "-", Span(outcome, is_bold=True), str(count), "-", "-", "-", "-"]


def _measured(row: LevelRow) -> Span:
    text = phrases.measured_level(row.graph.measured)
    if row.falls_short:
        return Span(text, is_bold=True, colour="red")
    return Span(text, colour="green" if row.graph.measured else "")


def _probes(rows: Sequence[LevelRow]) -> list[Block]:
    """Return the section of rows with equal probe outcomes: the probes, then the cases by what differs."""
    cases: dict[Probes, list[str]] = {}
    for row in rows:
        for result in row.results:
            cases.setdefault(result.graph.probes, []).extend(result.cases)
    found = sorted(cases, key=lambda probes: -len(cases[probes]))
    differing = [index for index, column in enumerate(zip(*found, strict=True)) if len(set(column)) > 1]
    measured = phrases.measured_level(rows[0].graph.measured)
    declared = " or ".join(dict.fromkeys(row.graph.declared for row in rows))
    count = phrases.plural(sum(row.cases for row in rows), "case")
    return [
        Heading(3, f"{rows[0].backend}: declared {declared}, measured {measured}, {count}"),
        table(["probe", "level", "outcome", "reason"], list(_probe_rows(found, differing))),
        *([table(["reason", "cases"], list(_by_reason(cases, found, differing)))] if differing else []),
        *(_by_declared(rows) if len(rows) > 1 or not differing else []),
    ]


def _probe_rows(found: Sequence[Probes], differing: Sequence[int]) -> Iterator[list[str]]:
    """Yield a row for each probe; probes that were not run because of one broken probe share a row."""
    columns = list(zip(*found, strict=True))

    def key(index: int) -> object:
        column = columns[index]
        return tuple(probe.reason for probe in column) if column[0].outcome == "not run" else index

    for _, indices in groupby(range(len(columns)), key):
        first, *others = group = list(indices)
        probe, last = columns[first][0], columns[group[-1]][0]
        yield [
            f"{phrases.plural(len(group), 'probe')} behind it" if others else probe.name,
            probe.level if probe.level == last.level else f"{probe.level} to {last.level}",
            phrases.probe_outcome(probe),
            "see below" if first in differing else joined(probe.reason) or "-",
        ]


def _by_reason(
    cases: Mapping[Probes, Sequence[str]], found: Sequence[Probes], differing: Sequence[int]
) -> Iterator[list[str]]:
    """Yield reasons with their cases; those that differ only in figures are merged beyond :data:`SHOWN_REASONS`."""
    kinds: dict[tuple[str, ...], Probes] = {}
    for probes in found:
        kinds.setdefault(tuple(without_figures(probe.reason) for probe in probes), probes)
    different = list(kinds.values())
    alike = [probes for probes in found if probes not in different]
    room = max(SHOWN_REASONS - len(different), 0)
    for probes in [*different, *alike[:room]]:
        reasons = dict.fromkeys(joined(probes[index].reason) for index in differing)
        yield ["; ".join(reasons), ", ".join(cases[probes])]
    if further := alike[room:]:
        names = [case for probes in further for case in cases[probes]]
        yield [f"{len(further)} more that differ in figures alone", ", ".join(names)]


def _by_declared(rows: Sequence[LevelRow]) -> list[Block]:
    names = [", ".join(case for result in row.results for case in result.cases) for row in rows]
    if len(rows) == 1:
        return [Paragraph(f"Cases: {names[0]}")]
    return listed([f"Cases that declare {row.graph.declared}: {own}" for row, own in zip(rows, names, strict=True)])
