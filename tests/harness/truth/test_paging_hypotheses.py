"""Numbers of too few bits and block tables read as they are not: a wrong output names them."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from attncheck.backends.mutants.catalogue import Mutant, catalogue
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.diagnosis.explain import explain
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import STALE_ROWS, build_problem, foreign_slots, rows_in_pool, stale_rows
from attncheck.harness.truth.truth import truth_of
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reports.run_file.causes import likely_causes

CPU = torch.device("cpu")
UNNAMED = {"stride-in-ten-bits", "rows-by-the-query", "grid-of-rows", "grid-of-requests-and-heads"}
"""The summary of the last two says which rows were never written; of the first two no hypothesis is known."""

NAMED = [m for m in catalogue() if m.area == "limits" and m.check == "numerics" and m.name not in UNNAMED]


@pytest.mark.parametrize("mutant", NAMED, ids=lambda mutant: mutant.name)
def test_the_likely_cause_is_the_fault(mutant: Mutant) -> None:
    suite, _, name = str(mutant.case).partition("/")
    (case,) = (case for case in load_suite(suite) if case.id == name)
    problem = build_problem(case, 0)
    seen = Session(load(mutant.ref).backend, problem, CPU).run()
    finding = check_numerics(problem, truth_of(problem, CPU), seen)
    assert isinstance(finding, Broken)
    assert re.search(str(mutant.cause), str(finding.meaning))


@pytest.mark.parametrize("first_block", [None, 8388600])
def test_the_contents_of_a_pool_are_known_slot_by_slot(make_case: Any, first_block: int | None) -> None:
    cache = {"first_block": first_block}
    problem = build_problem(make_case((1, 40), (3, 21), cache=cache, num_kv_heads=1, head_size=16), 0)
    for slots in (torch.tensor([-1]), torch.tensor([problem.num_blocks * 16])):
        assert rows_in_pool(problem)(slots) is None
    tail = foreign_slots(problem)["the unused tail of a last page"]
    found = rows_in_pool(problem)(torch.cat([problem.key_slots, tail]))
    assert found is not None
    for rows, own, stale in zip(found, (problem.keys, problem.values), stale_rows(problem), strict=True):
        assert torch.equal(rows[: len(own)], own)
        assert torch.equal(rows[len(own) :], stale[torch.arange(len(tail)) % STALE_ROWS])
    if first_block:
        untouched = rows_in_pool(problem)(torch.tensor([16 * 1234567]))
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
def test_exchanged_pages_are_named(make_case: Any, order: Any, cause: str) -> None:
    problem = build_problem(make_case((1, 100), (6, 90), (20, 120), alibi=True), 0)
    truth = truth_of(problem, CPU)
    size, slots = problem.cache.block_size, []
    for request in problem.requests:
        pages = order(request.pages)
        slots += [pages[position // size] * size + position % size for position in range(request.num_keys)]
    found = rows_in_pool(problem)(torch.tensor(slots))
    assert found is not None
    out, _ = replace(truth.rows, keys=found[0], values=found[1]).attend(truth.params)
    causes = likely_causes(explain(problem, truth, out, share_of_budget(out - truth.out, truth.budget)))
    assert causes[0].startswith(cause)
