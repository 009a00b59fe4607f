"""Lists what the engine's observer uses of vLLM, and checks that the installed version has it."""

import ast
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from attncheck.errors import QuestionError

INTERNALS: Mapping[str, tuple[str, str]] = {
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


def missing_internals(folder: Path, internals: Mapping[str, tuple[str, str]] = INTERNALS) -> tuple[str, ...]:
    """Return a sentence for each name that the package in ``folder`` lacks. It is read, not imported."""
    sentences = []
    for module, (purpose, names) in internals.items():
        file = folder / Path(*module.split(".")).with_suffix(".py")
        present = set(_names_of(ast.parse(file.read_bytes()))) if file.is_file() else set()
        missing = [f"{module}.{name}" for name in names.split() if name not in present]
        gone = missing if present else [f"module {module}"]
        sentences += [f"vLLM has no {each}: attncheck engine needs it for {purpose}" for each in gone]
    return tuple(sentences)


def check_internals() -> None:
    """Check the installed vLLM.

    Raises:
        QuestionError: vLLM is not installed, or lacks something that is used.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        raise QuestionError("attncheck engine: vLLM is not installed in this environment")
    missing = missing_internals(Path(spec.origin).parent.parent)
    if missing:
        raise QuestionError(f"attncheck engine does not know this version of vLLM: {'; '.join(missing)}")


def _names_of(module: ast.Module) -> Iterator[str]:
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
