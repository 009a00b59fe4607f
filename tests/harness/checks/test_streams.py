"""The check ``streams`` without a GPU: how it judges a step whose delay was too short, or that is wrong anyway."""

from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.harness.checks.findings import Holds, NotExamined
from attncheck.harness.checks.streams import FIRST_DELAY_NS, LONGEST_DELAY_NS, DelayedCall, check_streams
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of

CPU = torch.device("cpu")


class Late:
    """Steps that are right; forward returns after ``took(delay)`` nanoseconds, and after the delay, but for the last."""

    def __init__(self, took, num_late=3):
        self.took, self.num_late, self.delays = took, num_late, []

    def run(self, session, delay_ns):
        self.delays.append(delay_ns)
        call = DelayedCall(None, self.took(delay_ns), len(self.delays) > self.num_late, changed_later=False)
        return session.run(), [call]


@pytest.fixture
def check(make_case):
    problem = build_problem(make_case((1, 9), (3, 7)), seed=0)
    truth, session = truth_of(problem, CPU), Session(ReferenceBackend, problem, CPU)
    seen = session.run()

    def run(steps, first=seen):
        return check_streams(problem, truth, session, first, steps)

    return run, seen


def test_the_delay_grows_until_it_outlasts_forward(check):
    run, _ = check
    steps = Late(lambda _: 5_000_000, num_late=1)
    found = run(steps)
    assert isinstance(found, Holds)
    assert found.notes == ()
    assert steps.delays[0] == FIRST_DELAY_NS
    assert steps.delays[1:] == [15_000_000]


def test_a_forward_that_waits_for_every_delay_is_right_and_noted(check):
    run, _ = check
    found = run(Late(lambda delay_ns: delay_ns + 1_000_000))
    assert isinstance(found, Holds)
    assert found.notes == snapshot(("forward waits for the device: it returned after a delay of 30 ms",))


def test_a_forward_that_is_slower_than_every_delay_is_not_examined(check):
    run, _ = check
    found = run(Late(lambda _: 2 * LONGEST_DELAY_NS))
    assert found == NotExamined(snapshot(("forward returned after 2 s; its inputs are held back 1 s",)), "attncheck")


def test_a_step_that_is_wrong_without_a_delay_is_not_blamed_on_streams(check):
    run, seen = check
    found = run(None, replace(seen, output=torch.zeros_like(seen.output)))
    assert isinstance(found, NotExamined)
    assert found.reasons[0].startswith("the step is wrong on the default stream without a delay: 4 of 4 rows are wrong")
