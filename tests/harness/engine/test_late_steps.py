"""Async scheduling: a step begins before the tokens of the step before are known, and is observed when they are."""

import pytest
import torch

from attncheck.harness.engine.events import ContinuedRequest, StartedRequest, StepPlan
from attncheck.harness.engine.late_steps import LateSteps


class Observer:
    """Keeps what it is given, with the values that tensors have at that moment."""

    def __init__(self):
        self.calls = []
        self.plans = []

    def step_begins(self, plan):
        self.plans.append(plan)
        self.calls.append("begins")

    def inputs(self, request_ids, input_ids, positions):
        self.calls.append(("inputs", tuple(request_ids), input_ids.tolist(), positions.tolist()))

    def layer_rows(self, layer, query, key, value, output, kv_cache=None):
        self.calls.append((layer, query.tolist(), key if key is None else key.tolist(), kv_cache))

    def step_ends(self, sampled):
        self.calls.append(("ends", dict(sampled)))

    def request_finished(self, request_id):
        self.calls.append(("finished", request_id))


def plan(num_computed_tokens, num_scheduled_tokens=1, drafts=()):
    continued = ContinuedRequest("a", ((),), num_computed_tokens)
    return StepPlan((), (continued,), {"a": num_scheduled_tokens}, {"a": drafts} if drafts else {})


STARTED = StepPlan((StartedRequest("a", ((1,),), 0),), (), {"a": 1})


@pytest.fixture
def observer():
    return Observer()


@pytest.fixture
def steps(observer):
    return LateSteps(observer)


def forward(steps, number, num_rows=1, buffer=None):
    """The model's inputs and one layer, in buffers that the engine uses again; the last row is padding."""
    rows = torch.full((num_rows + 1,), number) if buffer is None else buffer.fill_(number)
    steps.inputs(["a"], rows, rows)
    steps.layer_rows("layer", rows, None, None, rows, kv_cache=torch.zeros(1))


def test_a_step_whose_tokens_are_known_is_observed_at_once(steps, observer):
    steps.step_begins(STARTED)
    forward(steps, 1)
    assert observer.calls[0] == "begins"
    assert observer.calls[2] == ("layer", [1, 1], None, torch.zeros(1))
    steps.step_ends({"a": (5,)})
    steps.step_begins(plan(1))
    assert observer.calls[-1] == "begins"


def test_a_step_is_observed_when_the_tokens_of_the_one_before_are_known(steps, observer):
    buffer = torch.zeros(2, dtype=torch.int64)
    steps.step_begins(STARTED)
    forward(steps, 1, buffer=buffer)
    steps.step_begins(plan(1))
    forward(steps, 2, buffer=buffer)
    before = len(observer.calls)
    assert before == 3
    steps.step_ends({"a": (5,)})
    buffer.fill_(3)  # the next step overwrites what the late one was given
    assert observer.calls[before:] == [
        ("ends", {"a": (5,)}),
        "begins",
        ("inputs", ("a",), [2], [2]),
        ("layer", [2], None, None),  # without the pages, which the next step may have written
    ]


def test_tokens_that_arrive_during_a_step_let_its_rest_be_observed_at_once(steps, observer):
    steps.step_begins(STARTED)
    forward(steps, 1)
    steps.step_begins(plan(1))
    steps.inputs(["a"], torch.tensor([2]), torch.tensor([1]))
    steps.step_ends({"a": (5,)})
    steps.layer_rows("layer", torch.tensor([2]), None, None, torch.tensor([2]))
    assert observer.calls[3:] == [
        ("ends", {"a": (5,)}),
        "begins",
        ("inputs", ("a",), [2], [1]),
        ("layer", [2], None, None),
    ]


def test_the_scheduler_counted_drafts_that_were_rejected(steps, observer):
    steps.step_begins(plan(10, 4, (7, 8, 9)))
    forward(steps, 0, 4)
    steps.step_begins(plan(14, 4, (-1, -1, -1)))
    steps.inputs(["a"], torch.tensor([6, 1, 2, 3, 0]), torch.tensor([12, 13, 14, 15, 0]))
    steps.step_ends({"a": (7, 6)})  # one draft of three was accepted
    (late,) = observer.plans[1].continued
    assert late.num_computed_tokens == 12
    assert observer.plans[1].drafts == {"a": (1, 2, 3)}


def test_a_request_that_sampled_nothing_lost_no_drafts(steps, observer):
    steps.step_begins(plan(10, 4, (7, 8, 9)))
    steps.step_begins(plan(14))
    steps.step_ends({"a": ()})
    assert observer.plans[1].continued[0].num_computed_tokens == 14


def test_a_request_ends_after_the_steps_that_it_is_in(steps, observer):
    steps.step_begins(STARTED)
    steps.step_begins(plan(1))
    steps.step_ends({"a": (5,)})
    steps.request_finished("a")
    assert ("finished", "a") not in observer.calls
    steps.step_ends({"a": (6,)})
    assert observer.calls[-2:] == [("ends", {"a": (6,)}), ("finished", "a")]
    steps.request_finished("b")
    assert observer.calls[-1] == ("finished", "b")
