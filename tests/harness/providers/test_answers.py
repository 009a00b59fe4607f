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


def test_a_difference_states_both_values():
    (found,) = answer_differences(returned(torch.tensor([7, 8])), returned(torch.tensor([7, 9])))
    assert str(found) == "returned[1]: expected 8 of int64 [7, 8]; got 9 of int64 [7, 9]"


@pytest.mark.parametrize("name", ["max_seq_len", "max_query_len"])
def test_a_maximum_above_the_truth_is_an_upper_bound_and_one_below_is_wrong(name):
    above, below = ({name: 5 + step} for step in (1, -1))
    (bound,) = answer_differences(returned({name: 5}), returned(above))
    (wrong,) = answer_differences(returned({name: 5}), returned(below))
    assert bound.tolerated
    assert not wrong.tolerated
    (other,) = answer_differences(returned({"num_reqs": 5}), returned({"num_reqs": 6}))
    assert not other.tolerated


def test_an_integer_of_numpys_is_a_tolerated_difference():
    (found,) = answer_differences(returned({"count": 3}), returned({"count": np.int32(3)}))
    assert (found.place, found.tolerated) == ("returned.count.type", True)
    (wrong,) = answer_differences(returned({"count": 3}), returned({"count": np.int32(4)}))
    assert (wrong.place, wrong.tolerated) == ("returned.count", False)
    (bound,) = answer_differences(returned({"max_seq_len": 3}), returned({"max_seq_len": np.int32(4)}))
    assert bound.tolerated


def test_both_refusing_is_equal_whatever_they_raise():
    ours, theirs = ProviderAnswer(Refusal("ValueError", "no"), {}), ProviderAnswer(Refusal("AssertionError", ""), {})
    assert answer_differences(ours, theirs) == []


@pytest.mark.parametrize("provider_refuses", [True, False])
def test_one_refusing_alone_is_a_difference(provider_refuses):
    refusal, answer = ProviderAnswer(Refusal("ValueError", "q = 9: must be less\nmore"), {}), returned([1])
    (found,) = answer_differences(*((answer, refusal) if provider_refuses else (refusal, answer)))
    assert found.place == "refusal"
    refusal_text = found.seen if provider_refuses else found.expected
    assert refusal_text == "a refusal (ValueError: q = 9: must be less)"


def test_what_becomes_of_the_arguments_belongs_to_the_answer():
    def keeps(values):
        return values.sum().item()

    def sorts(values):
        return values.copy_(values.sort()[0]).sum().item()

    ours, theirs = (answer_of(function, {"values": torch.tensor([3, 1, 2])}) for function in (keeps, sorts))
    (found,) = answer_differences(ours, theirs)
    assert found.place == "arguments.values[0]"
    assert found.seen == "1 of int64 [1, 2, 3]"


def test_an_argument_changed_before_a_refusal_is_a_difference():
    def refuses(values):
        raise ValueError

    def changes_first(values):
        values[0] = 9
        raise ValueError

    ours, theirs = (answer_of(function, {"values": torch.tensor([3])}) for function in (refuses, changes_first))
    assert [found.place for found in answer_differences(ours, theirs)] == ["arguments.values[0]"]


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
