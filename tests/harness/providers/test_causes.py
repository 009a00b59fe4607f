"""The likely cause of wrong answers: named where it explains each of them, and otherwise not."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attncheck import reference
from attncheck.harness.providers.batches import ALWAYS
from attncheck.harness.providers.causes import WrongAnswer, likely_cause
from attncheck.harness.providers.examine import SUBJECTS, examine_subject
from attncheck.harness.providers.provider import (
    Provider,
    ProviderAnswer,
    SubjectCall,
    SubjectSetting,
    answer_differences,
    plain_value,
)


def cause_of(name, function):
    module = ModuleType("fake")
    setattr(module, name, function)
    subject = next(subject for subject in SUBJECTS if subject.key == name)
    fake = Provider("fake", "fake", "1", [module])
    return examine_subject(fake, subject, SubjectSetting(ALWAYS[:5], torch.device("cpu"))).cause


def split_chunks(seq_lens_cpu, workspace_size, request_offset=0):
    return reference.split_prefill_chunks(seq_lens_cpu, workspace_size)


def changed(name, change):
    """The reference's function with ``change`` applied to what it returns."""

    def function(*positional, **named):
        return change(getattr(reference, name)(*positional, **named), *positional, **named)

    return function


def write_ranges(made, mm_prefix_range, **_):
    if mm_prefix_range:
        mm_prefix_range[99] = mm_prefix_range.pop(next(iter(mm_prefix_range)))
    return made


def swap_last(made, input_batch, *_, **__):
    if input_batch.num_reqs > 3:
        input_batch.swap_states(2, 3)
    return made


@pytest.mark.parametrize(
    ("name", "function", "cause"),
    [
        ("split_prefill_chunks", split_chunks, "request_offset is not used"),
        (
            "slice_query_start_locs",
            changed("slice_query_start_locs", lambda made, *_: made + 1),
            "each wrong number is 1 too large",
        ),
        (
            "make_local_attention_virtual_batches",
            changed(
                "make_local_attention_virtual_batches",
                lambda made, block_size, **_: replace(made, seq_lens=made.seq_lens - block_size),
            ),
            "each wrong number is 4 too small",
        ),
        (
            "get_dcp_local_seq_lens",
            changed("get_dcp_local_seq_lens", lambda made, **_: made.long()),
            "the values are right, of dtype int64 instead of int32",
        ),
        (
            "reshape_attn_output_for_spec_decode",
            changed("reshape_attn_output_for_spec_decode", lambda made, **_: made.clone()),
            "it returns a copy, and not a view of its argument",
        ),
        (
            "split_prefill_chunks",
            changed("split_prefill_chunks", lambda made, **_: made[::-1]),
            "the values are right, in another order",
        ),
        (
            "compute_mm_prefix_range_tensor",
            changed("compute_mm_prefix_range_tensor", write_ranges),
            "it writes into its argument mm_prefix_range",
        ),
        (
            "reorder_batch_to_split_decodes_and_prefills",
            changed("reorder_batch_to_split_decodes_and_prefills", swap_last),
            None,
        ),
        (
            "is_last_ubatch_empty",
            changed("is_last_ubatch_empty", lambda made, orig_num_tokens, **_: made ^ (orig_num_tokens == 8)),
            None,
        ),
    ],
)
def test_a_cause_is_named_if_it_explains_every_wrong_answer(name, function, cause):
    assert cause_of(name, function) == cause


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
