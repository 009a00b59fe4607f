"""Known differences between a provider and the reference, each with its reason and the place where it shows.

A *drift* is a change of signature or meaning since the behaviour the reference describes. A *judgement* is a defect, or
an input taken without a check, where the reference deliberately answers otherwise. Both are verified: a departure that
no longer shows is stale.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from attncheck.harness.providers.answers import AnswerDifference
from attncheck.harness.providers.questions import SubjectCall
from attncheck.harness.providers.signatures import PARAMETERS


@dataclass(frozen=True)
class Departure:
    """One known difference of one subject, told as what the provider does.

    It shows as a difference at one of ``places`` (a difference's place, or what it begins with; ``[]`` stands for any
    index), in a question that has one of ``tags`` if there are any; or, where no answer shows it, by ``shows(object)``
    being true of the provider's object.
    """

    subject: str
    kind: Literal["drift", "judgement"]
    what: str
    places: tuple[str, ...] = ()
    tags: frozenset[str] = frozenset()
    shows: Callable[[Any], bool] | None = None

    @property
    def is_form(self) -> bool:
        """Whether it is a matter of how the function is called, and no answer shows it."""
        return not any(place for place in self.places if not place.startswith(PARAMETERS))

    def explains(self, question: SubjectCall | None, difference: AnswerDifference) -> bool:
        """Whether this difference is this departure. The parameters of a function belong to no question."""
        if self.tags and not (question is not None and self.tags & question.tags):
            return False
        return any(_without_indices(difference.place).startswith(place) for place in self.places)


def _without_indices(place: str) -> str:
    return re.sub(r"\[\d+\]", "[]", place)


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
