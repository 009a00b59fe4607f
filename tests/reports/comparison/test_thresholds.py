"""What ``--fail-on`` understands, and which cases it concerns."""

import pytest

from attncheck.errors import QuestionError, UnknownNameError
from attncheck.reports.comparison.thresholds import SlowdownThresholds, parse_thresholds

LEAST = 0.01


@pytest.mark.parametrize(
    ("text", "case", "part", "share"),
    [
        ("decode: 5%", "decode/a", "forward", 0.05),
        ("decode:5 %", "decode/a", "build", 0.05),
        ("decode: 5%", "decode_long/a", "forward", None),
        ("dec*: 2.5%", "decode/a", "forward", 0.025),
        ("decode/long-*: 7%", "decode/long-8k.bfloat16", "forward", 0.07),
        ("decode/long-*: 7%", "decode/short", "forward", None),
        ("12%", "anything/at-all", "prefill", 0.12),
        ("@build: 20%", "decode/a", "build", 0.2),
        ("@build: 20%", "decode/a", "forward", None),
        ("decode@forward: 3%", "decode/a", "forward", 0.03),
        ("decode/[ab]*@forward: 3%", "decode/a", "forward", 0.03),
    ],
)
def test_a_threshold_concerns_what_it_names(text, case, part, share):
    found = parse_thresholds([text], least=LEAST).share(case, part)  # type: ignore[arg-type]
    assert found == (None if share is None else pytest.approx(share))


def test_of_several_the_last_that_concerns_a_case_counts():
    thresholds = parse_thresholds(["5%", "@build: 20%", "decode: 3%"], least=LEAST)
    assert thresholds.share("mixed/a", "forward") == pytest.approx(0.05)
    assert thresholds.share("mixed/a", "build") == pytest.approx(0.2)
    assert thresholds.share("decode/a", "build") == pytest.approx(0.03)
    assert SlowdownThresholds().share("decode/a", "forward") == 0.0  # every slowdown is too much


def test_another_form_is_refused_with_examples():
    for text in ("", "decode", "decode: 5", "decode 5%", "decode: -5%", ": x%", "a:b: 5%", "decode: 5%%"):
        with pytest.raises(QuestionError, match="decode: 5%"):
            parse_thresholds([text], least=LEAST)
    with pytest.raises(UnknownNameError, match="did you mean 'build'"):
        parse_thresholds(["decode@biuld: 5%"], least=LEAST)
    with pytest.raises(QuestionError, match="below 1%"):
        parse_thresholds(["decode: 0.5%"], least=LEAST)


def test_a_pattern_that_matches_nothing_is_refused_with_the_suites():
    thresholds = parse_thresholds(["5%", "decod: 5%"], least=LEAST)
    with pytest.raises(QuestionError, match=r"'decod: 5%' matches no case .*decode, mixed"):
        thresholds.refuse_unmatched(["mixed/a", "decode/a", "decode/b"])
    parse_thresholds(["decode: 5%"], least=LEAST).refuse_unmatched(["decode/a"])
