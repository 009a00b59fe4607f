"""Known differences between a provider and the reference, each with its reason and exactly what it changes.

A *drift* is a change of signature or meaning since the behaviour the reference describes. A *judgement* is a defect, or
an input taken without a check, where the reference deliberately answers otherwise. A departure makes of the reference's
object one that departs in this way alone. What that one answers is excused, and no other answer is. Departures are
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
    """One known difference of one subject, told as what the provider does.

    ``changes(object)`` returns the reference's object with this difference, for questions that have one of ``tags``, or
    for all of them if there are none. ``parameters``: the parameters that differ, and what is found in their place.
    ``shows(object)``: whether the provider's object has a difference of form that an adapter hides from the answers.
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
        """Whether it is a matter of how the function is called, and no answer shows it."""
        return self.changes is None

    def concerns(self, question: SubjectCall) -> bool:
        """Return whether it may change the answer to this question."""
        return self.changes is not None and (not self.tags or bool(self.tags & question.tags))

    def explains_parameter(self, difference: AnswerDifference) -> bool:
        """Return whether this difference between parameters is this departure."""
        return (difference.place, difference.seen) in self.parameters


@dataclass(frozen=True)
class Departures:
    """The table of one provider, empty for one without known departures.

    It was made from ``version``; ``gone`` says of names (shell patterns) of the reference why they are not there.
    """

    version: str = ""
    known: tuple[Departure, ...] = ()
    gone: tuple[tuple[str, str], ...] = ()

    def of(self, subject: str) -> tuple[Departure, ...]:
        """The departures of one subject."""
        return tuple(departure for departure in self.known if departure.subject == subject)

    def why_gone(self, subject: str) -> str | None:
        """Why a name is gone, if the table says so."""
        return next((why for pattern, why in self.gone if fnmatchcase(subject, pattern)), None)
