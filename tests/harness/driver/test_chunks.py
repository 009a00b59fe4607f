"""The rows of prefill context parallelism: which rank has them, and the calls that they make."""

import itertools

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.harness.driver.chunks import chunks_of_rank
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.driver.step import forward_calls_of, make_step
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.step_spec import PCPOptions

CPU = torch.device("cpu")


def spread(make_case, *requests, size=2, **fields):
    return make_case(*requests, path="pcp", options=PCPOptions(size=size), **fields)


def test_four_ranks_have_two_of_eight_chunks_each():
    """The picture in vLLM's ``PCPManager``."""
    found = [[chunk.offset // 3 for chunk in chunks_of_rank([24], [True], 4, rank)] for rank in range(4)]
    assert found == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_decodes_are_dealt_out_and_come_first():
    lens, prompts = [1, 9, 1, 1], [False, True, False, False]
    assert [chunk.request for chunk in chunks_of_rank(lens, prompts, 2, 0)] == [0, 3, 1]
    assert [chunk.request for chunk in chunks_of_rank(lens, prompts, 2, 1)] == [2, 1, 1]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_row_is_on_one_rank(size):
    lens = list(range(1, 40))
    chunks = itertools.chain(*(chunks_of_rank(lens, [True] * len(lens), size, rank) for rank in range(size)))
    rows = [(c.request, c.offset + row) for c in chunks for row in range(c.length)]
    assert sorted(rows) == [(request, row) for request, length in enumerate(lens) for row in range(length)]


def test_a_chunk_is_a_request_whose_keys_end_with_its_last_row(make_case):
    step = make_step(build_problem(spread(make_case, (8, 28), (1, 40), (1, 50)), 0), CPU)
    first, second = forward_calls_of(step, frozenset())
    assert first.common.query_start_loc.diff().tolist() == [1, 2, 2]
    assert first.common.seq_lens.tolist() == [40, 22, 28]
    assert (first.rows.tolist(), first.position.tolist()) == ([8, 0, 1, 6, 7], [39, 20, 21, 26, 27])
    assert second.common.seq_lens.tolist() == [50, 24, 26]
    assert second.rows.tolist() == [9, 2, 3, 4, 5]
    table = step.block_table
    assert torch.equal(first.common.block_table_tensor, table[[1, 0, 0]])
    assert torch.equal(first.common.slot_mapping, step.slot_mapping[first.rows])
    assert torch.equal(first.key, step.key[first.rows])


def test_a_rank_without_rows_makes_no_call(make_case):
    (only,) = forward_calls_of(make_step(build_problem(spread(make_case, (1, 40)), 0), CPU), frozenset())
    assert only.common.seq_lens.tolist() == [40]


def test_the_keys_of_other_ranks_are_in_the_cache_before_the_first_call(make_case):
    problem = build_problem(spread(make_case, (8, 28)), 0)
    session = Session(ReferenceBackend, problem, CPU)
    begun = session.begin(Fill())
    keys, _ = session.pool.read_image(begun.before, problem.key_slots)
    is_there = (keys == problem.keys).flatten(1).all(1).tolist()
    assert is_there == [True] * 20 + [False, False, True, True, True, True, False, False]
