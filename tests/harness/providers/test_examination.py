"""Verdicts on fakes: right, wrong, raising, missing, mutating; with and without known departures."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attncheck import reference
from attncheck.harness.providers.batches import ALWAYS, ProviderBatch
from attncheck.harness.providers.examine import SUBJECTS, UnfitQuestionError, examine_subject
from attncheck.harness.providers.provider import Departure, Departures, Provider, Subject, SubjectSetting, subject_call
from attncheck.harness.providers.vllm_departures import DEPARTURES
from attncheck.reference import split_attn_metadata, split_decodes_and_prefills, v0

SETTING = SubjectSetting(ALWAYS, torch.device("cpu"))
BY_KEY = {subject.key: subject for subject in SUBJECTS}
SPLIT = BY_KEY["split_decodes_and_prefills"]


def provider(departures=(), adapters=None, **functions):
    module = ModuleType("fake")
    vars(module).update(functions)
    table = Departures("1", tuple(departures))
    return Provider("fake", "fake", "1", [module], adapters=adapters or {}, departures=table)


def examine(subject=SPLIT, departures=(), **functions):
    return examine_subject(provider(departures, **functions), subject, SETTING)


@pytest.mark.parametrize("key", [subject.key for subject in SUBJECTS])
def test_the_reference_itself_is_equal_in_every_question(key):
    subject = BY_KEY[key]
    ours = Provider("reference", "reference", "1", [reference], v0=[v0])
    seen = examine_subject(ours, subject, SETTING)
    assert seen is not None
    assert seen.verdict == "equal"
    assert seen.counts == {"equal": seen.questions}
    assert seen.questions > 0


@pytest.mark.parametrize("key", [subject.key for subject in SUBJECTS])
def test_a_subject_that_is_not_there_is_missing(key):
    assert examine(BY_KEY[key]) is None


def test_a_wrong_answer_is_reported_with_both_values():
    def split(common_attn_metadata, decode_threshold=1, require_uniform=False):
        answer = split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)
        return (*answer[:3], answer[3] + 1) if answer[1] else answer

    seen = examine(split_decodes_and_prefills=split)
    assert seen.verdict == "differs"
    assert 0 < seen.counts["differs"] < seen.questions
    assert seen.first.question == "one prompt (q 9 / s 9): decode_threshold 1, require_uniform False"
    (difference,) = seen.first.differences
    assert (difference.place, difference.expected, difference.seen) == ("returned[3]", "9", "10")


def test_an_exception_where_an_answer_was_due_is_reported():
    def split(common_attn_metadata, decode_threshold=1, require_uniform=False):
        if require_uniform:
            raise NotImplementedError("uniform batches")
        return split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)

    seen = examine(split_decodes_and_prefills=split)
    assert seen.verdict == "differs"
    assert seen.first.differences[0].seen == "a refusal (NotImplementedError: uniform batches)"


def test_answering_what_must_be_refused_differs():
    def split(common_attn_metadata, decode_threshold=1, require_uniform=False):
        return split_decodes_and_prefills(common_attn_metadata, max(decode_threshold, 0), require_uniform)

    seen = examine(split_decodes_and_prefills=split)
    assert seen.counts["differs"] == 1
    assert seen.first.question.endswith("decode_threshold -1, require_uniform False")


def test_writing_into_an_argument_differs():
    def split(common_attn_metadata, decode_threshold=1, require_uniform=False):
        answer = split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)
        common_attn_metadata.query_start_loc_cpu += 1
        return answer

    seen = examine(split_decodes_and_prefills=split)
    assert seen.verdict == "differs"
    assert {d.place for d in seen.first.differences} == {"arguments.common_attn_metadata.query_start_loc_cpu[0]"}


def test_a_view_where_a_new_tensor_is_due_differs():
    def slice_query_start_locs(query_start_loc, request_slice):
        made = reference.slice_query_start_locs(query_start_loc, request_slice)
        start, stop = request_slice.start, request_slice.stop
        return query_start_loc[: stop + 1] if start == 0 else made

    seen = examine(BY_KEY["slice_query_start_locs"], slice_query_start_locs=slice_query_start_locs)
    assert 0 < seen.counts["differs"] < seen.questions
    assert seen.first.differences[0].place == "returned.are new"


def test_a_copy_where_a_view_is_due_differs():
    def reshape_attn_output_for_spec_decode(attn_output):
        return reference.reshape_attn_output_for_spec_decode(attn_output).clone()

    subject = BY_KEY["reshape_attn_output_for_spec_decode"]
    seen = examine(subject, reshape_attn_output_for_spec_decode=reshape_attn_output_for_spec_decode)
    assert {difference.place for difference in seen.first.differences} == {"returned.is a view"}


def test_host_and_device_tensors_that_share_storage_differ():
    def make_local_attention_virtual_batches(attn_chunk_size, common_attn_metadata, block_size=0):
        made = reference.make_local_attention_virtual_batches(attn_chunk_size, common_attn_metadata, block_size)
        return replace(made, seq_lens=made.seq_lens_cpu)

    subject = BY_KEY["make_local_attention_virtual_batches"]
    seen = examine(subject, make_local_attention_virtual_batches=make_local_attention_virtual_batches)
    assert seen.counts["differs"] == 1
    assert seen.first.differences[0].place == "returned.seq_lens"


def test_a_padding_request_explains_nothing_about_the_others():
    def make_local_attention_virtual_batches(attn_chunk_size, common_attn_metadata, block_size=0):
        made = reference.make_local_attention_virtual_batches(attn_chunk_size, common_attn_metadata, block_size)
        padded = int(common_attn_metadata.seq_lens_cpu[-1]) == 0
        return replace(made, seq_lens=made.seq_lens - int(padded))

    subject, known = BY_KEY["make_local_attention_virtual_batches"], DEPARTURES.known
    seen = examine(subject, known, make_local_attention_virtual_batches=make_local_attention_virtual_batches)
    assert seen.counts["differs"] > 0
    assert "returned.with queries.seq_lens[0]" in {difference.place for difference in seen.first.differences}


def test_a_renamed_parameter_differs_and_a_further_optional_one_does_not():
    def renamed(common_attn_metadata, threshold=1, require_uniform=False):
        return split_decodes_and_prefills(common_attn_metadata, threshold, require_uniform)

    def further(common_attn_metadata, decode_threshold=1, require_uniform=False, hint=None):
        return split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)

    seen = examine(split_decodes_and_prefills=renamed)
    assert seen.verdict == "differs"
    assert seen.first.question == "its parameters"
    assert "parameters.decode_threshold" in {difference.place for difference in seen.first.differences}
    assert examine(split_decodes_and_prefills=further).verdict == "equal"


def test_a_function_that_takes_anything_is_judged_by_its_answers():
    def split(*arguments, **keywords):
        return split_decodes_and_prefills(*arguments, **keywords)

    assert examine(split_decodes_and_prefills=split).verdict == "equal"


def causal(ubatch_slices, common_attn_metadata):
    """As vLLM does: the micro-batches forget that the batch was not causal."""
    return [replace(made, causal=True) for made in split_attn_metadata(ubatch_slices, common_attn_metadata)]


def forgetful(target):
    return lambda ubatch_slices, common_attn_metadata: [
        replace(made, causal=True) for made in target(ubatch_slices, common_attn_metadata)
    ]


CAUSAL = Departure("split_attn_metadata", "judgement", "forgets", forgetful)


@pytest.mark.parametrize(("kind", "verdict"), [("judgement", "judged"), ("drift", "drifted")])
def test_a_known_departure_is_no_failure_and_is_counted(kind, verdict):
    known = replace(CAUSAL, kind=kind)
    seen = examine(BY_KEY["split_attn_metadata"], [known], split_attn_metadata=causal)
    assert seen.verdict == verdict
    assert seen.counts[verdict] == seen.shown[known] > 0
    assert seen.counts["equal"] == seen.questions - seen.counts[verdict]
    assert seen.stale == ()


def test_a_departure_explains_nothing_but_what_it_is_about():
    def wrong(ubatch_slices, common_attn_metadata):
        made = causal(ubatch_slices, common_attn_metadata)
        return [replace(each, num_reqs=each.num_reqs + (not common_attn_metadata.causal)) for each in made]

    seen = examine(BY_KEY["split_attn_metadata"], [CAUSAL], split_attn_metadata=wrong)
    assert seen.verdict == "differs"
    assert [difference.place for difference in seen.first.differences] == ["returned[0].num_reqs"]


def test_a_departure_that_no_longer_shows_is_stale():
    seen = examine(BY_KEY["split_attn_metadata"], [CAUSAL], split_attn_metadata=split_attn_metadata)
    assert seen.verdict == "equal"
    assert seen.stale == (CAUSAL,)


def test_a_departure_that_shows_in_some_of_the_answers_it_predicts_is_stale_too():
    def at_times(ubatch_slices, common_attn_metadata):
        forgets = common_attn_metadata.num_reqs > 3
        return (causal if forgets else split_attn_metadata)(ubatch_slices, common_attn_metadata)

    batches = (ProviderBatch("four", (1, 1, 1, 1), (4, 5, 6, 7), causal=False), *ALWAYS)
    setting = SubjectSetting(batches, torch.device("cpu"))
    subject = provider([CAUSAL], split_attn_metadata=at_times)
    seen = examine_subject(subject, BY_KEY["split_attn_metadata"], setting)
    assert (seen.first, seen.stale) == (None, (CAUSAL,))
    assert seen.shown[CAUSAL] > 0
    assert seen.missed[CAUSAL] > 0


LOOSE = Departure(
    "split_attn_metadata",
    "drift",
    "the batch's",
    lambda target: (
        lambda ubatch_slices, common_attn_metadata: [
            replace(made, max_seq_len=common_attn_metadata.max_seq_len)
            for made in target(ubatch_slices, common_attn_metadata)
        ]
    ),
)


@pytest.mark.parametrize(
    ("longest", "verdict"),
    [
        (lambda own, whole: whole, "drifted"),
        (lambda own, whole: own, "equal"),
        (lambda own, whole: own - 1, "differs"),
        (lambda own, whole: whole - 1, "differs"),
        (lambda own, whole: whole + 1, "differs"),
    ],
)
def test_where_the_bound_is_known_it_is_that_bound_or_the_truth(longest, verdict):
    def split(ubatch_slices, common_attn_metadata):
        made = split_attn_metadata(ubatch_slices, common_attn_metadata)
        whole = common_attn_metadata.max_seq_len
        return [replace(each, max_seq_len=longest(each.max_seq_len, whole)) for each in made]

    seen = examine(BY_KEY["split_attn_metadata"], [LOOSE], split_attn_metadata=split)
    assert seen.verdict == verdict


@pytest.mark.parametrize("shown", [(), (CAUSAL,), (LOOSE,), (CAUSAL, LOOSE)])
def test_departures_that_meet_in_one_question_are_distinguished(shown):
    target = split_attn_metadata
    for each in shown:
        target = each.changes(target)

    def split(ubatch_slices, common_attn_metadata):
        return target(ubatch_slices, common_attn_metadata)

    seen = examine(BY_KEY["split_attn_metadata"], [CAUSAL, LOOSE], split_attn_metadata=split)
    assert seen.first is None
    assert set(seen.shown) == set(shown)
    assert set(seen.stale) == {CAUSAL, LOOSE} - set(shown)


def test_a_function_without_a_newer_parameter_is_examined_without_it():
    def older(common_attn_metadata, decode_threshold=1, require_uniform=False):
        return split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)

    def newer(common_attn_metadata, decode_threshold=1, require_uniform=False, treat_short_extends_as_decodes=True):
        return split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)

    assert examine(split_decodes_and_prefills=older).verdict == "equal"
    seen = examine(split_decodes_and_prefills=newer)
    assert seen.first.question.endswith("treat_short_extends_as_decodes False")


def test_a_departure_of_form_is_shown_by_the_object_itself():
    known = Departure("split_attn_metadata", "drift", "is ours", shows=lambda target: target is split_attn_metadata)
    subject = BY_KEY["split_attn_metadata"]
    assert examine(subject, [known], split_attn_metadata=split_attn_metadata).verdict == "drifted"
    assert known.is_form
    assert not CAUSAL.is_form

    def copy(ubatch_slices, common_attn_metadata):
        return split_attn_metadata(ubatch_slices, common_attn_metadata)

    assert examine(subject, [known], split_attn_metadata=copy).stale == (known,)


def test_an_upper_bound_is_counted_and_no_failure():
    def loose(ubatch_slices, common_attn_metadata):
        made = split_attn_metadata(ubatch_slices, common_attn_metadata)
        return [replace(each, max_seq_len=each.max_seq_len + 3) for each in made]

    seen = examine(BY_KEY["split_attn_metadata"], split_attn_metadata=loose)
    assert seen.verdict == "equal"
    assert seen.bounds > 0


def test_a_question_that_does_not_fit_the_reference_is_a_fault_of_ours():
    wrong = Subject("PAD_SLOT_ID", lambda _: [subject_call("its value", refused=True)], lambda target: target)
    with pytest.raises(UnfitQuestionError, match="which it should refuse"):
        examine_subject(provider(PAD_SLOT_ID=-1), wrong, SETTING)
