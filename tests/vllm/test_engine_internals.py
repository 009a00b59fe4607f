"""What ``attncheck engine`` uses of vLLM's internals: a name that is gone from the installed version fails its test."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

OF_BOTH_RUNNERS = "sample_tokens kv_cache_config vllm_config compilation_config model_config cache_config device"

USED = {
    "vllm.v1.core.sched.output.SchedulerOutput": """scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens
        total_num_scheduled_tokens scheduled_spec_decode_tokens finished_req_ids preempted_req_ids""",
    "vllm.v1.core.sched.output.NewRequestData": """req_id prompt_token_ids prefill_token_ids block_ids
        num_computed_tokens lora_request prompt_embeds mm_features""",
    "vllm.v1.core.sched.output.CachedRequestData": """req_ids resumed_req_ids all_token_ids new_block_ids
        num_computed_tokens""",
    "vllm.v1.outputs.ModelRunnerOutput": "req_id_to_index sampled_token_ids",
    "vllm.v1.outputs.AsyncModelRunnerOutput": "get_output",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "init_device worker",
    "vllm.v1.worker.worker_base.WorkerBase": "rank vllm_config",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner compile_or_warm_up_model",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": f"""execute_model(scheduler_output,intermediate_tensors)
        _model_forward(input_ids,positions) input_batch _kernel_block_sizes {OF_BOTH_RUNNERS}""",
    "vllm.v1.worker.gpu_input_batch.InputBatch": "req_ids",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": f"""prepare_inputs kernel_block_sizes
        execute_model(scheduler_output,intermediate_tensors,dummy_run) {OF_BOTH_RUNNERS}""",
    "vllm.v1.worker.gpu.input_batch.InputBatch": "req_ids input_ids positions",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "kv_cache_groups",
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": "layer_names kv_cache_spec",
    "vllm.v1.kv_cache_interface.KVCacheSpec": "block_size",
    "vllm.config.compilation.CompilationConfig": "static_forward_context",
    "vllm.config.scheduler.SchedulerConfig": "async_scheduling",
    "vllm.config.parallel.ParallelConfig": """pipeline_parallel_size decode_context_parallel_size
        data_parallel_rank""",
    "vllm.model_executor.layers.attention.attention.Attention": """impl num_heads num_kv_heads head_size
        sliding_window attn_type kv_cache_dtype get_attn_backend""",
    "vllm.v1.attention.backend.AttentionImpl": "forward(layer,query,key,value,kv_cache,attn_metadata,output)",
    "vllm.model_executor.layers.attention.mla_attention.MLAAttention": """impl num_heads num_kv_heads head_size
        kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim kv_cache_dtype
        forward_impl(q,k_c_normed,k_pe,kv_cache,attn_metadata,output)""",
}
"""Methods, fields and attributes of classes, except those that are read where a version has them.

``method(a,b)``: a method whose first parameters have these names.
"""


def names_of(owner):
    """Yield the methods and fields of a class, and what its methods set on ``self``."""
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [each.arg for each in node.args.args[1:]]
            yield node.name
            yield from (f"{node.name}({','.join(parameters[:number])})" for number in range(1, len(parameters) + 1))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("path", USED)
def test_what_is_used_of_a_class_is_there(path):
    """The file is read, not imported: some modules need a GPU."""
    import vllm

    module, _, name = path.rpartition(".")
    file = Path(vllm.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    classes = [node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)]
    (owner,) = (node for node in classes if node.name == name)
    missing = set(USED[path].split()) - set(names_of(owner))
    assert not missing, f"{path} has no {', '.join(sorted(missing))}"
