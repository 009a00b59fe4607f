"""Lists what the engine's observer uses of vLLM, and checks that the installed version has it."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from attncheck.errors import QuestionError


@dataclass(frozen=True)
class Internals:
    """Names of a class of vLLM, and what they are used for.

    names: methods, fields, and attributes that its methods set. ``method(a, b)``: a method whose first parameters have
    these names.
    """

    module: str
    owner: str
    names: tuple[str, ...]
    purpose: str

    @property
    def path(self) -> Path:
        """The file of the module within the folder that holds the package."""
        return Path(*self.module.split(".")).with_suffix(".py")


_OF_BOTH_RUNNERS = ("kv_cache_config", "vllm_config", "compilation_config", "model_config", "cache_config", "device")

INTERNALS = (
    Internals(
        "vllm.v1.core.sched.output",
        "SchedulerOutput",
        (
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
            "scheduled_spec_decode_tokens",
            "finished_req_ids",
            "preempted_req_ids",
        ),
        "the plan of a step",
    ),
    Internals(
        "vllm.v1.core.sched.output",
        "NewRequestData",
        ("req_id", "prompt_token_ids", "prefill_token_ids", "block_ids", "num_computed_tokens", "lora_request"),
        "new requests",
    ),
    Internals(
        "vllm.v1.core.sched.output",
        "CachedRequestData",
        ("req_ids", "resumed_req_ids", "all_token_ids", "new_block_ids", "num_computed_tokens"),
        "running requests",
    ),
    Internals("vllm.v1.outputs", "ModelRunnerOutput", ("req_id_to_index", "sampled_token_ids"), "sampled tokens"),
    Internals("vllm.v1.outputs", "AsyncModelRunnerOutput", ("get_output",), "sampled tokens that arrive late"),
    Internals("vllm.v1.worker.worker_base", "WorkerWrapperBase", ("init_device", "worker"), "the worker of a server"),
    Internals("vllm.v1.worker.worker_base", "WorkerBase", ("rank", "vllm_config"), "the worker of a server"),
    Internals("vllm.v1.worker.gpu_worker", "Worker", ("compile_or_warm_up_model",), "the warm-up, which is ignored"),
    Internals(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        (
            "initialize_kv_cache(kv_cache_config, is_profiling)",
            "execute_model(scheduler_output, intermediate_tensors)",
            "sample_tokens",
            "_model_forward(input_ids, positions)",
            "input_batch",
            "_kernel_block_sizes",
            *_OF_BOTH_RUNNERS,
        ),
        "the steps of model runner V1",
    ),
    Internals("vllm.v1.worker.gpu_input_batch", "InputBatch", ("req_ids",), "the order of rows of model runner V1"),
    Internals(
        "vllm.v1.worker.gpu.model_runner",
        "GPUModelRunner",
        (
            "initialize_kv_cache(kv_cache_config, is_profiling)",
            "execute_model(scheduler_output, intermediate_tensors, dummy_run)",
            "prepare_inputs",
            "sample_tokens",
            "kernel_block_sizes",
            *_OF_BOTH_RUNNERS,
        ),
        "the steps of model runner V2",
    ),
    Internals(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        ("req_ids", "input_ids", "positions"),
        "the inputs of model runner V2",
    ),
    Internals("vllm.v1.kv_cache_interface", "KVCacheConfig", ("kv_cache_groups",), "groups of layers"),
    Internals("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", ("layer_names", "kv_cache_spec"), "groups of layers"),
    Internals("vllm.v1.kv_cache_interface", "KVCacheSpec", ("block_size",), "the tokens of a block"),
    Internals("vllm.config.compilation", "CompilationConfig", ("static_forward_context",), "the attention layers"),
    Internals("vllm.config.scheduler", "SchedulerConfig", ("async_scheduling",), "whether tokens arrive late"),
    Internals(
        "vllm.config.parallel",
        "ParallelConfig",
        ("pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_rank"),
        "engines that are not followed",
    ),
    Internals(
        "vllm.model_executor.layers.attention.attention",
        "Attention",
        ("impl", "num_heads", "num_kv_heads", "head_size", "sliding_window", "kv_cache_dtype", "get_attn_backend"),
        "what a layer computes",
    ),
    Internals(
        "vllm.v1.attention.backend",
        "AttentionImpl",
        ("forward(layer, query, key, value, kv_cache, attn_metadata, output)",),
        "the rows of a layer",
    ),
    Internals(
        "vllm.model_executor.layers.attention.mla_attention",
        "MLAAttention",
        ("forward_impl(q, k_c_normed, k_pe, kv_cache, attn_metadata, output)", "impl"),
        "the rows of a latent layer",
    ),
)
"""What is used of vLLM, except names that are read where a version has them."""


def missing_internals(folder: Path, internals: Sequence[Internals] = INTERNALS) -> tuple[str, ...]:
    """Return a sentence for each name that the package in ``folder`` lacks. It is read, not imported."""
    return tuple(sentence for each in internals for sentence in _missing(folder, each))


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


def _missing(folder: Path, internals: Internals) -> Iterator[str]:
    file = folder / internals.path
    needed = f"attncheck engine needs it for {internals.purpose}"
    if not file.is_file():
        yield f"vLLM has no module {internals.module}: {needed}"
        return
    owner = _class_of(ast.parse(file.read_bytes()), internals.owner)
    if owner is None:
        yield f"vLLM has no {internals.module}.{internals.owner}: {needed}"
        return
    present = set(_names_of(owner))
    for name in internals.names:
        if name not in present:
            yield f"vLLM has no {internals.module}.{internals.owner}.{name}: {needed}"


def _class_of(module: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _names_of(owner: ast.ClassDef) -> Iterator[str]:
    """Yield the methods and fields of a class, and what its methods set on ``self``."""
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
            parameters = [each.arg for each in node.args.args[1:]]
            yield from (f"{node.name}({', '.join(parameters[:number])})" for number in range(1, len(parameters) + 1))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
