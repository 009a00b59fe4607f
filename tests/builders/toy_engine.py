"""A small serving engine on the reference: scheduler, prefix cache, block tables, drafts, preemption, paged layers.

``ToyEngine`` is right. A wrong one overrides a method. What it computes has no meaning: queries, keys and values are
random numbers of a token and a layer, and the next token is drawn from the request's id and the position.
"""

import random
from dataclasses import dataclass, field

import torch

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
from attncheck.reference import AttentionParams, Precision, paged_attention

BLOCK, VOCAB, HEADS, KV_HEADS, SIZE, WINDOW = 4, 50, 4, 2, 16, 6
DTYPE = torch.bfloat16


@dataclass
class Served:
    """A request, as the engine knows it."""

    name: str
    tokens: list[int]
    until: int
    done: int = 0
    table: list[list[int]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    num_preempted: int = 0
    num_freed: int = 0
    is_resumed: bool = False


class ToyEngine:
    """An engine with one group of two full layers, or with a second group of two layers with a window."""

    def __init__(self, observer, *, hybrid=False, blocks=24, budget=12, num_drafts=2, seed=0, prefix_caching=True):
        self.observer, self.draw = observer, random.Random(seed)
        self.groups = [("full.0", "full.1"), ("window.0", "window.1")] if hybrid else [("full.0", "full.1")]
        self.free = list(range(1, blocks))
        self.held = dict.fromkeys(range(blocks), 0)
        self.hash_of, self.cached = {}, {}  # block -> key, key -> block
        self.waiting, self.running, self.budget, self.num_drafts = [], [], budget, num_drafts
        self.prefix_caching, self.step = prefix_caching, 0
        made = torch.Generator().manual_seed(0)
        layers = [name for group in self.groups for name in group]
        self.weights = {name: torch.randn(VOCAB, HEADS + 2 * KV_HEADS, SIZE, generator=made) for name in layers}
        self.caches = {name: torch.zeros(blocks, BLOCK, KV_HEADS, 2 * SIZE, dtype=DTYPE) for name in layers}
        self.params = {name: self.settings_of(name) for name in layers}
        observer.engine_starts(
            [KVGroup(BLOCK, group) for group in self.groups],
            {name: LayerFacts(self.true_settings_of(name), write=self.write) for name in layers},
            EngineFacts(dtype="bfloat16"),
        )

    def true_settings_of(self, layer):
        window = (WINDOW - 1, 0) if layer.startswith("window") else (-1, -1)
        return AttentionParams(HEADS, KV_HEADS, SIZE, window=window)

    settings_of = true_settings_of

    # What faults replace.

    def seq_len(self, request, rows):
        return request.done + rows

    def positions(self, request, rows):
        return list(range(request.done, request.done + rows))

    def inputs(self, request, rows):
        return (request.tokens + request.drafts)[request.done : request.done + rows]

    def table_of(self, request, group):
        return request.table[group]

    def slots(self, request, group, rows):
        return [request.table[group][p // BLOCK] * BLOCK + p % BLOCK for p in range(request.done, request.done + rows)]

    def num_hit(self, request, num_blocks):
        return num_blocks

    def accepted(self, request, sampled):
        return len(sampled)

    def write(self, key, value, cache, slots):
        cache.view(-1, KV_HEADS, 2 * SIZE)[slots] = torch.cat([key, value], dim=-1)

    # The engine.

    def add(self, name, tokens, until):
        self.waiting.append(Served(name, list(tokens), until))
        self.observer.request_added(name, tokens)

    def keys_of(self, request, blocks):
        return [tuple(request.tokens[: (index + 1) * BLOCK]) for index in range(blocks)]

    def take_block(self):
        block = next((each for each in self.free if self.held[each] == 0), None)
        if block is None:
            return None
        self.free.remove(block)
        self.cached.pop(self.hash_of.pop(block, None), None)
        self.held[block] = 1
        return block

    def release(self, request):
        for group, table in enumerate(request.table):
            for block in reversed(table[request.num_freed if group else 0 :]):
                self.let_go(block)
        request.table, request.done, request.drafts, request.num_freed = [], 0, [], 0

    def let_go(self, block):
        self.held[block] -= 1
        if self.held[block] == 0 and block:
            self.free.append(block)

    def forget_unseen(self, request):
        """Let go of blocks that lie outside the window of all later rows; the table keeps their ids, as in vLLM."""
        unseen = max(0, request.done - WINDOW + 1) // BLOCK
        for table in request.table[1:]:
            for block in table[request.num_freed : unseen]:
                self.let_go(block)
        request.num_freed = max(request.num_freed, unseen)

    def grow(self, request, end):
        """Give the request blocks up to position ``end``; return the new ones by group, or None if there are none."""
        new = [[] for _ in self.groups]
        while len(request.table[0]) * BLOCK < end:
            taken = [self.take_block() for _ in self.groups]
            if None in taken:
                return None
            for group, block in enumerate(taken):
                request.table[group].append(block)
                new[group].append(block)
        return new

    def map_prefix(self, request):
        """Map cached blocks of the request's prefix."""
        request.table = [[] for _ in self.groups]
        if self.prefix_caching:
            keys = self.keys_of(request, (len(request.tokens) - 1) // BLOCK)
            tables = [[self.cached.get((group, key), 0) for key in keys] for group in range(len(self.groups))]
            hit = next((index for index, block in enumerate(tables[0]) if not block), len(keys))
            while any(0 in table[max(0, hit * BLOCK - WINDOW + 1) // BLOCK : hit] for table in tables[1:]):
                hit -= 1
            request.table = [table[:hit] for table in tables]
        hit = self.num_hit(request, len(request.table[0]))
        for table in request.table:
            for block in table:
                self.held[block] += 1
                if block in self.free:
                    self.free.remove(block)
        request.done = hit * BLOCK
        self.forget_unseen(request)

    def schedule(self):
        """Return the plan of a step: running requests first."""
        left, counts, chosen, has_preempted = self.budget, {}, [], False
        for request in list(self.running):
            rows = min(left, len(request.tokens) + len(request.drafts) - request.done)
            if rows <= 0 or request not in self.running:
                continue
            while (new := self.grow(request, request.done + rows)) is None:
                victim = self.running.pop()
                victim.num_preempted += 1
                self.release(victim)
                self.waiting.insert(0, victim)
                victim.is_resumed = has_preempted = True
                counts.pop(victim.name, None)
                chosen = [each for each in chosen if each.request_id != victim.name]
                if victim is request:
                    break
            else:
                counts[request.name], left = rows, left - rows
                chosen.append(ScheduledRequest(request.name, tuple(map(tuple, new)), request.done))
        while self.waiting and left > 0 and not has_preempted:
            request = self.waiting[0]
            self.map_prefix(request)
            rows = min(left, len(request.tokens) - request.done)
            if self.grow(request, request.done + rows) is None:
                self.release(request)
                break
            self.waiting.pop(0)
            self.running.append(request)
            counts[request.name], left = rows, left - rows
            table = tuple(map(tuple, request.table))
            chosen.append(ScheduledRequest(request.name, table, request.done, True, request.is_resumed))
        return StepPlan(tuple(chosen), counts, self.drafts_of(counts))

    def drafts_of(self, counts):
        return {each.name: tuple(each.drafts) for each in self.running if each.name in counts and each.drafts}

    def run_step(self):
        """Do one step: schedule, run the layers, sample."""
        self.step += 1
        plan = self.schedule()
        self.observer.step_begins(plan)
        counts = plan.num_scheduled_tokens
        batch = [(each, counts[each.name]) for each in self.running if each.name in counts]
        ids = torch.tensor([token for each, rows in batch for token in self.inputs(each, rows)])
        positions = torch.tensor([p for each, rows in batch for p in self.positions(each, rows)])
        self.observer.inputs([each.name for each, _ in batch], ids, positions)
        for group, layers in enumerate(self.groups):
            for layer in layers:
                self.run_layer(layer, group, batch, ids)
        sampled = {each.name: self.sample(each, rows) for each, rows in batch}
        self.observer.step_ends(sampled)
        for each, rows in batch:
            self.finish_step(each, rows, sampled[each.name])

    def run_layer(self, layer, group, batch, ids):
        drawn = self.weights[layer][ids].to(DTYPE)
        query, key, value = drawn.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        slots = [slot for each, rows in batch for slot in self.slots(each, group, rows)]
        cache = self.caches[layer]
        self.write(key, value, cache, torch.tensor(slots))
        tables = [self.table_of(each, group) for each, _ in batch]
        table = torch.tensor([each + [0] * (64 - len(each)) for each in tables])
        lens = torch.tensor([self.seq_len(each, rows) for each, rows in batch])
        starts = torch.tensor([0, *(rows for _, rows in batch)]).cumsum(0)
        kernel = Precision.kernel(DTYPE)
        key_cache, value_cache = cache.split(SIZE, dim=-1)
        out, _ = paged_attention(
            query, key_cache, value_cache, table, lens, starts, self.params[layer], precision=kernel
        )
        self.observer.layer_rows(LayerRows(layer, query, key, value, out.to(DTYPE), cache))

    def next_token(self, request, position):
        return random.Random(f"{request.name} {position}").randrange(VOCAB)

    def sample(self, request, rows):
        """Return the tokens behind the rows: of accepted drafts, and one more."""
        known = len(request.tokens)
        if request.done + rows < known:
            return ()
        sampled = [self.next_token(request, known)]
        for draft in request.drafts:
            if draft != sampled[-1]:
                break
            sampled.append(self.next_token(request, known + len(sampled)))
        return tuple(sampled)

    def finish_step(self, request, rows, sampled):
        request.done += rows - (len(request.drafts) + 1 - self.accepted(request, sampled) if request.drafts else 0)
        request.tokens += sampled
        request.drafts = []
        for index, key in enumerate(self.keys_of(request, request.done // BLOCK)):
            for group, table in enumerate(request.table):
                if (group, key) not in self.cached and (group == 0 or index >= request.num_freed):
                    self.hash_of[table[index]] = (group, key)
                    self.cached[group, key] = table[index]
        self.forget_unseen(request)
        if len(request.tokens) >= request.until:
            self.running.remove(request)
            self.release(request)
            self.observer.request_finished(request.name)
        elif sampled and self.num_drafts:
            known = len(request.tokens)
            right = [self.next_token(request, known + offset) for offset in range(self.num_drafts)]
            request.drafts = [token if self.draw.random() < 0.6 else (token + 1) % VOCAB for token in right]


def serve(
    engine_class=ToyEngine, settings=None, *, requests=10, steps=400, observer=lambda observer: observer, **options
):
    """Return the result of an observer that watched the engine serve some requests with shared prefixes.

    ``observer``: returns what the engine calls instead of an ``EngineObserver``.
    """
    observer = observer(EngineObserver(settings or ObserverSettings()))
    engine = engine_class(observer, **options)
    draw = random.Random(1)
    shared = [draw.randrange(VOCAB) for _ in range(14)]
    for index in range(requests):
        own = [draw.randrange(VOCAB) for _ in range(draw.choice([3, 9, 17]))]
        tokens = (shared if index % 2 else []) + own
        engine.add(f"r{index}", tokens, len(tokens) + draw.choice([4, 12]))
    for _ in range(steps):
        if not engine.waiting and not engine.running:
            break
        engine.run_step()
    assert not engine.waiting + engine.running, "the engine did not finish"
    return observer.result(), engine
