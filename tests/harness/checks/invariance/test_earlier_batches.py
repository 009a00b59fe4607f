"""The batches that come before: larger and smaller ones, which need nothing beyond the case's layer."""

from dataclasses import replace
from typing import Any

import pytest

from attncheck.cases.loader import load_suite
from attncheck.harness.checks import history as batches
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import AttentionType, MicroBatchOptions, RequestSpec, SpecDecodeOptions


def lengths(batch: Any) -> list[tuple[int, int]]:
    return [(r.query_len, r.total_len) for r in batch.case.batch]


@pytest.fixture
def case(make_case: Any) -> Any:
    return make_case((1, 37), (5, 40), (33, 33), padding=(1, 2))


def test_one_has_the_same_shape_and_one_half_the_lengths(case: Any) -> None:
    assert lengths(batches.alike(case)) == [(1, 36), (5, 39), (33, 33)]
    assert batches.alike(case).case.batch.padding.tokens == 2
    assert lengths(batches.half(case)) == [(17, 17), (3, 20), (1, 19)]


def test_others_are_longer_more_fewer_prompts_or_decodes(case: Any) -> None:
    assert lengths(batches.longer(case)) == [(1, 89), (5, 91), (33, 49)]
    assert lengths(batches.more(case)) == [(1, 36), (5, 39), (33, 33), (33, 33), (5, 39), (1, 36), (1, 36)]
    assert lengths(batches.fewer(case)) == [(33, 33)]
    assert lengths(batches.prompts(case)) == [(37, 37), (40, 40), (33, 33)]
    assert lengths(batches.decodes(case)) == [(1, 37), (1, 36), (1, 1)]
    assert lengths(batches.many_keys(case)) == [(1, 601)]


def test_a_batch_that_would_be_the_case_s_own_kind_is_left_out(make_case: Any) -> None:
    assert batches.decodes(make_case((1, 37), (1, 5))) is None
    assert batches.prompts(make_case((33, 33), (1, 1))) is None
    assert batches.fewer(make_case((33, 33))) is None
    assert batches.many_keys(make_case((9, 9), attn_type=AttentionType.ENCODER_ONLY)) is None


def test_a_path_keeps_its_number_of_rows(make_case: Any) -> None:
    case = make_case((4, 40), (4, 9), path="spec_decode", options=SpecDecodeOptions(num_speculative_tokens=3))
    for make in (*batches.LARGER, *batches.SMALLER):
        batch = make(case)
        assert batch is None or {rows for rows, _ in lengths(batch)} == {4}, batch


def test_a_way_of_cutting_the_batch_gives_way_to_an_ordinary_step(make_case: Any) -> None:
    case = make_case((7, 40), (9, 9), path="micro_batch", options=MicroBatchOptions(cuts=(3,)))
    assert all(batch.case.batch.path.name == "paged" for batch in batches.earlier_batches(case))


def test_pages_differ_where_lengths_cannot(make_case: Any) -> None:
    case = make_case((33, 33), (1, 1))
    alike = batches.alike(case)
    assert lengths(alike) == [(33, 33), (1, 1)]
    assert build_problem(alike.case, 1).block_table.tolist() != build_problem(case, 0).block_table.tolist()


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
def test_encoders_keep_as_many_keys_as_rows(make_case: Any, attn_type: str) -> None:
    for make in (*batches.LARGER, *batches.SMALLER):
        batch = make(make_case((9, 9), (3, 3), attn_type=attn_type))
        if batch is not None:
            assert all(query_len == seq_len for query_len, seq_len in lengths(batch))
            build_problem(batch.case, 0)


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


def test_the_choice_does_not_depend_on_the_description(case: Any) -> None:
    assert batches.earlier_batches(replace(case, description="again"))[0].kind == batches.earlier_batches(case)[0].kind
