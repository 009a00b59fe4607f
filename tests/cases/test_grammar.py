"""The batch grammar: what it accepts, what it refuses and why, and that formatting is lossless."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.cases.grammar import format_batch, parse_batch
from attncheck.errors import BatchSpecError, QuestionError, SpecError
from attncheck.reference.step_spec import RequestSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q1", [(1, 1, 1)]),
        ("q2k", [(1, 2048, 2048)]),
        ("8q1s1k", [(8, 1, 1024)]),
        ("2q2ks4k_32q1s1k", [(2, 2048, 4096), (32, 1, 1024)]),
        ("007q010", [(7, 10, 10)]),
        ("2097152q1s1k", [(2097152, 1, 1024)]),  # exactly 2^31 tokens
        ("q2097152k", [(1, 2**31, 2**31)]),
    ],
)
def test_parse(text, expected):
    assert [(r.count, r.query_len, r.seq_len) for r in parse_batch(text)] == expected


FORM = "a segment is [count]q<new tokens>[s<total tokens>], with lowercase k for x1024, as in 2q2ks4k_32q1s1k"


@pytest.mark.parametrize(
    ("text", "position", "phrase"),
    [
        ("", 0, "the string is empty; FORM"),
        ("0q1", 0, "a count of 0 has no effect; leave the segment out, or give a count"),
        ("q0", 0, "a request without new tokens has no effect; padding requests are written "),
        ("q5s3", 2, "3 are fewer than the 5 new ones; write q5s8 for 3 tokens of context, or use the list form"),
        ("q1_8q2kkv4k", 7, "kv is the old spelling of s; write 8q2ks4k"),
        ("Q1S1k", 0, "'Q' must be lowercase; write q1s1k"),
        ("q1 s5", 2, "blanks are not part of a batch; FORM"),
        ("q1__q2", 3, "a segment is empty; write one _ between segments"),
        ("s5", 0, "a segment lacks its q; FORM"),
        ("q1s2s3", 4, "'q1s2s3' is no segment; FORM"),
        ("q٣", 1, "'q٣' is no segment; FORM"),  # a digit, but not one of the grammar
        ("q2097153k", 1, "2097153k is too large; at most 2147483648 tokens are allowed"),
        ("q1_q1s9999999999k", 6, "9999999999k is too large"),
        ("9999999999q1", 0, "9999999999 is too large"),
        ("q" + "9" * 100_000, 1, "999999999999999999999999 is too large"),
        ("q1k_2097152q1s1k", 4, "up to here the batch holds 2147484672 tokens; at most 2147483648 tokens are allowed"),
    ],
)
def test_refusal(text, position, phrase):
    with pytest.raises(BatchSpecError) as caught:
        parse_batch(text)
    message = str(caught.value).replace(f" (at character {position + 1})", "")
    assert message != str(caught.value)
    assert phrase in message.replace(FORM, "FORM")
    assert caught.value.position == position
    assert caught.value.text == text
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, QuestionError)


_NUMBERS = st.one_of(st.integers(1, 300), st.integers(1, 64).map(lambda n: n * 1024))


@st.composite
def _requests(draw):
    query_len = draw(_NUMBERS)
    context = draw(st.one_of(st.just(0), _NUMBERS))
    return RequestSpec(query_len=query_len, seq_len=query_len + context, count=draw(st.integers(1, 40)))


@settings(max_examples=40)
@given(st.lists(_requests(), min_size=1, max_size=12).map(tuple))
def test_formatting_is_lossless(requests):
    assert parse_batch(format_batch(requests)) == requests


@settings(max_examples=60)
@given(st.text(alphabet="0123456789qskKv_ .", max_size=20))
def test_any_text_parses_or_is_refused(text):
    refusal = None
    try:
        assert parse_batch(text)
    except BatchSpecError as error:
        refusal = error
    assert refusal is None or (0 <= refusal.position <= len(text) and refusal.allowed)


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ((RequestSpec(query_len=1, encoder_len=5),), "encoder_len"),
        ((RequestSpec(query_len=1, seq_len=20, shared_prefix=16),), "shared_prefix"),
        ((RequestSpec(query_len=5, seq_len=3),), "seq_len"),
        ((), "requests"),
    ],
)
def test_formatting_refuses_what_the_string_cannot_hold(requests, field):
    with pytest.raises(SpecError) as caught:
        format_batch(requests)
    assert caught.value.field == field
