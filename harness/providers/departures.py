"""Known differences between a provider and the reference, each with its reason and exactly what it changes.

A *drift* is a change of signature or meaning since the version that the reference describes. A *judgement* is a defect,
or an input accepted without a check, for which the reference deliberately has another answer. A departure turns the
reference's object into one with this difference alone; only the answers of that object are excused. Departures are
verified: one that does not show wherever it is predicted is stale.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from attncheck.harness.providers.answers import AnswerDifference
from attncheck.harness.providers.questions import SubjectCall


@dataclass(frozen=True)
class Departure:
    """One known difference of one subject; ``what`` describes what the provider does.

    ``changes(object)``: returns the reference's object with this difference, for questions with one of ``tags``, or for
    all of them if there are no tags. ``parameters``: pairs of a differing parameter and what the provider has instead.
    ``shows(object)``: whether the provider's object has a difference of form, which an adapter hides from the answers.
    """

    subject: str
    kind: Literal["drift", "judgement"]
    what: str
    changes: Callable[[Any], Any] | None = None
    tags: frozenset[str] = frozenset()
    parameters: tuple[tuple[str, str], ...] = ()
    shows: Callable[[Any], bool] | None = None

    @property
    def is_form(self) -> bool:
        """Whether the difference is one of form, which no answer shows."""
        return self.changes is None

    def concerns(self, question: SubjectCall) -> bool:
        """Return whether this departure may change the answer to this question."""
        return self.changes is not None and (not self.tags or bool(self.tags & question.tags))

    def explains_parameter(self, difference: AnswerDifference) -> bool:
        """Return whether this departure is the cause of a difference between parameters."""
        return (difference.place, difference.seen) in self.parameters


@dataclass(frozen=True)
class Departures:
    """The departures of one provider, made from ``version``; empty if none are known.

    ``gone``: pairs of a shell pattern and a reason, for names of the reference that the provider no longer has.
    """

    version: str = ""
    known: tuple[Departure, ...] = ()
    gone: tuple[tuple[str, str], ...] = ()

    def of(self, subject: str) -> tuple[Departure, ...]:
        """Return the departures of one subject."""
        return tuple(departure for departure in self.known if departure.subject == subject)

    def why_gone(self, subject: str) -> str | None:
        """Return the reason why the provider lacks a name, or None if the table has none."""
        return next((why for pattern, why in self.gone if fnmatchcase(subject, pattern)), None)
