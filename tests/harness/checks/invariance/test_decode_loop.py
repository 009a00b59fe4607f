"""The steps of a decode loop: together they bring the rows of the case, over pages that requests gain."""

from typing import Any

import pytest
import torch

from attncheck.harness.checks.history import loop_steps
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import TreeOptions

REQUESTS = ((1, 33), (1, 15), (5, 40), (33, 33), (1, 130))


@pytest.fixture
def problem(make_case: Any) -> Any:
    return build_problem(make_case(*REQUESTS), 0)


def test_every_row_of_the_case_comes_once_with_its_own_query(problem: Any) -> None:
    rows = torch.cat([step.rows for step in loop_steps(problem)])
    queries = torch.cat([step.problem.query for step in loop_steps(problem)])
    known = rows >= 0
    assert rows[known].sort().values.tolist() == list(range(len(problem.query)))
    assert torch.equal(queries[known], problem.query[rows[known]])


def test_each_step_goes_on_where_the_one_before_ended(problem: Any) -> None:
    ends: dict[int, int] = {}
    for step in loop_steps(problem):
        for request in step.problem.requests:
            assert request.cached == ends.get(request.base, request.cached)
            ends[request.base] = request.num_keys
    assert list(ends.values()) != []
    assert sorted(ends.values()) == sorted(seq_len for _, seq_len in REQUESTS)


def test_tables_name_the_pages_of_the_case_and_then_pages_of_others(problem: Any) -> None:
    whole = {request.base: request.pages for request in problem.requests}
    gained = 0
    before: dict[int, int] = {}
    for step in loop_steps(problem):
        for request, table in zip(step.problem.requests, step.problem.block_table.tolist(), strict=True):
            pages = -(-request.num_keys // 16)
            assert tuple(table[:pages]) == whole[request.base][:pages]
            assert not set(table[pages:]) & set(whole[request.base])
            gained += pages > before.get(request.base, pages)
            before[request.base] = pages
    assert gained >= 2


def test_the_last_step_of_decodes_is_one_of_decodes(make_case: Any) -> None:
    *_, last = loop_steps(build_problem(make_case((1, 33), (1, 130)), 0))
    assert [request.query_len for request in last.problem.requests] == [1, 1]


@pytest.mark.parametrize(
    ("path", "options", "layer"),
    [
        ("paged", None, {"causal": False}),
        ("paged", None, {"kv_sharing": True}),
        ("tree", TreeOptions(parents=(-1, 0, 0)), {}),
        ("encoder_only", None, {"attn_type": "encoder_only"}),
    ],
)
def test_there_is_no_loop_where_rows_would_see_other_keys(
    make_case: Any, path: str, options: Any, layer: dict[str, Any]
) -> None:
    assert loop_steps(build_problem(make_case((3, 3), (3, 3), path=path, options=options, **layer), 0)) == ()
