"""Examine a provider: the plan, the answers to each subject, and their records."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial, reduce
from hashlib import sha256
from itertools import takewhile
from time import perf_counter
from typing import Any, Literal

import torch

import attncheck.reference
import attncheck.reference.v0
from attncheck.cases.loader import select
from attncheck.cases.model import Case
from attncheck.errors import InternalError, SelectionError
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.driver.observation import Raised, capture_exception
from attncheck.harness.providers import subjects_batch, subjects_other, subjects_v0
from attncheck.harness.providers.batches import ALWAYS, batches_of, drawn_batches
from attncheck.harness.providers.causes import WrongAnswer, likely_cause
from attncheck.harness.providers.provider import (
    AnswerDifference,
    Departure,
    Explanation,
    Provider,
    ProviderAnswer,
    Subject,
    SubjectCall,
    SubjectSetting,
    answer_of,
    call_directly,
    explain_answer,
    is_bound,
    load_provider,
    parameters_of,
    signature_differences,
)
from attncheck.harness.run.outcomes import OURSELVES, BackendDescription, Circumstances, record_of
from attncheck.harness.run.selection import select_cases
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import UTILITIES, Passed, Record, XPassed, without_outcome

SUBJECTS: tuple[Subject, ...] = (
    *subjects_other.CONTRACT,
    *subjects_batch.UBATCHES,
    *subjects_batch.ORDER,
    *subjects_batch.PATHS,
    *subjects_other.KERNELS,
    *subjects_other.LAYOUT,
    *subjects_other.LAYERS,
    *subjects_v0.V0_SEQUENCES,
    *subjects_v0.V0_STEPS,
)
"""The questions for each function of the reference, in the order of reports."""

# The functions of a run, as records and reports name them: they are to a provider what cases are to a backend.


@dataclass(frozen=True)
class Function:
    """A function of a provider. Its hash covers only the name, since its questions come from many sources."""

    id: str
    suite: str = UTILITIES

    @property
    def hash(self) -> str:
        """12 hex digits."""
        return sha256(self.id.encode()).hexdigest()[:12]


def functions_of(patterns: Sequence[str] = ()) -> tuple[Function, ...]:
    """Return the functions that match one of ``patterns``, or all if there are none."""
    keys = [subject.key for subject in SUBJECTS]
    return tuple(Function(key) for key in keys if not patterns or any(fnmatchcase(key, each) for each in patterns))


def split_patterns(patterns: Sequence[str], suites: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return those of ``patterns`` that match a function, and the others, which are for cases of ``suites``.

    Raises:
        QuestionError: a pattern matches no case, and is almost the name of a function; or a suite cannot be read.
    """
    functions = tuple(pattern for pattern in patterns if functions_of([pattern]))
    others = tuple(pattern for pattern in patterns if pattern not in functions)
    for pattern in others:
        near = get_close_matches(pattern, [subject.key for subject in SUBJECTS], n=1)
        if near and not select(select_cases(suites).cases, [pattern]):
            raise SelectionError(f"no function matches {pattern!r}; did you mean {near[0]!r}?")
    return functions, others


def header_with_providers(
    header: RunHeader, providers: Sequence[BackendInfo], functions: Sequence[Function], notes: Sequence[str]
) -> RunHeader:
    """Return the header of a run that also examines ``providers``, or only these if it has no backends.

    Raises:
        SelectionError: a provider and a backend have the same name, or a suite has the name of the functions' suite.
    """
    for taken in header.backends:
        if taken.name in {provider.name for provider in providers}:
            raise SelectionError(f"a backend and a provider are both called {taken.name!r}; examine them in two runs")
    if any(suite.name == UTILITIES for suite in header.suites):
        raise SelectionError(
            f"a suite may not be called {UTILITIES!r} where providers are examined: their functions are"
        )
    examined = tuple(each.name for each in header.backends)
    # Backends alone examine the cases: without any, no case is due.
    changes = {"backends": examined} if examined else {"checks": ()}
    cases = (each if each.backends else each.model_copy(update=changes) for each in header.cases)
    suite = SuiteInfo(name=UTILITIES, ref=UTILITIES, cases=len(functions))
    return header.model_copy(
        update={
            "suites": (*header.suites, suite),
            "cases": tuple(cases),
            "checks": (*(header.checks if header.backends else ()), UTILITIES),
            "backends": (*header.backends, *providers),
            "notes": (*header.notes, *notes),
        }
    )


# Put all questions about one subject to one provider, and count the results.

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
    """The result of one subject. ``counts``: questions by result.

    ``shown``: how often each departure showed. ``missed``: how often a departure was predicted but did not show.
    ``bounds``: number of upper bounds. ``first``: the first disagreement, which may come from the comparison of
    parameters; that comparison is not counted as a question. ``cause``: the likely cause of the wrong answers.
    """

    questions: int = 0
    counts: Counter[Word] = field(default_factory=Counter)
    bounds: int = 0
    shown: Counter[Departure] = field(default_factory=Counter)
    missed: Counter[Departure] = field(default_factory=Counter)
    stale: tuple[Departure, ...] = ()
    first: Disagreement | None = None
    cause: str | None = None


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
    raw, *helpers = [provider.find(name, subject.generation) for name in (subject.name, *subject.helpers)]
    if raw is None or None in helpers:
        return None
    ours = reference_targets(subject)
    theirs = [provider.adapted(subject.key, raw), *helpers]
    known = provider.departures.known.get(subject.key, ())
    examined = SubjectResult()
    if subject.is_function:
        _enter(
            examined, "its parameters", _explain_parameters(signature_differences(ours[0], raw, subject.newer), known)
        )
    places = _places(provider, subject, ours[0], raw)
    lacking = subject.newer - set(parameters_of(raw) or ())
    wrong: list[WrongAnswer] = []
    earlier: Any = None
    for number, named in enumerate(subject.questions(setting)):
        if not lacking.isdisjoint(named.arguments):
            continue
        question, called = named, theirs
        if places and number % 2:
            question = replace(named, text=f"{named.text}, by position")
            called = [partial(_call_by_position, theirs[0], places), *helpers]
        expected = _expected(subject, question, ours)
        seen = _seen(subject, question, called, earlier)
        earlier = earlier if seen.result is None else seen.result
        explanation = _explain(subject, question, expected, seen, ours, known)
        examined.questions += 1
        examined.counts[_enter(examined, question.text, explanation)] += 1
        if explanation.wrong:
            wrong.append(WrongAnswer(question, expected, seen, explanation.wrong))
    if wrong:
        examined.cause = likely_cause(wrong, ours[0], lambda question: _seen(subject, question, ours))
    for departure in known:
        if departure.shows is not None and departure.shows(raw):
            examined.shown[departure] += 1
    examined.stale = tuple(each for each in known if examined.missed[each] or not examined.shown[each])
    # Sort by the table, since the order in which departures were seen depends on the questions.
    examined.shown = Counter({each: examined.shown[each] for each in known if examined.shown[each]})
    return examined


def _places(provider: Provider, subject: Subject, ours: Any, raw: Any) -> tuple[str, ...]:
    """Return the parameters to pass by position; none if the object states others, or gets other arguments."""
    names = tuple(parameters_of(ours) or ())
    is_plain = subject.is_function and subject.call is call_directly and subject.key not in provider.adapters
    return names if is_plain and names == tuple(parameters_of(raw) or ()) else ()


def _call_by_position(target: Any, names: Sequence[str], **arguments: Any) -> Any:
    leading = list(takewhile(arguments.__contains__, names))
    values = [arguments.pop(name) for name in leading]
    return target(*values, **arguments)


def _explain_parameters(found: Sequence[AnswerDifference], known: tuple[Departure, ...]) -> Explanation:
    """Return which departures explain differences between parameters. Tolerated differences are ignored."""
    shown = tuple(each for each in known if any(map(each.explains_parameter, found)))
    wrong = [each for each in found if not each.tolerated and not any(one.explains_parameter(each) for one in shown)]
    return Explanation(shown, wrong=tuple(wrong))


def _explain(
    subject: Subject,
    question: SubjectCall,
    expected: ProviderAnswer,
    seen: ProviderAnswer,
    ours: list[Any],
    known: tuple[Departure, ...],
) -> Explanation:
    """Return the departures that explain the provider's answer ``seen``, from the reference with some of them."""

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


def _seen(subject: Subject, question: SubjectCall, targets: list[Any], earlier: Any = None) -> ProviderAnswer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on malformed input, a provider may divide by zero
        return answer_of(partial(subject.call, *targets), question.copies(), earlier)


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


# The providers of a run, in the process that imports them.

SHOWN_DIFFERENCES = 5


class Providers:
    """The imported providers of a run, and the batches with which their functions are examined.

    ``infos``: the providers as the header lists them. ``notes``: where the batches come from, and departures that were
    found in another version.

    Raises:
        QuestionError: a provider cannot be imported, or two have the same name.
    """

    def __init__(self, refs: Sequence[str], cases: Iterable[Case], device: str, circumstances: Circumstances) -> None:
        self._circumstances = circumstances
        providers = [load_provider(ref) for ref in dict.fromkeys(refs)]
        self._providers = {provider.name: provider for provider in providers}
        for name, count in Counter(provider.name for provider in providers).items():
            if count > 1:
                raise SelectionError(f"two of the providers are called {name!r}; examine them in two runs")
        written, drawn = batches_of(cases), drawn_batches(circumstances.seed)
        self._setting = SubjectSetting((*ALWAYS, *written, *drawn), torch.device(device))
        sources = f"{len(ALWAYS)} always used, {len(written)} of the suites, {len(drawn)} drawn"
        self.infos = tuple(provider.info for provider in providers)
        self.notes = (
            f"utilities are called with {len(self._setting.batches)} batches: {sources}",
            *(note for provider in providers for note in _age(provider)),
        )

    def examine(self, provider: BackendInfo, function: Function) -> Record:
        """Return the record of one function of the provider."""
        subject = next(subject for subject in SUBJECTS if subject.key == function.id)
        return record_subject(self._providers[provider.name], subject, self._setting, self._circumstances)


def _age(provider: Provider) -> list[str]:
    """Return a note if the table of departures was made from another version of the provider."""
    made_from = provider.departures.version
    if not made_from or made_from == provider.version:
        return []
    known = plural(sum(map(len, provider.departures.known.values())), "known departure")
    return [f"the {known} of {provider.name} were found in {made_from}, and this is {provider.version}"]


def record_subject(
    provider: Provider, subject: Subject, setting: SubjectSetting, circumstances: Circumstances
) -> Record:
    """Return the record of one subject of one provider."""
    began = perf_counter()
    examined: SubjectResult | None = None
    finding: Finding | Raised
    try:
        examined = examine_subject(provider, subject, setting)
        finding = _finding(provider, subject, examined)
    except Exception as error:  # noqa: BLE001 (ours: only this function's result is lost, and reported as an error)
        finding = capture_exception(OURSELVES, error)
    took = perf_counter() - began
    described = BackendDescription(info=provider.info)
    record = record_of(circumstances, Function(subject.key), described, UTILITIES, finding, took)
    if examined is not None and isinstance(record, Passed) and _is_stale(provider, examined):
        departures = "; ".join(departure.what for departure in examined.stale)
        reason = f"known in {provider.departures.version}, and no longer there: {departures}"
        return XPassed(**without_outcome(record), reason=reason)
    return record


def _is_stale(provider: Provider, examined: SubjectResult) -> bool:
    """Return whether a departure is stale in the very version that the table was made from.

    For other versions, a note states it.
    """
    return bool(examined.stale) and provider.version == provider.departures.version


def _finding(provider: Provider, subject: Subject, examined: SubjectResult | None) -> Finding:
    if examined is None:
        why = provider.departures.why_gone(subject.key)
        return NotExamined((f"offers nothing of that name{f': {why}' if why else ''}",))
    figures = {
        "questions": examined.questions,
        **{word: examined.counts[word] for word in ("equal", "drifted", "judged", "differs")},
        "upper_bounds": examined.bounds,
        "drifts": sum(departure.kind == "drift" for departure in examined.shown),
        "judgements": sum(departure.kind == "judgement" for departure in examined.shown),
    }
    if examined.first is None:
        return Holds(figures, _notes(provider, examined))
    first = examined.first
    wrong = examined.counts["differs"]
    count = (
        f"{wrong} of {plural(examined.questions, 'question')} have another answer than the reference, the first is "
        if wrong
        else ""
    )
    return Broken(
        f"{count}{first.question}: {first.differences[0]}",
        figures,
        meaning=examined.cause,
        details=tuple(map(str, first.differences[1:SHOWN_DIFFERENCES])),
    )


def _notes(provider: Provider, examined: SubjectResult) -> tuple[str, ...]:
    """Return a note for every departure that showed, with how often, for upper bounds, and for stale departures."""
    notes = [
        f"{departure.kind}: {departure.what}{_how_often(departure, count, examined)}"
        for departure, count in examined.shown.items()
    ]
    if examined.bounds and not any("upper bound" in note for note in notes):
        notes.append(f"upper bound: {plural(examined.bounds, 'maximum')} above the truth, which is no wrong answer")
    notes += [
        f"stale: known in {provider.departures.version}, and no longer there: {departure.what}"
        for departure in examined.stale
    ]
    return tuple(notes)


def _how_often(departure: Departure, count: int, examined: SubjectResult) -> str:
    if departure.changes is None:
        return ""
    return f" ({count} of {plural(examined.questions, 'question')})"
