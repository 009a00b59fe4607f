"""Results on fakes: right, wrong, raising, missing, mutating; with and without known departures; and their records."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attncheck import reference
from attncheck.errors import SelectionError
from attncheck.harness.providers.batches import ALWAYS, ProviderBatch
from attncheck.harness.providers.examine import (
    SUBJECTS,
    Function,
    UnfitQuestionError,
    examine_subject,
    header_with_providers,
    record_subject,
)
from attncheck.harness.providers.provider import Departure, Departures, Provider, Subject, SubjectSetting, subject_call
from attncheck.harness.providers.vllm_departures import DEPARTURES
from attncheck.harness.run.outcomes import Circumstances
from attncheck.reference import split_attn_metadata, split_decodes_and_prefills, v0
from attncheck.reports.analysis.utilities import function_rows
from attncheck.reports.run_file.header import BackendInfo, SuiteInfo

CPU = torch.device("cpu")
SETTING = SubjectSetting(ALWAYS[1:9], CPU)
BY_KEY = {subject.key: subject for subject in SUBJECTS}


def provider(departures=(), version="1", **functions):
    """A module of ``functions``, with known departures by subject."""
    module = ModuleType("fake")
    vars(module).update(functions)
    return Provider("fake", "fake", version, [module], departures=Departures("1", dict(departures)))


def examine(name, function, *departures):
    return examine_subject(provider({name: departures}, **{name: function}), BY_KEY[name], SETTING)


def places(seen):
    return {difference.place for difference in seen.first.differences}


def then(name, change):
    """The reference's function ``name``, with ``change`` applied to what it returns."""
    right = getattr(reference, name)

    def function(*positional, **named):
        return change(right(*positional, **named), *positional, **named)

    return function


def test_the_reference_itself_is_equal_in_every_question_and_nothing_is_missing():
    ours = Provider("reference", "reference", "1", [reference], v0=[v0])
    seen = {subject.key: examine_subject(ours, subject, SubjectSetting(ALWAYS, CPU)) for subject in SUBJECTS}
    assert {key: each.first for key, each in seen.items() if each.first} == {}
    assert all(each.counts == {"equal": each.questions} and each.questions for each in seen.values())
    assert {examine_subject(provider(), subject, SETTING) for subject in SUBJECTS} == {None}  # which has nothing


def raises_for_uniform(made, *_, require_uniform=False, **__):
    if require_uniform:
        raise NotImplementedError("uniform batches")
    return made


def writes_starts(made, common_attn_metadata, **_):
    common_attn_metadata.query_start_loc_cpu += 1
    return made


def shares_lengths(made, **_):
    return replace(made, seq_lens=made.seq_lens_cpu)


def never_refuses(common_attn_metadata, decode_threshold=1, require_uniform=False):
    return split_decodes_and_prefills(common_attn_metadata, max(decode_threshold, 0), require_uniform)


def view_of_the_first(made, query_start_loc, request_slice):
    return query_start_loc[: request_slice.stop + 1] if request_slice.start == 0 else made


SPLIT, CHUNKS, RESHAPE = (
    "split_decodes_and_prefills",
    "make_local_attention_virtual_batches",
    "reshape_attn_output_for_spec_decode",
)


@pytest.mark.parametrize(
    ("name", "function", "place", "count"),
    [
        (SPLIT, then(SPLIT, lambda made, *_, **__: (*made[:3], made[3] + 1)), "returned[3]", None),
        (SPLIT, then(SPLIT, raises_for_uniform), "refusal", None),
        (SPLIT, never_refuses, "refusal", 1),
        (SPLIT, then(SPLIT, writes_starts), "arguments.common_attn_metadata.query_start_loc_cpu[0]", None),
        ("slice_query_start_locs", then("slice_query_start_locs", view_of_the_first), "returned.memory", None),
        (RESHAPE, then(RESHAPE, lambda made, **_: made.clone()), "returned.result.memory", 3),
        (CHUNKS, then(CHUNKS, shares_lengths), "returned.seq_lens", 1),
    ],
)
def test_a_wrong_answer_is_reported_with_its_place(name, function, place, count):
    seen = examine(name, function)
    assert places(seen) == {place}
    assert 0 < seen.counts["differs"] < seen.questions
    assert count in (None, seen.counts["differs"])
    if place == "returned[3]":
        assert seen.first.question == "one prompt (q 9 / s 9): decode_threshold 1, require_uniform False"
        assert str(seen.first.differences[0]) == "returned[3]: expected 9; got 10"


def test_a_padding_request_explains_nothing_about_the_others():
    def shortened(made, common_attn_metadata, **_):
        return replace(made, seq_lens=made.seq_lens - int(common_attn_metadata.seq_lens_cpu[-1] == 0))

    seen = examine(CHUNKS, then(CHUNKS, shortened), *DEPARTURES.known[CHUNKS])
    assert "returned.with queries.seq_lens[0]" in places(seen)


def renamed(common_attn_metadata, threshold=1, require_uniform=False):
    return split_decodes_and_prefills(common_attn_metadata, threshold, require_uniform)


def further(common_attn_metadata, decode_threshold=1, require_uniform=False, hint=None):
    return split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)


def newer(common_attn_metadata, decode_threshold=1, require_uniform=False, treat_short_extends_as_decodes=True):
    return split_decodes_and_prefills(common_attn_metadata, decode_threshold, require_uniform)


def anything(*arguments, **keywords):
    return split_decodes_and_prefills(*arguments, **keywords)


@pytest.mark.parametrize(
    ("function", "place"),
    [(renamed, "parameters.decode_threshold"), (newer, "returned[0]"), (further, None), (anything, None)],
)
def test_parameters_are_compared_and_older_functions_are_examined_without_the_newer_ones(function, place):
    seen = examine(SPLIT, function)
    assert place is None if seen.first is None else place in places(seen)


# Known departures, on the micro-batches of batches that are causal and that are not.

PIECES = "split_attn_metadata"


def forgetful(target):
    """As vLLM does: the micro-batches forget that the batch was not causal."""
    return lambda ubatch_slices, common_attn_metadata: [
        replace(made, causal=True) for made in target(ubatch_slices, common_attn_metadata)
    ]


def with_longest(target, longest=lambda _, whole: whole):
    def function(ubatch_slices, common_attn_metadata):
        made = target(ubatch_slices, common_attn_metadata)
        return [replace(each, max_seq_len=longest(each.max_seq_len, common_attn_metadata.max_seq_len)) for each in made]

    return function


CAUSAL = Departure("judgement", "forgets", forgetful)
LOOSE = Departure("drift", "the batch's", with_longest)


@pytest.mark.parametrize(("kind", "word"), [("judgement", "judged"), ("drift", "drifted")])
def test_a_known_departure_is_no_failure_and_is_counted(kind, word):
    known = replace(CAUSAL, kind=kind)
    seen = examine(PIECES, forgetful(split_attn_metadata), known)
    assert (seen.first, seen.stale) == (None, ())
    assert seen.counts[word] == seen.shown[known] > 0
    assert seen.counts["equal"] == seen.questions - seen.counts[word]


def test_a_departure_explains_nothing_but_what_it_is_about():
    def wrong(ubatch_slices, common_attn_metadata):
        made = forgetful(split_attn_metadata)(ubatch_slices, common_attn_metadata)
        return [replace(each, num_reqs=each.num_reqs + (not common_attn_metadata.causal)) for each in made]

    assert places(examine(PIECES, wrong, CAUSAL)) == {"returned[0].num_reqs"}


def test_a_departure_that_shows_in_only_some_of_the_answers_it_predicts_is_stale():
    def at_times(ubatch_slices, common_attn_metadata):
        forgets = common_attn_metadata.num_reqs > 3
        return (forgetful(split_attn_metadata) if forgets else split_attn_metadata)(ubatch_slices, common_attn_metadata)

    batches = (ProviderBatch("four", (1, 1, 1, 1), (4, 5, 6, 7), causal=False), *SETTING.batches)
    fake = provider({PIECES: [CAUSAL]}, **{PIECES: at_times})
    seen = examine_subject(fake, BY_KEY[PIECES], SubjectSetting(batches, CPU))
    assert (seen.first, seen.stale) == (None, (CAUSAL,))
    assert seen.shown[CAUSAL] * seen.missed[CAUSAL] > 0


@pytest.mark.parametrize(
    ("longest", "is_right", "is_shown"),
    [
        (lambda own, whole: whole, True, True),
        (lambda own, whole: own, True, False),
        (lambda own, whole: own - 1, False, False),
        (lambda own, whole: whole - 1, False, False),
        (lambda own, whole: whole + 1, False, False),
    ],
)
def test_where_the_bound_is_known_it_is_that_bound_or_the_truth(longest, is_right, is_shown):
    seen = examine(PIECES, with_longest(split_attn_metadata, longest), LOOSE)
    assert (seen.first is None, bool(seen.shown)) == (is_right, is_shown)
    unknown = examine(PIECES, with_longest(split_attn_metadata, lambda own, _: own + 3))
    assert unknown.counts == {"equal": unknown.questions}  # an upper bound, which is counted and no failure
    assert unknown.bounds > 0


@pytest.mark.parametrize("shown", [(), (CAUSAL,), (LOOSE,), (CAUSAL, LOOSE)])
def test_departures_that_meet_in_one_question_are_distinguished(shown):
    target = split_attn_metadata
    for each in shown:
        target = each.changes(target)

    def split(ubatch_slices, common_attn_metadata):
        return target(ubatch_slices, common_attn_metadata)

    seen = examine(PIECES, split, CAUSAL, LOOSE)
    assert seen.first is None
    assert set(seen.shown) == set(shown)
    assert set(seen.stale) == {CAUSAL, LOOSE} - set(shown)


def test_a_departure_of_form_is_shown_by_the_object_itself():
    known = Departure("drift", "is ours", shows=lambda target: target is split_attn_metadata)
    assert set(examine(PIECES, split_attn_metadata, known).shown) == {known}
    assert examine(PIECES, with_longest(split_attn_metadata, lambda own, _: own), known).stale == (known,)


# Records, on one constant, and the header.

PAD = Subject("PAD_SLOT_ID", lambda _: [subject_call("its value")], lambda target: target, is_function=False)
KNOWN = Departure("judgement", "is 0", lambda _: 0)


def record(value, *known, subject=PAD, version="1", gone=()):
    fake = provider({"PAD_SLOT_ID": known}, version, **({} if value is None else {"PAD_SLOT_ID": value}))
    fake = replace(fake, departures=replace(fake.departures, gone=gone))
    return record_subject(fake, subject, SETTING, Circumstances(0, "0" * 12, "0.1.0"))


@pytest.mark.parametrize(
    ("value", "known", "outcome", "word"),
    [
        (-1, (), "passed", "equal"),
        (0, (), "failed", "differs"),
        (0, (KNOWN,), "passed", "judged"),
        (-1, (KNOWN,), "xpassed", "stale"),
        (None, (), "unsupported", "missing"),
    ],
)
def test_outcomes_and_the_words_of_reports(value, known, outcome, word):
    made = record(value, *known)
    assert made.outcome == outcome
    (row,) = function_rows([made], "fake")
    assert (row.name, row.word) == ("PAD_SLOT_ID", word)


def test_records_state_departures_causes_and_reasons():
    departed = record(0, KNOWN)
    assert departed.notes == ("judgement: is 0 (1 of 1 question)",)
    assert departed.figures["judged"] == departed.figures["judgements"] == 1
    assert record(0).meaning == "each wrong number is 1 too large"
    assert record(-1, KNOWN).reason == "known in 1, and no longer there: is 0"
    later = record(-1, KNOWN, version="2.1")  # of another version, so that the run notes it and goes on
    assert (later.outcome, later.notes) == ("passed", ("stale: known in 1, and no longer there: is 0",))
    assert record(None, gone=(("PAD_*", "padding went"),)).reasons == ("offers nothing of that name: padding went",)


def test_a_question_that_does_not_fit_the_reference_is_attnchecks_own_fault():
    unfit = replace(PAD, questions=lambda _: [subject_call("its value", refused=True)])
    with pytest.raises(UnfitQuestionError, match="which it should refuse"):
        examine_subject(provider(PAD_SLOT_ID=-1), unfit, SETTING)
    made = record(-1, subject=unfit)
    assert (made.outcome, made.stage) == ("errored", "attncheck itself")


FAKE = BackendInfo(name="fake", ref="fake.py", version="2.0")
FUNCTIONS = (Function("PAD_SLOT_ID"),)


def test_the_header_announces_providers_and_refuses_names_that_clash(header):
    header = header.model_copy(update={"suites": header.suites[:1], "checks": ("numerics",), "backends": ()})
    alone = header_with_providers(header, [FAKE], FUNCTIONS, ["a note"])
    assert alone.checks == ("utilities",)
    assert [(suite.name, suite.cases) for suite in alone.suites] == [("smoke", 2), ("utilities", 1)]
    assert alone.notes == ("a note",)
    beside = header.model_copy(update={"backends": (BackendInfo(name="b", ref="b"),)})
    both = header_with_providers(beside, [FAKE], FUNCTIONS, [])
    assert both.checks == ("numerics", "utilities")
    assert [info.name for info in both.backends] == ["b", "fake"]
    backend = header.model_copy(update={"backends": (BackendInfo(name="fake", ref="b"),)})
    suite = header.model_copy(update={"suites": (SuiteInfo(name="utilities", ref="u.yaml", cases=1),)})
    for clashing in (backend, suite):
        with pytest.raises(SelectionError, match="called"):
            header_with_providers(clashing, [FAKE], FUNCTIONS, [])
