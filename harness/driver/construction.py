"""Construct the impl and the metadata builder of a backend, with the arguments that a model runner passes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from attncheck.backends.contract import AttentionBackend, GroupShape, KVCacheSpec, QuantKey, ScaleDesc
from attncheck.backends.declarations import is_chunked
from attncheck.backends.dtypes import DTYPES, cache_dtype
from attncheck.backends.impl import set_current_vllm_config
from attncheck.harness.driver.latent_views import LatentImplView, latent_keywords
from attncheck.harness.driver.vllm_config import LayerStub, vllm_config
from attncheck.harness.problem.output_quantisation import output_codes
from attncheck.harness.problem.problem import Problem
from attncheck.reference import create_fast_prefill_custom_backend
from attncheck.reference.spec import FastPrefillOptions

LAYER, SHARED_LAYER = "layer.1", "layer.0"
"""Names of the layer under test, and of the layer whose cache it reads if it has none of its own."""


def construct_impl(
    backend: type[AttentionBackend],
    problem: Problem,
    device: torch.device,
    *,
    with_sinks: bool = True,
    writes: bool = False,
    reads: str | None = None,
) -> Any:
    """Return the impl of the problem's layer, constructed while its vLLM config is current, as in vLLM.

    ``with_sinks``: False for a part of the keys that must not count the sinks. ``writes``: construct the layer that
    fills the cache, if the problem's own layer reads another layer's cache. ``reads``: the name of the layer whose
    cache this one reads (``kv_sharing_target_layer_name``). Raises NotImplementedError if the impl cannot quantise the
    output as the problem requires.
    """
    layer = problem.layer
    if reads is None and problem.writes_nothing and not writes:
        reads = SHARED_LAYER
    keywords: dict[str, Any] = {}
    if layer.sink_logits is not None and with_sinks:
        dtype = DTYPES[layer.sinks_dtype or layer.dtype]
        keywords["sinks"] = torch.tensor(layer.sink_logits, dtype=dtype, device=device)
    if layer.value_head_size != layer.head_size:
        keywords["head_size_v"] = layer.value_head_size
    if layer.mla is not None and problem.up_projections is not None:
        keywords |= latent_keywords(layer.mla, problem.up_projections, device)
    config = builder_arguments(backend, [problem])[1]
    config.cache_config.num_gpu_blocks = None  # as in vLLM, which allocates the pool after the layers
    with set_current_vllm_config(config):
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
    """Raise NotImplementedError unless the impl supports the problem's output quantisation."""
    codes = output_codes(problem.layer)
    if codes is None:
        return
    # vLLM's graph compiler makes the same query before it fuses a quantisation into attention.
    key = QuantKey(codes.dtype, ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1)))
    if not impl.fused_output_quant_supported(key):
        raise NotImplementedError(f"fused_output_quant_supported returned False for {key}")


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
    """Return a metadata builder for ``problems``: the first sets everything except the maxima, which cover all of them.

    ``attn_layer``: the layer with its impl, which builders find in the config's ``static_forward_context``. ``beside``:
    further layers that the builder serves. ``fills``: if nonzero, the builder is for the layer that fills the cache,
    with prompts of up to this many tokens. ``capture_sizes``: token counts of the graphs that will be captured,
    ascending.
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
    """Return ``kv_cache_spec`` and ``vllm_config`` for :func:`construct_builder`."""
    problem = problems[0]
    layer, cache, batch = problem.layer, problem.cache, problem.case.batch
    has_chunks = _has_chunks(backend, problem)
    spec = KVCacheSpec(
        block_size=cache.block_size,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=cache_dtype(layer, cache),
        head_size_v=layer.value_head_size,
        sliding_window=layer.sliding_window,
        attention_chunk_size=layer.attn_chunk_size if has_chunks else None,
        chunked_prefill_workspace_size=None if layer.mla is None else layer.mla.workspace,
    )
    config = vllm_config(
        layer,
        cache,
        problem.dtype,
        max_model_len=max_model_len(backend, problems, fills),
        max_num_seqs=max(_num_seqs(backend, one) for one in problems),
        max_tokens=max(fills, *(_num_tokens(one) for one in problems)),
        num_blocks=max(one.num_blocks for one in problems),
        path=batch.path,
        capture_sizes=capture_sizes,
        layers=layers,
    )
    return spec, config


def max_model_len(backend: type[AttentionBackend], problems: Sequence[Problem], fills: int = 0) -> int:
    """Return the ``max_model_len`` of the config, in tokens. ``fills``: as in :func:`construct_builder`."""
    return max(fills, *(_longest(backend, one) for one in problems))


def _has_chunks(backend: type[AttentionBackend], problem: Problem) -> bool:
    """Return whether the builder gets the layer's chunk size; if not, chunks are run as virtual requests."""
    return not is_chunked(problem.layer, problem.cache, problem.case.batch, backend.features)


def _longest(backend: type[AttentionBackend], problem: Problem) -> int:
    """Return how many tokens the widest block table holds, or the longest sequence if there is no pool."""
    pages = [problem.block_table.shape[1], *(part.table.shape[1] for part in problem.parts)]
    chunk = 0 if _has_chunks(backend, problem) else problem.layer.attn_chunk_size or 0
    room = max(pages) * problem.cache.block_size if problem.has_pool else _num_tokens(problem)
    return max(room, chunk, problem.case.batch.max_seq_len)


def _num_tokens(problem: Problem) -> int:
    return problem.case.batch.num_tokens + problem.case.batch.padding.query_rows


def _num_seqs(backend: type[AttentionBackend], problem: Problem) -> int:
    """Return the number of requests, including padding.

    If chunks are run as virtual requests, each chunk that a request's rows touch counts as one.
    """
    batch = problem.case.batch
    if _has_chunks(backend, problem):
        return batch.num_requests + batch.padding.requests
    chunk = problem.layer.attn_chunk_size or 1
    pieces = ((r.num_keys - 1) // chunk - r.first_position // chunk + 1 for r in problem.requests)
    return sum(pieces) + batch.padding.requests
