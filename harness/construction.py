"""Makes impl and builder of a backend for a problem, with the arguments a model runner gives them.

Must not know: steps, caches, what is judged.
"""

from typing import Any

import torch

from attncheck.backends.contract import AttentionBackend, GroupShape, KVCacheSpec, QuantKey, ScaleDesc
from attncheck.backends.packings import cache_dtype
from attncheck.harness.config import vllm_config
from attncheck.harness.latent_calls import LatentImplView, latent_keywords
from attncheck.harness.output_codes import output_codes
from attncheck.harness.problem import Problem
from attncheck.reference import create_fast_prefill_custom_backend
from attncheck.reference.spec import FastPrefillOptions

LAYER, SHARED_LAYER = "layer.1", "layer.0"
"""The layer that is asked, and the one whose cache it reads where it has none of its own."""


def construct_impl(
    backend: type[AttentionBackend], problem: Problem, device: torch.device, *, with_sinks: bool = True
) -> Any:
    """The impl of the problem's layer; for a part of the keys that carries no sinks, ``with_sinks`` is off."""
    layer = problem.layer
    keywords: dict[str, Any] = {}
    if layer.sink_logits is not None and with_sinks:
        keywords["sinks"] = torch.tensor(layer.sink_logits, dtype=torch.float32, device=device)
    if layer.value_head_size != layer.head_size:
        keywords["head_size_v"] = layer.value_head_size
    if layer.mla is not None and problem.up_projections is not None:
        keywords |= latent_keywords(layer.mla, problem.up_projections, device)
    impl = backend.get_impl_cls()(
        layer.num_heads,
        layer.head_size,
        layer.softmax_scale,
        layer.num_kv_heads,
        None if layer.alibi_slopes is None else list(layer.alibi_slopes),
        layer.sliding_window,
        problem.cache.kv_cache_dtype,
        layer.logits_soft_cap,
        str(layer.attn_type),
        SHARED_LAYER if problem.writes_nothing else None,
        **keywords,
    )
    _require_output_quant(impl, problem)
    return impl if layer.mla is None else LatentImplView(impl, problem.dtype)


def _require_output_quant(impl: Any, problem: Problem) -> None:
    """Asks as the graph compiler does before it folds a quantisation into attention; no is a refusal."""
    codes = output_codes(problem.layer)
    if codes is None:
        return
    key = QuantKey(codes.dtype, ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1)))
    if not impl.fused_output_quant_supported(key):
        raise NotImplementedError(f"fused_output_quant_supported said no to {key}")


def construct_builder(backend: type[AttentionBackend], problem: Problem, device: torch.device) -> Any:
    """The metadata builder of the problem's layer."""
    layer, cache, batch = problem.layer, problem.cache, problem.case.batch
    width = max([problem.block_table.shape[1], *(part.table.shape[1] for part in problem.parts)]) * cache.block_size
    has_chunks = batch.path.name != "local" or "local" in backend.features
    num_seqs = batch.num_requests if has_chunks else _num_virtual_requests(problem)
    spec = KVCacheSpec(
        block_size=cache.block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=cache_dtype(layer, cache),
        head_size_v=layer.value_head_size if layer.value_head_size != layer.head_size else None,
        sliding_window=layer.sliding_window,
        attention_chunk_size=layer.attn_chunk_size if has_chunks else None,
        chunked_prefill_workspace_size=None if layer.mla is None else layer.mla.workspace,
    )
    config = vllm_config(
        layer,
        cache,
        problem.dtype,
        max_model_len=max(width, batch.max_seq_len),
        max_num_seqs=num_seqs + batch.padding.requests,
        max_tokens=batch.num_tokens + batch.padding.tokens,
        path=batch.path,
    )
    builder = backend.get_builder_cls()
    if isinstance(batch.path.options, FastPrefillOptions):
        builder = create_fast_prefill_custom_backend("FastPrefill", backend).get_builder_cls()
    return builder(spec, [LAYER], config, device)


def _num_virtual_requests(problem: Problem) -> int:
    """Chunks that the requests' rows touch: each is a request to a builder that knows no chunks."""
    chunk = problem.layer.attn_chunk_size or 1
    return sum((r.num_keys - 1) // chunk - r.first_position // chunk + 1 for r in problem.requests)
