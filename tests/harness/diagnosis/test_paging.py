"""The contents of a pool are known slot by slot, and pages that are exchanged are named."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.harness.problem.problem import STALE_ROWS, build_problem, foreign_slots, rows_in_pool, stale_rows
from attncheck.reports.run_file.causes import likely_causes


@pytest.mark.parametrize("first_block", [None, 8388600])
def test_the_contents_of_a_pool_are_known_slot_by_slot(make_case: Any, first_block: int | None) -> None:
    cache = {"first_block": first_block}
    problem = build_problem(make_case((1, 40), (3, 21), cache=cache, num_kv_heads=1, head_size=16), 0)
    read = rows_in_pool(problem)
    assert read(torch.tensor([-1])) is None
    assert read(torch.tensor([problem.num_blocks * 16])) is None
    tail = foreign_slots(problem)["the unused tail of a last page"]
    found = read(torch.cat([problem.key_slots, tail]))
    assert found is not None
    for rows, own, stale in zip(found, (problem.keys, problem.values), stale_rows(problem), strict=True):
        assert torch.equal(rows[: len(own)], own)
        assert torch.equal(rows[len(own) :], stale[torch.arange(len(tail)) % STALE_ROWS])
    if first_block:
        untouched = read(torch.tensor([16 * 1234567]))
        assert untouched is not None
        assert not any(bool(rows.any()) for rows in untouched)


@pytest.mark.parametrize(
    ("order", "cause"),
    [
        (lambda pages: (*pages[:-2], pages[-1], pages[-2]), "the last two pages of the block table are exchanged"),
        (lambda pages: (pages[-1], *pages[1:-1], pages[0]), "the first and the last page of the block table are"),
        (lambda pages: (pages[0], pages[2], pages[1], *pages[3:]), "pages 1 and 2 of the block table are exchanged"),
        (lambda pages: pages[::-1], "all pages, in reversed order, of the block table are exchanged"),
    ],
)
def test_exchanged_pages_are_named(ask: Any, order: Any, cause: str) -> None:
    asked = ask((1, 100), (6, 90), (20, 120), alibi=True)
    problem, truth = asked
    size, slots = problem.cache.block_size, []
    for request in problem.requests:
        pages = order(request.pages)
        slots += [pages[position // size] * size + position % size for position in range(request.num_keys)]
    found = rows_in_pool(problem)(torch.tensor(slots))
    assert found is not None
    out, _ = replace(truth.rows, keys=found[0], values=found[1]).attend(truth.params)
    assert likely_causes(asked.explained(out))[0].startswith(cause)
