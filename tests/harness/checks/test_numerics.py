"""Findings of ``numerics``, ``lse``, ``determinism`` and ``streams``."""

import math
from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.conventions import Conventions
from attncheck.harness.checks import numerics, streams
from attncheck.harness.checks.findings import Broken, Holds, NotExamined
from attncheck.harness.checks.interface import SharedByChecks
from attncheck.harness.checks.streams import FIRST_DELAY_NS, LONGEST_DELAY_NS, DelayedCall, DelayedSteps, check_streams
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import LayerSpec


@pytest.fixture
def judged(judge, backend_of, make_case):
    """Return a function from ``change(output, output before)`` to the finding about the reference with this change."""

    def run(change):
        class Impl(ReferenceImpl):
            def attend(self, *args):
                before = args[6].clone()
                super().attend(*args)
                change(args[6], before)

        found = judge("numerics", backend_of(Impl), make_case((1, 9), (6, 20)))
        assert isinstance(found, Broken)
        return found

    return run


@pytest.mark.parametrize("spoils", [False, True])
def test_finite_numbers_are_judged_apart_from_those_that_are_not(judged, spoils):
    def change(output, _before):
        output[0, 1] = torch.nan
        output[4, :2] = torch.inf
        if spoils:
            output[2:4, 3] *= 1.5

    found = judged(change)
    assert found.summary.startswith("4 of 7 rows" if spoils else "2 of 7 rows")
    assert {name: n for name, n in found.figures.items() if name.startswith(("rows_", "heads_"))} == {
        "rows_wrong": 4 if spoils else 2,
        "heads_wrong": 3 if spoils else 2,
        "rows_nan": 1,
        "rows_inf": 1,
        **({"rows_finite_wrong": 2} if spoils else {}),
    }
    assert (found.figures["finite_budget_share"] > 1) is spoils
    apart = "; among the finite values: 2 of 7 rows are wrong, the first is row 2 (request 1, position 15), in head 3; "
    assert (apart in found.summary) is spoils
    assert found.summary.endswith("all finite values are right") is not spoils
    assert ("the right one times 1.5" in str(found.meaning)) is spoils


def test_rows_that_were_never_written_do_not_hide_wrong_ones(plain, judged):
    def change(output, before):
        output[1] = before[1]
        output[3] *= 2

    found = judged(change)
    assert plain(found.summary) == snapshot(
        "1 of 7 rows were never written, or only added to, the first is row 1 (request 1, position 14); among the others: 1 of 7 rows is wrong, the first is row 3 (request 1, position 16), in all heads; the largest error is ..."
    )
    assert (found.figures["rows_unwritten"], found.figures["rows_finite_wrong"]) == (1, 1)


@pytest.mark.parametrize(
    ("heads", "channels", "where"),
    [
        (slice(None), slice(48, None), "in channels 48 to 63"),
        (slice(5, 6), slice(None), "in head 5"),
        (slice(0, 4), slice(0, 1), "in channel 0 of heads 0 to 3"),
    ],
)
def test_rows_that_were_written_in_part_are_not_called_unwritten(judged, heads, channels, where):
    def change(output, before):
        output[:, heads, channels] = before[:, heads, channels]

    start = f"7 of 7 rows were never written {where}, or only added to, the first is row 0"
    assert judged(change).summary.startswith(start)


CPU = torch.device("cpu")


def examine(case, change, conventions=None, *, output=1.0, explained=False):
    problem = build_problem(case, 0)
    seen = Session(ReferenceBackend, problem, CPU).run()
    changed = replace(seen, lse=change(seen.lse.clone()), output=seen.output * output)
    declared = conventions or Conventions()
    return numerics.check_lse(problem, truth_of(problem, CPU), changed, declared, is_output_explained=explained)


def same(rows):
    return rows


def test_rows_that_see_nothing_must_have_minus_infinity(make_case):
    case = make_case((5, 3), (2, 4))
    assert isinstance(examine(case, same), Holds)
    found = examine(case, lambda rows: rows.nan_to_num(neginf=-1e30))
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
    assert str(found.meaning).startswith(cause)


@pytest.mark.parametrize("explained", [False, True])
def test_faults_of_both_are_tried_on_the_lse_unless_the_output_is_explained(make_case, explained):
    case = make_case((1, 40), logits_soft_cap=5.0)
    truth = truth_of(build_problem(case, 0), CPU)
    _, without_cap = truth.rows.attend(replace(truth.params, logits_soft_cap=None))
    found = examine(case, lambda _: without_cap, output=3.0, explained=explained)
    assert ("the soft cap is ignored" in str(found.meaning)) is not explained


WAVERING = Conventions(padded_rows="untouched", deterministic=False)


def moved_by(amount):
    """The reference's impl, whose output grows by the share ``amount`` with every call."""

    class Impl(ReferenceImpl):
        calls = 0

        def attend(self, *args):
            super().attend(*args)
            self.calls += 1
            args[6][: args[5].num_rows] *= 1 + amount * (self.calls - 1)

    return Impl


def test_a_right_backend_has_the_same_bits(judge, make_case):
    found = judge("determinism", ReferenceBackend, make_case((5, 3), (1, 20), padding=(1, 2)))
    assert isinstance(found, Holds)
    assert found.figures["bitwise"] == 1


def test_a_backend_that_declares_it_must_stay_within_the_budget(judge, backend_of, make_case):
    case, slightly = make_case(dtype="float32"), moved_by(2.0**-22)
    found = judge("determinism", backend_of(slightly), case)
    assert "of the output have other bits" in found.summary
    assert "when the step is repeated on the same impl" in found.summary
    found = judge("determinism", backend_of(slightly, conventions=WAVERING), case)
    assert isinstance(found, Holds)
    assert found.notes == snapshot(("compared within the allowed error: the backend declares deterministic=False",))
    found = judge("determinism", backend_of(moved_by(0.1), conventions=WAVERING), case)
    assert found.summary.startswith(
        "right at first, wrong when the step is repeated on the same impl: 40 of 40 rows are wrong"
    )


def test_a_cache_that_wavers_is_found_whatever_is_declared(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        calls = 0

        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            super().write(layer, key, value, key_cache, value_cache, slot_mapping)
            self.calls += 1
            value_cache[0, 0] = self.calls

    found = judge("determinism", backend_of(Impl, conventions=WAVERING), make_case())
    assert found.summary.endswith("the cache holds other bytes than after the first step")


class Late(DelayedSteps):
    """Steps that are right; forward returns after ``took(delay)`` nanoseconds, and after the delay, but for the last."""

    def __init__(self, took, num_late=3):
        self.took, self.num_late, self.delays = took, num_late, list[int]()

    def run(self, session, delay_ns):
        self.delays.append(delay_ns)
        call = DelayedCall(None, self.took(delay_ns), len(self.delays) > self.num_late, changed_later=False)
        return session.run(), [call]


@pytest.fixture
def case(checked, make_case, monkeypatch):
    monkeypatch.setattr(streams, "accelerator_of", lambda _: object())
    return checked(ReferenceBackend, make_case((1, 9), (3, 7)))


def check(case, steps):
    case.shared = SharedByChecks()
    case.shared.get(DelayedSteps, lambda: steps)
    return check_streams(case)


def test_the_delay_grows_until_it_outlasts_forward(case):
    steps = Late(lambda _: 5_000_000, num_late=1)
    assert check(case, steps).notes == ()
    assert steps.delays == [FIRST_DELAY_NS, 15_000_000]


def test_a_forward_that_waits_for_every_delay_is_right_and_noted_and_a_slow_one_is_not_examined(case):
    waits = check(case, Late(lambda delay_ns: delay_ns + 1_000_000))
    assert isinstance(waits, Holds)
    assert waits.notes == snapshot(("forward waits for the device: it returned after a delay of 30 ms",))
    slow = check(case, Late(lambda _: 2 * LONGEST_DELAY_NS))
    assert slow == NotExamined(snapshot(("forward returned after 2 s; its inputs are held back 1 s",)), "attncheck")


def test_a_step_that_is_wrong_without_a_delay_is_not_blamed_on_streams(case, monkeypatch):
    session, seen = case.first_step()
    wrong = replace(seen, output=torch.zeros_like(seen.output))
    monkeypatch.setattr(case, "first_step", lambda: (session, wrong))
    found = check(case, Late(lambda _: 0))
    assert found.reasons[0].startswith("the step is wrong on the default stream without a delay: 4 of 4 rows are wrong")
