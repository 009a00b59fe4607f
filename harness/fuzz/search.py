"""The order of drawn cases: all pairs of values first, then random ones, with lengths at constants of the code.

Keys get the values that the backend declares. Occasionally a value is drawn that it does not declare: the backend must
refuse the case or compute the right result.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from random import Random
from typing import Any

from attncheck.cases.model import Case
from attncheck.errors import MissingExtraError
from attncheck.harness.fuzz.axes import Axes, all_axes, plain
from attncheck.harness.fuzz.drawing import Lengths, draw_case
from attncheck.harness.fuzz.pairs import PairwiseCover
from attncheck.harness.run.selection import checks_of, unanswered_reasons

ReasonsAgainst = Callable[[Sequence[Case]], Sequence[tuple[str, ...]]]
"""Function that returns, for each case, why the backend does not support it; empty if it does."""

UNDECLARED_ONE_IN = 10
"""One in this many drawn cases has a value that the backend does not declare."""

GRAPHS_ONE_IN = 40
"""One in this many drawn cases is examined for its CUDA-graph level, which takes as long as many other checks."""

_AT_ONCE = 64


@dataclass(frozen=True)
class DrawnQuestion:
    """A drawn case, and the checks to run on it."""

    case: Case
    checks: tuple[str, ...]


@dataclass(frozen=True)
class DeclaredAxes:
    """The values that a backend declares in a plain case, and those that it does not."""

    declared: Axes
    undeclared: Axes


def declared_axes(reasons_against: ReasonsAgainst, constants: Sequence[int]) -> DeclaredAxes:
    """Return which values of each key the backend declares, changing one key of a plain case at a time.

    The plain case is the first that the backend declares, over all combinations of dtype, sizes and latent cache. If it
    declares none of them, every value counts as declared.
    """
    axes = all_axes(constants)
    forms = ("layer.mla", "layer.dtype", "layer.head_size", "cache.block_size", "layer.attn_type")
    choices = (dict(zip(forms, values, strict=True)) for values in product(*(axes[key] for key in forms)))
    base = next(_declared_choices(axes, choices, reasons_against), None)
    if base is None:
        return DeclaredAxes(axes, {})
    first = {
        key: (base.get(key, values[0]), *(v for v in values if v != base.get(key, values[0])))
        for key, values in axes.items()
    }
    tried = [(key, value) for key, values in first.items() for value in values[1:]]
    drawn = [draw_case(first, {key: value}, Lengths(), 0, "declared") for key, value in tried]
    cases = [(key, value, each.case) for (key, value), each in zip(tried, drawn, strict=True) if each and each.kept]
    answers = reasons_against([case for _, _, case in cases])
    refused = {
        key: [v for (k, v, _), reasons in zip(cases, answers, strict=True) if reasons and k == key] for key in first
    }
    return DeclaredAxes(
        {key: tuple(v for v in values if v not in refused[key]) for key, values in first.items()},
        {key: tuple(values) for key, values in refused.items() if values},
    )


def _declared_choices(
    axes: Axes, choices: Iterator[dict[str, Any]], reasons_against: ReasonsAgainst
) -> Iterator[dict[str, Any]]:
    """Yield the choices whose plain case the backend declares."""
    while some := list(islice(choices, _AT_ONCE)):
        known = [(choice, case) for choice in some if (case := _plain_batch(axes, choice)) is not None]
        answers = reasons_against([case for _, case in known])
        yield from (choice for (choice, _), reasons in zip(known, answers, strict=True) if not reasons)


def _plain_batch(axes: Axes, choice: Mapping[str, Any]) -> Case | None:
    """Return the case of one decode with these values, or None if they are not valid together."""
    drawn = draw_case(axes, {**choice, "batch.queries": "one"}, Lengths(), 0, "plain")
    return drawn.case if drawn is not None and choice.items() <= {**plain(axes), **drawn.kept}.items() else None


def questions(
    axes: DeclaredAxes, reasons_against: ReasonsAgainst, lengths: Lengths, seed: int, checks: tuple[str, ...] | None
) -> Iterator[DrawnQuestion]:
    """An endless supply of drawn cases with checks to run. ``checks``: None for all that apply."""
    numbers, random = count(1), Random(seed)
    for drawn in _cases(axes, lengths, seed, numbers, random):
        (reasons,) = reasons_against([drawn])
        if unanswered_reasons(drawn):
            continue
        made = checks_of(drawn, checks)
        if reasons:
            made = tuple(check for check in made if check == "refusals")
            if random.randrange(UNDECLARED_ONE_IN):
                continue
        elif checks is None and random.randrange(GRAPHS_ONE_IN):
            made = tuple(check for check in made if check != "cudagraph")
        if made:
            yield DrawnQuestion(drawn, made)


def _cases(axes: DeclaredAxes, lengths: Lengths, seed: int, numbers: Iterator[int], random: Random) -> Iterator[Case]:
    cover = PairwiseCover(axes.declared, seed)
    for row in cover.rows():
        number = next(numbers)
        drawn = draw_case(axes.declared, _with_undeclared(row, axes, random), lengths, seed + number, f"case-{number}")
        if drawn is not None and cover.cover(drawn.kept):
            yield drawn.case
    while True:
        for choice, own in _by_hypothesis(axes.declared, seed, next(numbers)):
            wanted = _with_undeclared(choice, axes, random)
            drawn = draw_case(axes.declared, wanted, lengths, own, f"case-{next(numbers)}")
            if drawn is not None:
                yield drawn.case


def _with_undeclared(choice: Mapping[str, Any], axes: DeclaredAxes, random: Random) -> Mapping[str, Any]:
    """Return the choice; one time in :data:`UNDECLARED_ONE_IN`, replace one value by one that is not declared."""
    if not axes.undeclared or random.randrange(UNDECLARED_ONE_IN):
        return choice
    key = random.choice(sorted(axes.undeclared))
    return {key: random.choice(axes.undeclared[key]), **{k: v for k, v in choice.items() if k != key}}


def _by_hypothesis(axes: Axes, seed: int, number: int) -> list[tuple[Mapping[str, Any], int]]:
    """Return some choices drawn by hypothesis, each with a seed for its lengths.

    Most keys keep their plain value. No database file is written.

    Raises:
        MissingExtraError: hypothesis is not installed.
    """
    try:
        import hypothesis
        from hypothesis import strategies as st
    except ImportError as error:
        raise MissingExtraError("attncheck fuzz", "hypothesis", "fuzz") from error
    values = {key: st.sampled_from(each) for key, each in axes.items() if len(each) > 1}
    found: list[tuple[Mapping[str, Any], int]] = []

    @hypothesis.seed(seed * 1_000_003 + number)
    @hypothesis.settings(
        max_examples=_AT_ONCE,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.fixed_dictionaries({}, optional=values), st.integers(0, 2**32))
    def draw(choice: dict[str, Any], own: int) -> None:
        found.append((choice, own))

    draw()
    return found
