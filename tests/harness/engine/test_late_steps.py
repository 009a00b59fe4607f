"""Async scheduling: a step begins before the tokens of the step before are known, and is observed when they are."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from toy_engine import Served, ToyEngine, serve

from attncheck.harness.engine.events import ContinuedRequest, LayerRows, ObserverSettings, StartedRequest, StepPlan
from attncheck.harness.engine.late_steps import LateSteps
from attncheck.harness.engine.observer import EngineObserver


class Observer:
    """Keeps what it is given, with the values that tensors have at that moment."""

    failure = None

    def __init__(self):
        self.calls = []
        self.plans = []
        self.known = set()
        self.not_followed = set()
        self.computed = {}

    def num_computed_tokens(self, request_id):
        return self.computed.get(request_id)

    def request_added(self, request_id):
        self.known.add(request_id)
        self.calls.append(f"{request_id} is added")

    def request_finished(self, request_id):
        self.known.discard(request_id)
        self.calls.append(f"{request_id} is dropped")

    def knows(self, request_id):
        return request_id in self.known

    def may_follow(self, request_id):
        return request_id not in self.not_followed

    def step_begins(self, plan):
        self.plans.append(plan)
        self.calls.append("begins")

    def inputs(self, request_ids, input_ids, positions):
        self.calls.append(("inputs", tuple(request_ids), input_ids.tolist(), positions.tolist()))

    def layer_rows(self, rows):
        layer, query, key, _, _, kv_cache = rows
        self.calls.append((layer, query.tolist(), key if key is None else key.tolist(), kv_cache))

    def forward_ends(self):
        self.calls.append("forward ends")

    def step_ends(self, sampled):
        self.calls.append(("ends", dict(sampled)))


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
    steps.layer_rows(LayerRows("layer", rows, None, None, rows, kv_cache=torch.zeros(1)))
    steps.forward_ends()
    steps.layer_rows(LayerRows("layer of a drafter", rows, None, None, rows))


def test_a_step_whose_tokens_are_known_is_observed_at_once(steps, observer):
    first = steps.step_begins(STARTED)
    forward(steps, 1)
    assert observer.calls[0] == "begins"
    assert observer.calls[2:] == [("layer", [1, 1], None, torch.zeros(1)), "forward ends"]
    steps.step_ends(first, {"a": (5,)})
    steps.step_begins(plan(1))
    assert observer.calls[-1] == "begins"


def test_a_step_is_observed_when_the_tokens_of_the_one_before_are_known(steps, observer):
    buffer = torch.zeros(2, dtype=torch.int64)
    first = steps.step_begins(STARTED)
    forward(steps, 1, buffer=buffer)
    steps.step_begins(plan(1))
    forward(steps, 2, buffer=buffer)
    before = len(observer.calls)
    assert before == 4
    buffer.fill_(3)  # the next step overwrites what the late one was given
    steps.step_ends(first, {"a": (5,)})
    assert observer.calls[before:] == [
        ("ends", {"a": (5,)}),
        "begins",
        ("inputs", ("a",), [2, 2], [2, 2]),
        ("layer", [2], None, None),  # without the pages, which the next step may have written
        "forward ends",
    ]


def test_tokens_that_arrive_during_a_step_let_its_rest_be_observed_at_once(steps, observer):
    first = steps.step_begins(STARTED)
    forward(steps, 1)
    steps.step_begins(plan(1))
    steps.inputs(["a"], torch.tensor([2]), torch.tensor([1]))
    steps.layer_rows(LayerRows("first", torch.tensor([2]), None, None, torch.tensor([2])))
    steps.step_ends(first, {"a": (5,)})
    steps.layer_rows(LayerRows("second", torch.tensor([2]), None, None, torch.tensor([2])))
    assert observer.calls[4:] == [
        ("ends", {"a": (5,)}),
        "begins",
        ("inputs", ("a",), [2], [1]),
        ("first", [2], None, None),
        ("second", [2], None, None),
    ]


def test_after_a_failure_nothing_is_copied(steps, observer):
    steps.step_begins(STARTED)
    forward(steps, 1)
    late = steps.step_begins(plan(1))
    steps.inputs(["a"], torch.tensor([2]), torch.tensor([1]))
    observer.failure = "RuntimeError: out of memory"
    for _ in range(3):  # a replayed graph gives rows without a hook
        steps.layer_rows(LayerRows("layer", torch.tensor([2]), None, None, torch.tensor([2])))
    assert late.layers == []


@pytest.mark.parametrize("counted", [14, 12])
@pytest.mark.parametrize("is_early", [False, True])
def test_the_scheduler_may_count_drafts_that_were_rejected(observer, counted, is_early):
    """Whether the tokens arrive before or after the next step begins, its plan may be older."""
    steps = LateSteps(observer, is_async=True)
    first = steps.step_begins(plan(10, 4, (7, 8, 9)))
    forward(steps, 0, 4)
    observer.computed["a"] = 12  # when the first step has ended: one draft of three was accepted
    if is_early:
        steps.step_ends(first, {"a": (7, 6)})
    steps.step_begins(plan(counted, 4, (-1, -1, -1)))
    assert len(observer.plans) == 1  # the drafts are not known yet
    steps.inputs(["a"], torch.tensor([6, 1, 2, 3, 0]), torch.tensor([12, 13, 14, 15, 0]))
    if not is_early:
        steps.step_ends(first, {"a": (7, 6)})
    (late,) = observer.plans[1].continued
    assert late.num_computed_tokens == 12
    assert observer.plans[1].drafts == {"a": (1, 2, 3)}


@pytest.mark.parametrize("counted", [11, 13, 15])
def test_a_count_with_some_of_the_rejected_drafts_is_kept(observer, counted):
    steps = LateSteps(observer, is_async=True)
    first = steps.step_begins(plan(10, 4, (7, 8, 9)))
    steps.step_begins(plan(counted))
    observer.computed["a"] = 12
    steps.step_ends(first, {"a": (7, 6)})
    assert observer.plans[1].continued[0].num_computed_tokens == counted


def test_a_request_that_sampled_nothing_lost_no_drafts(steps, observer):
    first = steps.step_begins(plan(10, 4, (7, 8, 9)))
    steps.step_begins(plan(14))
    steps.step_ends(first, {"a": ()})
    assert observer.plans[1].continued[0].num_computed_tokens == 14


def test_requests_change_between_the_steps_that_have_begun_and_the_next(steps, observer):
    first = steps.step_begins(STARTED)
    second = steps.step_begins(plan(1))
    steps.request_finished("a")
    steps.request_added("a")
    third = steps.step_begins(plan(2))
    steps.step_ends(first, {"a": (5,)})
    assert "a is dropped" not in observer.calls
    steps.step_ends(second, {"a": (6,)})
    assert observer.calls[-4:] == [("ends", {"a": (6,)}), "a is dropped", "a is added", "begins"]
    steps.step_ends(third, {})
    steps.request_finished("a")
    assert observer.calls[-1] == "a is dropped"


def test_a_new_request_is_added_while_a_step_runs(steps, observer):
    steps.step_begins(STARTED)
    steps.request_added("b")
    assert observer.calls[-1] == "b is added"


def test_rows_of_requests_that_are_not_followed_are_not_copied(steps, observer):
    steps.step_begins(STARTED)
    late = steps.step_begins(StepPlan((), (), {"a": 1, "b": 2, "c": 1}))
    observer.not_followed = {"b"}
    rows = torch.arange(1.0, 6.0)[:, None]
    steps.inputs(["a", "b", "c"], torch.zeros(5), torch.zeros(5))
    steps.layer_rows(LayerRows("layer", rows, rows, rows, rows))
    copies = late.layers[0][1:]
    assert [copy.copied.flatten().tolist() for copy in copies] == [[1.0, 4.0]] * 4
    assert [copy.spread().flatten().tolist() for copy in copies] == [[1.0, 0.0, 0.0, 4.0]] * 4


def test_rows_of_a_request_that_is_added_again_are_copied(steps, observer):
    steps.request_added("a")
    steps.step_begins(STARTED)
    observer.not_followed = {"a"}
    steps.request_finished("a")
    steps.request_added("a")
    late = steps.step_begins(plan(0))
    forward(steps, 7)
    assert len(late.layers[0][1].copied) == 1


def test_tokens_out_of_order_are_refused(steps):
    steps.step_begins(STARTED)
    second = steps.step_begins(plan(1))
    with pytest.raises(ValueError, match="those of an earlier one"):
        steps.step_ends(second, {})


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_step_that_ends_in_another_thread_is_observed_on_the_stream_of_the_model(steps, observer, monkeypatch):
    @contextmanager
    def stream(entered):
        observer.calls.append(f"on {entered}")
        yield
        observer.calls.append(f"off {entered}")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: threading.current_thread().name)
    first = steps.step_begins(STARTED)
    steps.step_begins(plan(1))
    forward(steps, 2, buffer=torch.zeros(2, dtype=torch.int64).as_subclass(OnGPU))
    thread = threading.Thread(target=steps.step_ends, args=(first, {"a": (5,)}))
    thread.start()
    thread.join()
    begin, end = (observer.calls.index(f"{edge} MainThread") for edge in ("on", "off"))
    assert observer.calls[begin + 1 : end] == [
        ("ends", {"a": (5,)}),
        "begins",
        ("inputs", ("a",), [2, 2], [2, 2]),
        ("layer", [2], None, None),
        "forward ends",
    ]


class Async:
    """What an engine with async scheduling gives of the steps of the toy engine: each begins before the last ends."""

    def __init__(self, observer):
        judge_every = observer.settings.judge_every
        self.observer, self.steps = observer, LateSteps(observer, is_async=True, judge_every=judge_every)
        self.ending, self.rejected = None, {}
        self.settings, self.engine_starts = observer.settings, observer.engine_starts
        self.layer_rows = self.steps.layer_rows
        self.inputs = self.steps.inputs

    def request_added(self, *request):
        self.steps.request_added(*request)

    def request_finished(self, request_id):
        self.steps.request_finished(request_id)

    def step_begins(self, plan):
        self.take_early()
        continued = tuple(
            replace(each, num_computed_tokens=each.num_computed_tokens + self.rejected.get(each.request_id, 0))
            for each in plan.continued
        )
        drafts = {name: (-1,) * len(ids) for name, ids in plan.drafts.items()}
        self.step, self.plan = self.steps.step_begins(replace(plan, continued=continued, drafts=drafts)), plan

    def step_ends(self, sampled):
        self.steps.forward_ends()
        if self.ending is not None:
            self.steps.step_ends(*self.ending)
        self.ending = self.step, sampled
        drafts = self.plan.drafts.items()
        self.rejected = {name: len(ids) + 1 - len(sampled[name]) for name, ids in drafts if sampled[name]}

    def take_early(self):
        """Take the tokens of the last step before the next one begins; its plan was made without them."""

    def result(self):
        if self.ending is not None:
            self.steps.step_ends(*self.ending)
        return self.observer.result()


class Early(Async):
    def take_early(self):
        if self.ending is not None:
            self.steps.step_ends(*self.ending)
            self.ending = None


@pytest.mark.parametrize(("judge_every", "follow_one_of"), [(1, 1), (3, 1), (1, 3)])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("arrival", [Async, Early])
def test_late_steps_are_judged_as_others(arrival, hybrid, judge_every, follow_one_of):
    settings = ObserverSettings(judge_every=judge_every, follow_one_of=follow_one_of)
    options = {"settings": settings, "hybrid": hybrid, "blocks": 26 if hybrid else 13}
    right, _ = serve(**options)
    late, _ = serve(observer=arrival, **options)
    assert late.failure is None
    assert late.findings == ()
    compared = ("output", "token", "position", "count", "prefix_hit")
    assert [late.checks.get(kind) for kind in compared] == [right.checks.get(kind) for kind in compared]
    assert late.counts == right.counts
    assert "write" not in late.checks


class ReadsOneShort(ToyEngine):
    def seq_len(self, request, rows):
        return super().seq_len(request, rows) - (self.step == 8 and request.done > 8)


def test_a_late_step_has_the_number_and_place_of_its_fault():
    direct, late = (serve(ReadsOneShort, observer=each)[0] for each in (lambda observer: observer, Async))
    found = [(each.kind, each.step, each.request_id, each.position, each.layer) for each in late.findings]
    assert found == [(each.kind, each.step, each.request_id, each.position, each.layer) for each in direct.findings]
    assert {step for _, step, *_ in found} == {8}


@pytest.mark.parametrize("arrival", [Async, Early])
def test_a_prefix_hit_on_drafts_that_were_accepted(arrival):
    """The blocks have the tokens of the drafts, and not the -1 that the scheduler writes for each."""
    observer = arrival(EngineObserver())
    engine = ToyEngine(observer, blocks=64)
    answered = Served("first turn", [1, 2, 3, 4, 5, 6, 7], 40)
    engine.waiting.append(answered)
    observer.request_added(answered.name, list(answered.tokens))
    while engine.waiting or engine.running:
        engine.run_step()
    engine.add("second turn", [*answered.tokens[:36], 9, 9, 9], 60)
    while engine.waiting or engine.running:
        engine.run_step()
    result = observer.result()
    assert (result.failure, result.findings) == (None, ())
    assert result.checks["prefix_hit"] == 9
