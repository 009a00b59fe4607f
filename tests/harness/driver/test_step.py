"""Steps: what is handed to a backend keeps vLLM's conventions."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.contract import Conventions
from attncheck.harness.driver.lending import copied_calls, lend_copies
from attncheck.harness.driver.step import forward_calls_of, make_step, refill_host
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import AttentionType
from attncheck.reference.step_spec import BlockTableSpec, PaddingSpec, RequestSpec

CPU = torch.device("cpu")


def test_padding_as_vllm_pads(make_case):
    step = make_step(build_problem(make_case((1, 5), (3, 3), padding=(2, 4)), 0), CPU)
    assert step.query_start_loc.tolist() == [0, 1, 4, 4, 4]
    assert step.seq_lens.tolist() == [5, 3, 0, 0]
    assert step.block_table[2:].eq(0).all()
    assert step.slot_mapping[4:].tolist() == [-1] * 4
    assert step.key is not None
    for rows in (step.query, step.key):
        assert len(rows) == 8
        assert torch.isnan(rows[4:]).all()
        assert torch.isfinite(rows[:4]).all()
    common = step.common_metadata()
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len, common.max_seq_len) == (4, 8, 3, 5)
    assert common.num_computed_tokens_cpu.tolist() == [4, 0, 0, 0]
    common.seq_lens.fill_(-5)  # metadata share nothing with those of another call, nor with their twins
    common.query_start_loc_cpu.fill_(-5)
    assert step.common_metadata().seq_lens.tolist() == common.seq_lens_cpu.tolist() == [5, 3, 0, 0]
    assert step.common_metadata().query_start_loc.tolist() == [0, 1, 4, 4, 4]


def around(case, **spec):
    """``case`` with another padding or block table."""
    return replace(case, batch=replace(case.batch, **spec))


@pytest.mark.parametrize(
    ("requests", "padding", "starts", "seq_lens", "computed"),
    [
        (((1, 37), (3, 30), (2, 2)), (0, 0), [0, 1, 2, 2], [2, 2, 0], [1, 1, 0]),
        (((1, 1), (3, 30)), (0, 0), [0, 1, 1], [1, 0], [0, 0]),
        (((5, 40),), (0, 0), [0, 1], [2], [1]),
        (((1, 2),), (0, 0), [0, 1], [1], [0]),
        (((1, 37),), (2, 0), [0, 1, 1, 1], [2, 0, 0], [1, 0, 0]),
    ],
)
def test_refilled_host_tensors_are_those_of_a_smaller_step(make_case, requests, padding, starts, seq_lens, computed):
    common = make_step(build_problem(make_case(*requests, padding=padding), 0), CPU).common_metadata()
    refill_host(common, ("query_start_loc_cpu", "seq_lens_cpu", "num_computed_tokens_cpu"))
    assert common.query_start_loc_cpu.tolist() == starts
    assert common.seq_lens_cpu.tolist() == seq_lens
    assert common.num_computed_tokens_cpu.tolist() == computed


def test_tokens_without_a_slot_are_in_no_count(make_case):
    padding = PaddingSpec(requests=1, tokens=2, unmapped_tokens=3, key_rows=4)
    problem = build_problem(around(make_case((1, 5), (3, 3)), padding=padding), 0)
    step = make_step(problem, CPU)
    assert step.value is not None
    assert [len(rows) for rows in (step.query, step.key, step.value)] == [9, 13, 13]
    assert torch.isnan(step.key[4:]).all()
    common = step.common_metadata()
    assert (common.num_actual_tokens, int(common.query_start_loc[-1])) == (6, 4)
    assert common.slot_mapping.tolist() == [int(problem.key_slots[i]) for i in (4, 5, 6, 7)] + [-1, -1]


def test_a_table_with_a_gap_is_a_slice_of_a_wider_one(make_case):
    case = make_case((1, 37), (5, 40))
    whole = make_step(build_problem(case, 0), CPU).common_metadata().block_table_tensor
    gap = BlockTableSpec(row_gap=5)
    step = make_step(build_problem(around(case, block_table=gap, requests=case.batch.requests), 0), CPU)
    (call,) = copied_calls(forward_calls_of(step, frozenset()))
    for table in (step.common_metadata().block_table_tensor, call.common.block_table_tensor):
        assert table.shape == whole.shape
        assert table.stride() == (whole.shape[1] + 5, 1)
        assert torch.equal(table, step.block_table)


def test_another_order_maps_back_to_the_problems_rows(make_case):
    problem = build_problem(make_case((3, 9), (1, 4), (2, 2)), 0)
    step = make_step(problem, CPU, order=[1, 2, 0])
    assert step.row_order.tolist() == [3, 4, 5, 0, 1, 2]
    assert step.query_start_loc.tolist() == [0, 1, 3, 6]
    assert torch.equal(step.query, problem.query[step.row_order])
    assert torch.equal(step.block_table, problem.block_table[[1, 2, 0]])
    slots = [int(problem.key_slots[i]) for i in (12, 13, 14, 6, 7, 8)]
    assert step.slot_mapping.tolist() == slots


def test_encoders_have_no_slots(make_case):
    step = make_step(build_problem(make_case((4, 4), (2, 2), attn_type=AttentionType.ENCODER_ONLY), 0), CPU)
    assert step.slot_mapping.tolist() == [-1] * 6
    assert step.block_table.tolist() == [[0], [0]]
    assert step.common_metadata().causal is False


def test_later_cross_attention_steps_bring_no_keys(make_case):
    later = RequestSpec(query_len=1, seq_len=9, encoder_len=21)
    step = make_step(build_problem(make_case(later, attn_type=AttentionType.ENCODER_DECODER), 0), CPU)
    assert step.key is None
    assert step.value is None
    assert step.slot_mapping.numel() == 0
    encoder_lens = step.common_metadata().encoder_seq_lens
    assert encoder_lens.tolist() == [21]


def test_rows_before_every_key_still_bring_a_key_each(make_case):
    step = make_step(build_problem(make_case((3, 0), padding=(0, 2)), 0), torch.device("cpu"))
    assert step.key is not None
    assert len(step.key) == len(step.slot_mapping) == 5
    assert step.slot_mapping.tolist() == [-1] * 5


def test_image_spans_and_first_keys_follow_their_requests(make_case):
    """As vLLM's runner passes them: by the index in the step, with empty lists, and numbers of keys on the host."""
    first, second = ((1, 4), (6, 30)), ((0, 2),)
    images = [
        RequestSpec(query_len=9, mm_req_doc_ranges=first),
        RequestSpec(query_len=1, seq_len=8),
        RequestSpec(query_len=4, seq_len=7, mm_req_doc_ranges=second),
    ]
    problem = build_problem(make_case(*images, padding=(2, 0)), 0)
    common = make_step(problem, CPU, (2, 0, 1)).common_metadata()
    assert common.mm_req_doc_ranges == {0: [(0, 2)], 1: [(1, 4), (6, 30)], 2: []}
    assert common.rswa_prefix_lens is None
    keys = [RequestSpec(query_len=1, seq_len=60, rswa_prefix_len=20), RequestSpec(query_len=1, seq_len=40)]
    problem = build_problem(make_case(*keys, padding=(2, 0), rswa_window=8), 0)
    common = make_step(problem, CPU, (1, 0)).common_metadata()
    assert common.mm_req_doc_ranges is None
    assert common.rswa_prefix_lens.tolist() == [0, 20, 0, 0]
    assert make_step(build_problem(make_case(*images[1:2]), 0), CPU).common_metadata().mm_req_doc_ranges is None


def test_chosen_keys_follow_their_rows_in_the_form_of_the_conventions(make_case):
    """Padding rows name no key, and stale rows of a larger buffer follow them."""
    problem = build_problem(make_case((3, 20), (1, 40), padding=(1, 2), index_topk=6), 0)
    stale = 3
    common = make_step(problem, CPU, (1, 0)).common_metadata()
    rows = problem.topk_indices[[3, 0, 1, 2]]
    assert torch.equal(common.topk_indices[:4], rows)
    assert (common.topk_indices[4:6] == -1).all()
    assert len(common.topk_indices) == common.num_actual_tokens + stale
    assert (common.topk_indices[6:] >= 0).all()
    own = Conventions(topk_indices_form="slots")
    slots = make_step(problem, CPU, (1, 0), conventions=own).common_metadata().topk_indices
    for row, (request, entries) in enumerate(zip((1, 0, 0, 0), rows.tolist(), strict=True)):
        named = [int(problem.block_table[request, key // 16]) * 16 + key % 16 for key in entries if key >= 0]
        found = [slot for slot in slots[row].tolist() if slot >= 0]
        assert found == list(dict.fromkeys(named))


def test_a_change_of_the_image_spans_shows(make_case):
    case = make_case(RequestSpec(query_len=9, mm_req_doc_ranges=((1, 4),)))
    lent = lend_copies(forward_calls_of(make_step(build_problem(case, 0), CPU), frozenset()))
    assert lent.changed() == []
    lent.calls[0].common.mm_req_doc_ranges[0].append((5, 6))
    assert lent.changed() == ["metadata.mm_req_doc_ranges"]
