"""Measured support of each backend, by feature and form, next to its declarations.

Support is measured by the output checks (:data:`ANSWERS`) of the cases that need a feature or have a form such as
``head_size=64``. Other checks (poison, graphs, claims) do not depend on the feature. A case that needs several features
and does not pass counts in the row of each. This module computes rows; ``document.support`` makes tables of them.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
    is_out_of_time,
)

REFUSALS = "refusals"
"""The check that runs cases a backend does not declare."""

ANSWERS = ("numerics", "lse", "cache_write")
"""The checks that compare outputs with the truth."""

LATENT = "mla"
"""The feature of MLA layers; backends that declare it serve only layers that need it."""

REFUSED = "refused at"
ANSWERED = "answered right without declaring it"
"""First words of the notes of :data:`REFUSALS` if an undeclared case was refused, or computed correctly."""

UNCLEAR = "not declared, and no clear refusal"
"""First words of its summary if such a case raised an error that is no refusal."""

_AS_DECLARED = ("right", "short")

SupportVerdict = Literal["right", "short", "unproven", "wrong", "died", "answered", "unclear", "refused", "left"]
"""The verdict of a :class:`SupportRow`, named after its counts."""


@dataclass(frozen=True)
class SupportRow:
    """Cases of one backend that need one feature, or have one form (``key=value``), counted by result.

    Declared cases: right (all outputs right) or short (one did not pass). ``is_false``: the reason for the failure
    needs the feature or form; otherwise the cases in ``short`` prove nothing about it. Undeclared cases: refused,
    unclear (raised without a clear refusal), died (the process), answered (right anyway), wrong (accepted, wrong
    output). left: not run, or passed against expectation, in which case the record does not show how.
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
        """Whether the row is about a form instead of a feature."""
        return "=" in self.feature

    @property
    def value(self) -> str:
        """The value of a form, "" for a feature."""
        return self.feature.partition("=")[2]

    @property
    def verdict(self) -> SupportVerdict:
        """The verdict on the declared cases; if none was examined, the worst result of the others.

        ``unproven``: every case failed, for reasons that need neither this feature nor this form.
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
        """The row in words, counting cases: ``right (12)``, ``wrong in 2 of 12``, ``not declared: refused (4)``."""
        examined = self.right + self.short
        words = []
        if examined and self.short and self.is_false:
            words.append(f"wrong in {self.short} of {examined}")
        elif examined:
            words += [f"right ({self.right})"] if self.right else []
            words += [f"{self.short} fail for other reasons"] if self.short else []
        words += [
            f"{what} ({count})"
            for what, count in (
                ("refused", self.refused),
                ("refused unclearly", self.unclear),
                ("died", self.died),
                ("right all the same", self.answered),
                ("accepted, and the output is wrong", self.wrong),
            )
            if count
        ]
        text = "; ".join(words) or "not examined"
        return text if examined else f"{'declared' if self.is_declared else 'not declared'}: {text}"


@dataclass(frozen=True)
class CountedCase:
    """A case of one backend. ``count``: that of a :class:`SupportRow`. ``reasons``: why it is not declared."""

    count: str
    needs: tuple[str, ...]
    reasons: frozenset[str]

    @property
    def is_declared(self) -> bool:
        """Whether the case was examined as declared."""
        return self.count in _AS_DECLARED


CountedCases = Mapping[tuple[str, str], CountedCase]
"""Cases by backend and ``suite/id``."""


def counted_cases(records: Iterable[Record]) -> CountedCases:
    """Return the cases of ``records``, in their order."""
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if record.check != UTILITIES:
            cases.setdefault((record.backend, record.case), []).append(record)
    return {
        key: CountedCase(
            _became(members),
            _needs(members),
            frozenset(reason for record in members if isinstance(record, Unsupported) for reason in record.reasons),
        )
        for key, members in cases.items()
    }


def _needs(records: Sequence[Record]) -> tuple[str, ...]:
    """Return what a case of one backend needs: ``lse``, too, where the LSE was compared, though no path needs it."""
    has_lse = any(record.check == "lse" and record.outcome in EXAMINED for record in records)
    return tuple(sorted({*records[0].needs, *(["lse"] if has_lse else [])}))


def support_rows(
    cases: CountedCases, features: Mapping[str, Collection[str]], false: Mapping[str, Collection[str]] | None = None
) -> tuple[SupportRow, ...]:
    """Return a row for each backend and feature or form that a case needs; backends in the order of ``features``.

    ``features``: by backend, what it declares. ``false``: by backend, the capabilities that a finding concerns. If
    None, every failing case counts against everything it needs.

    An undeclared case counts only for the needs that its reasons name: a case refused for its layout proves nothing
    about its head size. A case without a latent cache does not count for a backend that serves only latent layers.
    """
    declared = {backend: set(own) for backend, own in features.items()}
    for (backend, _), case in cases.items():
        if case.is_declared:
            declared[backend].update(case.needs)
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for (backend, _), case in cases.items():
        if LATENT in declared[backend] and LATENT not in case.needs:
            continue
        own_needs = concerned(case, declared[backend])
        for feature in case.needs:
            counts[backend, feature][case.count] += feature in own_needs
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


def concerned(case: CountedCase, declared: Collection[str]) -> tuple[str, ...]:
    """Return the needs that the result of a case concerns: all needs of a declared case, else those not declared.

    ``declared``: the features and forms of its backend. If the reasons of an undeclared case name needs, only these.
    """
    if case.is_declared:
        return case.needs
    named = [feature for feature in case.needs if any(_is_named(feature, reason) for reason in case.reasons)]
    return tuple(named or [feature for feature in case.needs if feature not in declared])


def _is_named(feature: str, reason: str) -> bool:
    """Return whether a reason names a feature (``...: feature 'sinks' ...``) or form (``head_size 72: ...``)."""
    key, is_form, value = feature.partition("=")
    return f"'{key}'" in reason if not is_form else re.match(rf"{re.escape(f'{key} {value}')}\b", reason) is not None


def by_size(value: str) -> tuple[bool, int, str]:
    """Return a sort key for values of forms: numbers by size, then texts."""
    is_size = value.isdecimal() and len(value) < 20
    return not is_size, int(value) if is_size else 0, value


def by_form(need: str) -> tuple[bool, str, tuple[bool, int, str]]:
    """Return a sort key for needs: features, then forms by name and value."""
    key, is_form, value = need.partition("=")
    return bool(is_form), key, by_size(value)


def is_not_compared(records: Sequence[Record]) -> bool:
    """Return whether a case lost every check that compares outputs for want of time, and nothing fell short.

    Its other checks prove nothing about its outputs.
    """
    examined = [record for record in records if record.outcome in EXAMINED and not is_out_of_time(record)]
    if not any(map(is_out_of_time, records)) or any(map(_is_short, examined)):
        return False
    return not any(record.check in ANSWERS or _tried(record) for record in examined)


def _tried(record: Record) -> str:
    """Return whether :data:`REFUSALS` found that an undeclared case is ``refused`` or ``answered``, else ""."""
    notes = record.notes if record.check == REFUSALS and isinstance(record, Passed) else ()
    kinds = (("refused", REFUSED), ("answered", ANSWERED))
    return next((kind for kind, words in kinds for note in notes if note.startswith(words)), "")


def _became(records: Sequence[Record]) -> str:
    """Return the count of a :class:`SupportRow` that one case of one backend belongs to."""
    examined = [record for record in records if record.outcome in EXAMINED and not is_out_of_time(record)]
    if not examined or is_not_compared(records):
        return "left"
    if all(record.check == REFUSALS for record in examined):
        (claim,) = examined
        if tried := _tried(claim):
            return tried
        if isinstance(claim, XPassed):
            return "left"  # its record does not state whether it was refused or computed
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
    """Return whether the backend's result is wrong; an unexpected pass fails the run, but its result is right."""
    return isinstance(record, XFailed) or (record.outcome in FALLEN_SHORT and not isinstance(record, XPassed))
