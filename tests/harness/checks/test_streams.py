"""The check ``streams`` without a GPU: how it judges a step whose delay was too short, or that is wrong anyway."""

from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.harness.checks import streams
from attncheck.harness.checks.findings import Holds, NotExamined
from attncheck.harness.checks.interface import SharedByChecks
from attncheck.harness.checks.streams import FIRST_DELAY_NS, LONGEST_DELAY_NS, DelayedCall, DelayedSteps, check_streams


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
    assert isinstance(found, NotExamined)
    assert found.reasons[0].startswith("the step is wrong on the default stream without a delay: 4 of 4 rows are wrong")
