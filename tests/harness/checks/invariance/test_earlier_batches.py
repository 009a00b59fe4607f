"""The batches that come before: larger and smaller ones, which need nothing beyond the case's layer."""

from typing import Any

import pytest

from attncheck.cases.loader import load_suite
from attncheck.harness.checks import history as batches
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import AttentionType, MicroBatchOptions, RequestSpec, SpecDecodeOptions


def lengths(batch: Any) -> list[tuple[int, int]] | None:
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
def test_the_lengths_of_each_kind(make_case: Any, make: Any, expected: list[tuple[int, int]]) -> None:
    batch = make(make_case((1, 37), (5, 40), (33, 33), padding=(1, 2)))
    assert lengths(batch) == expected
    assert batch.case.batch.padding.tokens == (2 if make is batches.alike else 0)


def test_a_batch_that_would_be_the_case_s_own_kind_is_left_out(make_case: Any) -> None:
    assert batches.decodes(make_case((1, 37), (1, 5))) is None
    assert batches.prompts(make_case((33, 33), (1, 1))) is None
    assert batches.fewer(make_case((33, 33))) is None
    assert batches.many_keys(make_case((9, 9), attn_type=AttentionType.ENCODER_ONLY)) is None


def test_a_path_keeps_its_number_of_rows_and_an_encoder_as_many_keys(make_case: Any) -> None:
    drafts = make_case((4, 40), (4, 9), path="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=3))
    encoder = make_case((9, 9), (3, 3), attn_type=AttentionType.ENCODER_ONLY)
    for make in (*batches.LARGER, *batches.SMALLER):
        assert {rows for rows, _ in lengths(make(drafts)) or ()} <= {4}
        assert all(query_len == seq_len for query_len, seq_len in lengths(make(encoder)) or ())


def test_a_way_of_cutting_the_batch_gives_way_to_an_ordinary_step(make_case: Any) -> None:
    case = make_case((7, 40), (9, 9), path="micro_batch", options=MicroBatchOptions(cuts=(3,)))
    assert all(batch.case.batch.path.name == "paged" for batch in batches.earlier_batches(case))


def test_pages_differ_where_lengths_cannot(make_case: Any) -> None:
    case = make_case((33, 33), (1, 1))
    alike = batches.alike(case)
    assert lengths(alike) == [(33, 33), (1, 1)]
    assert build_problem(alike.case, 1).block_table.tolist() != build_problem(case, 0).block_table.tolist()


def test_cross_attention_keeps_an_encoder(make_case: Any) -> None:
    first = RequestSpec(query_len=4, seq_len=4, encoder_len=30)
    later = RequestSpec(query_len=1, seq_len=2, encoder_len=21)
    case = make_case(first, later, attn_type=AttentionType.ENCODER_DECODER)
    requests = [
        [(r.context_len > 0, r.encoder_len) for r in make(case).case.batch] for make in (batches.alike, batches.half)
    ]
    assert requests == [[(False, 30), (True, 21)], [(True, 10), (False, 15)]]


def test_one_is_larger_and_one_smaller_and_all_occur_in_smoke() -> None:
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
