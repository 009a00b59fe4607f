"""Faults in what the model is given, and in the metadata and the kernel of its attention."""

from dataclasses import replace

import torch
from planting import around, block_of, fault, is_long_decode, once_attended, when_built, when_prepared
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.gpu_input_batch import InputBatch

# Tokens and positions.


def _differs_from_the_last(runner, rows):
    tokens = runner.input_batch.token_ids_cpu[rows.place]
    return is_long_decode(runner, rows) and tokens[rows.computed] != tokens[rows.computed - 1]


@when_prepared(_differs_from_the_last)
def token_of_the_step_before(runner, rows):
    """A request's last token is given again."""
    tokens = runner.input_batch.token_ids_cpu[rows.place]
    runner.input_ids.gpu[rows.first] = int(tokens[rows.computed - 1])
    return (rows.computed,)


@fault()
def stale_draft_given(acts):
    """The model is given another draft than the scheduler chose."""

    def update(original, batch, request, scheduled):
        original(batch, request, scheduled)
        drafts = scheduled.get(request.req_id)
        if drafts and acts.due():
            place = batch.req_id_to_index[request.req_id]
            start = int(batch.num_tokens_no_spec[place])
            batch.token_ids_cpu[place, start] = (drafts[0] + 1) % 500
            acts.note(request.req_id, start)

    around(InputBatch, "update_req_spec_token_ids", update)


@when_prepared()
def position_one_more(runner, rows):
    """The rotary position of a request's rows is one too high."""
    runner.positions[rows.first : rows.first + rows.count] += 1
    return (rows.computed,)


@fault()
def position_restarts_after_preemption(acts):
    """The runner forgets the prefix hit of a resumed request."""

    def add(original, batch, request):
        place = original(batch, request)
        if request.output_token_ids and request.num_computed_tokens and acts.due(0):
            batch.num_computed_tokens_cpu[place] = 0
            acts.note(request.req_id, request.num_computed_tokens)
        return place

    around(InputBatch, "add_request", add)


# Lengths and metadata.


@when_prepared()
def seq_len_one_less(runner, rows):
    """A request's last key is not read."""
    runner.seq_lens[rows.place] -= 1
    return (rows.computed,)


def _in_a_used_block(runner, rows):
    """Whether each slot of the block was written before, so that there is a key behind the last."""
    layer = next(iter(runner.compilation_config.static_forward_context.values()))
    block = layer.kv_cache[block_of(runner, rows, rows.computed)]
    return is_long_decode(runner, rows) and block.count_nonzero() > 0.99 * block.numel()


@when_prepared(_in_a_used_block)
def seq_len_one_more(runner, rows):
    """A request reads a key behind its last."""
    runner.seq_lens[rows.place] += 1
    return rows.computed, block_of(runner, rows, rows.computed + 1)


@when_prepared(lambda runner, rows: rows.is_decode and rows.count > 1)
def seq_len_without_drafts(runner, rows):
    """The drafts of one request are not counted."""
    runner.seq_lens[rows.place] -= rows.count - 1
    return (rows.computed,)


@when_built()
def query_start_one_more(common):
    """The border between the rows of two requests is one row too far."""
    counts = common.query_start_loc.diff()
    if len(counts) < 2 or int(counts[1]) < 4:
        return None
    starts = common.query_start_loc.clone()
    starts[1] += 1
    return replace(common, query_start_loc=starts), 1


@when_built(after=0)
def common_prefix_one_block_too_long(common):
    """A block behind the common prefix of two requests is read from one of them for both."""
    table, lengths = common.block_table_tensor, common.seq_lens
    for one in range(len(lengths)):
        for other in range(len(lengths)):
            shared = int((table[one] == table[other]).int().cumprod(0).sum())
            if one != other and shared and min(lengths[one], lengths[other]) > (shared + 1) * 32:
                changed = table.clone()
                changed[one, shared] = table[other, shared]
                return replace(common, block_table_tensor=changed), one, shared * 32, int(table[one, shared])
    return None


@when_built()
def not_causal(common):
    """The rows of one step see later keys."""
    counts = common.query_start_loc.diff()
    return (replace(common, causal=False), int(counts.argmax())) if counts.max() > 3 else None


# The kernel.


@fault()
def scale_larger(acts):
    """One layer uses another softmax scale in one step."""
    once_attended(acts, "scale", lambda scale: scale * 1.1)


def _beyond_window(impl, metadata):
    return impl.sliding_window >= 0 and metadata.seq_lens.max() >= 100


@fault("hybrid")
def window_one_more(acts):
    """One layer's window is one key too long in one step."""
    once_attended(acts, "sliding_window", lambda window: window + 1, _beyond_window, after=6)


@fault("hybrid")
def window_one_less(acts):
    """One layer's window is one key too short in one step."""
    once_attended(acts, "sliding_window", lambda window: window - 1, _beyond_window, after=6)


@fault()
def output_not_a_number(acts):
    """One row of one layer is NaN in one step."""

    def forward(original, impl, layer, query, key, value, cache, metadata, output, *args, **keywords):
        made = original(impl, layer, query, key, value, cache, metadata, output, *args, **keywords)
        if metadata is not None and acts.due(12):
            output[0, 0] = torch.nan
            acts.note_first()
        return made

    around(CPUAttentionBackendImpl, "forward", forward)
