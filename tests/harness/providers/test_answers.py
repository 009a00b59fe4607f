"""Answers as plain values: what counts as a difference, its place, and its message."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.harness.providers.provider import ProviderAnswer, Refusal, answer_differences, answer_of, plain_value


def returned(value):
    return ProviderAnswer(plain_value(value), {})


def places(expected, seen):
    return [difference.place for difference in answer_differences(returned(expected), returned(seen))]


@dataclass
class Pair:
    a: int
    b: object


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]),
        (True, np.bool_(True)),
        (torch.tensor([1, 2], dtype=torch.int32), np.array([1, 2], dtype=np.int32)),
        (Pair(1, None), SimpleNamespace(a=1, b=None)),
        ({"a": 1}, {"a": 1, "further": 2}),
        (Pair(1, 2), SimpleNamespace(a=1, b=2, further=3)),
    ],
)
def test_what_is_equal_in_another_form_is_equal(one, other):
    assert places(one, other) == []


@pytest.mark.parametrize(
    ("expected", "seen", "place"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 5, 4]), "returned[1]"),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]), "returned[1][1]"),
        (torch.tensor([1]), torch.tensor([1], dtype=torch.int32), "returned.dtype"),
        (torch.tensor([1, 2]), torch.tensor([1]), "returned"),
        (1, True, "returned"),
        (1, 2, "returned"),
        ([1, 2], [1, 2, 3], "returned"),
        ({"a": 1}, {}, "returned.a"),
        (Pair(1, [2]), Pair(1, [3]), "returned.b[0]"),
        (None, 0, "returned"),
    ],
)
def test_a_difference_has_a_place(expected, seen, place):
    assert places(expected, seen) == [place]


@pytest.mark.parametrize(
    ("expected", "seen", "place", "tolerated"),
    [
        ({"max_seq_len": 5}, {"max_seq_len": 6}, "returned.max_seq_len", True),
        ({"max_query_len": 5}, {"max_query_len": 6}, "returned.max_query_len", True),
        ({"max_seq_len": 5}, {"max_seq_len": 4}, "returned.max_seq_len", False),
        ({"num_reqs": 5}, {"num_reqs": 6}, "returned.num_reqs", False),
        ({"count": 3}, {"count": np.int32(3)}, "returned.count.type", True),
        ({"count": 3}, {"count": np.int32(4)}, "returned.count", False),
        ({"max_seq_len": 3}, {"max_seq_len": np.int32(4)}, "returned.max_seq_len", True),
    ],
)
def test_an_upper_bound_and_an_integer_of_numpys_are_tolerated(expected, seen, place, tolerated):
    (found,) = answer_differences(returned(expected), returned(seen))
    assert (found.place, found.tolerated) == (place, tolerated)


def test_both_refusing_is_equal_whatever_they_raise_and_one_refusing_alone_is_a_difference():
    refusal, answer = ProviderAnswer(Refusal("ValueError", "q = 9: must be less\nmore"), {}), returned([1])
    assert answer_differences(refusal, ProviderAnswer(Refusal("AssertionError", ""), {})) == []
    (lacking,), (missing,) = answer_differences(answer, refusal), answer_differences(refusal, answer)
    assert lacking.place == missing.place == "refusal"
    assert lacking.seen == missing.expected == "a refusal (ValueError: q = 9: must be less)"


@pytest.mark.parametrize("raises", [False, True])
def test_what_becomes_of_the_arguments_belongs_to_the_answer(raises):
    def keeps(values):
        if raises:
            raise ValueError

    def sorts(values):
        values.copy_(values.sort()[0])
        keeps(values)

    ours, theirs = (answer_of(function, {"values": torch.tensor([3, 1, 2])}) for function in (keeps, sorts))
    (found,) = answer_differences(ours, theirs)
    assert (found.place, found.seen) == ("arguments.values[0]", "1 of int64 [1, 2, 3]")


def test_leaving_the_process_is_a_refusal_and_an_interrupt_is_none():
    def leaves():
        raise SystemExit(3)

    def interrupts():
        raise KeyboardInterrupt

    assert answer_of(leaves, {}).refused
    with pytest.raises(KeyboardInterrupt):
        answer_of(interrupts, {})


def test_a_snapshot_shares_nothing_with_its_value():
    tensor, array = torch.tensor([1]), np.array([1])
    before = plain_value({"tensor": tensor, "array": array})
    tensor[0] = array[0] = 5
    assert [int(before[name].values[0]) for name in ("tensor", "array")] == [1, 1]
