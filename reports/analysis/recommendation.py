"""Which backends of a device were measured as right for a combination of needs, over any number of runs.

A need is a feature (``sinks``), a form (``block_size=32``), or a CUDA-graph level (``cudagraph=ALWAYS``). The site's
script applies the same :data:`RULES` to the needs that a reader selects.
"""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from attncheck.errors import SelectionError
from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.measured import LEVEL, WRONG, MeasuredFinding, Pace, Subject, paces
from attncheck.reports.analysis.support import SupportRow, SupportVerdict, by_form

Standing = Literal["wrong", "right", "right in each", "not declared", "refused", "not reached", "not examined"]
"""``right``: in cases that need all; ``right in each``: in cases of each need, but no examined case needs all."""

STANDINGS: Mapping[Standing, str] = {
    "wrong": "accepts it and returns wrong output",
    "right": "right in every case that needs all of this",
    "right in each": "right for each alone; never tested together",
    "not declared": "not declared, right all the same",
    "refused": "refused",
    "not reached": "not reached: the run ended before",
    "not examined": "not examined: no case shows it",
}
"""Headings, in the order of all answers: what returns wrong output must be seen first."""

ORDER: tuple[Standing, ...] = get_args(Standing)

STANDING_OF: Mapping[str, Standing] = {
    "short": "wrong",
    "wrong": "wrong",
    "died": "wrong",
    "right": "right",
    "answered": "not declared",
    "refused": "refused",
    "unclear": "refused",
    "unproven": "not examined",
    "left": "not examined",
}
"""The standing of a case by its count, and of a need by the verdict of its :class:`SupportRow`."""


RULES: tuple[tuple[Literal["together", "alone"], Standing], ...] = (
    ("together", "wrong"),
    ("together", "right"),
    ("together", "refused"),
    ("alone", "refused"),
    ("alone", "wrong"),
    ("together", "not declared"),
    ("alone", "not declared"),
    ("alone", "not reached"),
    ("alone", "not examined"),
)
"""The standing of a combination is the first that a case with all needs, or a need alone, has. The site uses it too."""


@dataclass(frozen=True)
class NeedAnswer:
    """The result for one need of one backend alone; ``words``: counts of cases, as in the support table.

    ``verdict``: that of its row of support; ``declared`` and ``unreached`` if it has none, or none that is examined.
    ``count``: the cases with this verdict, ``12``, or ``2/12`` if some of the declared ones are wrong.
    """

    standing: Standing
    verdict: SupportVerdict | Literal["declared", "unreached"]
    words: str
    count: str = ""


@dataclass(frozen=True)
class Suitability:
    """The result for one backend and all needs together.

    right, wrong: numbers of cases that need all. ``why``: an explanation. ``findings``: those of the cases concerned.
    ``median_ns``: geometric mean of the times of ``forward`` over ``timed`` right cases that need all. ``pace``: the
    same as a multiple of the fastest in each case, None if no other backend was timed there.
    """

    subject: Subject
    standing: Standing
    right: int
    wrong: int
    why: str
    findings: tuple[MeasuredFinding, ...]
    median_ns: float | None
    timed: int
    pace: Pace | None


def known_needs(subjects: Iterable[Subject]) -> tuple[str, ...]:
    """Return every need of a case and every declared feature, features first, forms by numeric value."""
    needs = {need for subject in subjects for need in (*subject.support, *subject.not_reached, *subject.features)}
    return tuple(sorted(needs, key=by_form))


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


def need_answer(subject: Subject, need: str) -> NeedAnswer:
    """Return the result for one need alone."""
    row = subject.support.get(need)
    unreached = subject.not_reached[need]
    count = f" ({unreached})" if unreached else ""
    if row is not None and row.verdict != "left":
        is_below = need.startswith(f"{LEVEL}=") and row.verdict == "refused"
        words = f"not declared: a lower level is measured ({row.refused})" if is_below else row.in_words
        words += f"; not reached{count}" if unreached else ""
        return NeedAnswer(STANDING_OF[row.verdict], row.verdict, words, _count(row))
    if unreached or (row is None and subject.is_stopped):
        return NeedAnswer("not reached", "unreached", f"not reached{count}: the run ended before", str(unreached or ""))
    if row is not None:
        return NeedAnswer("not examined", "left", row.in_words)
    if need in subject.features:
        return NeedAnswer("not examined", "declared", "declared: no case")
    return NeedAnswer("not examined", "left", "no case")


def _count(row: SupportRow) -> str:
    declared = row.right + row.short
    if row.verdict == "short":
        return f"{row.short}/{declared}"
    return str(declared or row.wrong or row.died or row.answered or row.unclear or row.refused)


def recommend(needs: Sequence[str], members: Sequence[Subject]) -> tuple[Suitability, ...]:
    """Return the backends of one device by standing; right backends are ordered by time, untimed ones last."""
    relative = paces(members)
    judged = [_suitability(subject, needs, relative) for subject in members]

    def key(each: Suitability) -> tuple[int, bool, float, int]:
        pace = each.pace.ratio if each.pace else 0.0
        return ORDER.index(each.standing), each.pace is None, pace, -each.right

    return tuple(sorted(judged, key=key))


def _suitability(subject: Subject, needs: Sequence[str], relative: Mapping[tuple[str, str], Pace]) -> Suitability:
    counted = {name: case for name, case in subject.cases.items() if case.counts_for(needs)}
    right = [name for name, case in counted.items() if case.counted.count == "right"]
    wrong = [name for name, case in counted.items() if case.counted.count in WRONG]
    alone = {need: need_answer(subject, need) for need in needs}
    together = {STANDING_OF[case.counted.count] for case in counted.values()}
    standing = standing_of(together, {answer.standing for answer in alone.values()})
    decisive = {need: answer for need, answer in alone.items() if standing in ("right in each", answer.standing)}
    concerned = set(wrong or counted)
    if standing == "wrong" and not wrong:
        failing = {name: case for name, case in subject.cases.items() if case.counted.count in WRONG}
        concerned = {name for name, case in failing.items() if case.blamed.intersection(decisive)}
    times = [time.median for name in right if (time := counted[name].time) is not None]
    timed = [relative[subject.name, name] for name in right if (subject.name, name) in relative]
    return Suitability(
        subject=subject,
        standing=standing,
        right=len(right),
        wrong=len(wrong),
        why="; ".join(_why(subject, standing, (len(right), len(wrong)), alone, decisive)),
        findings=tuple(finding for finding in subject.faults if concerned.intersection(finding.cases)),
        median_ns=statistics.geometric_mean(times) if times else None,
        timed=len(times),
        pace=_mean(timed) if timed else None,
    )


def _why(
    subject: Subject,
    standing: Standing,
    counts: tuple[int, int],
    needs: Collection[str],
    decisive: Mapping[str, NeedAnswer],
) -> list[str]:
    """Return what explains a standing. ``counts``: right and wrong cases. ``decisive``: answers that caused it."""
    right, wrong = counts
    if wrong:
        return [f"wrong in {wrong} of {right + wrong}"]
    if standing == "right":
        failing = [case for case in subject.cases.values() if case.counted.count == "short"]
        with_all = [case for case in failing if set(needs).issubset(case.needs)]
        beyond = {claim for case in with_all for claim in case.blamed.difference(needs)}
        return [f"fails only with {', '.join(sorted(beyond))}"] if beyond else []
    return [f"{need}: {answer.words}" for need, answer in decisive.items()]


def standing_of(together: Collection[Standing], alone: Collection[Standing]) -> Standing:
    """Return the standing for a combination of needs: that of the first of :data:`RULES` that applies.

    ``together``: the standings of the cases that need all. ``alone``: the standings of each need.
    """
    found = {"together": together, "alone": alone}
    return next((standing for which, standing in RULES if standing in found[which]), "right in each")


def _mean(found: Sequence[Pace]) -> Pace:
    """Return the geometric mean; without an interval if one of them has none."""
    ratio = statistics.geometric_mean(pace.ratio for pace in found)
    low = [pace.low for pace in found if pace.low is not None]
    high = [pace.high for pace in found if pace.high is not None]
    if len(low) < len(found):
        return Pace(ratio, None, None)
    return Pace(ratio, statistics.geometric_mean(low), statistics.geometric_mean(high))


def pace_words(pace: Pace) -> str:
    """Return ``the fastest``, or ``53 times the fastest``, with its interval, or with why there is none."""
    words = "the fastest" if pace.ratio < 1.0005 else f"{phrases.budgets(pace.ratio)} times the fastest"
    if pace.low is None or pace.high is None:
        return f"{words}; fewer than 3 processes: no interval"
    return f"{words} ({phrases.budgets(pace.low)} to {phrases.budgets(pace.high)})"
