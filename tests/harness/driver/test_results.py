"""Answers of several calls put together: rows where they belong, parts by their LSE."""

import math

import pytest
import torch

from attncheck.backends.conventions import Conventions
from attncheck.harness.driver.outputs import CallResult, merged, placed
from attncheck.harness.driver.step import ForwardCall

PAD, OTHER_PAD = 7.0, 8.0


def result(rows, output, lse, unwritten=-1):
    """One head of size 1; what follows ``rows`` is padding."""
    index = torch.tensor(rows)
    call = ForwardCall(
        common=None,  # not looked at
        query=torch.zeros(len(output), 1, 1),
        key=None,
        value=None,
        rows=index,
        nth=torch.zeros_like(index),
        position=index * 10,
        num_key_rows=0,
    )
    missing = torch.arange(len(output)) == unwritten
    numbers = None if lse is None else torch.tensor(lse)[:, None]
    return CallResult(call, torch.tensor(output)[:, None, None], numbers, missing, None if lse is None else missing)


def flat(rows):
    assert rows is not None
    return [round(x, 6) for x in rows.flatten().tolist()]


def test_rows_go_to_their_places_and_padding_behind_them():
    one = result([2, 0], [20.0, 0.0, PAD], [2.5, 0.5, PAD], unwritten=1)
    whole = placed([one, result([3, 1], [30.0, 10.0, OTHER_PAD], [3.5, 1.5, OTHER_PAD])])
    assert flat(whole.output) == [0.0, 10.0, 20.0, 30.0, PAD, OTHER_PAD]
    assert flat(whole.lse) == [0.5, 1.5, 2.5, 3.5, PAD, OTHER_PAD]
    assert whole.lse_unwritten is not None
    assert whole.unwritten.tolist() == whole.lse_unwritten.tolist() == [True, False, False, False]
    assert whole.position.tolist() == [0, 10, 20, 30]
    without = placed([result([1, 0], [1.0, 0.0], None)])
    assert flat(without.output) == [0.0, 1.0]
    assert (without.lse, without.lse_unwritten) == (None, None)


@pytest.mark.parametrize(("base", "unit"), [("e", 1.0), ("2", math.log(2))])
def test_parts_are_weighted_by_their_lse(base, unit):
    """Row 0: weights 3 and 1. Row 1: nothing in the second part, whose output is anything finite."""
    first = result([0, 1], [1.0, 5.0, PAD], [math.log(3) / unit, 0.25, PAD], unwritten=1)
    second = result([0, 1], [9.0, 77.0, OTHER_PAD], [0.0, -math.inf, OTHER_PAD])
    whole = merged([first, second], Conventions(lse_base=base))
    assert flat(whole.output) == [3.0, 5.0, PAD, OTHER_PAD]
    assert flat(whole.lse) == [round(math.log(4) / unit, 6), 0.25, PAD, OTHER_PAD]
    assert whole.output.dtype == torch.float64
    assert whole.unwritten.tolist() == [False, True]


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
def test_rubbish_of_a_part_that_saw_nothing_is_seen(rubbish):
    parts = [result([0, 1], [1.0, 1.0], [0.0, 0.0]), result([0, 1], [1.0, rubbish], [0.0, -math.inf])]
    output = merged(parts, Conventions()).output.flatten().tolist()
    assert output[0] == 1.0
    assert math.isnan(output[1])


def test_parts_without_an_lse_cannot_be_merged():
    with pytest.raises(ValueError, match="without an LSE"):
        merged([result([0], [1.0], None)] * 2, Conventions())
