"""Rank the backends of a run by measured suitability for a combination of needs.

A need is a feature (``sinks``) or a form (``block_size=32``), as in a record's ``needs``. Pure functions of records,
findings and times. A script in the HTML page applies the same rules to the same values.
"""

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

from attncheck.errors import SelectionError
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.support import SupportRow, by_size
from attncheck.reports.analysis.verdicts import RunFindings
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import UTILITIES, Record

Standing = Literal["right", "right in each", "wrong", "declared", "not declared", "not tried"]
"""``right``: in cases that need all; ``right in each``: in cases of each need, but no right case needs all."""

STANDINGS: Mapping[Standing, str] = {
    "right": "right in every case that needs all of this",
    "right in each": "right for each alone; never tested together",
    "wrong": "wrong",
    "declared": "declared, not measured",
    "not declared": "not declared",
    "not tried": "not tried: no case shows it",
}
"""Headings, best first."""


@dataclass(frozen=True)
class NeededCase:
    """A case of one backend: its needs, and the count of a :class:`SupportRow` it belongs to.

    ``false``: the needs of the case that are false claims of the backend.
    """

    backend: str
    case: str
    needs: frozenset[str]
    count: str
    false: frozenset[str]

    def counts_for(self, needs: Collection[str]) -> bool:
        """Return whether the case needs all of ``needs``, and no false claim beyond ``needs`` explains its failure."""
        return self.needs.issuperset(needs) and not (self.count == "short" and self.false.difference(needs))


@dataclass(frozen=True)
class NeedAnswer:
    """The result for one need of one backend alone; ``words``: counts of cases, as in the support table."""

    standing: Literal["right", "wrong", "declared", "not declared", "not tried"]
    words: str


@dataclass(frozen=True)
class Suitability:
    """The result for one backend and all needs together.

    right, wrong: numbers of cases that need all. ``why``: an explanation. ``findings``: those of the cases concerned.
    ``median_ns``: geometric mean of the times of ``forward`` over ``timed`` cases. These cases need all, and were timed
    for every right backend that has times.
    """

    backend: str
    standing: Standing
    right: int = 0
    wrong: int = 0
    why: str = ""
    findings: tuple[Finding, ...] = ()
    median_ns: float | None = None
    timed: int = 0


def known_needs(records: Sequence[Record], header: RunHeader) -> tuple[str, ...]:
    """Return every need of a case and every declared feature of the run, features first, forms by numeric value."""
    needs = {need for record in records if record.check != UTILITIES for need in record.needs}
    needs.update(feature for backend in header.backends for feature in backend.features)
    return tuple(sorted(needs, key=_order))


def checked_needs(text: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the distinct needs in a text such as ``sinks,fp8_kv,block_size=32``.

    Raises:
        SelectionError: no case needs one of them and no backend declares it.
    """
    needs = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for need in needs:
        if need not in known:
            key = f"{need.partition('=')[0]}="
            values = [each for each in known if each.startswith(key)]
            near = get_close_matches(need, known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else "run cases that need it, or give another need"
            theirs = ", ".join(values or known) or "none"
            raise SelectionError(f"no case of these runs needs {need!r}; {advice} (known: {theirs})")
    return needs


def needed_cases(found: RunFindings) -> tuple[NeededCase, ...]:
    """Return every case of every backend, in the order of the records."""
    false = {each.backend: {claim.capability for claim in each.false_claims} for each in found.verdicts}
    return tuple(
        NeededCase(backend, name, needs := frozenset(case.needs), case.count, needs & false.get(backend, set()))
        for (backend, name), case in found.cases.items()
    )


def need_answers(
    needs: Collection[str], found: RunFindings, cases: Sequence[NeededCase], header: RunHeader
) -> dict[tuple[str, str], NeedAnswer]:
    """Return, by (backend, need), the result for each need alone."""
    rows = {(row.backend, row.feature): row for row in found.support}
    features = {backend.name: backend.features for backend in header.backends}
    examined = {case.backend for case in cases if case.count != "left"}
    return {
        (each.backend, need): _need_answer(
            need, rows.get((each.backend, need)), features.get(each.backend, ()), each.backend in examined
        )
        for each in found.verdicts
        for need in needs
    }


def recommend(
    needs: Sequence[str],
    found: RunFindings,
    cases: Sequence[NeededCase],
    answers: Mapping[tuple[str, str], NeedAnswer],
    times: Mapping[tuple[str, str], float],
) -> tuple[Suitability, ...]:
    """Return the backends of a run, the most suitable first; right backends are ordered by time, untimed ones last.

    ``times``: the median of ``forward`` in nanoseconds by (backend, ``suite/id``). ``answers``: the results for each
    need alone.
    """
    own = {each.backend: [case for case in cases if case.backend == each.backend] for each in found.verdicts}
    judged = [_suitability(name, needs, found, own[name], answers) for name in own]
    matching = {
        each.backend: {case.case for case in own[each.backend] if case.count == "right" and case.counts_for(needs)}
        for each in judged
        if each.standing == "right"
    }
    timed = {name: {case for case in members if (name, case) in times} for name, members in matching.items()}
    shared = sorted(set.intersection(*known)) if (known := [each for each in timed.values() if each]) else []
    if shared:
        judged = [
            replace(
                each,
                median_ns=statistics.geometric_mean(times[each.backend, case] for case in shared),
                timed=len(shared),
            )
            if timed.get(each.backend)
            else each
            for each in judged
        ]
    order = list(STANDINGS)
    return tuple(
        sorted(
            judged,
            key=lambda each: (order.index(each.standing), each.median_ns is None, each.median_ns or 0.0, -each.right),
        )
    )


def _suitability(
    backend: str,
    needs: Sequence[str],
    found: RunFindings,
    own: Sequence[NeededCase],
    answers: Mapping[tuple[str, str], NeedAnswer],
) -> Suitability:
    counted = [case for case in own if case.counts_for(needs)]
    right = [case for case in counted if case.count == "right"]
    wrong = {case.case for case in counted if case.count == "short"}
    beyond = {name for case in own if case.needs.issuperset(needs) and case not in counted for name in case.false}
    each = {need: answers[backend, need] for need in needs}
    standing = _standing(len(right), len(wrong), [answer.standing for answer in each.values()])
    if standing == "wrong" and not wrong:
        false = {need for need, answer in each.items() if answer.standing == "wrong"}
        wrong = {case.case for case in own if case.count == "short" and case.needs & false}
        why = [f"{need}: {each[need].words}" for need in needs if need in false]
    elif standing in ("right", "wrong"):
        why = [f"wrong in {len(wrong)} of {len(right) + len(wrong)}"] if wrong else []
        why += [f"fails only with {', '.join(sorted(beyond - set(needs)))}"] if beyond and not wrong else []
    elif standing == "right in each":
        why = [f"{need}: {answer.words}" for need, answer in each.items()]
        others = Counter(case.count for case in counted)
        why += (
            [f"cases that need all of this: {', '.join(f'{n} {what}' for what, n in others.items())}"] if others else []
        )
    else:
        why = [f"{need}: {answer.words}" for need, answer in each.items() if answer.standing == standing]
    concerned = wrong or {case.case for case in counted}
    return Suitability(
        backend,
        standing,
        len(right),
        len(wrong),
        "; ".join(why),
        tuple(f for f in found.findings if f.backend == backend and concerned.intersection(f.cases)),
    )


def _standing(right: int, wrong: int, alone: Sequence[str]) -> Standing:
    if wrong or (not right and "wrong" in alone):
        return "wrong"
    if right:
        return "right"
    order: tuple[Standing, ...] = ("not declared", "not tried", "declared")
    return next((standing for standing in order if standing in alone), "right in each")


def _need_answer(need: str, row: SupportRow | None, features: Collection[str], is_examined: bool) -> NeedAnswer:
    if row is None or not is_examined:
        words = "no case" if is_examined else "not examined"
        if "=" in need:
            return NeedAnswer("not tried", words)  # the header lists declared features only, no forms
        return NeedAnswer("declared" if need in features else "not declared", words)
    if row.verdict in ("right", "short"):
        return NeedAnswer("right" if row.verdict == "right" else "wrong", row.in_words)
    return NeedAnswer("declared" if row.is_declared else "not declared", row.in_words.rpartition("declared: ")[2])


def _order(need: str) -> tuple[bool, str, tuple[bool, int, str]]:
    key, is_form, value = need.partition("=")
    return bool(is_form), key, by_size(value)
