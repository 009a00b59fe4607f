"""Faults in vLLM's scheduler, cache manager, model runner and cache writer. Each acts once or rarely.

``python engine_faults.py FOLDER [FAULT ...]`` starts each engine once, and serves the same requests in a fork of it for
each fault. A line of JSON for each: what the fault did, what ``attncheck engine`` found, and the greedy tokens.
"""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial, wraps
from pathlib import Path

import torch
import vllm
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from attncheck.harness.engine.events import ObserverSettings
from attncheck.harness.engine.models import CONFIGS, VOCAB_SIZE, make_model
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.vllm_runner import EngineHooks

MAX_STEPS = 400
SELDOM = 4
"""Steps of which one is judged if nothing is planted."""


LATER = 4
"""Times that a fault may act, before it does: the engine is in the middle of its work then."""


@dataclass
class Acts:
    """What a fault did: the step, the request, the first position, and the physical block that it concerns.

    seen: times that it could act. watched: steps that are watched after the first act; the others are served without, to
    compare the tokens.
    """

    did: list[dict] = field(default_factory=list)
    step: int = 0
    seen: int = 0
    after: int = 10**9
    watched: int = 6

    @property
    def is_near(self) -> bool:
        """Whether it has acted, or may act in the next step."""
        return bool(self.did) or self.seen >= self.after - 2

    @property
    def is_over(self) -> bool:
        """Whether its effect is seen by now."""
        return bool(self.did) and self.step > self.did[0]["step"] + self.watched

    def due(self, after: int = LATER) -> bool:
        """Return whether to act now: once, after some times."""
        self.after = after
        self.seen += 1
        return not self.did and self.seen > after

    def note(self, request_id, position=None, block_id=None, *, step=None, **more):
        """Keep what was done."""
        act = {"step": self.step if step is None else step, "request_id": request_id, "position": position}
        self.did.append(act | {"block_id": block_id} | more)


@dataclass(frozen=True)
class Fault:
    """A fault, and the engine in which it is planted."""

    name: str
    engine: str
    plant: Callable[[Acts], None]


FAULTS: dict[str, Fault] = {}


def fault(engine="full"):
    """Register a function that plants a fault."""

    def register(plant):
        FAULTS[plant.__name__] = Fault(plant.__name__, engine, plant)
        return plant

    return register


def around(owner, name, wrapper):
    """Replace a method by ``wrapper(original, *args, **keywords)``."""
    original = owner.__dict__[name]
    is_bound = isinstance(original, (classmethod, staticmethod))
    function = original.__func__ if is_bound else original

    @wraps(function)
    def replaced(*args, **keywords):
        return wrapper(function, *args, **keywords)

    setattr(owner, name, type(original)(replaced) if is_bound else replaced)


# Rows of a step, as the model runner has them.


@dataclass
class Rows:
    """The rows of one request in a step."""

    request_id: str
    index: int
    first: int
    count: int
    computed: int
    num_prompt: int
    num_known: int

    @property
    def is_decode(self):
        """Whether it has no prompt token, so that its rows are a sampled token and drafts."""
        return self.computed >= self.num_prompt

    @property
    def is_unfinished_chunk(self):
        """Whether more of its known tokens are left."""
        return self.computed + self.count < self.num_known


def rows_of(runner):
    """Return the rows of each request of the step that is prepared."""
    batch, starts = runner.input_batch, runner.query_start_loc.np
    return [
        Rows(
            request_id,
            index,
            int(starts[index]),
            int(starts[index + 1] - starts[index]),
            int(batch.num_computed_tokens_cpu[index]),
            int(batch.num_prompt_tokens[index]),
            runner.requests[request_id].num_tokens,
        )
        for index, request_id in enumerate(batch.req_ids)
    ]


def block_of(runner, rows, position, group=0):
    """Return the physical block of a position."""
    table = runner.input_batch.block_table[group]
    return int(table.block_table.np[rows.index, position // table.block_size])


def when_prepared(acts, choose, act, after=LATER):
    """Once a step is prepared, act on the first request that ``choose`` accepts."""

    def prepare(original, runner, *args, **keywords):
        made = original(runner, *args, **keywords)
        rows = next((each for each in rows_of(runner) if choose(runner, each)), None)
        if rows is not None and acts.due(after):
            act(runner, rows)
        return made

    around(GPUModelRunner, "_prepare_inputs", prepare)


def _long_decode(runner, rows):
    size = runner.input_batch.block_table[0].block_size
    return rows.is_decode and rows.count == 1 and rows.computed > 70 and 3 < rows.computed % size < size - 3


def _slots(runner, group=0):
    return runner.input_batch.block_table[group].slot_mapping.gpu


# Lengths, tokens and positions.


@fault()
def seq_len_one_less(acts):
    """A request's last key is not read."""

    def act(runner, rows):
        runner.seq_lens[rows.index] -= 1
        acts.note(rows.request_id, rows.computed)

    when_prepared(acts, _long_decode, act)


@fault()
def seq_len_one_more(acts):
    """A request reads a key behind its last."""

    def act(runner, rows):
        runner.seq_lens[rows.index] += 1
        acts.note(rows.request_id, rows.computed, block_of(runner, rows, rows.computed + 1))

    when_prepared(acts, _long_decode, act)


def _has_drafts(runner, rows):
    return rows.is_decode and rows.count > 1


@fault()
def seq_len_without_drafts(acts):
    """The drafts of one request are not counted."""

    def act(runner, rows):
        runner.seq_lens[rows.index] -= rows.count - 1
        acts.note(rows.request_id, rows.computed)

    when_prepared(acts, _has_drafts, act)


@fault()
def token_of_the_step_before(acts):
    """A request's last token is given again."""

    def choose(runner, rows):
        tokens = runner.input_batch.token_ids_cpu[rows.index]
        return _long_decode(runner, rows) and tokens[rows.computed] != tokens[rows.computed - 1]

    def act(runner, rows):
        tokens = runner.input_batch.token_ids_cpu[rows.index]
        runner.input_ids.gpu[rows.first] = int(tokens[rows.computed - 1])
        acts.note(rows.request_id, rows.computed)

    when_prepared(acts, choose, act)


@fault()
def position_one_more(acts):
    """The rotary position of a request's rows is one too high."""

    def act(runner, rows):
        runner.positions[rows.first : rows.first + rows.count] += 1
        acts.note(rows.request_id, rows.computed)

    when_prepared(acts, _long_decode, act)


@fault()
def stale_draft_given(acts):
    """The model is given another draft than the scheduler chose."""

    def update(original, batch, request, scheduled):
        original(batch, request, scheduled)
        drafts = scheduled.get(request.req_id)
        if drafts and acts.due():
            index = batch.req_id_to_index[request.req_id]
            start = int(batch.num_tokens_no_spec[index])
            batch.token_ids_cpu[index, start] = (drafts[0] + 1) % 500
            acts.note(request.req_id, start)

    around(InputBatch, "update_req_spec_token_ids", update)


@fault()
def position_restarts_after_preemption(acts):
    """The runner forgets the prefix hit of a resumed request."""

    def add(original, batch, request):
        index = original(batch, request)
        if request.output_token_ids and request.num_computed_tokens and acts.due(0):
            batch.num_computed_tokens_cpu[index] = 0
            acts.note(request.req_id, request.num_computed_tokens)
        return index

    around(InputBatch, "add_request", add)


# What is sampled and accepted.


@fault()
def tokens_of_two_requests_exchanged(acts):
    """The tokens of two requests reach the scheduler exchanged."""

    def update(original, scheduler, scheduler_output, output):
        sampled, place = output.sampled_token_ids, output.req_id_to_index
        single = [
            name
            for name in scheduler_output.num_scheduled_tokens
            if len(sampled[place[name]]) == 1 and scheduler.requests[name].num_output_tokens
        ]
        if len(single) > 1 and sampled[place[single[0]]] != sampled[place[single[1]]] and acts.due():
            first, second = single[:2]
            sampled[place[first]], sampled[place[second]] = sampled[place[second]], sampled[place[first]]
            acts.note(first, scheduler.requests[first].num_tokens, step=acts.step + 1, other=second)
        return original(scheduler, scheduler_output, output)

    around(Scheduler, "update_from_output", update)


# Slots and pages.


@fault()
def slot_one_more(acts):
    """A key is written one slot late."""

    def act(runner, rows):
        _slots(runner)[rows.first] += 1
        acts.note(rows.request_id, rows.computed, block_of(runner, rows, rows.computed))

    when_prepared(acts, _long_decode, act)


@fault()
def slot_of_the_next_block(acts):
    """A key is written to the block with the next id, which may be another request's."""

    def act(runner, rows):
        _slots(runner)[rows.first] += runner.input_batch.block_table[0].block_size
        acts.note(rows.request_id, rows.computed, block_of(runner, rows, rows.computed))

    when_prepared(acts, _long_decode, act)


@fault()
def write_skipped_at_block_start(acts):
    """The first key of a new block is not written."""

    def choose(runner, rows):
        return rows.is_decode and rows.computed % runner.input_batch.block_table[0].block_size == 0

    def act(runner, rows):
        _slots(runner)[rows.first] = -1
        acts.note(rows.request_id, rows.computed, block_of(runner, rows, rows.computed))

    when_prepared(acts, choose, act, after=1)


@fault()
def chunk_loses_its_last_token(acts):
    """The last key of a chunk of a prompt is not written."""

    def choose(runner, rows):
        return rows.is_unfinished_chunk and rows.count > 1

    def act(runner, rows):
        last = rows.computed + rows.count - 1
        _slots(runner)[rows.first + rows.count - 1] = -1
        acts.note(rows.request_id, last, block_of(runner, rows, last))

    when_prepared(acts, choose, act, after=2)


@fault()
def write_skipped_after_rejection(acts):
    """The key of a rejected draft is kept, since the token that was sampled instead is not written."""
    drafted = {}

    def choose(runner, rows):
        until, of_step = drafted.get(rows.request_id, (0, -1))
        is_after = rows.is_decode and rows.computed < until and of_step == acts.step - 1
        if rows.is_decode and rows.count > 1:
            drafted[rows.request_id] = rows.computed + rows.count, acts.step
        return is_after

    def act(runner, rows):
        _slots(runner)[rows.first] = -1
        acts.note(rows.request_id, rows.computed, block_of(runner, rows, rows.computed))

    when_prepared(acts, choose, act, after=3)


@fault()
def padding_row_written(acts):
    """A padding row is written to a slot that a request uses."""

    def prepare(original, runner, *args, **keywords):
        made = original(runner, *args, **keywords)
        rows = next((each for each in rows_of(runner) if _long_decode(runner, each)), None)
        if rows is not None and acts.due():
            block_id = block_of(runner, rows, 33)
            for layer in runner.compilation_config.static_forward_context.values():
                zeros = torch.zeros(1, layer.num_kv_heads, layer.head_size, dtype=torch.bfloat16)
                slot = torch.tensor([32 * block_id + 1])
                layer.impl.do_kv_cache_update(layer, zeros, zeros, layer.kv_cache, slot)
            acts.note(rows.request_id, 33, block_id)
        return made

    around(GPUModelRunner, "_prepare_inputs", prepare)


@fault()
def used_block_zeroed(acts):
    """A block in use is among those that are set to zero."""

    def prepare(original, runner, *args, **keywords):
        made = original(runner, *args, **keywords)
        rows = next((each for each in rows_of(runner) if _long_decode(runner, each)), None)
        if rows is not None and acts.due():
            block_id = block_of(runner, rows, 32)
            runner._zero_block_ids([block_id])
            acts.note(rows.request_id, 32, block_id)
        return made

    around(GPUModelRunner, "_prepare_inputs", prepare)


def _writes(acts, change, impl=CPUAttentionBackendImpl, after=LATER):
    """Change the arguments of one call of the cache writer in a step of the engine."""

    def update(original, own, *args):
        if acts.step and not acts.is_judging():
            args = change(own, *args) or args
        return original(own, *args)

    around(impl, "do_kv_cache_update", update)


@fault()
def value_of_another_row(acts):
    """One layer writes the values of a step exchanged between rows."""

    def change(_impl, layer, key, value, cache, slots):
        if len(slots) > 1 and acts.due(12):
            acts.note(acts.owner(0), None, int(slots[0]) // 32)
            return layer, key, value.roll(1, 0), cache, slots
        return None

    _writes(acts, change)


@fault()
def key_before_rotary(acts):
    """One layer writes keys without their rotary position."""
    kept = {}

    def rotate(original, positions, query, key, *args):
        kept["key"] = key.clone()
        return original(positions, query, key, *args)

    def change(_impl, layer, key, value, cache, slots):
        if acts.due(12):
            acts.note(acts.owner(0), None, int(slots[0]) // 32)
            return layer, kept["key"].view_as(key), value, cache, slots
        return None

    for module in acts.model.modules():
        if isinstance(module, RotaryEmbedding):  # vLLM binds what it calls when the layer is made
            module._forward_method = partial(rotate, module._forward_method)
    _writes(acts, change)


# Block tables.


@fault()
def new_block_not_appended(acts):
    """The runner does not append a new block to a request's row."""

    def append(original, table, block_ids, row):
        if block_ids and table.num_blocks_per_row[row] and acts.due(3):
            acts.note(acts.owner_of_row(row), int(table.num_blocks_per_row[row]) * table.block_size, block_ids[0])
            return None
        return original(table, block_ids, row)

    around(BlockTable, "append_row", append)


@fault()
def new_block_one_place_early(acts):
    """A new block replaces the last one of a request's row."""

    def append(original, table, block_ids, row):
        if block_ids and table.num_blocks_per_row[row] > 1 and acts.due(3):
            table.num_blocks_per_row[row] -= 1
            position = int(table.num_blocks_per_row[row]) * table.block_size
            acts.note(acts.owner_of_row(row), position, int(table.block_table.np[row, position // table.block_size]))
        return original(table, block_ids, row)

    around(BlockTable, "append_row", append)


@fault()
def row_not_moved(acts):
    """A request moves to another place of the batch, but its block table does not."""

    def move(original, tables, source, target):
        if acts.due(0):
            acts.note(acts.owner_of_row(source), 0)
            return None
        return original(tables, source, target)

    around(MultiGroupBlockTable, "move_row", move)


@fault()
def rows_of_two_requests_exchanged(acts):
    """The order of requests in the batch and in the block table differ."""

    def prepare(original, runner, *args, **keywords):
        batch = runner.input_batch
        if batch.num_reqs > 2 and min(batch.num_computed_tokens_cpu[:2]) > 40 and acts.due():
            batch.block_table.swap_row(0, 1)
            acts.note(batch.req_ids[0], 0, other=batch.req_ids[1])
        return original(runner, *args, **keywords)

    around(GPUModelRunner, "_prepare_inputs", prepare)


@fault()
def stale_table_after_preemption(acts):
    """A resumed request keeps the block table that it had before."""
    tables = {}

    def remove(original, batch, request_id):
        index = batch.req_id_to_index.get(request_id)
        if index is not None:
            table = batch.block_table[0]
            tables[request_id] = table.block_table.np[index, : table.num_blocks_per_row[index]].copy()
        return original(batch, request_id)

    def add(original, batch, request):
        index = original(batch, request)
        old = tables.get(request.req_id)
        table = batch.block_table[0]
        if old is None:
            return index
        size = min(len(old), int(table.num_blocks_per_row[index]))
        new = table.block_table.np[index, :size]
        if (new != old[:size]).any() and acts.due(0):
            at = int((new != old[:size]).argmax())
            acts.note(request.req_id, at * table.block_size, int(new[at]))
            table.block_table.np[index, :size] = old[:size]
        return index

    around(InputBatch, "remove_request", remove)
    around(InputBatch, "add_request", add)


# Metadata.


def _builds(acts, change, after=LATER):
    """Change the metadata of one step; ``change`` returns a changed copy, or None."""

    def build(original, builder, common_prefix_len, common, fast_build=False):
        return original(builder, common_prefix_len, change(builder, common) or common, fast_build)

    around(CPUAttentionMetadataBuilder, "build", build)


@fault()
def query_start_one_more(acts):
    """The border between the rows of two requests is one row too far."""

    def change(_builder, common):
        counts = common.query_start_loc.diff()
        if len(counts) > 1 and int(counts[1]) > 3 and acts.due(2):
            starts = common.query_start_loc.clone()
            starts[1] += 1
            acts.note(acts.owner_of_row(1), None, other=acts.owner_of_row(0))
            return replace(common, query_start_loc=starts)
        return None

    _builds(acts, change)


@fault()
def common_prefix_one_block_too_long(acts):
    """A block behind the common prefix of two requests is read from one of them for both."""

    def change(_builder, common):
        table, lengths = common.block_table_tensor, common.seq_lens
        for one in range(len(lengths)):
            for other in range(len(lengths)):
                shared = int((table[one] == table[other]).int().cumprod(0).sum())
                if one == other or not shared > 0 or min(lengths[one], lengths[other]) <= (shared + 1) * 32:
                    continue
                if acts.due(0):
                    changed = table.clone()
                    changed[one, shared] = table[other, shared]
                    acts.note(acts.owner_of_row(one), shared * 32, int(table[one, shared]))
                    return replace(common, block_table_tensor=changed)
        return None

    _builds(acts, change)


@fault()
def not_causal(acts):
    """The rows of one step see later keys."""

    def change(_builder, common):
        if common.query_start_loc.diff().max() > 3 and acts.due(2):
            acts.note(acts.owner_of_row(int(common.query_start_loc.diff().argmax())), None)
            return replace(common, causal=False)
        return None

    _builds(acts, change)


def _forwards(acts, change, restore):
    """Change something during one call of the attention kernel."""

    def forward(original, impl, layer, query, key, value, cache, metadata, *args, **keywords):
        if metadata is None or not change(impl, metadata):
            return original(impl, layer, query, key, value, cache, metadata, *args, **keywords)
        try:
            return original(impl, layer, query, key, value, cache, metadata, *args, **keywords)
        finally:
            restore(impl)

    around(CPUAttentionBackendImpl, "forward", forward)


@fault()
def keys_written_after_attention(acts):
    """One layer attends before its keys are written."""
    late = []

    def update(original, impl, *args):
        if acts.step and not acts.is_judging() and acts.due(12):
            acts.note(acts.owner(0))
            late.append((impl, args))
            return
        original(impl, *args)

    def forward(original, impl, *args, **keywords):
        made = original(impl, *args, **keywords)
        while late:
            own, kept = late.pop()
            writer(own, *kept)
        return made

    around(CPUAttentionBackendImpl, "do_kv_cache_update", update)
    around(CPUAttentionBackendImpl, "forward", forward)
    writer = CPUAttentionBackendImpl.do_kv_cache_update


@fault()
def output_not_a_number(acts):
    """One row of one layer is NaN in one step."""

    def forward(original, impl, layer, query, key, value, cache, metadata, output, *args, **keywords):
        made = original(impl, layer, query, key, value, cache, metadata, output, *args, **keywords)
        if metadata is not None and acts.due(12):
            output[0, 0] = torch.nan
            acts.note(acts.owner(0))
        return made

    around(CPUAttentionBackendImpl, "forward", forward)


@fault()
def scale_larger(acts):
    """One layer uses another softmax scale in one step."""

    def change(impl, _metadata):
        if not acts.due(12):
            return False
        impl.scale *= 1.1
        acts.note(acts.owner(0))
        return True

    def restore(impl):
        impl.scale /= 1.1

    _forwards(acts, change, restore)


# Scheduler and cache manager.


@fault()
def hit_one_block_too_many(acts):
    """A prefix hit maps a block behind the equal tokens."""

    def computed(original, manager, request):
        blocks, count, boundary = original(manager, request)
        size = manager.block_pool.hash_block_size
        cached = [block for block in manager.block_pool.blocks if block.block_hash is not None]
        other = next((block for block in cached if block not in blocks.blocks[0]), None)
        if count and other is not None and request.num_tokens > count + size + 1 and acts.due(0):
            acts.note(request.request_id, count, other.block_id, step=acts.step + 1)
            return manager.create_kv_cache_blocks(([*blocks.blocks[0], other],)), count + size, boundary
        return blocks, count, boundary

    around(KVCacheManager, "get_computed_blocks", computed)


@fault()
def block_has_two_owners(acts):
    """A block of a running request is given to another one."""

    def allocate(original, manager, request, *args, **keywords):
        blocks = manager.coordinator.get_blocks(request.request_id)[0]
        inner = blocks[1] if len(blocks) > 3 else None
        if inner is not None and inner.ref_cnt == 1 and acts.due():
            acts.note(request.request_id, 32, inner.block_id, step=acts.step + 1)
            manager.block_pool._maybe_evict_cached_block(inner)
            manager.block_pool.free_blocks([inner])
        return original(manager, request, *args, **keywords)

    around(KVCacheManager, "allocate_slots", allocate)


@fault()
def count_kept_after_preemption(acts):
    """A preempted request is resumed as if its first block were still there."""

    def preempt(original, scheduler, request, *args, **keywords):
        original(scheduler, request, *args, **keywords)
        if acts.due(0):
            request.num_computed_tokens = 32
            acts.note(request.request_id, 0)

    around(Scheduler, "_preempt_request", preempt)


# Models with windows.


@fault("hybrid")
def window_one_more(acts):
    """One layer's window is one key too long in one step."""

    def change(impl, metadata):
        if impl.sliding_window < 0 or metadata.seq_lens.max() < 100 or not acts.due(6):
            return False
        impl.sliding_window += 1
        acts.note(acts.owner(0))
        return True

    def restore(impl):
        impl.sliding_window -= 1

    _forwards(acts, change, restore)


@fault("hybrid")
def window_one_less(acts):
    """One layer's window is one key too short in one step."""

    def change(impl, metadata):
        if impl.sliding_window < 0 or metadata.seq_lens.max() < 100 or not acts.due(6):
            return False
        impl.sliding_window -= 1
        acts.note(acts.owner(0))
        return True

    def restore(impl):
        impl.sliding_window += 1

    _forwards(acts, change, restore)


@fault("hybrid")
def table_of_another_group(acts):
    """The layers of one group read the block table of another one in one step."""

    def build(original, runner, *args, **keywords):
        metadata, common = original(runner, *args, **keywords)
        groups = runner.kv_cache_config.kv_cache_groups
        if runner.input_batch.num_computed_tokens_cpu[0] > 40 and acts.due():
            other = metadata[groups[1].layer_names[0]].block_table
            for name in groups[0].layer_names:
                metadata[name] = replace(metadata[name], block_table=other)
            acts.note(runner.input_batch.req_ids[0], 0)
        return metadata, common

    around(GPUModelRunner, "_build_attention_metadata", build)


@fault("hybrid")
def slots_of_another_group(acts):
    """The layers of one group write to the slots of another one in one step."""

    def slots(original, runner, *args, **keywords):
        by_group, by_layer = original(runner, *args, **keywords)
        groups = runner.kv_cache_config.kv_cache_groups
        if runner.input_batch.num_reqs and runner.input_batch.num_computed_tokens_cpu[0] > 40 and acts.due():
            for name in groups[0].layer_names:
                by_layer[name] = by_group[1]
            rows = rows_of(runner)[0]
            acts.note(rows.request_id, rows.computed, block_of(runner, rows, rows.computed))
        return by_group, by_layer

    around(GPUModelRunner, "_get_slot_mappings", slots)


# Latent caches.


@fault("latent")
def rotary_key_of_another_row(acts):
    """One latent layer writes the rotary keys of a step exchanged between rows."""

    def change(_impl, latent, rotary, cache, slots, *more):
        if len(slots) > 1 and acts.due(12):
            acts.note(acts.owner(0), None, int(slots[0]) // 16)
            return latent, rotary.roll(1, 0), cache, slots, *more
        return None

    _writes(acts, change, CPUMLAImpl)


# Engines.

ENGINES = {
    "full": ("full", {"num_gpu_blocks_override": 18}),
    "hybrid": ("hybrid", {"num_gpu_blocks_override": 34}),
    "latent": ("latent", {"num_gpu_blocks_override": 34, "block_size": 16, "max_num_batched_tokens": 320}),
}
"""The model of each engine, and what it is given besides :data:`OPTIONS`. Its pool is small: requests are preempted."""

OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 320,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 96,
    "block_size": 32,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
    "seed": 0,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
}


def start(name, folder):
    """Return the engine ``name``."""
    model, more = ENGINES[name]
    return vllm.LLM(model=str(Path(folder) / model), **OPTIONS | more).llm_engine


def serve(engine, plant):
    """Serve the requests with a fault planted, and return what was found."""
    acts = Acts()
    worker = engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = worker.model_runner
    acts.model = runner.model
    acts.owner_of_row = lambda row: runner.input_batch.req_ids[row]
    acts.owner = lambda row: next(
        each.request_id for each in rows_of(runner) if each.first <= row < each.first + each.count
    )
    observer = EngineObserver(ObserverSettings(max_explained=2))
    in_judge = []
    acts.is_judging = lambda: bool(in_judge)

    def judging(original, *args, **keywords):
        in_judge.append(True)
        try:
            return original(*args, **keywords)
        finally:
            in_judge.pop()

    around(EngineObserver, "step_ends", judging)
    around(EngineObserver, "layer_rows", judging)

    def execute(original, own, scheduler_output, *args, **keywords):
        acts.step += bool(scheduler_output.total_num_scheduled_tokens)
        return original(own, scheduler_output, *args, **keywords)

    if plant is not None:
        plant(acts)
    around(GPUModelRunner, "execute_model", execute)
    tokens, raised = {}, ""
    began = time.perf_counter()
    judged = observer.settings

    def inputs(original, own, *args):
        seldom = SELDOM if plant is None else 10**9
        own.settings = judged if acts.is_near else replace(judged, judge_every=seldom)
        return original(own, *args)

    around(EngineObserver, "inputs", inputs)
    hooks = EngineHooks(observer)
    hooks.install(worker)
    try:
        tokens = _tokens(engine, lambda: acts.is_over and hooks.remove())
    except Exception:  # noqa: BLE001 (whatever a fault makes vLLM raise)
        raised = traceback.format_exc(limit=-3)
    result = observer.result()
    return {
        "acts": acts.did,
        "findings": [asdict(finding) for finding in result.findings],
        "checks": result.checks,
        "not_followed": result.not_followed,
        "counts": result.counts,
        "failure": result.failure,
        "steps": result.steps,
        "worst_share": result.worst_share,
        "raised": raised,
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
    }


def requests():
    """Return (id, step of arrival, prompt, number of tokens): some share prefixes, one repeats itself, two are long."""
    draw = random.Random(0)

    def tokens(number):
        return [draw.randrange(VOCAB_SIZE) for _ in range(number)]

    prefix, pattern = tokens(100), tokens(3)
    return [
        ("a", 0, prefix + tokens(9), 24),
        ("b", 0, tokens(210), 12),
        ("c", 1, pattern * 30, 30),
        ("d", 2, tokens(20), 24),
        ("e", 5, prefix[:70] + tokens(30), 24),
        ("f", 6, prefix + tokens(60), 24),
        ("g", 10, pattern * 34, 20),
        ("h", 20, prefix + tokens(5), 8),
    ]


def _tokens(engine, after_step):
    """Serve the requests, and return the tokens of each."""
    waiting = requests()
    step, tokens = 0, {}
    while waiting or engine.has_unfinished_requests():
        while waiting and (waiting[0][1] <= step or not engine.has_unfinished_requests()):
            request_id, _, prompt, number = waiting.pop(0)
            limits = vllm.SamplingParams(max_tokens=number, temperature=0, ignore_eos=True, detokenize=False)
            engine.add_request(request_id, {"prompt_token_ids": prompt}, limits)
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        after_step()
        step += 1
        if step > MAX_STEPS:
            raise RuntimeError(f"the requests do not end within {MAX_STEPS} steps")
    return tokens


def fork(work):
    """Run ``work`` in a fork of this process, and return its id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:  # noqa: BLE001 (the process ends here)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def serve_engine(name, faults, folder, out):
    """Start one engine, and serve the requests without and with each fault."""
    engine = start(name, folder)

    def one(fault_name, plant):
        line = json.dumps({"fault": fault_name, "engine": name} | serve(engine, plant)) + "\n"
        with out.open("a") as file:
            file.write(line)

    for each in (Fault(f"none-{name}", name, None), *faults):
        os.waitpid(fork(partial(one, each.name, each.plant)), 0)


def main(folder, *names):
    """Serve all engines at once, or those of the named faults."""
    out = Path(folder) / "found.jsonl"
    Path(folder).mkdir(parents=True, exist_ok=True)
    out.write_text("")
    for model in CONFIGS:
        if not (Path(folder) / model).exists():
            (Path(folder) / model).mkdir()
            make_model(Path(folder) / model, model)
    chosen = [FAULTS[name] for name in names] or list(FAULTS.values())
    engines = []
    for name in ENGINES:
        own = [each for each in chosen if each.engine == name]
        parts = min(4, -(-len(own) // 6))
        engines += [fork(partial(serve_engine, name, own[part::parts], folder, out)) for part in range(parts)]
    for engine in engines:
        os.waitpid(engine, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
