"""Find the known departures that turn the reference's answer into the observed one: exactly these, or none.

If departures change the right answer, two kinds of answers are excused: that of the reference with all departures, and
with some of them, since a newer version may have fixed one. An upper bound is not wrong, unless a departure predicts
its exact value.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations

from attncheck.harness.providers.answers import AnswerDifference, ProviderAnswer, answer_differences
from attncheck.harness.providers.departures import Departure

Chosen = tuple[Departure, ...]


@dataclass(frozen=True)
class Explanation:
    """``shown``: the departures that showed. ``missed``: those predicted that did not show.

    ``kinds``: kinds of the departures that showed and change an answer in more than a tolerated way. ``tolerated`` and
    ``wrong``: the remaining differences.
    """

    shown: Chosen = ()
    missed: Chosen = ()
    kinds: frozenset[str] = frozenset()
    tolerated: tuple[AnswerDifference, ...] = ()
    wrong: tuple[AnswerDifference, ...] = ()


def explain_answer(
    expected: ProviderAnswer, seen: ProviderAnswer, known: Chosen, predict: Callable[[Chosen], ProviderAnswer]
) -> Explanation:
    """Return the departures that explain ``seen``, and the differences that none explains.

    expected: the reference's answer. known: the departures that concern the question. predict: returns the reference's
    answer with some of them applied.
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
    assert closest is not None  # the empty subset is always tried
    return closest


def _without(chosen: Chosen, departure: Departure) -> Chosen:
    return tuple(each for each in chosen if each is not departure)


def _subsets(bearing: Chosen) -> Iterable[Chosen]:
    """Return all subsets, the largest first; the empty one, which is the reference's own answer, comes last."""
    return (chosen for size in range(len(bearing), -1, -1) for chosen in combinations(bearing, size))


def _matters(without: ProviderAnswer, answer: ProviderAnswer) -> bool:
    return not all(difference.tolerated for difference in answer_differences(without, answer))
