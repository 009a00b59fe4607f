"""Which known departures turn the reference's answer into the one that was seen: exactly these, or none.

Where departures change the right answer, the answers that are excused are that of the reference under all of them, and
that under some of them, for a newer version may have mended one. An upper bound is no wrong answer, except where a
departure says which bound it is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

from attncheck.harness.providers.answers import AnswerDifference, ProviderAnswer, answer_differences
from attncheck.harness.providers.departures import Departure

Chosen = tuple[Departure, ...]


@dataclass(frozen=True)
class Explanation:
    """``shown``: the departures seen; ``missed``: those predicted and not seen, ``tolerated`` and ``wrong``: the rest.

    ``kinds``: those of the departures seen that change an answer, and do not merely make it as good.
    """

    shown: Chosen = ()
    missed: Chosen = ()
    kinds: frozenset[str] = frozenset()
    tolerated: tuple[AnswerDifference, ...] = ()
    wrong: tuple[AnswerDifference, ...] = ()


def explain_answer(
    expected: ProviderAnswer, seen: ProviderAnswer, known: Chosen, predict: Callable[[Chosen], ProviderAnswer]
) -> Explanation:
    """Return what explains ``seen``, and what nothing explains.

    expected: the reference's answer. known: the departures that concern the question. predict: the reference's answer
        under some of them.
    """
    everything = predict(known) if known else expected
    bearing = tuple(each for each in known if answer_differences(predict(_without(known, each)), everything))
    contested = {difference.place for difference in answer_differences(expected, everything)}
    closest: Explanation | None = None
    for chosen in _subsets(bearing):
        answer = predict(chosen) if chosen else expected
        found = answer_differences(answer, seen)
        tolerated = tuple(each for each in found if each.tolerated and each.place not in contested)
        wrong = tuple(each for each in found if each not in tolerated)
        missed = tuple(each for each in bearing if each not in chosen)
        if not wrong:
            kinds = frozenset(each.kind for each in chosen if _matters(predict(_without(chosen, each)), answer))
            return Explanation(chosen, missed, kinds, tolerated)
        if closest is None or len(wrong) <= len(closest.wrong):
            closest = Explanation(chosen, missed, frozenset(), tolerated, wrong)
    assert closest is not None  # there is always the subset of none
    return closest


def _without(chosen: Chosen, departure: Departure) -> Chosen:
    return tuple(each for each in chosen if each is not departure)


def _subsets(bearing: Chosen) -> Iterable[Chosen]:
    """The largest first, and last of all none: the reference's own answer."""
    return (chosen for size in range(len(bearing), -1, -1) for chosen in combinations(bearing, size))


def _matters(without: ProviderAnswer, answer: ProviderAnswer) -> bool:
    return not all(difference.tolerated for difference in answer_differences(without, answer))
