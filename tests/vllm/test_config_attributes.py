"""Every attribute of vLLM's config that its attention classes read is set by the bridge, or stays at vLLM's default.

A new version of vLLM whose classes read another attribute fails here, until it is set or has a reason.
"""

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

SET = {
    "cache_config": "block_size cache_dtype get_resolved_kv_cache_layout kv_cache_layout num_gpu_blocks",
    "compilation_config": "cudagraph_capture_sizes cudagraph_mode max_cudagraph_capture_size static_forward_context",
    "hf_config": "model_type",
    "hf_text_config": "attn_logit_softcapping head_dim kv_lora_rank model_type q_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim",
    "model_config": "architectures dtype get_head_size get_num_attention_heads get_num_kv_heads is_mm_prefix_lm "
    "max_model_len rswa_window",
    "scheduler_config": "max_num_batched_tokens max_num_seqs",
    "speculative_config": "method num_speculative_tokens",
    "vllm_config": "num_speculative_tokens",
}

LEFT = {
    "an option that a user sets, and an engine leaves alone": {
        "attention_config": "disable_flashinfer_q_quantization flash_attn_max_num_splits_for_cuda_graph "
        "flash_attn_version flex_attn_block_m flex_attn_block_n mla_prefill_backend tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_non_causal use_prefill_query_quantization use_trtllm_attention",
        "cache_config": "enable_prefix_caching kv_cache_dtype_skip_layers",
        "kernel_config": "enable_jit_warmup enable_rocm_segmented_attn_autotune",
        "scheduler_config": "async_scheduling enable_chunked_prefill",
        "speculative_config": "enable_adaptive_verification parallel_drafting use_dspark",
        "vllm_config": "use_v2_model_runner",
    },
    "one device, whose keys no other device holds": {
        "kv_transfer_config": "is_kv_transfer_instance",
        "parallel_config": "cp_kv_cache_interleave_size dcp_comm_backend decode_context_parallel_size "
        "pcp_shard_decode_requests prefill_context_parallel_size tensor_parallel_size",
    },
    "a fact of a model that no case describes: diffusion, layers of several kinds, quantised weights": {
        "cache_config": "skip_page_size_padded sliding_window",
        "model_config": "is_diffusion is_hybrid",
        "quant_config": "kv_cache_scheme",
    },
    "of layers whose keys an indexer chooses, which the bridge refuses": {
        "attention_config": "hisparse_config indexer_sparse_logits resolve_indexer_kv_dtype sparse_mla_force_mqa "
        "sparse_mla_prefill_workspace_factor",
        "hf_config": "compress_ratios mm_prefix_clamp_sliding_window sliding_window vision_max_n_token",
        "hf_text_config": "candidate_block_size candidate_topk_blocks compress_ratios index_head_dim index_kpool "
        "index_n_heads index_topk",
        "kernel_config": "sparse_indexer_topk_backend",
    },
    "of layers with a state, of which only the builder is driven": {
        "cache_config": "mamba_cache_mode replayssm_buffer_len use_replayssm",
        "mamba_config": "backend",
        "model_config": "get_mamba_chunk_size",
    },
}
"""Attributes that keep vLLM's default, by reason."""


def test_each_attribute_that_vllms_classes_read_is_set_or_has_a_reason():
    spec = find_spec("vllm")
    assert spec.origin is not None
    read = set(read_attributes(Path(spec.origin).parent))
    known = [name for listed in (SET, *LEFT.values()) for name in dotted(listed)]
    assert len(known) == len(set(known))
    assert read - set(known) == set()
    assert set(known) - read == set()


def dotted(listed):
    yield from (f"{section}.{name}" for section, names in listed.items() for name in names.split())


def read_attributes(root):
    """Yield ``section.attribute`` for every read of a section of ``VllmConfig``, or of the model's own config."""
    sections = {*config_fields(root / "config" / "vllm.py"), "vllm_config", "hf_config", "hf_text_config"}
    folders = [root / "v1" / "attention" / "backends", root / "v1" / "attention" / "backends" / "mla"]
    layers = root / "model_executor" / "layers" / "attention"
    files = [file for folder in folders for file in folder.glob("*.py")]
    for file in (
        *files,
        root / "v1" / "attention" / "backend.py",
        layers / "attention.py",
        layers / "mla_attention.py",
    ):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        section_of = {name: name for name in sections}
        for node in nodes:  # such as ``cfg = vllm_config.attention_config``
            if isinstance(node, ast.Assign) and last_name(node.value) in sections:
                section_of |= {last_name(target): last_name(node.value) for target in node.targets}
        for node in nodes:
            owner, name = owner_and_name(node)
            if owner in section_of and name not in sections:
                yield f"{section_of[owner]}.{name}"


def config_fields(file):
    classes = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef))
    (config,) = (node for node in classes if node.name == "VllmConfig")
    for node in config.body:
        if isinstance(node, ast.AnnAssign) and last_name(node.target).endswith("_config"):
            yield last_name(node.target)


def owner_and_name(node):
    """Return ("a", "b") for ``x.a.b`` and ``getattr(x.a, "b")``, and ("", "") for other nodes."""
    if isinstance(node, ast.Attribute):
        return last_name(node.value), node.attr
    if isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "hasattr"):
        name = node.args[1]
        return (last_name(node.args[0]), str(name.value)) if isinstance(name, ast.Constant) else ("", "")
    return "", ""


def last_name(node):
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
