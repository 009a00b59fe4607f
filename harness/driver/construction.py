"""Makes impl and builder of a backend for a problem, with the arguments a model runner gives them."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from attncheck.backends.contract import AttentionBackend, GroupShape, KVCacheSpec, QuantKey, ScaleDesc
from attncheck.backends.declarations import is_chunked
from attncheck.backends.dtypes import cache_dtype
from attncheck.backends.impl import set_current_vllm_config
from attncheck.harness.driver.latent_views import LatentImplView, latent_keywords
from attncheck.harness.driver.vllm_config import LayerStub, vllm_config
from attncheck.harness.problem.output_quantisation import output_codes
from attncheck.harness.problem.problem import Problem
from attncheck.reference import create_fast_prefill_custom_backend
from attncheck.reference.spec import FastPrefillOptions

LAYER, SHARED_LAYER = "layer.1", "layer.0"
"""The layer that is asked, and the one whose cache it reads where it has none of its own."""


def construct_impl(
    backend: type[AttentionBackend],
    problem: Problem,
    device: torch.device,
    *,
    with_sinks: bool = True,
    writes: bool = False,
    reads: str | None = None,
) -> Any:
    """The impl of the problem's layer; for a part of the keys that carries no sinks, ``with_sinks`` is off.

    ``writes``: of the layer that fills the cache, where the problem's reads another layer's. ``reads``: of a layer that
    reads the cache of this one. The config is current while the impl is made, as in vLLM.
    """
    layer = problem.layer
    if reads is None and problem.writes_nothing and not writes:
        reads = SHARED_LAYER
    keywords: dict[str, Any] = {}
    if layer.sink_logits is not None and with_sinks:
        keywords["sinks"] = torch.tensor(layer.sink_logits, dtype=torch.float32, device=device)
    if layer.value_head_size != layer.head_size:
        keywords["head_size_v"] = layer.value_head_size
    if layer.mla is not None and problem.up_projections is not None:
        keywords |= latent_keywords(layer.mla, problem.up_projections, device)
    with set_current_vllm_config(builder_arguments(backend, [problem])[1]):
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
            reads,
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


def construct_builder(
    backend: type[AttentionBackend],
    problems: Sequence[Problem],
    device: torch.device,
    attn_layer: LayerStub | None = None,
    *,
    beside: Sequence[LayerStub] = (),
    fills: int = 0,
    capture_sizes: tuple[int, ...] = (),
) -> Any:
    """The metadata builder of a layer that is asked ``problems``, the first of which says all but the bounds.

    ``attn_layer``: the layer, with its impl, which builders find in the config's ``static_forward_context``.
    ``beside``: further layers that the builder serves. ``fills``: of the layer that fills the cache, by prompts of up
    to so many tokens. ``capture_sizes``: tokens of the graphs that will be captured, ascending.
    """
    builder = backend.get_builder_cls()
    if isinstance(problems[0].case.batch.path.options, FastPrefillOptions) and not fills:
        builder = create_fast_prefill_custom_backend("FastPrefill", backend).get_builder_cls()
    layers = {} if attn_layer is None else {LAYER: attn_layer}
    layers |= {f"layer.{number}": layer for number, layer in enumerate(beside, start=2)}
    spec, config = builder_arguments(backend, problems, fills=fills, capture_sizes=capture_sizes, layers=layers)
    with set_current_vllm_config(config):
        return builder(spec, list(layers) or [LAYER], config, device)


def builder_arguments(
    backend: type[AttentionBackend],
    problems: Sequence[Problem],
    *,
    fills: int = 0,
    capture_sizes: tuple[int, ...] = (),
    layers: Mapping[str, LayerStub] = MappingProxyType({}),
) -> tuple[KVCacheSpec, Any]:
    """``kv_cache_spec`` and ``vllm_config`` of such a builder."""
    problem = problems[0]
    layer, cache, batch = problem.layer, problem.cache, problem.case.batch
    has_chunks = _has_chunks(backend, problem)
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
        max_model_len=max(fills, *(_longest(backend, one) for one in problems)),
        max_num_seqs=max(_num_seqs(backend, one) for one in problems),
        max_tokens=max(fills, *(_num_tokens(one) for one in problems)),
        path=batch.path,
        capture_sizes=capture_sizes,
        layers=layers,
    )
    return spec, config


def _has_chunks(backend: type[AttentionBackend], problem: Problem) -> bool:
    """Whether the builder is told of the layer's chunks; else they are played as virtual requests."""
    return not is_chunked(problem.layer, problem.cache, problem.case.batch, backend.features)


def _longest(backend: type[AttentionBackend], problem: Problem) -> int:
    """Tokens that the widest block table has room for, or that a sequence without one has."""
    pages = [problem.block_table.shape[1], *(part.table.shape[1] for part in problem.parts)]
    chunk = 0 if _has_chunks(backend, problem) else problem.layer.attn_chunk_size or 0
    room = max(pages) * problem.cache.block_size if problem.has_pool else _num_tokens(problem)
    return max(room, chunk, problem.case.batch.max_seq_len)


def _num_tokens(problem: Problem) -> int:
    return problem.case.batch.num_tokens + problem.case.batch.padding.query_rows


def _num_seqs(backend: type[AttentionBackend], problem: Problem) -> int:
    """Requests and padding; to a builder that is not told of chunks, each that a request's rows touch is one."""
    batch = problem.case.batch
    if _has_chunks(backend, problem):
        return batch.num_requests + batch.padding.requests
    chunk = problem.layer.attn_chunk_size or 1
    pieces = ((r.num_keys - 1) // chunk - r.first_position // chunk + 1 for r in problem.requests)
    return sum(pieces) + batch.padding.requests
