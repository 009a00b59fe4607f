"""A fill counts where it shows every time, and the clean answer is itself again without it."""

from collections.abc import Callable

import torch
from torch import Tensor

from attncheck.harness.checks.again import Repeats

RIGHT = torch.tensor([1.0, 2.0, 3.0])


def repeats(call: Callable[[float | None], Tensor]) -> Repeats[Tensor, float]:
    def shares(answer: Tensor) -> Tensor:
        return (answer - RIGHT).abs()[:, None] / 0.1

    return Repeats(call(None), call, lambda a, b: a != b, shares, str)


def test_a_leak_is_the_rows_it_reaches() -> None:
    found = repeats(lambda fill: RIGHT if fill is None else RIGHT + torch.tensor([0.0, fill, 0.0]))
    assert found.reached(0.01).tolist() == [False, True, False]
    assert found.reached(0.0).tolist() == [False] * 3
    assert (found.bitwise, found.notes) == (True, ())


def test_a_race_that_strikes_once_is_no_leak() -> None:
    calls: list[None] = []

    def call(fill: float | None) -> Tensor:
        calls.append(None)
        return RIGHT + (0.01 if len(calls) == 2 else 0.0)

    found = repeats(call)
    assert found.reached(5.0).tolist() == [False] * 3
    assert not found.bitwise


def test_who_never_repeats_himself_is_held_to_the_budget() -> None:
    calls: list[None] = []

    def call(fill: float | None) -> Tensor:
        calls.append(None)
        leak = torch.tensor([0.0, 0.0, fill or 0.0])
        return RIGHT + 0.001 * len(calls) + leak

    found = repeats(call)
    assert found.reached(0.05).tolist() == [False] * 3
    assert not found.bitwise
    assert found.reached(5.0).tolist() == [False, False, True]
    assert len(found.notes) == 1


def test_who_stops_repeating_himself_is_held_to_the_budget_from_then_on() -> None:
    calls: list[None] = []

    def call(fill: float | None) -> Tensor:
        calls.append(None)
        return RIGHT + (0.0 if len(calls) < 3 else 0.001 * len(calls))

    found = repeats(call)
    assert found.reached(5.0).tolist() == [False] * 3
    assert found.bitwise
    assert found.reached(5.0).tolist() == [False] * 3
    assert not found.bitwise


def test_rows_wrong_without_poison_are_not_blamed_on_it() -> None:
    calls: list[None] = []

    def call(fill: float | None) -> Tensor:
        calls.append(None)
        return RIGHT + torch.tensor([9.0, 0.0, 0.0]) + 0.001 * len(calls)

    assert repeats(call).reached(5.0).tolist() == [False] * 3
