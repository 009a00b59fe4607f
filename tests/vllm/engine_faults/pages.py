"""Faults in slots, block tables, and what is written to the cache."""

from functools import partial

import torch
from planting import around, block_of, block_size_of, fault, once_prepared, once_written, rows_of, when_prepared
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.worker.block_table import BlockTable, MultiGroupBlockTable
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# Slots.


def _change_slot(runner, rows, change, row=0):
    """Change the slot of a request's row; return its position and block."""
    slots = runner.input_batch.block_table[0].slot_mapping.gpu
    slots[rows.first + row] = change(int(slots[rows.first + row]))
    return rows.computed + row, block_of(runner, rows, rows.computed + row)


def _skipped(_slot):
    return -1


@when_prepared()
def slot_one_more(runner, rows):
    """A key is written one slot late."""
    return _change_slot(runner, rows, lambda slot: slot + 1)


@when_prepared()
def slot_of_the_next_block(runner, rows):
    """A key is written to the block with the next id, which may be another request's."""
    return _change_slot(runner, rows, lambda slot: slot + block_size_of(runner))


@when_prepared(lambda runner, rows: rows.is_decode and rows.computed % block_size_of(runner) == 0, after=1)
def write_skipped_at_block_start(runner, rows):
    """The first key of a new block is not written."""
    return _change_slot(runner, rows, _skipped)


@when_prepared(lambda _, rows: rows.computed + rows.count < rows.num_known and rows.count > 1, after=2)
def chunk_loses_its_last_token(runner, rows):
    """The last key of a chunk of a prompt is not written."""
    return _change_slot(runner, rows, _skipped, row=rows.count - 1)


@fault()
def write_skipped_after_rejection(acts):
    """The key of a rejected draft is kept, since the token that was sampled instead is not written."""
    drafted = {}

    def is_after_drafts(_runner, rows):
        until, of_step = drafted.get(rows.request_id, (0, -1))
        is_after = rows.is_decode and rows.computed < until and of_step == acts.step - 1
        if rows.is_decode and rows.count > 1:
            drafted[rows.request_id] = rows.computed + rows.count, acts.step
        return is_after

    once_prepared(acts, is_after_drafts, partial(_change_slot, change=_skipped), after=3)


@fault("hybrid")
def slots_of_another_group(acts):
    """The layers of one group write to the slots of another one in one step."""

    def slots(original, runner, *args, **keywords):
        by_group, by_layer = original(runner, *args, **keywords)
        if runner.input_batch.num_reqs and runner.input_batch.num_computed_tokens_cpu[0] > 40 and acts.due():
            for name in runner.kv_cache_config.kv_cache_groups[0].layer_names:
                by_layer[name] = by_group[1]
            rows = rows_of(runner)[0]
            acts.note(rows.request_id, rows.computed, block_of(runner, rows, rows.computed))
        return by_group, by_layer

    around(GPUModelRunner, "_get_slot_mappings", slots)


# What is written.


@when_prepared()
def padding_row_written(runner, rows):
    """A padding row is written to a slot that a request uses."""
    block_id = block_of(runner, rows, 33)
    for layer in runner.compilation_config.static_forward_context.values():
        zeros = torch.zeros(1, layer.num_kv_heads, layer.head_size, dtype=torch.bfloat16)
        layer.impl.do_kv_cache_update(layer, zeros, zeros, layer.kv_cache, torch.tensor([32 * block_id + 1]))
    return 33, block_id


@when_prepared()
def used_block_zeroed(runner, rows):
    """A block in use is among those that are set to zero."""
    block_id = block_of(runner, rows, 32)
    runner._zero_block_ids([block_id])
    return 32, block_id


@fault()
def value_of_another_row(acts):
    """One layer writes the values of a step exchanged between rows."""
    once_written(acts, lambda layer, key, value, *more: (layer, key, value.roll(1, 0), *more))


@fault("latent")
def rotary_key_of_another_row(acts):
    """One latent layer writes the rotary keys of a step exchanged between rows."""

    def change(latent, rotary, *more):
        return latent, rotary.roll(1, 0), *more

    once_written(acts, change, CPUMLAImpl, slots_at=3, block_size=16)


@fault()
def key_before_rotary(acts):
    """One layer writes keys without their rotary position."""
    kept = {}

    def rotate(original, positions, query, key, *args):
        kept["key"] = key.clone()
        return original(positions, query, key, *args)

    for module in acts.runner.model.modules():
        if isinstance(module, RotaryEmbedding):  # vLLM binds what it calls when the layer is made
            module._forward_method = partial(rotate, module._forward_method)
    once_written(acts, lambda layer, key, *more: (layer, kept["key"].view_as(key), *more))


@fault()
def keys_written_after_attention(acts):
    """One layer attends before its keys are written."""
    late = []

    def write(original, impl, *args):
        if acts.step and not acts.is_judging and acts.due(12):
            acts.note_first()
            late.append(lambda: original(impl, *args))
        else:
            original(impl, *args)

    def forward(original, impl, *args, **keywords):
        made = original(impl, *args, **keywords)
        while late:
            late.pop()()
        return made

    around(CPUAttentionBackendImpl, "do_kv_cache_update", write)
    around(CPUAttentionBackendImpl, "forward", forward)


# Block tables.


@fault()
def new_block_not_appended(acts):
    """The runner does not append a new block to a request's row."""

    def append(original, table, block_ids, row):
        if block_ids and table.num_blocks_per_row[row] and acts.due(3):
            acts.note(acts.request_at(row), int(table.num_blocks_per_row[row]) * table.block_size, block_ids[0])
            return None
        return original(table, block_ids, row)

    around(BlockTable, "append_row", append)


@fault()
def new_block_one_place_early(acts):
    """A new block replaces the last one of a request's row."""

    def append(original, table, block_ids, row):
        if block_ids and table.num_blocks_per_row[row] > 1 and acts.due(3):
            table.num_blocks_per_row[row] -= 1
            index = int(table.num_blocks_per_row[row])
            acts.note(acts.request_at(row), index * table.block_size, int(table.block_table.np[row, index]))
        return original(table, block_ids, row)

    around(BlockTable, "append_row", append)


@fault()
def row_not_moved(acts):
    """A request moves to another place of the batch, but its block table does not."""

    def move(original, tables, source, target):
        if acts.due(0):
            acts.note(acts.request_at(source), 0)
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
            acts.note_first(0)
        return original(runner, *args, **keywords)

    around(GPUModelRunner, "_prepare_inputs", prepare)


@fault()
def stale_table_after_preemption(acts):
    """A resumed request keeps the block table that it had before."""
    tables = {}

    def remove(original, batch, request_id):
        place = batch.req_id_to_index.get(request_id)
        if place is not None:
            table = batch.block_table[0]
            tables[request_id] = table.block_table.np[place, : table.num_blocks_per_row[place]].copy()
        return original(batch, request_id)

    def add(original, batch, request):
        place = original(batch, request)
        old, table = tables.get(request.req_id, ()), batch.block_table[0]
        size = min(len(old), int(table.num_blocks_per_row[place]))
        new = table.block_table.np[place, :size]
        differing = [index for index in range(size) if new[index] != old[index]]
        if differing and acts.due(0):
            acts.note(request.req_id, differing[0] * table.block_size, int(new[differing[0]]))
            new[:] = old[:size]
        return place

    around(InputBatch, "remove_request", remove)
    around(InputBatch, "add_request", add)
