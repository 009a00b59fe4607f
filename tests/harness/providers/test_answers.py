"""Answers as plain values: what counts as a difference, its place, its message, and its likely cause."""

from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck import reference
from attncheck.harness.providers.batches import ALWAYS
from attncheck.harness.providers.causes import WrongAnswer, likely_cause
from attncheck.harness.providers.examine import SUBJECTS, examine_subject
from attncheck.harness.providers.provider import (
    Provider,
    ProviderAnswer,
    Refusal,
    SubjectCall,
    SubjectSetting,
    answer_differences,
    answer_of,
    plain_value,
)


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


# The likely cause of wrong answers: named where it explains each of them, and otherwise not.


def cause_of(name, function):
    module = ModuleType("fake")
    setattr(module, name, function)
    subject = next(subject for subject in SUBJECTS if subject.key == name)
    fake = Provider("fake", "fake", "1", [module])
    return examine_subject(fake, subject, SubjectSetting(ALWAYS[:5], torch.device("cpu"))).cause


def write_ranges(made, mm_prefix_range, **_):
    if mm_prefix_range:
        mm_prefix_range[99] = mm_prefix_range.pop(next(iter(mm_prefix_range)))
    return made


def swap_last(made, input_batch, *_, **__):
    if input_batch.num_reqs > 3:
        input_batch.swap_states(2, 3)
    return made


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("slice_query_start_locs", lambda made, **_: made + 1, "each wrong number is 1 too large"),
        (
            "make_local_attention_virtual_batches",
            lambda made, block_size, **_: replace(made, seq_lens=made.seq_lens - block_size),
            "each wrong number is 4 too small",
        ),
        (
            "get_dcp_local_seq_lens",
            lambda made, **_: made.long(),
            "the values are right, of dtype int64 instead of int32",
        ),
        (
            "reshape_attn_output_for_spec_decode",
            lambda made, **_: made.clone(),
            "it returns a copy, and not its argument or a view of it",
        ),
        ("split_prefill_chunks", lambda made, **_: made[::-1], "the values are right, in another order"),
        ("compute_mm_prefix_range_tensor", write_ranges, "it writes into its argument mm_prefix_range"),
        ("reorder_batch_to_split_decodes_and_prefills", swap_last, None),
        ("is_last_ubatch_empty", lambda made, orig_num_tokens, **_: made ^ (orig_num_tokens == 8), None),
    ],
)
def test_a_cause_is_named_if_it_explains_every_wrong_answer(name, change, cause):
    """``change``: applied to what the reference's function returns."""
    right = getattr(reference, name)
    assert cause_of(name, lambda *given, **named: change(right(*given, **named), *given, **named)) == cause


def test_an_argument_that_is_not_used_is_named():
    def split_chunks(seq_lens_cpu, workspace_size, request_offset=0):
        return reference.split_prefill_chunks(seq_lens_cpu, workspace_size)

    assert cause_of("split_prefill_chunks", split_chunks) == "request_offset is not used"


def wrong_answer(block_size, expected, seen, *tags):
    ours, theirs = (ProviderAnswer(plain_value(value), {}) for value in (expected, seen))
    question = SubjectCall("a question", {"block_size": block_size}, frozenset(tags))
    return WrongAnswer(question, ours, theirs, tuple(answer_differences(ours, theirs)))


def test_a_shift_by_a_page_is_named_where_pages_differ():
    wrong = [wrong_answer(4, [3, 9], [7, 9]), wrong_answer(16, torch.tensor([1, 2]), torch.tensor([17, 18]))]
    assert likely_cause(wrong, int, lambda _: None) == "each wrong number is one page too large"
    assert likely_cause([*wrong, wrong_answer(16, [1], [2])], int, lambda _: None) is None


@pytest.mark.parametrize(
    ("expected", "seen", "tags", "cause"),
    [
        ({"a": torch.tensor([1, 2]), "b": 3}, {"a": torch.tensor([2, 1]), "b": 3}, (), "in another order"),
        ({"a": torch.tensor([1, 2])}, {"a": torch.tensor([2.0, 1.0])}, (), None),
        ({"a": torch.tensor([1, 2]), "b": 3}, {"a": torch.tensor([2, 1]), "b": 3.0}, (), None),
        ({"are apart": True}, {"are apart": False}, ("storage",), "share storage"),
        ({"are apart": True, "length": 3}, {"are apart": True, "length": 5}, ("storage",), "2 too large"),
    ],
)
def test_a_cause_holds_for_every_difference(expected, seen, tags, cause):
    found = likely_cause([wrong_answer(4, expected, seen, *tags)], int, lambda _: None)
    assert (found or "").endswith(cause) if cause else found is None
