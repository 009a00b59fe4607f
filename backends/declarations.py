"""The declarations of a backend compared with a case: the features a case needs, and why a backend does not support it.

These are pure functions of class-level data and specs; they load no torch. A reason is a sentence fragment with the
value and the limit, and all reasons are returned. A path that a backend does not declare is run through ``forward``;
the features which that requires count among the needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, get_args

from attncheck.backends.claims import PREDICATES
from attncheck.backends.conventions import CacheStrides, Conventions
from attncheck.reference.spec import FORMS, MODIFIERS, AttentionType, LayerSpec
from attncheck.reference.step_spec import (
    CHANNEL_RULES,
    FP8_CACHES,
    REGISTERED,
    BatchSpec,
    CacheSpec,
    DCPOptions,
    IndexerOptions,
    KVCacheDType,
    RecurrenceOptions,
    RequestSpec,
    SplitKVOptions,
)

if TYPE_CHECKING:
    import torch

FUNCTION_PATHS = ("merge", "causal_conv1d", "indexer")
"""Paths that call a function of the backend instead of its attention."""

STATE_PATH = "recurrence"
"""The path of layers with a state."""

OTHER_PATHS = (*FUNCTION_PATHS, STATE_PATH)
"""Paths that do not call attention."""

_UNREAD: Mapping[str, str] = MappingProxyType(
    {
        "supports_dtype": "supported_dtypes",
        "supports_head_size": "get_supported_head_sizes",
        "supports_block_size": "get_supported_kernel_block_sizes",
        "supports_combination": "unsupported_reasons",
        "validate_configuration": "unsupported_reasons",
        "supports_compute_capability": "unavailable_reasons",
        "supports_batch_invariance": "conventions = Conventions(batch_invariant=True)",
        "supported_kv_cache_layouts": "supported_layouts",
        "customize_spec": "get_kv_cache_shape and kv_cache_codec",
    }
)
"""Declarations of vLLM's class that attncheck's classes do not read, and the declaration to write instead."""

_NO_LATENT_CACHE = "the layer has no latent cache"
_NO_INDEXER = "the layer has no indexer"
_NO_STATE = "the layer has a KV cache, not a state"
_HAS_STATE = "the layer has a state, not a KV cache"


@dataclass(frozen=True)
class MultipleOf:
    """An entry of the supported block sizes: every multiple of ``base``."""

    base: int

    def __post_init__(self) -> None:
        if self.base < 1:
            raise ValueError(f"base = {self.base}: must be at least 1")

    def __str__(self) -> str:
        return f"multiples of {self.base}"


class Declarations(Protocol):
    """The members of an ``AttentionBackend`` class that a case is compared with; the contract documents them."""

    features: frozenset[str]
    conventions: Conventions
    supported_kv_cache_dtypes: Sequence[str]
    registered_kv_cache_dtype: "tuple[str, torch.dtype] | None"
    supported_layouts: tuple[str, ...]
    supported_attn_types: Sequence[str]
    supported_sinks_dtypes: tuple[str, ...]
    builder_only: bool

    def is_mla(self) -> bool: ...

    def is_sparse(self) -> bool: ...

    def is_ssm(self) -> bool: ...

    def get_supported_dtypes(self) -> "list[torch.dtype]": ...

    def get_supported_head_sizes(self) -> list[int]: ...

    def get_supported_kernel_block_sizes(self) -> list[int | MultipleOf]: ...


def read_predicates(backend: type[Any]) -> None:
    """Set the declarations of ``backend`` that its own body makes in vLLM's form, by methods such as ``supports_sink``.

    The class keeps the other declarations of its bases. An inherited ``indexes_kv_by_block_stride`` counts, too, if the
    class's conventions do not declare ``cache_strides``.
    """
    own = dict(vars(backend))
    for feature, predicate in PREDICATES.items():
        if predicate in own:
            others = backend.features - {feature}
            backend.features = others | {feature} if getattr(backend, predicate)() else others
    reads_block_stride = getattr(backend, "indexes_kv_by_block_stride", None)
    if reads_block_stride is not None and _needs_cache_strides(backend):
        strides: CacheStrides = "blocks" if reads_block_stride() else "pages"
        backend.conventions = replace(backend.conventions, cache_strides=strides)
    if "supports_attn_type" in own:
        backend.supported_attn_types = tuple(kind for kind in AttentionType if backend.supports_attn_type(kind))
    if "supports_kv_cache_dtype" in own:
        names = get_args(KVCacheDType)
        backend.supported_kv_cache_dtypes = tuple(name for name in names if backend.supports_kv_cache_dtype(name))
    names_caches = not own.keys().isdisjoint(("supported_kv_cache_dtypes", "supports_kv_cache_dtype"))
    if names_caches and "features" not in own:  # vLLM's classes declare FP8 caches by their names alone
        has_codes = any(name in FP8_CACHES for name in backend.supported_kv_cache_dtypes)
        backend.features |= {"fp8_kv"} if has_codes else set()


def _needs_cache_strides(backend: type[Any]) -> bool:
    """Return whether vLLM's method decides ``cache_strides``: nothing else does, or the method alone is the class's."""
    own, conventions = vars(backend), backend.conventions
    if not isinstance(conventions, Conventions):
        return False
    is_overridden = "indexes_kv_by_block_stride" in own and "conventions" not in own
    return is_overridden or conventions.cache_strides == "undeclared"


def unread_declarations(backend: type[Any]) -> list[str]:
    """Return which declarations in vLLM's form attncheck does not read, each with the one to write instead."""
    return [
        f"{theirs} is a declaration of vLLM's that attncheck's classes do not read: declare {ours}"
        for theirs, ours in _UNREAD.items()
        if hasattr(backend, theirs)
    ]


def required_features(
    layer: LayerSpec, cache: CacheSpec, batch: BatchSpec, declared: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the features that a backend must declare to support the case; ``declared`` are those it has.

    Encoder and cross attention are attention types, not features. Scales on a 16-bit or 32-bit cache need no feature,
    since they must be ignored. If the backend does not declare ``local`` or ``cascade``, those paths are run through
    ``forward`` where that is possible. They then need the features which that requires, as ``split_kv`` and ``dcp``
    always do. A layer with a state needs none: its backends declare rules and dtypes instead.
    """
    if batch.path.name == STATE_PATH:
        return frozenset()
    layer_needs = frozenset(_layer_needs(layer))
    if is_chunked(layer, cache, batch, declared):
        layer_needs -= {"local"}
    path_needs = frozenset(_batch_needs(layer, batch)) | _played_needs(layer, cache, batch, declared)
    return layer_needs | frozenset(_cache_needs(layer, cache)) | path_needs


def needs_of(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec, declared: frozenset[str]) -> tuple[str, ...]:
    """Return what a case needs, as the labels by which reports count.

    The labels are its :func:`required_features`, then ``key=value`` labels: the sizes and forms of the layer (and of
    the cache, if it has one), ``group_size`` (query heads per KV head), and ``path``. A layer with a state has ``rule``
    and ``state_dtype``, too.
    """
    has_cache = layer.has_cache and batch.path.name != STATE_PATH
    specs = (layer, cache) if has_cache else (layer,)
    forms = [f"{name}={getattr(spec, name)}" for spec in specs for name in FORMS if hasattr(spec, name)]
    derived = [f"group_size={layer.num_heads // layer.num_kv_heads}", f"path={batch.path.name}"]
    if isinstance(batch.path.options, RecurrenceOptions):
        derived += [f"rule={batch.path.options.rule}", f"state_dtype={batch.path.options.dtype_of_states(layer.dtype)}"]
    return (*sorted(required_features(layer, cache, batch, declared)), *forms, *derived)


def is_chunked(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec, declared: frozenset[str]) -> bool:
    """Return whether the path is run as virtual requests, one per chunk.

    Otherwise the backend is given the chunk size and applies it itself.
    """
    are_whole_pages = (layer.attn_chunk_size or 1) % cache.block_size == 0
    return batch.path.name == "local" and "local" not in declared and are_whole_pages


def is_merged(batch: BatchSpec, declared: frozenset[str]) -> bool:
    """Return whether the path is run as several calls over different keys, whose results are merged by their LSE."""
    return batch.path.name in ("split_kv", "dcp") or (batch.path.name == "cascade" and "cascade" not in declared)


def undeclared(backend: Declarations, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
    """Return every reason why the declarations of ``backend`` exclude the case.

    The backend must give the right result for the case if the list is empty.
    """
    dtype = _not_among("dtype", layer.dtype, [str(d).removeprefix("torch.") for d in backend.get_supported_dtypes()])
    path = batch.path.name
    needs = required_features(layer, cache, batch, backend.features) - backend.features
    missing = [f"{_describe(need, layer, cache, batch)}: feature {need!r} is not declared" for need in sorted(needs)]
    of_function = [reason for reason in (dtype, *(missing if needs == {"fp8_index"} else ())) if reason]
    has_other_layers = backend.is_ssm() and path not in FUNCTION_PATHS and not backend.builder_only
    if path == STATE_PATH or has_other_layers:
        of_kind = "" if backend.is_ssm() and path == STATE_PATH else _NO_STATE if backend.is_ssm() else _HAS_STATE
        sizes = "" if of_kind else _head_size_reason(backend, _with_sizes_of_state(layer, batch))
        return [reason for reason in (dtype, of_kind, sizes) if reason]
    if backend.is_mla() and layer.mla is None:
        # Other reasons would not concern this backend. A function that it offers has no cache at all.
        return of_function if path in FUNCTION_PATHS else [_NO_LATENT_CACHE]
    if backend.is_sparse() and layer.index_topk is None:
        return of_function if path in FUNCTION_PATHS else [_NO_INDEXER]
    reasons = [
        dtype,
        _not_among("attn_type", str(layer.attn_type), [str(t) for t in backend.supported_attn_types]),
        _head_size_reason(backend, layer),
    ]
    if layer.sinks and "sinks" in backend.features:
        reasons += [_not_among("sinks_dtype", layer.sinks_dtype or layer.dtype, backend.supported_sinks_dtypes)]
    if layer.has_cache:
        reasons += [
            _kv_cache_dtype_reason(backend, layer, cache),
            block_size_reason(backend, cache.block_size),
            _not_among("layout", cache.layout, backend.supported_layouts),
        ]
        if cache.pool_order not in backend.conventions.pool_orders:
            reasons.append(f"pool_order {cache.pool_order}: cache_strides is {backend.conventions.cache_strides!r}")
    return [reason for reason in (*reasons, *missing) if reason]


def is_block_size_supported(backend: Declarations, block_size: int) -> bool:
    """Return whether ``block_size`` is a supported kernel block size, or a multiple that the backend accepts."""
    return any(
        block_size % size.base == 0 if isinstance(size, MultipleOf) else block_size == size
        for size in backend.get_supported_kernel_block_sizes()
    )


def block_size_reason(backend: Declarations, block_size: int) -> str:
    """Return why the backend cannot use pages of ``block_size`` tokens, or "" if it can."""
    if is_block_size_supported(backend, block_size):
        return ""
    sizes = ", ".join(str(size) for size in backend.get_supported_kernel_block_sizes())
    return f"block_size {block_size}: supported are {sizes}"


def _layer_needs(layer: LayerSpec) -> list[str]:
    needs = {
        "alibi_non_causal": layer.alibi_slopes is not None and not layer.is_causal,
        "non_causal": layer.attn_type == AttentionType.DECODER and not layer.is_causal,
        "head_size_v": layer.value_head_size != layer.head_size,
        "kv_sharing": layer.kv_sharing,
        "output_quant": layer.output_quant is not None,
        "fp8_query": layer.query_quant,
        "mla": layer.mla is not None,
        "rswa": layer.rswa_window is not None,
        "sparse": layer.index_topk is not None,
    }
    modifiers = [MODIFIERS[name].feature for name in layer.modifiers]
    return modifiers + [feature for feature, needed in needs.items() if needed]


def _cache_needs(layer: LayerSpec, cache: CacheSpec) -> list[str]:
    if cache.kv_cache_dtype not in FP8_CACHES:
        return []
    scales = [cache.k_scale, cache.v_scale, *([cache.q_scale] if layer.query_quant else [])]
    per_head = any(isinstance(scale, tuple) for scale in scales)
    return ["fp8_kv", "fp8_per_head"] if per_head else ["fp8_kv"]


def _played_needs(layer: LayerSpec, cache: CacheSpec, batch: BatchSpec, declared: frozenset[str]) -> frozenset[str]:
    """Return the features needed by a path that is run as separate calls over parts of the keys.

    The merge needs ``lse``. Parts without new keys need ``non_causal``, parts without any key ``short_keys``.
    """
    if not is_merged(batch, declared):
        return frozenset()
    if batch.path.name == "cascade" and layer.position_modifiers:
        return frozenset({"cascade"})  # position modifiers need the query's position, which the prefix call lacks
    needs = {"lse"}
    is_spread_whole = batch.path.name == "dcp" and batch.max_query_len == 1
    if not is_spread_whole:
        needs.add("non_causal")
    if any(_has_empty_part(request, cache, batch, whole=is_spread_whole) for request in batch.requests):
        needs.add("short_keys")
    return frozenset(needs)


def _has_empty_part(request: RequestSpec, cache: CacheSpec, batch: BatchSpec, *, whole: bool) -> bool:
    """Return whether some part holds no key of the request; ``whole``: new keys are distributed with the context."""
    context = max(0, request.context_len)
    match batch.path.options:
        case SplitKVOptions(parts=parts):
            return parts > 1 and context // cache.block_size < parts
        case DCPOptions(size=size, interleave=interleave):
            ends = (size - 1) * interleave  # up to this length the last rank holds no key
            return (request.total_len if whole else context) <= ends
        case _:
            return False


def _batch_needs(layer: LayerSpec, batch: BatchSpec) -> list[str]:
    needs = {"tree": ["tree"], "fast_prefill": ["kv_sharing"], "ranks": ["dcp"]}.get(batch.path.name, [])
    if layer.attn_type == AttentionType.DECODER and any(request.context_len < 0 for request in batch.requests):
        needs.append("short_keys")
    if any(request.mm_req_doc_ranges for request in batch.requests):
        needs.append("mm_prefix")
    if isinstance(batch.path.options, IndexerOptions) and batch.path.options.index_cache_dtype != "auto":
        needs.append("fp8_index")
    return needs


def _describe(feature: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> str:
    """Return what in the case needs ``feature``, with its value."""
    match feature:
        case "alibi":
            return "the layer has ALiBi slopes"
        case "alibi_non_causal":
            return "the layer has ALiBi slopes and is not causal"
        case "sinks":
            return "the layer has attention sinks"
        case "lse":
            return f"path {batch.path.name} merges the results of its parts"
        case "non_causal" if layer.is_causal:
            return f"path {batch.path.name} has parts in which every row sees every key"
        case "non_causal":
            return "causal false"
        case "cascade":
            return "path cascade for a layer whose scores depend on positions"
        case "kv_sharing":
            return "kv_sharing true" if layer.kv_sharing else f"path {batch.path.name} reads another layer's cache"
        case "head_size_v":
            return f"head_size_v {layer.head_size_v} beside head_size {layer.head_size}"
        case "fp8_kv":
            return f"kv_cache_dtype {cache.kv_cache_dtype}"
        case "fp8_per_head":
            return "k_scale, v_scale or q_scale per head"
        case "output_quant" if layer.output_quant is not None:
            return f"output quantised to {layer.output_quant.dtype}"
        case "fp8_query":
            return "query_quant true"
        case "mla":
            return "the layer has a latent cache"
        case "tree" | "dcp":
            return f"path {batch.path.name}"
        case "mm_prefix":
            return "mm_req_doc_ranges of image spans"
        case "rswa":
            return f"rswa_window {layer.rswa_window}"
        case "fp8_index":
            return "an indexer with FP8 keys"
        case "sparse":
            return f"index_topk {layer.index_topk}: an indexer chooses the keys"
        case "short_keys":
            short = next((request for request in batch.requests if request.context_len < 0), None)
            if short is None:
                return f"path {batch.path.name} with a part that holds no key of a request"
            return f"query_len {short.query_len} above seq_len {short.total_len}"
        case _:
            key = next((name for name, modifier in MODIFIERS.items() if modifier.feature == feature), feature)
            return f"{key} {getattr(layer, key)}"


def _not_among(name: str, value: str, supported: Sequence[str]) -> str:
    return "" if value in supported else f"{name} {value}: supported are {', '.join(supported) or 'none'}"


def _head_size_reason(backend: Declarations, layer: LayerSpec) -> str:
    supported = backend.get_supported_head_sizes()
    sizes = {"head_size": layer.head_size, "head_size_v": layer.value_head_size}
    wrong = [f"{name} {size}" for name, size in sizes.items() if supported and size not in supported]
    if layer.value_head_size == layer.head_size:
        wrong = wrong[:1]
    return f"{' and '.join(wrong)}: supported are {', '.join(map(str, supported))}" if wrong else ""


def _with_sizes_of_state(layer: LayerSpec, batch: BatchSpec) -> LayerSpec:
    """Return the layer without ``head_size_v`` where the rule determines it: values of a channel have the size 1."""
    options = batch.path.options
    is_given = isinstance(options, RecurrenceOptions) and options.rule in CHANNEL_RULES
    return replace(layer, head_size_v=None) if is_given else layer


def _kv_cache_dtype_reason(backend: Declarations, layer: LayerSpec, cache: CacheSpec) -> str:
    """Treat a cache dtype that equals the layer's own as ``auto``."""
    if cache.kv_cache_dtype == REGISTERED:
        has_one = backend.registered_kv_cache_dtype is not None
        return "" if has_one else "kv_cache_dtype registered: registered_kv_cache_dtype is None"
    names = ("auto", layer.dtype) if cache.kv_cache_dtype in ("auto", layer.dtype) else (cache.kv_cache_dtype,)
    if any(name in backend.supported_kv_cache_dtypes for name in names):
        return ""
    return _not_among("kv_cache_dtype", cache.kv_cache_dtype, backend.supported_kv_cache_dtypes)
