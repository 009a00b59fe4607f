"""The batch grammar: what it accepts, what it refuses and why, and that formatting is lossless."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.cases.grammar import format_batch, parse_batch
from attncheck.errors import BatchSpecError, QuestionError, SpecError
from attncheck.reference.spec import RequestSpec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q1", [(1, 1, 1)]),
        ("q2k", [(1, 2048, 2048)]),
        ("8q1s1k", [(8, 1, 1024)]),
        ("2q2ks4k_32q1s1k", [(2, 2048, 4096), (32, 1, 1024)]),
        ("q5s37_3q1s200", [(1, 5, 37), (3, 1, 200)]),
        ("q5s5", [(1, 5, 5)]),
        ("q1_q1", [(1, 1, 1), (1, 1, 1)]),
        ("007q010", [(7, 10, 10)]),
        ("2097152q1s1k", [(2097152, 1, 1024)]),  # exactly 2^31 tokens
        ("q2097152k", [(1, 2**31, 2**31)]),
    ],
)
def test_parse(text: str, expected: list[tuple[int, int, int]]) -> None:
    assert [(r.count, r.query_len, r.seq_len) for r in parse_batch(text)] == expected


@pytest.mark.parametrize(
    ("text", "position", "phrase"),
    [
        ("", 0, "empty"),
        ("0q1", 0, "count of 0 asks nothing"),
        ("q1_0q5s9", 3, "count of 0 asks nothing"),
        ("q0", 0, "padding: {requests: n}"),
        ("2q0s16", 1, "without new tokens"),
        ("q5s3", 2, "write q5s8 for 3 tokens of context"),
        ("q1ks1", 3, "s counts the new tokens too"),
        ("q5s0", 2, "cannot hold 5 new ones"),
        ("q1kv1k", 2, "write q1s1k"),
        ("q1_8q2kkv4k", 7, "write 8q2ks4k"),
        ("q2K", 2, "write q2k"),
        ("Q1S1k", 0, "write q1s1k"),
        ("q1 s5", 2, "blanks"),
        (" q1", 0, "blanks"),
        ("q1_\tq2", 3, "blanks"),
        ("q1__q2", 3, "segment is empty"),
        ("_q1", 0, "segment is empty"),
        ("q1_", 3, "segment is empty"),
        ("8", 0, "lacks its q"),
        ("s5", 0, "lacks its q"),
        ("8x1", 0, "lacks its q"),
        ("q", 0, "'q' is no segment"),
        ("q1m", 2, "'q1m' is no segment"),
        ("q1s", 2, "'q1s' is no segment"),
        ("2kq1", 1, "'2kq1' is no segment"),
        ("q-1", 1, "'q-1' is no segment"),
        ("q1.5", 2, "'q1.5' is no segment"),
        ("q1s2s3", 4, "'q1s2s3' is no segment"),
        ("q٣", 1, "is no segment"),  # a digit, but not one of the grammar
        ("q1000000000000", 1, "too large"),
        ("q2097153k", 1, "too large"),
        ("q1_q1s9999999999k", 6, "too large"),
        ("9999999999q1", 0, "too large"),
        ("q1k_2097152q1s1k", 4, "holds 2147484672 tokens"),
        ("q" + "9" * 100_000, 1, "too large"),
    ],
)
def test_refusal(text: str, position: int, phrase: str) -> None:
    with pytest.raises(BatchSpecError) as caught:
        parse_batch(text)
    assert phrase in str(caught.value)
    assert caught.value.position == position
    assert caught.value.text == text
    assert len(str(caught.value)) < 400
    assert isinstance(caught.value, QuestionError)


def test_a_huge_batch_costs_no_memory() -> None:
    requests = parse_batch("2147483648q1")
    assert len(requests) == 1
    assert sys.getsizeof(requests) < 1000


_NUMBERS = st.one_of(st.integers(1, 300), st.integers(1, 64).map(lambda n: n * 1024))


@st.composite
def _requests(draw: st.DrawFn) -> RequestSpec:
    query_len = draw(_NUMBERS)
    context = draw(st.one_of(st.just(0), _NUMBERS))
    return RequestSpec(query_len=query_len, seq_len=query_len + context, count=draw(st.integers(1, 40)))


@given(st.lists(_requests(), min_size=1, max_size=12).map(tuple))
def test_formatting_is_lossless(requests: tuple[RequestSpec, ...]) -> None:
    assert parse_batch(format_batch(requests)) == requests


@given(st.from_regex(r"([1-9][0-9]?)?q[0-9]{1,3}k?(s[0-9]{1,4}k?)?(_q[1-9]s[1-9][0-9])?", fullmatch=True))
def test_what_parses_formats_to_the_same_batch(text: str) -> None:
    try:
        requests = parse_batch(text)
    except BatchSpecError:
        return
    canonical = format_batch(requests)
    assert parse_batch(canonical) == requests
    assert format_batch(parse_batch(canonical)) == canonical


@given(st.text(alphabet="0123456789qskKv_ .", max_size=20))
def test_any_text_parses_or_is_refused(text: str) -> None:
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
def test_formatting_refuses_what_the_string_cannot_say(requests: tuple[RequestSpec, ...], field: str) -> None:
    with pytest.raises(SpecError) as caught:
        format_batch(requests)
    assert caught.value.field == field


def test_canonical_form() -> None:
    assert format_batch(parse_batch("1q1024s1024_8q1s4096_q3")) == "q1k_8q1s4k_q3"
