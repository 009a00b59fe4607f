"""Asks one provider all questions about one subject, and counts what comes of it."""

import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import attncheck.reference
import attncheck.reference.v0
from attncheck.errors import InternalError
from attncheck.harness.providers.answers import (
    AnswerDifference,
    ProviderAnswer,
    answer_differences,
    answer_of,
    is_bound,
)
from attncheck.harness.providers.departures import Departure
from attncheck.harness.providers.provider import Provider
from attncheck.harness.providers.questions import Generation, Subject, SubjectCall, SubjectSetting
from attncheck.harness.providers.signatures import signature_differences

Word = Literal["equal", "drifted", "judged", "differs"]


class UnfitQuestionError(InternalError):
    """The reference answered a question it should refuse, or refused one it should answer: a fault of attncheck."""


@dataclass(frozen=True)
class Disagreement:
    """One question that no known departure explains: where the answers differ."""

    question: str
    differences: tuple[AnswerDifference, ...]


@dataclass
class SubjectResult:
    """What came of one subject. ``place``: the module it was found in; ``shown``: how often each departure showed.

    Questions are counted by how they were answered. The comparison of parameters is no question; ``first`` may be it.
    """

    place: str
    questions: int = 0
    counts: Counter[Word] = field(default_factory=Counter)
    bounds: int = 0
    shown: Counter[Departure] = field(default_factory=Counter)
    stale: tuple[Departure, ...] = ()
    first: Disagreement | None = None

    @property
    def verdict(self) -> Word:
        """The most serious of what was seen; a judgement weighs more than a drift."""
        if self.first is not None:
            return "differs"
        kinds = {departure.kind for departure in self.shown}
        if "judgement" in kinds:
            return "judged"
        return "drifted" if "drift" in kinds else "equal"


def reference_targets(subject: Subject) -> list[Any]:
    """The reference's own objects of a subject: its name, then its helpers'."""
    home = attncheck.reference if subject.generation == "v1" else attncheck.reference.v0
    return [getattr(home, name) for name in (subject.name, *subject.helpers)]


def examine_subject(provider: Provider, subject: Subject, setting: SubjectSetting) -> SubjectResult | None:
    """Every question about ``subject``, put to the reference and the provider; None where the provider lacks it.

    Raises:
        UnfitQuestionError: a question that does not fit the reference.
    """
    generation: Generation = subject.generation
    offered = [provider.find(name, generation) for name in (subject.name, *subject.helpers)]
    found = [each for each in offered if each is not None]
    if len(found) < len(offered):
        return None
    raw = found[0].target
    ours = reference_targets(subject)
    theirs = [provider.adapted(subject.key, raw), *(each.target for each in found[1:])]
    known = provider.departures.of(subject.key)
    examined = SubjectResult(found[0].place)
    if subject.is_function:
        _judge(examined, None, signature_differences(ours[0], raw), known)
    for question in subject.questions(setting):
        expected = _expected(subject, question, ours)
        seen = _seen(subject, question, theirs)
        examined.questions += 1
        examined.counts[_judge(examined, question, answer_differences(expected, seen), known)] += 1
    for departure in known:
        if departure.shows is not None and departure.shows(raw):
            examined.shown[departure] += 1
    examined.stale = tuple(departure for departure in known if not examined.shown[departure])
    # In the order of the table: which departure of a question is seen first is a matter of chance.
    examined.shown = Counter({each: examined.shown[each] for each in known if examined.shown[each]})
    return examined


def _expected(subject: Subject, question: SubjectCall, targets: list[Any]) -> ProviderAnswer:
    expected = answer_of(partial(subject.ask, *targets), question.copies())
    if expected.refused != question.refused:
        what = f"answered {question.text}, which it should refuse" if question.refused else "refused"
        told = "" if question.refused else f" {question.text}: {expected.returned}"
        raise UnfitQuestionError(f"{subject.key}: the reference {what}{told}")
    return expected


def _seen(subject: Subject, question: SubjectCall, targets: list[Any]) -> ProviderAnswer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a provider computes from malformed input may divide by zero
        return answer_of(partial(subject.ask, *targets), question.copies())


def _judge(
    examined: SubjectResult,
    question: SubjectCall | None,
    found: Iterable[AnswerDifference],
    known: tuple[Departure, ...],
) -> Word:
    """Enters the differences of one question, and says how it was answered."""
    showing: set[Departure] = set()
    kinds: set[str] = set()
    unexplained = []
    for difference in found:
        explanation = next((each for each in known if each.explains(question, difference)), None)
        if explanation is not None:
            showing.add(explanation)
            kinds |= set() if difference.tolerated else {explanation.kind}
        elif not difference.tolerated:
            unexplained.append(difference)
        else:
            examined.bounds += is_bound(difference.place)
    examined.shown.update(showing)
    if unexplained:
        if examined.first is None:
            examined.first = Disagreement("its parameters" if question is None else question.text, tuple(unexplained))
        return "differs"
    return "judged" if "judgement" in kinds else "drifted" if "drift" in kinds else "equal"
