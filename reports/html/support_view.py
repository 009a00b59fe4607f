"""What backends support, as a matrix of coloured cells with words: features, then sizes and forms."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from attncheck.reports.analysis.support import SupportRow

Tone = Literal["good", "bad", "warn", "calm", "none"]

TONES: Mapping[str, Tone] = {
    "right": "good",
    "short": "bad",
    "unproven": "none",
    "wrong": "bad",
    "died": "bad",
    "answered": "warn",
    "unclear": "warn",
    "refused": "calm",
    "left": "none",
}
"""The colour of each verdict; words say the same."""

WORDS = {
    "right": "right",
    "short": "wrong",
    "unproven": "not known: all fail for other reasons",
    "wrong": "not declared, accepted and wrong",
    "died": "not declared, and the process died",
    "answered": "not declared, right all the same",
    "unclear": "refused unclearly",
    "refused": "refused",
    "left": "not examined",
}


class FeatureCell(NamedTuple):
    """A feature of a backend: its colour, whether it is declared where that matters, and what was found."""

    tone: Tone
    declared: str
    words: str


class FormValues(NamedTuple):
    """The values of one form that share a verdict."""

    tone: Tone
    words: str
    values: tuple[str, ...]


class SupportMatrix(NamedTuple):
    """Rows of a feature or form and a cell a backend, None where no case says anything."""

    features: Mapping[str, tuple[FeatureCell | None, ...]]
    forms: Mapping[str, tuple[tuple[FormValues, ...], ...]]


def support_matrix(rows: Sequence[SupportRow], backends: Sequence[str]) -> SupportMatrix:
    """The matrix of these backends, in their order; features by name, forms as they first come."""
    features = {(row.feature, row.backend): _cell(row) for row in rows if not row.is_form}
    forms: dict[tuple[str, str], list[SupportRow]] = {}
    for row in rows:
        if row.is_form:
            forms.setdefault((row.feature.partition("=")[0], row.backend), []).append(row)
    names = sorted({feature for feature, _ in features})
    keys = dict.fromkeys(key for key, _ in forms)
    return SupportMatrix(
        {name: tuple(features.get((name, backend)) for backend in backends) for name in names},
        {key: tuple(_values(forms.get((key, backend), ())) for backend in backends) for key in keys},
    )


def _cell(row: SupportRow) -> FeatureCell:
    declared, _, words = row.in_words.rpartition("declared: ")
    return FeatureCell(TONES[row.verdict], f"{declared}declared" if words != row.in_words else "", words)


def _values(rows: Sequence[SupportRow]) -> tuple[FormValues, ...]:
    found: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        value = row.feature.partition("=")[2]
        counted = f" ({row.right} of {row.right + row.short} right)" if row.verdict == "short" else ""
        found.setdefault(row.verdict, []).append((value, f"{value}{counted}"))
    return tuple(
        FormValues(TONES[verdict], WORDS[verdict], tuple(shown for _, shown in sorted(found[verdict], key=_by_size)))
        for verdict in WORDS
        if verdict in found
    )


def _by_size(value: tuple[str, str]) -> tuple[bool, int, str]:
    text = value[0]
    return not text.isdecimal(), int(text) if text.isdecimal() else 0, text
