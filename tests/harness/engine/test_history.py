"""Which requests of a server are followed: by the first block of their prompts, and as memory allows."""

import random

import pytest

from attncheck.harness.engine.events import (
    KVGroup,
    LayerFacts,
    ObserverResult,
    ScheduledRequest,
    StepPlan,
)
from attncheck.harness.engine.history import EngineHistory
from attncheck.reference import AttentionParams

SIZE = 16
PARAMS = AttentionParams(8, 2, 64)


class Server:
    """A server without preemption or drafts; ``rows``, ``followed``: how many it computed, and how many of them were."""

    def __init__(self, **options):
        self.tally = ObserverResult()
        self.history = EngineHistory([KVGroup(SIZE, ("layer",))], {"layer": LayerFacts(PARAMS)}, self.tally, **options)
        self.rows = self.followed = 0

    def step(self, *requests, **counts):
        self.tally.steps += 1
        plan = StepPlan(requests, counts)
        entered = self.history.begin_step(plan, list(counts))
        self.rows += sum(counts.values())
        self.followed += sum(len(request.step_tokens) for request in entered)
        self.history.end_step(plan, dict.fromkeys(counts, (7,)))


@pytest.mark.parametrize("one_of", [4, 8])
def test_the_turns_of_a_conversation_are_followed_together(one_of):
    server, draw, num_blocks = Server(follow_one_of=one_of), random.Random(0), 0
    turns = [chat for chat in range(100) for _ in range(6)]
    draw.shuffle(turns)
    tokens = {chat: [draw.randrange(1000) for _ in range(64)] for chat in turns}
    cached = {chat: [] for chat in turns}
    for number, chat in enumerate(turns):
        tokens[chat] += [draw.randrange(1000) for _ in range(32)]
        length, hit = len(tokens[chat]), len(cached[chat])
        new = range(num_blocks + 1, num_blocks + 1 + length // SIZE - hit)
        num_blocks += len(new)
        cached[chat] = [*cached[chat], *new]
        reason = server.history.reason_of(tokens[chat])
        server.history.add(f"r{number}", tokens[chat], not_followed=reason)
        started = ScheduledRequest(f"r{number}", (tuple(cached[chat]),), hit * SIZE, starts=True)
        server.step(started, **{f"r{number}": length - hit * SIZE})
        server.history.finish(f"r{number}")
    assert server.tally.findings == ()
    assert set(server.tally.not_followed) == {f"--follow {one_of} leaves out the first block of their prompt"}
    assert 0.5 < server.followed / server.rows * one_of < 1.5


def serve_unlike(server, *, num_steps, running=8, prompt=40, until=72):
    """Serve requests of unlike prompts. The blocks of one that ends are given to others, the first to end first."""
    draw, free, requests = random.Random(0), list(range(1, 400)), {}
    for step in range(num_steps):
        for name in [name for name, (done, _) in requests.items() if done >= until]:
            server.history.finish(name)
            free += requests.pop(name)[1]
        counts, scheduled = {}, []
        for name, (done, table) in requests.items():
            new = [free.pop(0)] if done % SIZE == 0 else []
            table.extend(new)
            scheduled.append(ScheduledRequest(name, (tuple(new),), done))
            counts[name] = 1
        if len(requests) < running:
            name, table = f"r{step}", [free.pop(0) for _ in range(-(-prompt // SIZE))]
            server.history.add(name, [draw.randrange(1000) for _ in range(prompt)])
            scheduled.append(ScheduledRequest(name, (tuple(table),), 0, starts=True))
            requests[name] = (0, table)
            counts[name] = prompt
        server.step(*scheduled, **counts)
        requests = {name: (done + counts[name], table) for name, (done, table) in requests.items()}


def test_new_requests_are_followed_though_ended_ones_left_rows_in_blocks():
    server = Server(capacity=1024)  # of 6,384 that the blocks hold
    serve_unlike(server, num_steps=600)
    assert server.tally.findings == ()
    assert server.tally.not_followed == {}
    assert server.followed == server.rows > 4000


def test_if_the_running_requests_do_not_fit_some_are_not_followed():
    server = Server(capacity=256)  # of 576 that eight requests have at most
    serve_unlike(server, num_steps=600)
    assert server.tally.findings == ()
    assert set(server.tally.not_followed) == {"their keys and values do not fit into the memory for them"}
    assert 0.3 < server.followed / server.rows < 0.9


def test_a_hit_on_blocks_that_were_dropped_is_counted_and_no_finding():
    server = Server(capacity=256)
    for number in range(40):
        server.history.add(f"r{number}", [number] * 20)
        table = 2 * number + 1, 2 * number + 2
        server.step(ScheduledRequest(f"r{number}", (table,), 0, starts=True), **{f"r{number}": 20})
        server.history.finish(f"r{number}")
    assert server.followed == 800
    for name, number in (("late", 39), ("early", 0)):
        server.history.add(name, [number] * 20)
        started = ScheduledRequest(name, ((2 * number + 1, 101 + number),), SIZE, starts=True)
        server.step(started, **{name: 4})
        assert server.followed == 804, name
    assert server.tally.findings == ()
    assert server.tally.not_followed == {"their prefix hit maps blocks whose keys are not kept": 4}


def compute(server, name, tokens, table, hit=0):
    """Serve one request of these tokens in one step; return whether it is followed."""
    before = server.followed
    server.history.add(name, tokens)
    server.step(ScheduledRequest(name, (table,), hit, starts=True), **{name: len(tokens) - hit})
    return server.followed > before


def test_a_block_that_is_mapped_again_and_again_is_kept_while_others_are_dropped():
    server, system = Server(capacity=256), [7] * SIZE
    for number in range(60):  # 1,200 rows; each request maps the block of the first
        table = (1, 2 + number)
        assert compute(server, f"r{number}", [*system, *[number] * 20][: 2 * SIZE], table, hit=SIZE if number else 0)
        server.history.finish(f"r{number}")
    assert server.tally.findings == ()


def test_a_prompt_that_does_not_fit_leaves_running_requests_followed():
    server = Server(capacity=256)
    assert compute(server, "running", [1] * 100, tuple(range(1, 8)))
    assert not compute(server, "long", [2] * 200, tuple(range(10, 23)))
    before = server.followed
    server.step(ScheduledRequest("running", ((),), 100), running=1)
    assert server.followed == before + 1
    assert server.tally.not_followed == {"their keys and values do not fit into the memory for them": 200}


def test_a_request_whose_rows_are_dropped_is_not_followed_from_then_on():
    server, table = Server(capacity=64), {"old": (1, 2, 3), "new": (4, 5, 6)}
    assert compute(server, "old", [1] * 30, table["old"])
    assert compute(server, "new", [2] * 28, table["new"])
    for step in range(4):  # from the third on, 63 rows are too few
        running = ScheduledRequest("old", ((),), 30 + step), ScheduledRequest("new", ((),), 28 + step)
        server.step(*running, old=1, new=1)
    assert server.followed == 58 + 2 + 2 + 1 + 1
    assert server.tally.not_followed == {"their keys and values do not fit into the memory for them": 2}


def test_a_request_with_too_few_blocks_is_reported_and_its_blocks_are_not_known_then():
    server = Server()
    server.history.add("short", [1] * 40)
    server.step(ScheduledRequest("short", ((1, 2),), 0, starts=True), short=40)
    assert not compute(server, "new", [1] * 17, (1, 3), hit=SIZE), "the keys of block 1 were not kept"
    assert [(finding.kind, finding.request_id) for finding in server.tally.findings] == [("count", "short")]
    assert server.tally.not_followed == {
        "the scheduler gave them too few blocks": 40,
        "their prefix hit maps blocks whose keys are not kept": 1,
    }


def test_a_request_whose_prefix_hit_is_wrong_is_not_followed():
    server = Server()
    assert compute(server, "old", [1] * 32, (1, 2))
    assert not compute(server, "new", [2] * 17, (1, 3), hit=SIZE)
    assert compute(server, "newer", [3] * 17, (4, 5))
    assert [(finding.kind, finding.position, finding.block_id) for finding in server.tally.findings] == [
        ("prefix_hit", 0, 1)
    ]
    assert server.tally.not_followed == {"their prefix hit maps a wrong block": 1}
