"""Writes the expectation file under which a given run would not have failed: one entry for each finding."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape

from attncheck.reports.analysis.findings import stated_cause
from attncheck.reports.analysis.phrases import cut, one_line, plural, what_happened
from attncheck.reports.analysis.reasons import without_figures
from attncheck.reports.run_file.records import OURSELVES, Ended, Errored, Failed, Passed, Record, XFailed
from attncheck.reports.run_file.store import Run

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_SHOWN = 100
"""Maximum length of a comment, in characters."""

Fallen = Failed | Errored | Ended | XFailed


@dataclass(frozen=True)
class FindingGroup:
    """Records of one backend and check that failed in the same way; the first one is shown."""

    records: tuple[Fallen, ...]

    @property
    def first(self) -> Fallen:
        """The record whose message is shown."""
        return self.records[0]

    @property
    def outcome(self) -> str:
        """The outcome before expectations were applied."""
        return _outcome(self.first)

    @property
    def cases(self) -> tuple[str, ...]:
        """The ``suite/id`` of every case, without duplicates."""
        return tuple(dict.fromkeys(record.case for record in self.records))


def groups(records: Iterable[Record]) -> tuple[FindingGroup, ...]:
    """Return the failed records, expected or not, grouped by finding regardless of its figures.

    Faults of attncheck itself are left out, since no expectation excuses them.
    """
    found: dict[tuple[str, ...], list[Fallen]] = {}
    for record in records:
        if isinstance(record, Fallen) and not (isinstance(record, Errored) and record.stage == OURSELVES):
            reason = record.reason if isinstance(record, XFailed) else ""
            key = (record.backend, record.check, _outcome(record), _pattern(_words(record)), reason)
            found.setdefault(key, []).append(record)
    return tuple(FindingGroup(tuple(members)) for members in found.values())


def expectations_text(run: Run) -> str:
    """Return a YAML file of expectations that excuses exactly the failures in ``run``.

    The entry of a finding in one case names that case. The entry of a finding in several cases has a pattern on the
    cases and ``says``, a pattern on their common message, so that it does not apply to cases that passed.
    """
    found = groups(run.records)
    ways = Counter((group.first.backend, group.first.check, case) for group in found for case in group.cases)
    ways.update({(record.backend, record.check, record.case) for record in run.records if isinstance(record, Passed)})
    day = run.header.started[:10]
    opening = [f"# Expected failures, from {one_line(run.path)}: {plural(len(found), 'finding')}."]
    if not run.complete:
        opening.append("# The run was cut off: a whole run may find more.")
    # An entry without `says` needs a matching record. An earlier entry with `says` could consume that record.
    placed = sorted(((group, _is_place(group, ways)) for group in found), key=lambda each: not each[1])
    entries = [_entry(group, day, is_place=is_place) for group, is_place in placed]
    return "\n".join([*opening, *(f"\n{entry}" for entry in entries)]) + "\n"


def _is_place(group: FindingGroup, ways: Mapping[tuple[str, str, str], int]) -> bool:
    """Return whether the group is one case with a single result; the rounds of a case may differ."""
    first = group.first
    return len(group.cases) == 1 and ways[first.backend, first.check, first.case] == 1


def _entry(group: FindingGroup, day: str, *, is_place: bool) -> str:
    first, cases = group.first, group.cases
    comments = [f"{plural(len(cases), 'case')}, such as {cases[0]}: {_happened(first)}"]
    if isinstance(first, Failed) and first.meaning:
        comments.append(stated_cause(first))
    fields = {
        "backend": first.backend,
        "case": _case_pattern(cases),
        "check": first.check,
        "outcome": group.outcome,
        **({} if is_place else {"says": _pattern(_words(first))}),
        "reason": first.reason if isinstance(first, XFailed) else f"not explained yet; found by the run of {day}",
    }
    lines = [f"{name}: {json.dumps(_plain(value), ensure_ascii=False)}" for name, value in fields.items()]
    comment_lines = [f"# {cut(one_line(comment), _SHOWN)}" for comment in comments]
    return "\n".join([*comment_lines, f"- {lines[0]}", *(f"  {line}" for line in lines[1:])])


def _case_pattern(cases: Sequence[str]) -> str:
    """Return the shortest form that fits these ``suite/id``: the only one, their common prefix with ``*``, or ``*``."""
    if len(cases) == 1:
        return escape(cases[0])
    if len({case.partition("/")[0] for case in cases}) > 1:
        return "*"
    low, high = min(cases), max(cases)
    alike = (index for index, (one, other) in enumerate(zip(low, high, strict=False)) if one != other)
    return f"{escape(low[: next(alike, len(low))])}*"


def _pattern(words: str) -> str:
    """Return a pattern that matches ``words`` with any figures and addresses."""
    without = without_figures(_ADDRESS.sub("#", escape(words)))
    return re.sub(r"[*#]*#[*#]*", "*", _plain(without))


def _words(record: Fallen) -> str:
    """Return the text that ``says`` is matched against: the likely cause if there is one, else what happened."""
    return (record.meaning if isinstance(record, Failed) else None) or _happened(record)


def _happened(record: Fallen) -> str:
    return record.summary if isinstance(record, XFailed) else what_happened(record)


def _outcome(record: Fallen) -> str:
    return record.underlying if isinstance(record, XFailed) else record.outcome


def _plain(text: str) -> str:
    """Return ``text`` with ``?`` for each character that YAML rejects; in a pattern ``?`` matches any character."""
    return "".join(character if character.isprintable() else "?" for character in text)
