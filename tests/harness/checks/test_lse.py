"""``lse`` where a row sees nothing, and where a backend declares another convention."""

import math
from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.conventions import Conventions
from attncheck.harness.checks import numerics
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import LayerSpec

CPU = torch.device("cpu")


def examine(case, change, conventions=None, *, output=1.0, explained=False):
    problem = build_problem(case, 0)
    seen = Session(ReferenceBackend, problem, CPU).run()
    assert seen.lse is not None
    changed = replace(seen, lse=change(seen.lse.clone()), output=seen.output * output)
    declared = conventions or Conventions()
    return numerics.check_lse(problem, truth_of(problem, CPU), changed, declared, is_output_explained=explained)


def same(rows):
    return rows


def test_rows_that_see_nothing_must_have_minus_infinity(make_case):
    case = make_case((5, 3), (2, 4))
    assert isinstance(examine(case, same), Holds)
    found = examine(case, lambda rows: rows.nan_to_num(neginf=-1e30))
    assert isinstance(found, Broken)
    assert found.summary == snapshot(
        "2 of 7 rows are wrong, the first is row 0 (request 0, position -2), in all heads; the error is NaN or infinite at row 0, head 0; all finite values are right"
    )
    assert found.meaning == snapshot("a row that sees nothing must have -inf")


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_rows_that_see_keys_must_be_numbers(make_case, wrong):
    assert isinstance(examine(make_case((3, 9)), lambda rows: rows.index_fill(0, torch.tensor([1]), wrong)), Broken)


def test_a_declared_base_is_converted(make_case):
    case, two = make_case((1, 9), (3, 7)), Conventions(lse_base="2")
    assert isinstance(examine(case, lambda rows: rows / math.log(2), two), Holds)
    assert isinstance(examine(case, same, two), Broken)


@pytest.mark.parametrize(("reference", "context"), [("zero", (8, 4)), ("context", (0, 0))])
def test_a_declared_reference_point_of_alibi_is_undone(make_case, reference, context):
    case = make_case((1, 9), (3, 7), alibi=True)
    offsets = torch.cat([torch.arange(rows) + first for rows, first in zip((1, 3), context, strict=True)])
    shift = offsets[:, None].double() * torch.tensor(case.layer.alibi_slopes, dtype=torch.float64)
    declared = Conventions(alibi_reference=reference)
    assert isinstance(examine(case, lambda rows: (rows.double() + shift).float(), declared), Holds)
    assert isinstance(examine(case, same, declared), Broken)


def test_alibi_from_elsewhere_with_sinks_has_no_meaning(make_case):
    found = examine(make_case(alibi=True, sinks=True), same, Conventions(alibi_reference="zero"))
    assert isinstance(found, NotExamined)


def test_a_fault_of_the_lse_beside_a_right_output_is_one_of_the_lse_alone(make_case):
    case = make_case((1, 40), sliding_window=9, dtype="float32")
    problem = build_problem(case, 0)
    keys = problem.keys.double().repeat_interleave(4, dim=1)
    without_window = (torch.einsum("thd,khd->thk", problem.query.double(), keys) / 8).logsumexp(dim=2).float()
    found = examine(case, lambda _: without_window)
    assert found.meaning.startswith("in the LSE alone: the window is ignored: ")


def from_position_0(rows):
    slopes = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, alibi=True).alibi_slopes
    return rows + torch.tensor([29, *range(35, 40)])[:, None] * torch.tensor(slopes)


def wrong_in_head_2(rows):
    rows[:, 2] += torch.sin(torch.arange(len(rows))) + 2
    return rows


@pytest.mark.parametrize(
    ("change", "layer", "cause"),
    [
        (lambda rows: torch.full_like(rows, -math.inf), {}, "the LSE is -inf, as if no key were seen: "),
        (from_position_0, {"alibi": True}, "the ALiBi bias is measured from position 0, not from the query: "),
        (wrong_in_head_2, {}, "not known; wrong are only head 2"),
    ],
)
def test_the_cause_of_a_wrong_lse_is_named(make_case, change, layer, cause):
    found = examine(make_case((1, 30), (5, 40), **layer), change)
    assert isinstance(found, Broken)
    assert str(found.meaning).startswith(cause)


@pytest.mark.parametrize("explained", [False, True])
def test_faults_of_both_are_tried_on_the_lse_unless_the_output_is_explained(make_case, explained):
    case = make_case((1, 40), logits_soft_cap=5.0)
    truth = truth_of(build_problem(case, 0), CPU)
    _, without_cap = truth.rows.attend(replace(truth.params, logits_soft_cap=None))
    found = examine(case, lambda _: without_cap, output=3.0, explained=explained)
    assert isinstance(found, Broken)
    assert ("the soft cap is ignored" in str(found.meaning)) is not explained
