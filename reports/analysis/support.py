"""What a backend supports by measurement, feature by feature, beside what it declares; sizes and forms likewise.

Told by the answers to the cases that need a feature, or have a form such as ``head_size=64``; what other checks found
(of poison, graphs, claims) is true of a backend whatever the feature. A case needs several: that it fell short is told
in the row of each. Rows only; ``markdown.support`` makes the tables.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import (
    EXAMINED,
    FALLEN_SHORT,
    UTILITIES,
    Ended,
    Failed,
    Passed,
    Record,
    Unsupported,
    XFailed,
    XPassed,
)

REFUSALS = "refusals"
"""The check that tries what is not declared."""

ANSWERS = ("numerics", "lse", "cache_write")
"""The checks that judge an answer."""

LATENT = "mla"
"""The feature whose backends serve layers that need it, and no others."""

REFUSED = "refused at"
ANSWERED = "answered right without declaring it"
"""How the notes of :data:`REFUSALS` begin where an undeclared case was refused, or answered right."""

UNCLEAR = "not declared, and no clear refusal"
"""How its summary begins where such a case raised something else than a refusal."""

_AS_DECLARED = ("right", "short")

SupportVerdict = Literal["right", "short", "unproven", "wrong", "died", "answered", "unclear", "refused", "left"]
"""What a :class:`SupportRow` comes to, in the words of its counts."""


@dataclass(frozen=True)
class SupportRow:
    """Cases of one backend that need one feature, or have one form (``key=value``), by what became of them.

    right, short: examined as declared, and all answers right, or one fell short. ``is_false``: the reason needs the
    feature or form; else the cases in ``short`` say nothing about it. Of the rest, which the declarations
    leave out: refused, unclear (raised, and no clear refusal), died (the process), answered (right all the same), wrong
    (accepted, and wrong); left: never put, or passed against expectation, which does not tell how.
    """

    backend: str
    feature: str
    is_declared: bool
    right: int = 0
    short: int = 0
    refused: int = 0
    unclear: int = 0
    died: int = 0
    answered: int = 0
    wrong: int = 0
    left: int = 0
    is_false: bool = True

    @property
    def is_form(self) -> bool:
        """Whether this is a size or form, and no feature."""
        return _is_form(self.feature)

    @property
    def verdict(self) -> SupportVerdict:
        """The count that matters most: of what was examined as declared, and where nothing was, the gravest.

        ``unproven``: every case falls short, for reasons that need neither this feature nor this form.
        """
        if self.short and self.is_false:
            return "short"
        if self.right or self.short:
            return "right" if self.right else "unproven"
        gravest: tuple[tuple[SupportVerdict, int], ...] = (
            ("wrong", self.wrong),
            ("died", self.died),
            ("answered", self.answered),
            ("unclear", self.unclear),
            ("refused", self.refused),
        )
        return next((verdict for verdict, count in gravest if count), "left")

    @property
    def in_words(self) -> str:
        """``right (12)``, ``wrong in 2 of 12``, ``not declared: refused (4)``; numbers count cases."""
        asked = self.right + self.short
        words = []
        if asked and self.short and self.is_false:
            words.append(f"wrong in {self.short} of {asked}")
        elif asked:
            words += [f"right ({self.right})"] if self.right else []
            words += [f"{self.short} fail for other reasons"] if self.short else []
        words += [
            f"{what} ({count})"
            for what, count in (
                ("refused", self.refused),
                ("refused unclearly", self.unclear),
                ("died", self.died),
                ("right all the same", self.answered),
                ("accepted, and wrong", self.wrong),
            )
            if count
        ]
        told = "; ".join(words) or "not examined"
        return told if asked else f"{'declared' if self.is_declared else 'not declared'}: {told}"


def support_rows(
    records: Sequence[Record], header: RunHeader, false: Mapping[str, Collection[str]] | None = None
) -> tuple[SupportRow, ...]:
    """A row a backend and feature that any case needs; backends in the header's order, features by name.

    ``false``: by backend, the capabilities that a finding concerns; None: every failing case counts against all it
    needs.

    A case outside the declarations says something of what the reasons against it name: one refused for its layout says
    nothing of its head size. One without a latent cache says nothing of a backend that serves no other layers.
    """
    cases = _by_case(records)
    became = {key: _became(members) for key, members in cases.items()}
    declared = {backend.name: set(backend.features) for backend in header.backends}
    for (backend, case), what in became.items():
        if what in _AS_DECLARED:
            declared[backend].update(cases[backend, case][0].needs)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for (backend, case), what in became.items():
        needs = cases[backend, case][0].needs
        if LATENT in declared[backend] and LATENT not in needs:
            continue
        reasons = [reason for r in cases[backend, case] if isinstance(r, Unsupported) for reason in r.reasons]
        named = [feature for feature in needs if any(_is_named(feature, reason) for reason in reasons)]
        outside = named or [feature for feature in needs if feature not in declared[backend]]
        told = needs if what in _AS_DECLARED else outside
        for feature in needs:
            counted = counts.setdefault((backend, feature), Counter())
            counted[what] += feature in told
    order = list(declared)
    return tuple(
        SupportRow(
            backend,
            feature,
            feature in declared[backend],
            **counts[backend, feature],
            is_false=false is None or feature in false.get(backend, ()),
        )
        for backend, feature in sorted(counts, key=lambda key: (order.index(key[0]), key[1]))
    )


def _is_named(feature: str, reason: str) -> bool:
    """Whether a reason is about a feature (``...: feature 'sinks' ...``) or a form (``head_size 72: ...``)."""
    key, is_form, value = feature.partition("=")
    return f"'{key}'" in reason if not is_form else re.match(rf"{re.escape(f'{key} {value}')}\b", reason) is not None


def _is_form(feature: str) -> bool:
    return "=" in feature


def case_counts(records: Iterable[Record]) -> dict[tuple[str, str], str]:
    """Return, by (backend, ``suite/id``), the count of a :class:`SupportRow` that a case belongs to."""
    return {key: _became(members) for key, members in _by_case(records).items()}


def _by_case(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.check != UTILITIES:
            cases.setdefault((record.backend, record.case), []).append(record)
    return cases


def answered_cases(records: Iterable[Record]) -> frozenset[tuple[str, str]]:
    """Return (suite, id) of the cases of one backend that were examined as declared."""
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.check != UTILITIES:
            cases.setdefault((record.suite, record.case_id), []).append(record)
    return frozenset(case for case, members in cases.items() if _became(members) in _AS_DECLARED)


def _became(records: Iterable[Record]) -> str:
    """Which count of a :class:`SupportRow` one case of one backend belongs to."""
    examined = [record for record in records if record.outcome in EXAMINED]
    if not examined:
        return "left"
    if all(record.check == REFUSALS for record in examined):
        (claim,) = examined
        notes = claim.notes if isinstance(claim, Passed) else ()
        if any(note.startswith(REFUSED) for note in notes):
            return "refused"
        if any(note.startswith(ANSWERED) for note in notes):
            return "answered"
        if isinstance(claim, XPassed):
            return "left"  # its record does not tell whether it was refused or answered
        if _is_short(claim):
            return _how_short(claim)
        return "right"
    answers = [record for record in examined if record.check in ANSWERS] or examined
    return "short" if any(map(_is_short, answers)) else "right"


def _how_short(claim: Record) -> str:
    if isinstance(claim, Ended) or (isinstance(claim, XFailed) and claim.underlying in ("crashed", "timed_out")):
        return "died"
    is_unclear = isinstance(claim, Failed | XFailed) and claim.summary.startswith(UNCLEAR)
    return "unclear" if is_unclear else "wrong"


def _is_short(record: Record) -> bool:
    """Whether the backend fell short; what passed against expectation makes the run fail, and is right."""
    return isinstance(record, XFailed) or (record.outcome in FALLEN_SHORT and not isinstance(record, XPassed))
