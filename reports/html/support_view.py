"""The support matrix of backends: a sign for each feature, then the values of sizes and forms by verdict."""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from attncheck.reports.analysis.graph_levels import LevelRow
from attncheck.reports.analysis.phrases import measured_level
from attncheck.reports.analysis.support import SupportRow, SupportVerdict, by_size
from attncheck.reports.run_file.graph_levels import GraphLevel

Tone = Literal["good", "bad", "warn", "calm", "none"]

GRAPHS = "CUDA-graph level"
"""The column for the CUDA-graph level."""

_LEVELS: Mapping[GraphLevel, str] = {
    "NEVER": "never",
    "UNIFORM_SINGLE_TOKEN_DECODE": "1 token",
    "UNIFORM_BATCH": "uniform",
    "ALWAYS": "always",
}
"""Short names of levels."""


class Sign(NamedTuple):
    """A verdict as one character, its colour, and its meaning in the legend."""

    sign: str
    tone: Tone
    meaning: str


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


class FeatureCell(NamedTuple):
    """A feature of a backend: its sign, the number of cases (or the level), and the same in words."""

    sign: Sign
    small: str
    words: str


class FormValues(NamedTuple):
    """The values of one form that share a verdict."""

    sign: Sign
    values: tuple[str, ...]


class SupportLine(NamedTuple):
    """A backend: a cell for each feature, None if no case needs it, and the values of each form."""

    backend: str
    features: tuple[FeatureCell | None, ...]
    forms: tuple[tuple[FormValues, ...], ...]


class SupportMatrix(NamedTuple):
    """Columns of features and of forms, a line for each backend, and the signs in use."""

    features: tuple[str, ...]
    forms: tuple[str, ...]
    lines: tuple[SupportLine, ...]
    signs: tuple[Sign, ...]


def support_matrix(
    rows: Sequence[SupportRow],
    backends: Mapping[str, Collection[str]],
    levels: Sequence[LevelRow] = (),
) -> SupportMatrix:
    """Return the matrix of these backends, in their order; features by name, forms in order of first use.

    ``backends``: the declared features of each.
    """
    cells = {
        (name, feature): FeatureCell(SIGNS["declared"], "", "declared: no case")
        for name, features in backends.items()
        for feature in features
    }
    cells |= {(row.backend, row.feature): _cell(row) for row in rows if not row.is_form and row.backend in backends}
    names = tuple(sorted({feature for _, feature in cells}))
    if levels:
        cells |= {(name, GRAPHS): cell for name in backends if (cell := _graph_cell(name, levels))}
        names = (*names, GRAPHS)
    forms: dict[tuple[str, str], list[SupportRow]] = {}
    for row in rows:
        if row.is_form:
            forms.setdefault((row.backend, row.feature.partition("=")[0]), []).append(row)
    keys = tuple(dict.fromkeys(key for _, key in forms))
    lines = tuple(
        SupportLine(
            backend,
            tuple(cells.get((backend, name)) for name in names),
            tuple(_values(forms.get((backend, key), ())) for key in keys),
        )
        for backend in backends
    )
    used = {cell.sign for line in lines for cell in line.features if cell}
    used |= {values.sign for line in lines for form in line.forms for values in form}
    return SupportMatrix(names, keys, lines, tuple(sign for sign in SIGNS.values() if sign in used))


def sign_of(row: SupportRow) -> Sign:
    """Return the sign of a row."""
    return SIGNS["declared" if row.verdict == "left" and row.is_declared else row.verdict]


def _cell(row: SupportRow) -> FeatureCell:
    declared = row.right + row.short
    if row.verdict == "short":
        cases = f"{row.short}/{declared}"
    else:
        cases = str(declared or row.wrong or row.died or row.answered or row.unclear or row.refused or "")
    return FeatureCell(sign_of(row), cases, row.in_words)


def _graph_cell(backend: str, levels: Sequence[LevelRow]) -> FeatureCell | None:
    own = [row for row in levels if row.backend == backend]
    if not own:
        return None
    short = [row for row in own if row.falls_short]
    shown = (short or own)[0]
    unknown = all(row.graph.measured is None for row in own)
    sign = SIGNS["short" if short else "unproven" if unknown else "right"]
    words = f"declared {shown.graph.declared}, measured {measured_level(shown.graph.measured)}"
    return FeatureCell(sign, _LEVELS[shown.proven], words)


def _values(rows: Sequence[SupportRow]) -> tuple[FormValues, ...]:
    found: dict[Sign, list[str]] = {}
    for row in sorted(rows, key=lambda row: by_size(row.value)):
        counted = f" ({row.right} of {row.right + row.short} right)" if row.verdict == "short" else ""
        found.setdefault(sign_of(row), []).append(f"{row.value}{counted}")
    return tuple(FormValues(sign, tuple(found[sign])) for sign in SIGNS.values() if sign in found)
