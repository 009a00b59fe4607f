"""Async scheduling: a step begins before the tokens of the step before are known, and is judged when its own are."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from toy_engine import VOCAB, Served, ToyEngine, serve

from attncheck.harness.engine.events import (
    EngineFacts,
    KVGroup,
    LayerFacts,
    LayerRows,
    ObserverSettings,
    ScheduledRequest,
    StepPlan,
)
from attncheck.harness.engine.observer import EngineObserver
from attncheck.reference import AttentionParams


class Async:
    """What an engine with async scheduling gives of the steps of the toy engine: each begins before the last ends."""

    def __init__(self, observer):
        self.observer = observer
        self.ending, self.rejected = None, {}
        self.request_added, self.request_finished = observer.request_added, observer.request_finished
        self.inputs, self.layer_rows = observer.inputs, observer.layer_rows

    def engine_starts(self, groups, layers, engine):
        self.observer.engine_starts(groups, layers, replace(engine, is_async=True))

    def step_begins(self, plan):
        self.take_early()
        requests = tuple(
            replace(each, num_computed_tokens=each.num_computed_tokens + self.rejected.get(each.request_id, 0))
            if not each.starts
            else each
            for each in plan.requests
        )
        drafts = {name: (-1,) * len(ids) for name, ids in plan.drafts.items()}
        step = self.observer.step_begins(replace(plan, requests=requests, drafts=drafts))
        self.step, self.plan = step, plan

    def step_ends(self, sampled):
        self.observer.forward_ends()
        if self.ending is not None:
            self.observer.step_ends(*self.ending)
        self.ending = sampled, self.step
        drafts = self.plan.drafts.items()
        self.rejected = {name: len(ids) + 1 - len(sampled[name]) for name, ids in drafts if sampled[name]}

    def take_early(self):
        """Take the tokens of the last step before the next one begins; its plan was made without them."""

    def result(self):
        if self.ending is not None:
            self.observer.step_ends(*self.ending)
        return self.observer.result()


class Early(Async):
    def take_early(self):
        if self.ending is not None:
            self.observer.step_ends(*self.ending)
            self.ending = None


@pytest.mark.parametrize(("judge_every", "follow_one_of"), [(1, 1), (3, 1), (1, 3)])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("arrival", [Async, Early])
def test_steps_are_judged_as_without_async_scheduling(arrival, hybrid, judge_every, follow_one_of):
    settings = ObserverSettings(judge_every=judge_every, follow_one_of=follow_one_of)
    options = {"settings": settings, "hybrid": hybrid, "blocks": 26 if hybrid else 13}
    right, _ = serve(**options)
    late, _ = serve(observer=arrival, **options)
    assert late.findings == ()
    compared = ("output", "position", "count", "prefix_hit")
    assert [late.checks.get(kind) for kind in compared] == [right.checks.get(kind) for kind in compared]
    assert late.counts == right.counts
    assert "write" not in late.checks
    if follow_one_of == 1:  # the scheduler does not give the tokens of drafts, and those of rejected ones are any
        rejected = right.counts["drafts"] - right.counts["drafts accepted"]
        assert late.checks["token"] == right.checks["token"] - rejected > 0


class ReadsOneShort(ToyEngine):
    def seq_len(self, request, rows):
        return super().seq_len(request, rows) - (self.step == 8 and request.done > 8)


def test_a_late_step_has_the_number_and_place_of_its_fault():
    direct, late = (serve(ReadsOneShort, observer=each)[0] for each in (lambda observer: observer, Async))
    found = [(each.kind, each.step, each.request_id, each.position, each.layer) for each in late.findings]
    assert found == [(each.kind, each.step, each.request_id, each.position, each.layer) for each in direct.findings]
    assert {step for _, step, *_ in found} == {8}


class GivesAnotherDraft(ToyEngine):
    """The model is given another token than the first draft, which is accepted."""

    act = None

    def inputs(self, request, rows):
        right = super().inputs(request, rows)
        known = len(request.tokens)
        if self.act is None and request.drafts and request.drafts[0] == self.next_token(request, known):
            self.act = (self.step, request.name, known)
            right[known - request.done] = (request.drafts[0] + 1) % VOCAB
        return right


def test_a_draft_that_is_accepted_is_compared_with_what_the_model_was_given():
    result, engine = serve(GivesAnotherDraft, observer=Async, blocks=40)
    tokens = [each for each in result.findings if each.kind == "token"]
    assert [(each.step, each.request_id, each.position) for each in tokens] == [engine.act]


class CountsOneMore(ToyEngine):
    """Counts a token of one step that was not computed."""

    act = None

    def schedule(self):
        plan = super().schedule()
        first = plan.requests[0]
        if self.act is None and self.step > 5 and not first.starts and not first.block_ids[0]:
            self.act = (self.step, first.request_id)
            wrong = replace(first, num_computed_tokens=first.num_computed_tokens + 3)  # two drafts may be rejected
            plan = replace(plan, requests=(wrong, *plan.requests[1:]))
        return plan


def test_a_count_that_rejected_drafts_do_not_explain_is_found():
    result, engine = serve(CountsOneMore, observer=Async, blocks=40)
    assert [(each.kind, each.step, each.request_id) for each in result.findings] == [("count", *engine.act)]


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
    assert result.findings == ()
    assert result.checks["prefix_hit"] == 9


# What is kept of a step until its tokens arrive.


@pytest.fixture
def observer():
    observer = EngineObserver(ObserverSettings(judge_every=2))
    facts = {"layer": LayerFacts(AttentionParams(1, 1, 1))}
    observer.engine_starts([KVGroup(4, ("layer",))], facts, EngineFacts(is_async=True))
    return observer


def begin(observer, *names):
    """Begin a step in which each request is given one row; the last row is padding. Return it and its query."""
    step = observer.step_begins(
        StepPlan(
            tuple(ScheduledRequest(name, ((ord(name),),), 0, starts=True) for name in names), dict.fromkeys(names, 1)
        )
    )
    rows = torch.arange(len(names) + 1)
    observer.inputs(names, rows, torch.zeros_like(rows))
    query = rows[:, None, None].bfloat16()
    observer.layer_rows(LayerRows("layer", query, query, query, query))
    return step, query


def test_followed_rows_are_copied_and_of_a_judged_step_query_and_output(observer):
    for name, reason in (("a", None), ("b", "of a test"), ("c", None)):
        observer.request_added(name, [0], "", reason)
    for is_judged in (False, True):
        step, query = begin(observer, *"abcd")  # "d" was never added
        query.zero_()  # the engine uses its buffers again
        kept = [rows.flatten().tolist() for rows in step.layers[0][1:5]]
        judged = [0, 2] if is_judged else []
        assert kept == [judged, [0, 2], [0, 2], judged]
    assert observer.result().not_followed == {"of a test": 2, "requests whose start was not seen": 2}


def test_a_request_that_is_added_again_with_a_reason_is_not_followed_from_the_next_step_on(observer):
    observer.request_added("a", [0])
    first, _ = begin(observer, "a")
    observer.request_added("a", [0], "", "of a test")
    second, _ = begin(observer, "a")
    assert [len(step.rows) for step in (first, second)] == [1, 0]
    observer.step_ends({"a": (1,)}, first)
    observer.step_ends({"a": (1,)}, second)
    assert observer.result().checks["token"] == 1


def test_a_drafter_behind_the_forward_is_ignored(observer):
    observer.request_added("a", [0])
    step, query = begin(observer, "a")
    observer.forward_ends()
    observer.layer_rows(LayerRows("layer", query, query, query, query))
    assert len(step.layers) == 1


def test_tokens_out_of_order_are_refused(observer):
    observer.step_begins(StepPlan((), {}))
    second = observer.step_begins(StepPlan((), {}))
    with pytest.raises(ValueError, match="those of an earlier one"):
        observer.step_ends({}, second)


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_step_that_ends_in_another_thread_is_judged_on_the_stream_of_the_model(observer, monkeypatch):
    entered = []

    @contextmanager
    def stream(of_thread):
        entered.append(of_thread)
        yield

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: threading.current_thread().name)
    observer.request_added("a", [0])
    step = observer.step_begins(StepPlan((ScheduledRequest("a", ((1,),), 0, starts=True),), {"a": 1}))
    observer.inputs(["a"], torch.zeros(1), torch.zeros(1).as_subclass(OnGPU))
    thread = threading.Thread(target=observer.step_ends, args=({"a": (5,)}, step))
    thread.start()
    thread.join()
    assert entered == ["MainThread"]
    assert observer.result().checks["position"] == 1
