"""What ``attncheck engine`` uses of vLLM's internals: a name that is gone from the installed version fails its test."""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

INTERNALS = {
    "vllm.v1.core.sched.output": (
        "the plan of a step",
        """SchedulerOutput scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens
        scheduled_spec_decode_tokens finished_req_ids preempted_req_ids
        NewRequestData req_id prompt_token_ids prefill_token_ids block_ids num_computed_tokens lora_request
        CachedRequestData req_ids resumed_req_ids all_token_ids new_block_ids""",
    ),
    "vllm.v1.outputs": (
        "sampled tokens",
        "ModelRunnerOutput req_id_to_index sampled_token_ids AsyncModelRunnerOutput get_output",
    ),
    "vllm.v1.worker.worker_base": ("the worker", "WorkerWrapperBase init_device worker WorkerBase rank vllm_config"),
    "vllm.v1.worker.gpu_worker": ("the warm-up, which is ignored", "Worker model_runner compile_or_warm_up_model"),
    "vllm.v1.worker.gpu_model_runner": (
        "the steps of model runner V1",
        """GPUModelRunner execute_model(scheduler_output,intermediate_tensors) _model_forward(input_ids,positions)
        sample_tokens input_batch _kernel_block_sizes
        kv_cache_config vllm_config compilation_config model_config cache_config""",
    ),
    "vllm.v1.worker.gpu_input_batch": ("the order of rows of model runner V1", "InputBatch req_ids"),
    "vllm.v1.worker.gpu.model_runner": (
        "the steps of model runner V2",
        """GPUModelRunner execute_model(scheduler_output,intermediate_tensors,dummy_run) prepare_inputs sample_tokens
        kernel_block_sizes kv_cache_config vllm_config compilation_config model_config cache_config""",
    ),
    "vllm.v1.worker.gpu.input_batch": (
        "the inputs of model runner V2",
        "InputBatch req_ids input_ids positions",
    ),
    "vllm.v1.kv_cache_interface": (
        "groups of layers",
        "KVCacheConfig kv_cache_groups KVCacheGroupSpec layer_names kv_cache_spec KVCacheSpec block_size",
    ),
    "vllm.config.compilation": ("the attention layers", "CompilationConfig static_forward_context"),
    "vllm.config.scheduler": ("whether tokens arrive late", "SchedulerConfig async_scheduling"),
    "vllm.config.parallel": (
        "engines that are not followed",
        "ParallelConfig pipeline_parallel_size decode_context_parallel_size data_parallel_rank",
    ),
    "vllm.model_executor.layers.attention.attention": (
        "what a layer computes",
        "Attention impl num_heads num_kv_heads head_size sliding_window kv_cache_dtype get_attn_backend",
    ),
    "vllm.v1.attention.backend": (
        "the rows of a layer",
        "AttentionImpl forward(layer,query,key,value,kv_cache,attn_metadata,output)",
    ),
    "vllm.model_executor.layers.attention.mla_attention": (
        "the rows of a latent layer",
        "MLAAttention impl forward_impl(q,k_c_normed,k_pe,kv_cache,attn_metadata,output)",
    ),
}
"""What is used of a module of vLLM, and what for, except names that are read where a version has them.

The names are those of classes, methods, fields and attributes. ``method(a,b)``: one whose first parameters are these.
"""


def names_of(module):
    """Yield the classes, methods and fields of a module, and what its methods set on ``self``."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [each.arg for each in node.args.args[1:]]
            yield node.name
            yield from (f"{node.name}({','.join(parameters[:number])})" for number in range(1, len(parameters) + 1))
        elif isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@pytest.mark.parametrize("module", INTERNALS)
def test_what_is_used_of_a_module_is_there(module):
    """The file is read, not imported: some modules need a GPU."""
    import vllm

    purpose, names = INTERNALS[module]
    file = Path(vllm.__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    missing = set(names.split()) - set(names_of(ast.parse(file.read_bytes())))
    assert not missing, f"{module} has no {', '.join(sorted(missing))}: attncheck engine needs it for {purpose}"
