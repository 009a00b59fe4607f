"""Cases with image spans, and with first keys beyond a window: their truth, their needles, and what must be noticed."""

import pytest
import torch
from made_cases import make_case

from attncheck.errors import BlindCaseError
from attncheck.harness.problem.problem import build_problem, foreign_slots
from attncheck.harness.truth.faults import keys_seen, toggles
from attncheck.harness.truth.truth import params_of, rows_of, truth_of
from attncheck.reference import paged_attention
from attncheck.reference.step_spec import RequestSpec

CPU = torch.device("cpu")
IMAGES = make_case(
    RequestSpec(query_len=40, mm_req_doc_ranges=((3, 12), (20, 60))),
    RequestSpec(query_len=9, seq_len=30),
    RequestSpec(query_len=22, seq_len=40, mm_req_doc_ranges=((0, 9), (15, 33))),
    sliding_window=7,
)
FIRST_KEYS = make_case(
    RequestSpec(query_len=9, seq_len=60, rswa_prefix_len=17),
    RequestSpec(query_len=20, rswa_prefix_len=64),
    RequestSpec(query_len=1, seq_len=50),
    rswa_window=8,
)


def seen_by_hand(case):
    """The set of keys of each row, from the definition; request after request."""
    layer, found = case.layer, []
    for request in case.batch:
        for q in range(request.context_len, request.total_len):
            window = layer.sliding_window or layer.rswa_window
            seen = {j for j in range(q + 1) if q - j < window or j < request.rswa_prefix_len}
            for first, last in request.mm_req_doc_ranges:
                if first <= q <= last:
                    seen |= set(range(first, min(last, request.total_len - 1) + 1))
            found.append(seen)
    return found


@pytest.mark.parametrize("case", [IMAGES, FIRST_KEYS], ids=["images", "first keys"])
def test_every_row_sees_the_keys_of_the_definition(case):
    problem = build_problem(case, 0)
    truth, wanted = truth_of(problem, CPU), seen_by_hand(case)
    assert keys_seen(truth.rows, truth.params).tolist() == list(map(len, wanted))
    scores = torch.einsum("thd,khd->thk", problem.query.double(), problem.keys.double().repeat_interleave(4, dim=1))
    for request in problem.requests:
        for row in range(request.first_row, request.first_row + request.rows):
            keys = torch.tensor(sorted(wanted[row])) + request.base
            weights = torch.softmax(scores[row][:, keys] / 8, dim=-1)
            values = problem.values.double().repeat_interleave(4, dim=1)[keys]
            assert torch.allclose(truth.out[row], torch.einsum("hk,khd->hd", weights, values))


@pytest.mark.parametrize("case", [IMAGES, FIRST_KEYS], ids=["images", "first keys"])
def test_needles_lie_at_each_end_of_what_a_row_sees(case):
    """For each end: some row is aligned to the last key that it sees, and some row to the first hidden one."""
    problem = build_problem(case, 0)
    wanted = seen_by_hand(case)
    keys = problem.keys.double()
    at_ends, behind_ends = set(), set()
    for index, request in enumerate(problem.requests):
        own = keys[request.base : request.base + request.num_keys].repeat_interleave(4, dim=1)
        for row in range(request.first_row, request.first_row + request.rows):
            query = problem.query[row].double()
            likeness = torch.einsum("hd,khd->hk", query, own) / query.norm(dim=-1).clamp(min=1e-9)[:, None]
            position = request.first_position + row - request.first_row
            for key in (likeness / own.norm(dim=-1).T).argmax(dim=1).tolist():
                if key in (position, position + 1):
                    continue  # the end of the causal mask
                if key in wanted[row] and key + 1 not in wanted[row]:
                    at_ends.add((index, key))
                if key not in wanted[row] and key - 1 in wanted[row]:
                    behind_ends.add((index, key))
    ends = {(0, 12), (0, 39), (2, 33)} if case is IMAGES else {(0, 16)}
    assert ends <= at_ends
    assert {(index, key + 1) for index, key in ends} - {(0, 40)} <= behind_ends


def test_every_change_of_the_masks_changes_the_truth():
    for case in (IMAGES, FIRST_KEYS):
        problem = build_problem(case, 0)
        params, rows = params_of(problem), rows_of(problem, CPU)
        out, _ = rows.attend(params)
        changes = [each for each in toggles(params, rows) if bool(each.acts.any())]
        assert len(changes) >= 6
        assert all(bool((each.hypothesis.compute()[0] != out)[each.acts].any()) for each in changes)


@pytest.mark.parametrize(
    "case",
    [
        make_case(RequestSpec(query_len=5, seq_len=30, mm_req_doc_ranges=((3, 12),))),
        make_case(RequestSpec(query_len=5, seq_len=30, rswa_prefix_len=40), rswa_window=9),
    ],
    ids=["no row in a span", "no key hidden"],
)
def test_a_case_whose_masks_hide_and_show_nothing_is_blind(case):
    with pytest.raises(BlindCaseError, match="lengthen a request"):
        truth_of(build_problem(case, 0), CPU)


def test_keys_of_a_span_before_the_window_are_not_free():
    """A page that the window has left behind may be reused, but not while a row of its image span is computed."""
    name = "pages the window has left behind"
    chunk = {"query_len": 10, "seq_len": 70}
    without = build_problem(make_case(RequestSpec(**chunk), sliding_window=4), 0)
    within = RequestSpec(**chunk, mm_req_doc_ranges=((20, 62),))
    with_span = build_problem(make_case(within, sliding_window=4), 0)
    assert len(foreign_slots(without)[name]) == 48  # the first row is at position 60, and sees from key 57 on
    assert len(foreign_slots(with_span)[name]) == 16
    first_keys = make_case(RequestSpec(**chunk, rswa_prefix_len=5), rswa_window=4)
    assert name not in foreign_slots(build_problem(first_keys, 0))


def test_the_truth_is_that_of_the_paged_reference():
    problem = build_problem(IMAGES, 1)
    truth = truth_of(problem, CPU)
    caches = [torch.zeros(problem.num_blocks * 16, 2, 64) for _ in range(2)]
    for cache, rows in zip(caches, (problem.keys, problem.values), strict=True):
        cache[problem.key_slots] = rows.float()
    paged = [cache.view(problem.num_blocks, 16, 2, 64) for cache in caches]
    lens = torch.tensor([request.num_keys for request in problem.requests])
    ranges = {i: list(spec.mm_req_doc_ranges) for i, spec in enumerate(IMAGES.batch)}
    out, lse = paged_attention(
        problem.query, *paged, problem.block_table, lens, problem.cu_seqlens_q, truth.params, mm_req_doc_ranges=ranges
    )
    assert torch.allclose(out, truth.out)
    assert torch.allclose(lse, truth.lse)
