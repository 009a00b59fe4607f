"""What failing cases have in common: the simplest conditions that no passing case meets together."""

from random import Random
from time import process_time

import pytest

from attncheck.reports.analysis.contrast import contrast_of, parts_of


def cases(key, *values):
    """Return a case for each value of one key; None: the key is not given."""
    return [{} if value is None else {key: value} for value in values]


def conditions_of(contrast):
    assert contrast is not None
    return [(each.key, each.bound, each.values) for each in contrast.conditions]


@pytest.mark.parametrize(
    ("wrong", "right", "condition", "text"),
    [
        ((8, 8), (1, 1), ("", (8,)), "size is 8 in all 2 that fail; 1 in all 2 that pass"),
        ((1, 1), (16, 16), ("", (1,)), "size is 1 in all 2 that fail; 16 in all 2 that pass"),
        (
            (1, 8, 8, 128),
            (16, 32),
            ("", (1, 8, 128)),
            "size is 1, 8 or 128 in all 4 that fail; 16 or 32 in all 2 that pass",
        ),
        (
            (64, 96, 128, 160, 192),
            (16, 32, 48),
            ("at least", (64,)),
            "size is at least 64 in all 5 that fail; in none that passes",
        ),
        (
            (1, 2, 4, 8, 12),
            (16, 32, 48),
            ("at most", (12,)),
            "size is at most 12 in all 5 that fail; in none that passes",
        ),
        ((7, 8, 9), (None, None), ("given", ()), "size is given in all 3 that fail; in none that passes"),
        ((7,), (None, None), ("", (7,)), "size is 7 in the one case that fails; in none that passes"),
        ((None, None), (7, 8), ("", (None,)), "size is not given in all 2 that fail; 7 or 8 in all 2 that pass"),
        (("HND", "HND"), ("NHD",), ("", ("HND",)), "size is HND in all 2 that fail; NHD in the one that passes"),
        ((True, True), (None,), ("", (True,)), "size is given in all 2 that fail; not in the one that passes"),
    ],
)
def test_one_key_separates_failing_cases_from_passing_ones(wrong, right, condition, text):
    contrast = contrast_of(cases("size", *wrong), cases("size", *right))
    assert conditions_of(contrast) == [("size", *condition)]
    assert contrast is not None
    assert (contrast.wrong, contrast.right, contrast.exceptions) == (len(wrong), len(right), 0)
    assert str(contrast) == text


def test_two_keys_separate_cases_that_neither_does_alone():
    wrong = [{"heads": heads, "dtype": "fp8", "size": 64} for heads in (10, 10)]
    right = [{"heads": 10, "dtype": "bf16", "size": 64}, {"heads": 8, "dtype": "fp8", "size": 64}]
    contrast = contrast_of(wrong, right)
    assert sorted(conditions_of(contrast)) == [("dtype", "", ("fp8",)), ("heads", "", (10,))]
    assert str(contrast).endswith(" in all 2 that fail; in none that passes")


def test_no_more_than_three_keys_or_four_values_are_a_pattern():
    wrong = [{"a": True, "b": True, "c": True}]
    right = [{"a": True, "b": True}, {"a": True, "c": True}, {"b": True, "c": True}]
    assert [key for key, _, _ in conditions_of(contrast_of(wrong, right))] == ["a", "b", "c"]
    four = [{key: True for key in "abcd" if key != other} for other in "abcd"]
    assert contrast_of([dict.fromkeys("abcd", True)], four) is None
    scattered = cases("size", 1, 3, 5, 7, 9)
    assert contrast_of(scattered[:4], cases("size", 2, 4, 6, 8)) is not None
    assert contrast_of(scattered, cases("size", 2, 4, 6, 8, 10)) is None


def test_all_that_separates_the_cases_equally_is_named_or_counted():
    wrong = {"layer.sinks": True, "cache.block_size": 8, "inputs": "zeros", "other": 1}
    right = cases("cache.block_size", 16)
    contrast = contrast_of([wrong], right)
    assert conditions_of(contrast) == [("layer.sinks", "", (True,))]
    assert str(contrast).endswith(" (other differences: cache.block_size is 8; inputs is zeros; other is 1)")
    contrast = contrast_of([wrong | {"path": "x", "more": 2}] * 4, right)
    assert str(contrast).endswith(" (other differences: cache.block_size is 8; path is x; inputs is zeros; and 2 more)")


def test_a_kind_of_request_that_is_absent_is_written_in_words():
    contrast = contrast_of(cases("size", 1, 1), [{"batch has a decode": True, "size": 1}] * 2)
    assert str(contrast) == "batch has no decode in all 2 that fail; in none that passes"


def test_where_nothing_excludes_all_what_excludes_nine_of_ten_is_the_answer():
    wrong = cases("window", 9, 9)
    right = [*cases("window", 9), *cases("window", *[None] * 9)]
    contrast = contrast_of(wrong, right)
    assert conditions_of(contrast) == [("window", "", (9,))]
    assert contrast is not None
    assert contrast.exceptions == 1
    assert str(contrast) == "window is 9 in all 2 that fail; in 1 of 10 that pass"
    assert contrast_of(wrong, [*right, *cases("window", 9)]) is None
    assert contrast_of(wrong, []) is contrast_of([], right) is None


def test_what_a_layer_has_explains_better_than_its_sizes_a_length_and_a_dtype():
    features = {"layer.logits_soft_cap": 30.0, "layer.head_size": 80, "layer.dtype": "float16"}
    wrong = [features | {"batch.max_seq_len": length} for length in (300, 90, 120)]
    right = [{"layer.dtype": "float32", "batch.max_seq_len": 40, "layer.head_size": 64}]
    contrast = contrast_of(wrong, right)
    assert contrast is not None
    found = [contrast.conditions[0], *contrast.alternatives]
    keys = ["layer.logits_soft_cap", "layer.head_size", "batch.max_seq_len", "layer.dtype"]
    assert [each.key for each in found] == keys
    assert (found[2].bound, found[2].values) == ("at least", (90,))


def test_values_are_compared_with_their_types():
    """A sentence names the value that the failing cases have, though True == 1."""
    assert str(contrast_of(cases("v_scale", 1, 1), cases("v_scale", 2))).startswith("v_scale is 1 in all 2")
    assert str(contrast_of(cases("sinks", True, True), cases("sinks", 2))).startswith("sinks is given in all 2")
    assert conditions_of(contrast_of(cases("alibi", True), cases("alibi", 1))) == [("alibi", "", (True,))]
    contrast = contrast_of(cases("k_scale", 0.5, "2 values", 0.5), cases("k_scale", None, 1, True, "per head"))
    assert conditions_of(contrast) == [("k_scale", "", (0.5, "2 values"))]


def test_many_conditions_without_an_answer_take_less_than_a_second():
    """No three of forty conditions exclude all passing cases, and all combinations are tried; nor do any of 600."""
    luck = Random(0)
    wrong = [{f"key{place}": 0 for place in range(40)}] * 100
    right = [{f"key{place}": luck.randrange(10) // 9 for place in range(40)} for _ in range(200)]
    names = [f"key-{number}" for number in range(600)]
    without = [{name: True for name in names if name != missing} for missing in names]
    before = process_time()
    assert contrast_of(wrong, right) is None
    assert parts_of(wrong, right) == []
    assert process_time() - before < 1
    before = process_time()
    assert contrast_of([dict.fromkeys(names, True)], without) is None
    assert process_time() - before < 2


def test_failing_cases_of_two_causes_are_two_parts():
    right = [{"window": 0, "heads": 8}, {"heads": 4}]
    wrong = [
        {"window": 9, "heads": 8},
        {"heads": 10},
        {"window": 9, "heads": 4},
        {"heads": 10},
        {"window": 9},
    ]
    parts = parts_of(wrong, right)
    assert [(conditions_of(contrast), positions) for contrast, positions in parts] == [
        ([("window", "", (9,))], [0, 2, 4]),
        ([("heads", "", (10,))], [1, 3]),
    ]
    assert [(contrast.wrong, contrast.right) for contrast, _ in parts] == [(3, 2), (2, 2)]


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(cases("a", 1, 1), id="one part is no split"),
        pytest.param([{name: 1} for name in "abcde"], id="five are too many"),
        pytest.param([{"a": 1}, {}], id="one does not differ from those that pass"),
    ],
)
def test_what_is_not_separable_as_a_whole_is_not_split(wrong):
    assert parts_of(wrong, [{}]) == []
