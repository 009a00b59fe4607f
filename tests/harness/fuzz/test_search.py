"""Which values a backend declares, and the order of questions."""

from collections.abc import Sequence
from itertools import islice

import pytest

from attncheck.cases.model import Case
from attncheck.harness.fuzz.search import (
    DeclaredAxes,
    DrawnQuestion,
    Lengths,
    all_axes,
    declared_axes,
    plain,
    questions,
)


def narrow(cases: Sequence[Case]) -> list[tuple[str, ...]]:
    """The declarations of a backend of float16 alone, without sinks, of head sizes 80 and 96."""

    def reasons(case: Case) -> tuple[str, ...]:
        layer = case.layer
        is_declared = layer.dtype == "float16" and layer.head_size in (80, 96) and not layer.sinks and layer.mla is None
        return () if is_declared else ("undeclared",)

    return [reasons(case) for case in cases]


@pytest.fixture(scope="module")
def axes() -> DeclaredAxes:
    return declared_axes(narrow, ())


def drawn(axes: DeclaredAxes, seed: int, count: int, checks: tuple[str, ...] | None = None) -> list[DrawnQuestion]:
    return list(islice(questions(axes, narrow, Lengths(), seed, checks), count))


def test_the_values_that_are_declared_are_found(axes: DeclaredAxes) -> None:
    assert axes.declared["layer.dtype"] == ("float16",)
    assert axes.declared["layer.sinks"] == (False,)
    assert set(axes.declared["layer.head_size"]) == {80, 96}
    assert axes.declared["layer.mla"] == (None,)
    assert set(axes.undeclared["layer.dtype"]) == {"bfloat16", "float32"}
    assert "cache.layout" not in axes.undeclared


def test_every_value_is_declared_if_no_case_is_undeclared() -> None:
    found = declared_axes(lambda cases: [("no",)] * len(cases), ())
    assert len(found.declared["layer.dtype"]) == 3
    assert not found.undeclared


@pytest.fixture(scope="module")
def found(axes: DeclaredAxes) -> list[DrawnQuestion]:
    return drawn(axes, 0, 300)


def test_most_questions_are_declared_and_the_others_require_a_refusal(found: list[DrawnQuestion]) -> None:
    undeclared = [each for each in found if narrow([each.case])[0]]
    assert 0 < len(undeclared) < 60
    assert {each.checks for each in undeclared} == {("refusals",)}
    assert all("numerics" in each.checks for each in found if each not in undeclared)


def test_graphs_are_examined_now_and_then_unless_they_are_selected(
    axes: DeclaredAxes, found: list[DrawnQuestion]
) -> None:
    assert 0 < sum("cudagraph" in each.checks for each in found if "numerics" in each.checks) < 40
    assert {each.checks for each in drawn(axes, 0, 5, ("cudagraph",))} == {("cudagraph",)}


def test_the_same_seed_draws_the_same_questions(axes: DeclaredAxes, found: list[DrawnQuestion]) -> None:
    first = [each.case.hash for each in found[:40]]
    again, other = ([each.case.hash for each in drawn(axes, seed, 40)] for seed in (0, 1))
    assert first == again
    assert first != other


def test_behind_the_pairs_cases_are_drawn_by_chance_without_end() -> None:
    fixed = {key: (value,) for key, value in plain(all_axes()).items()}
    few = DeclaredAxes(fixed | {"layer.dtype": ("float16", "float32")}, {})
    found = list(islice(questions(few, lambda cases: [()] * len(cases), Lengths(), 0, ("numerics",)), 80))
    assert len({each.case.id for each in found}) == 80
    assert len({each.case.hash for each in found}) > 20
