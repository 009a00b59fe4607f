"""Faults in the scheduler, the cache manager, and the groups of layers."""

from dataclasses import replace

from planting import around, fault
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


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
            acts.note(first, scheduler.requests[first].num_tokens, step=acts.step + 1)
        return original(scheduler, scheduler_output, output)

    around(Scheduler, "update_from_output", update)


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
            acts.note_first(0)
        return metadata, common

    around(GPUModelRunner, "_build_attention_metadata", build)
