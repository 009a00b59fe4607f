"""Put all questions about one subject to one provider, and count the results."""

import inspect
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Literal

import attncheck.reference
import attncheck.reference.v0
from attncheck.errors import InternalError
from attncheck.harness.providers.answers import (
    AnswerDifference,
    ProviderAnswer,
    answer_of,
    is_bound,
)
from attncheck.harness.providers.departures import Departure
from attncheck.harness.providers.explanation import Explanation, explain_answer
from attncheck.harness.providers.provider import Provider
from attncheck.harness.providers.questions import Generation, Subject, SubjectCall, SubjectSetting
from attncheck.harness.providers.signatures import signature_differences

Word = Literal["equal", "drifted", "judged", "differs"]


class UnfitQuestionError(InternalError):
    """The reference answered a question it should refuse, or refused one it should answer: a bug in attncheck."""


@dataclass(frozen=True)
class Disagreement:
    """A question whose answer no known departure explains, with the differences."""

    question: str
    differences: tuple[AnswerDifference, ...]


@dataclass
class SubjectResult:
    """The result of one subject. ``place``: the module it was found in. ``counts``: questions by result.

    ``shown``: how often each departure showed. ``missed``: how often a departure was predicted but did not show.
    ``bounds``: number of upper bounds. ``first``: the first disagreement, which may come from the comparison of
    parameters; that comparison is not counted as a question.
    """

    place: str
    questions: int = 0
    counts: Counter[Word] = field(default_factory=Counter)
    bounds: int = 0
    shown: Counter[Departure] = field(default_factory=Counter)
    missed: Counter[Departure] = field(default_factory=Counter)
    stale: tuple[Departure, ...] = ()
    first: Disagreement | None = None

    @property
    def verdict(self) -> Word:
        """The most serious result; a judgement outranks a drift."""
        if self.first is not None:
            return "differs"
        kinds = {departure.kind for departure in self.shown}
        if "judgement" in kinds:
            return "judged"
        return "drifted" if "drift" in kinds else "equal"


def reference_targets(subject: Subject) -> list[Any]:
    """Return the reference's own objects of a subject: the subject's, then its helpers."""
    home = attncheck.reference if subject.generation == "v1" else attncheck.reference.v0
    named, *helpers = [getattr(home, name) for name in (subject.name, *subject.helpers)]
    return [subject.ours or named, *helpers]


def examine_subject(provider: Provider, subject: Subject, setting: SubjectSetting) -> SubjectResult | None:
    """Put every question about ``subject`` to the reference and the provider; return None if the provider lacks it.

    Raises:
        UnfitQuestionError: a question does not fit the reference.
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
        _enter(
            examined, "its parameters", _explain_parameters(signature_differences(ours[0], raw, subject.newer), known)
        )
    lacking = subject.newer - _parameters_of(raw)
    for question in subject.questions(setting):
        if not lacking.isdisjoint(question.arguments):
            continue
        explanation = _explain(subject, question, ours, theirs, known)
        examined.questions += 1
        examined.counts[_enter(examined, question.text, explanation)] += 1
    for departure in known:
        if departure.shows is not None and departure.shows(raw):
            examined.shown[departure] += 1
    examined.stale = tuple(each for each in known if examined.missed[each] or not examined.shown[each])
    # Sort by the table, since the order in which departures were seen depends on the questions.
    examined.shown = Counter({each: examined.shown[each] for each in known if examined.shown[each]})
    return examined


def _parameters_of(function: Any) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _explain_parameters(found: Sequence[AnswerDifference], known: tuple[Departure, ...]) -> Explanation:
    """Return which departures explain differences between parameters. Tolerated differences are ignored."""
    shown = tuple(each for each in known if any(map(each.explains_parameter, found)))
    wrong = [each for each in found if not each.tolerated and not any(one.explains_parameter(each) for one in shown)]
    return Explanation(shown, wrong=tuple(wrong))


def _explain(
    subject: Subject, question: SubjectCall, ours: list[Any], theirs: list[Any], known: tuple[Departure, ...]
) -> Explanation:
    """Put one question to the reference, to the reference with known departures, and to the provider."""
    expected = _expected(subject, question, ours)
    seen = _seen(subject, question, theirs)

    def predict(chosen: tuple[Departure, ...]) -> ProviderAnswer:
        changed = reduce(_change, chosen, ours[0])
        return _seen(subject, question, [changed, *ours[1:]])

    return explain_answer(expected, seen, tuple(each for each in known if each.concerns(question)), predict)


def _change(target: Any, departure: Departure) -> Any:
    return target if departure.changes is None else departure.changes(target)


def _expected(subject: Subject, question: SubjectCall, targets: list[Any]) -> ProviderAnswer:
    expected = answer_of(partial(subject.call, *targets), question.copies())
    if expected.refused != question.refused:
        what = f"answered {question.text}, which it should refuse" if question.refused else "refused"
        detail = "" if question.refused else f" {question.text}: {expected.returned}"
        raise UnfitQuestionError(f"{subject.key}: the reference {what}{detail}")
    return expected


def _seen(subject: Subject, question: SubjectCall, targets: list[Any]) -> ProviderAnswer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on malformed input, a provider may divide by zero
        return answer_of(partial(subject.call, *targets), question.copies())


def _enter(examined: SubjectResult, question: str, explanation: Explanation) -> Word:
    """Count the result of one question, and return its name."""
    examined.bounds += sum(is_bound(difference.place) for difference in explanation.tolerated)
    if explanation.wrong:
        if examined.first is None:
            examined.first = Disagreement(question, explanation.wrong)
        return "differs"
    examined.shown.update(explanation.shown)
    examined.missed.update(explanation.missed)
    return "judged" if "judgement" in explanation.kinds else "drifted" if "drift" in explanation.kinds else "equal"
