"""Which requests of a server are followed: by the first block of their prompts, and as memory allows."""

import random

import pytest

from attncheck.harness.engine.events import KVGroup, StartedRequest, StepPlan, Tally
from attncheck.harness.engine.history import History
from attncheck.reference import AttentionParams

SIZE = 16
PARAMS = AttentionParams(8, 2, 64)


class Server:
    """A server without preemption or drafts; ``rows``, ``followed``: how many it computed, and how many of them were."""

    def __init__(self, **options):
        self.tally = Tally(100)
        self.history = History([KVGroup(SIZE, ("layer",))], [[PARAMS]], self.tally, **options)
        self.rows = self.followed = 0

    def step(self, started=(), continued=(), **counts):
        self.tally.step += 1
        self.history.begin(StepPlan(tuple(started), tuple(continued), counts))
        entered = self.history.enter(list(counts))
        self.history.end(dict.fromkeys(counts, (7,)))
        self.rows += sum(counts.values())
        self.followed += sum(each.num_rows for each in entered.followed)


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
        server.history.add(f"r{number}", tokens[chat])
        started = StartedRequest(f"r{number}", (tuple(cached[chat]),), hit * SIZE)
        server.step([started], **{f"r{number}": length - hit * SIZE})
        server.history.finish(f"r{number}")
    assert server.tally.findings == []
    assert set(server.tally.not_followed) == {f"--follow {one_of} leaves out the first block of their prompt"}
    assert 0.5 < server.followed / server.rows * one_of < 1.5
