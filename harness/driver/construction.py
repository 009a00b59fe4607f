"""Construct a backend's builder and layer from a case, with the configuration that they read."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.caches.codecs import KVCacheCodec
from attncheck.backends.contract import AttentionBackend, GroupShape, KVCacheSpec, QuantKey, ScaleDesc
from attncheck.backends.declarations import is_chunked
from attncheck.backends.dtypes import DTYPES, cache_dtype, passed_name
from attncheck.backends.impl import set_current_vllm_config
from attncheck.harness.problem.problem import Problem
from attncheck.harness.problem.queries import token_tree
from attncheck.harness.problem.storage import UpProjections, output_codes
from attncheck.reference import create_fast_prefill_custom_backend
from attncheck.reference.spec import LayerSpec, MLASpec
from attncheck.reference.step_spec import (
    CacheSpec,
    DCPOptions,
    FastPrefillOptions,
    PathSpec,
    RecurrenceOptions,
    SpecDecodeOptions,
    TreeOptions,
)

# The config that a builder reads and the layer that `forward` reads, with only the attributes the contract names.
#
# Reading any other attribute of a config fails with its name, so that a backend that relies on one fails at once.


class ConfigNode:
    """Attributes given at construction. Reading any other raises AttributeError with its name and the known ones."""

    def __init__(self, path: str, **values: object) -> None:
        self._path = path
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(key for key in self.__dict__ if not key.startswith("_")))
        raise AttributeError(f"{self._path} has no {name!r}: the contract provides {known}")


def vllm_config(
    layer: LayerSpec,
    cache: CacheSpec,
    dtype: torch.dtype,
    *,
    passed_cache_dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    max_tokens: int,
    num_blocks: int = 0,
    has_image_spans: bool = False,
    path: PathSpec = PathSpec(),  # noqa: B008 (frozen)
    capture_sizes: tuple[int, ...] = (),
    layers: Mapping[str, "LayerStub"] = MappingProxyType({}),
) -> ConfigNode:
    """Return the ``vllm_config`` that a builder reads, for one layer, cache and execution path.

    ``passed_cache_dtype``: the name of the cache dtype that the backend gets. ``num_blocks``: pages of the pool.
    ``has_image_spans``: whether a request has ``mm_req_doc_ranges``. ``capture_sizes``: token counts of the graphs that
    will be captured, ascending. ``layers``: the layers constructed so far, by name.
    """
    ranks = DCPOptions(size=1)
    if path.name == "ranks" and isinstance(path.options, DCPOptions):
        ranks = path.options
    model = ConfigNode(
        "vllm_config.model_config",
        dtype=dtype,
        max_model_len=max_model_len,
        get_num_attention_heads=lambda _parallel_config: layer.num_heads,
        get_num_kv_heads=lambda _parallel_config: layer.num_kv_heads,
        get_head_size=lambda: layer.head_size,
        is_mm_prefix_lm=has_image_spans,
        rswa_window=layer.rswa_window,
    )
    return ConfigNode(
        "vllm_config",
        model_config=model,
        cache_config=ConfigNode(
            "vllm_config.cache_config",
            block_size=cache.manager_block_size or cache.block_size,
            cache_dtype=passed_cache_dtype,
            kv_cache_layout=cache.layout,
            num_gpu_blocks=num_blocks or 1,  # as in vLLM: 1 without a pool
        ),
        scheduler_config=ConfigNode(
            "vllm_config.scheduler_config", max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens
        ),
        parallel_config=ConfigNode(
            "vllm_config.parallel_config",
            tensor_parallel_size=ranks.size,
            pipeline_parallel_size=1,
            decode_context_parallel_size=ranks.size,
            cp_kv_cache_interleave_size=ranks.interleave,
        ),
        compilation_config=ConfigNode(
            "vllm_config.compilation_config",
            cudagraph_capture_sizes=list(capture_sizes),
            max_cudagraph_capture_size=max(capture_sizes, default=0),
            static_forward_context=dict(layers),
        ),
        speculative_config=_speculative_config(path),
    )


def _speculative_config(path: PathSpec) -> ConfigNode | None:
    """Return the config of a path that verifies drafts, with the tree of drafts if it has one; None for other paths."""
    match path.options:
        case SpecDecodeOptions(num_speculative_tokens=drafts):
            tree = None
        case RecurrenceOptions(num_speculative_tokens=drafts) if drafts:
            tree = None
        case TreeOptions(parents=parents):
            drafts, tree = len(parents) - 1, token_tree(parents)
        case _:
            return None
    return ConfigNode("vllm_config.speculative_config", num_speculative_tokens=drafts, speculative_token_tree=tree)


class LayerStub:
    """The ``AttentionLayer`` that ``forward`` takes: scales as float32 tensors, and their host copies."""

    impl: Any
    """The impl that runs the layer, set once it is constructed; builders find it by the layer's name."""

    def __init__(self, cache: CacheSpec, device: torch.device) -> None:
        self._q_scale, self._q_scale_float = _scale(cache.q_scale, device)
        self._k_scale, self._k_scale_float = _scale(cache.k_scale, device)
        self._v_scale, self._v_scale_float = _scale(cache.v_scale, device)
        self._prob_scale, _ = _scale(1.0, device)


def _scale(scale: float | tuple[float, ...], device: torch.device) -> tuple[Tensor, float]:
    """Return a scale's tensor (one element, or one per KV head) and its host copy, which is NaN for per-head scales."""
    values = scale if isinstance(scale, tuple) else (scale,)
    tensor = torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)
    return tensor, float(values[0]) if len(values) == 1 else math.nan


# Translate between heads and the arguments that impls and codecs of latent attention (MLA) take.
#
# The rest of the harness works with heads: latent rows as keys `[n, 1, L]`, rotary parts as values `[n, 1, E]`, and
# outputs `[n, H, V]`.


class KVBProj:
    """The fused up-projection, called like a model's linear layer."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, latent: Tensor) -> tuple[Tensor, None]:
        """Project ``[n, kv_lora_rank]`` to ``[n, num_heads * (qk_nope_head_dim + v_head_dim)]``; the bias is None."""
        # Sum in float32 and round once, so that a backend's error contains only its own arithmetic.
        return torch.nn.functional.linear(latent.float(), self.weight.float()).to(latent.dtype), None


def latent_keywords(mla: MLASpec, weights: UpProjections, device: torch.device) -> dict[str, Any]:
    """Return the keywords that an MLA impl's constructor takes after its ten positional arguments."""
    return {
        "q_lora_rank": None,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "qk_head_dim": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "kv_b_proj": KVBProj(weights.fused().to(device)),
    }


class LatentImplView:
    """An impl of latent attention behind an interface of heads; other attributes are those of the impl."""

    def __init__(self, impl: Any, act_dtype: torch.dtype) -> None:
        self._impl = impl
        if hasattr(impl, "process_weights_after_loading"):
            impl.process_weights_after_loading(act_dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._impl, name)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **keywords: Any,
    ) -> object:
        """Call the impl with ``output [tokens, H, V]`` as ``[tokens, H * V]`` in the same memory."""
        latent = None if key is None else key[:, 0]
        return self._impl.forward(
            layer, query, latent, value, kv_cache, attn_metadata, output=output.flatten(1), **keywords
        )

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Pass the impl latent rows ``[n, L]`` and rotary parts ``[n, 1, E]``, as in :meth:`forward`."""
        self._impl.do_kv_cache_update(layer, key[:, 0], value, kv_cache, slot_mapping)


class LatentCodecView:
    """A codec of a latent cache behind an interface of heads."""

    def __init__(self, codec: KVCacheCodec) -> None:
        self.codec = codec

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key [n, 1, L]`` and ``value [n, 1, E]`` at ``slots``."""
        self.codec.write(kv_cache, slots, key[:, 0], value[:, 0])

    def read(self, kv_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``key [n, 1, L]`` and ``value [n, 1, E]`` at ``slots``."""
        latent, rotary = self.codec.read(kv_cache, slots)
        return latent[:, None], rotary[:, None]


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
    output, or take an FP8 query, as the problem requires.
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
            passed_name(problem.cache.kv_cache_dtype, backend),
            layer.logits_soft_cap,
            str(layer.attn_type),
            reads,
            **keywords,
        )
    _require_quantisation(impl, problem)
    return impl if layer.mla is None else LatentImplView(impl, problem.dtype)


def _require_quantisation(impl: Any, problem: Problem) -> None:
    # As vLLM's layer, which passes FP8 queries to such impls alone.
    if problem.layer.query_quant and not getattr(impl, "supports_quant_query_input", False):
        raise NotImplementedError("supports_quant_query_input is False, so vLLM's layer passes no FP8 query")
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
    if int(problems[0].case.hash, 16) % 2:  # what is true of the first layer of a group is not true of all
        layers = dict(reversed(layers.items()))
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
        dtype=cache_dtype(layer, cache, backend),
        head_size_v=layer.value_head_size,
        sliding_window=layer.sliding_window,
        attention_chunk_size=layer.attn_chunk_size if has_chunks else None,
        chunked_prefill_workspace_size=None if layer.mla is None else layer.mla.workspace,
    )
    config = vllm_config(
        layer,
        cache,
        problem.dtype,
        passed_cache_dtype=passed_name(cache.kv_cache_dtype, backend),
        max_model_len=max_model_len(backend, problems, fills),
        max_num_seqs=max(_num_seqs(backend, one) for one in problems),
        max_tokens=max(fills, *(_num_tokens(one) for one in problems)),
        num_blocks=max(one.num_blocks for one in problems),
        has_image_spans=any(request.prefix.mm_req_doc_ranges for one in problems for request in one.requests),
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
