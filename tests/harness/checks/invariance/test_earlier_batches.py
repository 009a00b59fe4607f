"""The batches that come before: larger and smaller ones, which need nothing beyond the case's layer."""

import pytest

from attncheck.cases.loader import load_suite
from attncheck.harness.checks import history as batches
from attncheck.reference.spec import AttentionType


def lengths(batch):
    return batch and [(r.query_len, r.total_len) for r in batch.case.batch]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (batches.alike, [(1, 36), (5, 39), (33, 33)]),
        (batches.half, [(17, 17), (3, 20), (1, 19)]),
        (batches.longer, [(1, 89), (5, 91), (33, 49)]),
        (batches.more, [(1, 36), (5, 39), (33, 33), (33, 33), (5, 39), (1, 36), (1, 36)]),
        (batches.fewer, [(33, 33)]),
        (batches.prompts, [(37, 37), (40, 40), (33, 33)]),
        (batches.decodes, [(1, 37), (1, 36), (1, 1)]),
        (batches.many_keys, [(1, 601)]),
    ],
)
def test_the_lengths_of_each_kind(make_case, make, expected):
    batch = make(make_case((1, 37), (5, 40), (33, 33), padding=(1, 2)))
    assert lengths(batch) == expected
    assert batch.case.batch.padding.tokens == (2 if make is batches.alike else 0)


def test_a_batch_that_would_be_the_case_s_own_kind_is_left_out(make_case):
    assert batches.decodes(make_case((1, 37), (1, 5))) is None
    assert batches.prompts(make_case((33, 33), (1, 1))) is None
    assert batches.fewer(make_case((33, 33))) is None
    encoder = make_case((9, 9), (3, 3), attn_type=AttentionType.ENCODER_ONLY)
    assert batches.many_keys(encoder) is None
    assert lengths(batches.longer(encoder)) == [(18, 18), (6, 6)]


def test_one_is_larger_and_one_smaller_and_all_occur_in_smoke():
    kinds, orders = set(), set()
    for case in load_suite("smoke"):
        pair = batches.earlier_batches(case)
        larger = {batch.kind for make in batches.LARGER if (batch := make(case)) is not None}
        is_large = [batch.kind in larger for batch in pair]
        assert sorted(is_large) == [False, True]
        kinds |= {batch.kind for batch in pair}
        orders.add(is_large[0])
    assert len(kinds) == len(batches.LARGER) + len(batches.SMALLER)
    assert orders == {False, True}
