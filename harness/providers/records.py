"""Turn the result of a subject into a record, and add providers to the header of a run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter

from attncheck.errors import SelectionError
from attncheck.harness.checks.findings import Broken, Finding, Holds, NotExamined
from attncheck.harness.driver.observation import capture_exception
from attncheck.harness.providers.departures import Departure
from attncheck.harness.providers.examination import SubjectResult, examine_subject
from attncheck.harness.providers.plan import ProviderPlan
from attncheck.harness.providers.provider import Provider
from attncheck.harness.providers.questions import Subject
from attncheck.harness.providers.subjects import SUBJECTS
from attncheck.harness.run.outcomes import OURSELVES, Circumstances, record_of
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import UTILITIES, Passed, Record, XPassed, without_outcome

SHOWN_DIFFERENCES = 5


@dataclass(frozen=True)
class SubjectIdentity:
    """A subject as records name it. Its hash covers only the name, since its questions come from many sources."""

    id: str
    suite: str = UTILITIES

    @property
    def hash(self) -> str:
        """12 hex digits."""
        return sha256(self.id.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class PlannedProviders:
    """A plan as plain data. ``subjects``: keys of the examined ones, out of all that are ``known``."""

    infos: tuple[BackendInfo, ...] = ()
    subjects: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """The number of records."""
        return len(self.infos) * len(self.subjects)


def describe_plan(plan: ProviderPlan) -> PlannedProviders:
    """Return ``plan`` as plain data."""
    return PlannedProviders(
        tuple(BackendInfo(name=each.name, ref=each.ref, version=each.version) for each in plan.providers),
        tuple(subject.key for subject in plan.subjects),
        tuple(subject.key for subject in SUBJECTS),
        plan.notes,
    )


def header_with_providers(header: RunHeader, plan: PlannedProviders) -> RunHeader:
    """Return the header of a run that also examines providers, or only these if it has no backends.

    Raises:
        SelectionError: a provider and a backend have the same name, or a suite has the name of the functions' suite.
    """
    if not plan.infos:
        return header
    for taken in header.backends:
        if taken.name in {provider.name for provider in plan.infos}:
            raise SelectionError(f"a backend and a provider are both called {taken.name!r}; examine them in two runs")
    if any(suite.name == UTILITIES for suite in header.suites):
        raise SelectionError(
            f"a suite may not be called {UTILITIES!r} where providers are examined: their functions are"
        )
    suite = SuiteInfo(name=UTILITIES, ref=UTILITIES, cases=len(plan.subjects))
    return header.model_copy(
        update={
            "suites": (*header.suites, suite),
            "checks": (*(header.checks if header.backends else ()), UTILITIES),
            "backends": (*header.backends, *plan.infos),
            "notes": (*header.notes, *plan.notes),
        }
    )


def examine_providers(
    plan: ProviderPlan, circumstances: Circumstances, first: int = 0, begin: Callable[[str], None] | None = None
) -> Iterator[Record]:
    """Yield a record for each subject and provider, from index ``first`` on.

    ``begin``: called with the name of each function before it is examined.
    """
    pairs = [(provider, subject) for provider in plan.providers for subject in plan.subjects]
    for provider, subject in pairs[first:]:
        if begin is not None:
            begin(f"function {subject.key}")
        yield _record(provider, subject, plan, circumstances)


def _record(provider: Provider, subject: Subject, plan: ProviderPlan, circumstances: Circumstances) -> Record:
    began = perf_counter()
    examined: SubjectResult | None = None
    finding: Finding
    try:
        examined = examine_subject(provider, subject, plan.setting)
        finding = _finding(provider, subject, examined)
    except Exception as error:  # noqa: BLE001 (ours: only this function's result is lost, and reported as an error)
        finding = capture_exception(OURSELVES, error)
    record = record_of(
        circumstances, SubjectIdentity(subject.key), provider, UTILITIES, finding, perf_counter() - began
    )
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
    if departure.is_form:
        return ""
    return f" ({count} of {plural(examined.questions, 'question')})"
