"""The likely cause of a function's wrong answers. It is named only if it explains all of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from attncheck.harness.providers.aliases import EARLIER
from attncheck.harness.providers.provider import (
    MEMORY,
    AnswerDifference,
    ProviderAnswer,
    SubjectCall,
    Values,
    answer_differences,
    parameters_of,
    plain_value,
)


@dataclass(frozen=True)
class WrongAnswer:
    """One wrong answer, with the right one and the differences that no known departure explains."""

    question: SubjectCall
    expected: ProviderAnswer
    seen: ProviderAnswer
    differences: tuple[AnswerDifference, ...]


def likely_cause(
    wrong: Sequence[WrongAnswer], reference: Any, answer: Callable[[SubjectCall], ProviderAnswer]
) -> str | None:
    """Return the first cause that explains every answer of ``wrong``, or None.

    ``reference``: the reference's function or class. ``answer``: returns its answer to a question.
    """
    for name, parameter in (parameters_of(reference) or {}).items():
        is_optional = parameter.default is not Parameter.empty
        if is_optional and all(_ignores(name, each, answer) for each in wrong):
            return f"{name} is not used"
    for cause in _CAUSES:
        words = {cause(each) for each in wrong}
        if len(words) == 1 and (found := words.pop()):
            return found
    return None


def _ignores(name: str, wrong: WrongAnswer, answer: Callable[[SubjectCall], ProviderAnswer]) -> bool:
    """Return whether the reference gives the wrong answer if the argument ``name`` is left out."""
    given = wrong.question.arguments
    if name not in given:
        return False
    without = SubjectCall(wrong.question.text, {key: value for key, value in given.items() if key != name})
    return all(difference.tolerated for difference in answer_differences(answer(without), wrong.seen))


# Each cause returns its words for one wrong answer, or None.


def _writes(wrong: WrongAnswer) -> str | None:
    owners = {each.place.split("[")[0].split(".")[1] for each in wrong.differences if _is_argument(each)}
    if len(owners) != 1 or not all(map(_is_argument, wrong.differences)):
        return None
    name = owners.pop()
    before = ProviderAnswer(None, plain_value({name: wrong.question.arguments[name]}))
    right = ProviderAnswer(None, {name: wrong.expected.arguments[name]})
    is_kept = not answer_differences(before, right)  # a function whose result is in its argument must write into it
    return f"it writes into its argument {name}" if is_kept else None


def _is_argument(difference: AnswerDifference) -> bool:
    return difference.place.startswith("arguments.")


def _aliases(wrong: WrongAnswer) -> str | None:
    if "storage" in wrong.question.tags and all(
        (each.expected, each.seen) == ("True", "False") for each in wrong.differences
    ):
        return "a tensor on the host and the one on the device share storage"
    if {each.place.rpartition(".")[2] for each in wrong.differences} != {MEMORY}:
        return None
    due = {each.expected == "new" for each in wrong.differences}
    if due == {False}:
        return "it returns a copy, and not its argument or a view of it"
    if any(each.seen.endswith(EARLIER) for each in wrong.differences):
        return "it returns the memory of an earlier result, and not a new tensor"
    if any("argument" not in each.seen for each in wrong.differences):
        return "two tensors of the result share memory"
    return "it returns its argument or a view of it, and nothing new" if due == {True} else None


def _differs_by(kind: str) -> Callable[[WrongAnswer], str | None]:
    """Return the cause that all values are right but for their dtype, or their device."""

    def cause(wrong: WrongAnswer) -> str | None:
        found = {(each.expected, each.seen) for each in wrong.differences}
        if len(found) != 1 or not all(each.place.endswith(f".{kind}") for each in wrong.differences):
            return None
        expected, seen = found.pop()
        return f"the values are right, of {kind} {seen} instead of {expected}"

    return cause


def _shifted(wrong: WrongAnswer) -> str | None:
    shift = _shift_of(wrong)
    return None if shift is None else f"each wrong number is {abs(shift):g} too {_direction(shift)}"


def _shifted_by_a_page(wrong: WrongAnswer) -> str | None:
    shift, page = _shift_of(wrong), wrong.question.arguments.get("block_size")
    if shift is None or abs(shift) != page:
        return None
    return f"each wrong number is one page too {_direction(shift)}"


def _direction(shift: float) -> str:
    return "large" if shift > 0 else "small"


def _shift_of(wrong: WrongAnswer) -> float | None:
    """Return by how much every wrong number is too large, or None if it is not the same for all."""
    shifts = set(_shifts(wrong.expected.returned, wrong.seen.returned))
    return shifts.pop() if len(shifts) == 1 else None


def _shifts(expected: Any, seen: Any) -> Iterator[float | None]:
    """Yield the shift of each number that differs, and None for a difference of another kind."""
    match expected, seen:
        case dict(), dict() if expected.keys() == seen.keys():
            for key, value in expected.items():
                yield from _shifts(value, seen[key])
        case list(), list() if len(expected) == len(seen):
            for one, other in zip(expected, seen, strict=True):
                yield from _shifts(one, other)
        case Values(), Values() if expected.values.shape == seen.values.shape:
            moved = seen.values.double() - expected.values.double()
            yield from moved[moved != 0].unique().tolist()
        case ((int() | float()), (int() | float())) if not isinstance(expected, bool):
            if seen != expected:
                yield float(seen - expected)
        case _:
            if expected != seen:
                yield None


def _in_another_order(wrong: WrongAnswer) -> str | None:
    def is_reordered(expected: Any, seen: Any) -> bool:
        match expected, seen:
            case dict(), dict() if expected.keys() == seen.keys():
                return all(is_reordered(value, seen[key]) for key, value in expected.items())
            case Values(), Values() if expected.values.shape == seen.values.shape:
                return bool((expected.values.flatten().sort()[0] == seen.values.flatten().sort()[0]).all())
            case list(), list():
                return sorted(map(repr, expected)) == sorted(map(repr, seen))
        return isinstance(seen, type(expected)) and bool(expected == seen)

    if any(_is_argument(each) or each.place.endswith((".dtype", ".device")) for each in wrong.differences):
        return None
    if not is_reordered(wrong.expected.returned, wrong.seen.returned):
        return None
    return "the values are right, in another order"


_CAUSES = (
    _writes,
    _aliases,
    _differs_by("dtype"),
    _differs_by("device"),
    _shifted,
    _shifted_by_a_page,
    _in_another_order,
)
