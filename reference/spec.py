"""Definitions shared by all packages: layers, caches, batches, and the names of checks, features and paths.

The module imports no torch, so that listing, validating and reporting stay fast. Every field is defined once: ``cases``
validates YAML into these classes, backends check them in ``unsupported_reasons``, and ``reference`` derives its
parameters from them. The cache is defined here, the rest in submodules; all names are imported from here.
"""

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Literal

from attncheck.errors import SpecError
from attncheck.reference.spec_batch import MAX_TOKENS, BatchSpec, BlockTableSpec, PaddingSpec, RequestSpec
from attncheck.reference.spec_fields import STRICT, option, refuse_beyond_float32
from attncheck.reference.spec_layer import AttentionType, DType, LayerSpec, MLASpec, OutputQuantSpec
from attncheck.reference.spec_names import (
    BACKEND_CHECKS,
    CHECKS,
    DEFAULT_CHECKS,
    FEATURES,
    FORMER_CHECKS,
    FORMS,
    MODIFIERS,
    CheckInfo,
    default_checks,
)
from attncheck.reference.spec_paths import (
    PATH_OPTIONS,
    PATHS,
    CausalConv1dOptions,
    DCPOptions,
    FastPrefillOptions,
    MicroBatchOptions,
    PathOptions,
    PathSpec,
    SpecDecodeOptions,
    SplitKVOptions,
    TreeOptions,
)

__all__ = [
    "BACKEND_CHECKS",
    "CHECKS",
    "DEFAULT_CHECKS",
    "FEATURES",
    "FORMER_CHECKS",
    "FORMS",
    "GENERATOR_VERSION",
    "MAX_TOKENS",
    "MODIFIERS",
    "PATHS",
    "PATH_OPTIONS",
    "AttentionCGSupport",
    "AttentionType",
    "BatchSpec",
    "BlockTableSpec",
    "CacheSpec",
    "CausalConv1dOptions",
    "CheckInfo",
    "DCPOptions",
    "DType",
    "FastPrefillOptions",
    "InputName",
    "KVCacheDType",
    "LayerSpec",
    "Layout",
    "MLASpec",
    "MicroBatchOptions",
    "OutputQuantSpec",
    "PaddingSpec",
    "PathOptions",
    "PathSpec",
    "RequestSpec",
    "SpecDecodeOptions",
    "SplitKVOptions",
    "StrideForm",
    "StridesSpec",
    "TreeOptions",
    "default_checks",
]

GENERATOR_VERSION = 1
"""Version of the problem generator, part of a case's hash. Raise it when the same case yields different tensors."""


class AttentionCGSupport(Enum):
    """The batches for which a CUDA graph with all of attention may be replayed (vLLM's levels; compare ``.value``).

    Cascade attention is never in a graph.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    """Every query length is 1."""
    UNIFORM_BATCH = 2
    """All query lengths are equal, as when draft tokens are verified."""
    ALWAYS = 3
    """Any query lengths, including mixed prefills and decodes."""


KVCacheDType = Literal["auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"]
Layout = Literal["NHD", "HND"]
InputName = Literal["needles", "large_scores", "equal_scores", "coordinates", "views"]
StrideForm = Literal["contiguous", "fused", "padded", "offset", "odd", "transposed"]
"""Memory layout of an operand ``[T, H, D]``. ``contiguous``. ``fused``: a slice of a tensor shared with other operands.
``padded``: unused memory after every row. ``offset``: contiguous, but not at the start of its memory. ``odd``: as
``offset``, with odd strides for dimensions of size 1. ``transposed``: one head after the other, as ``[H, T, D]``.
"""


@dataclass(frozen=True, kw_only=True)
class StridesSpec:
    """How the operands of ``forward`` lie in memory; the last dimension is contiguous in every form."""

    __pydantic_config__: ClassVar = STRICT

    query: StrideForm = option("fused", "memory of query")
    key: StrideForm = option("fused", "memory of key")
    value: StrideForm = option("fused", "memory of value")
    output: StrideForm = option("contiguous", "memory of output; a fused one is padded")


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The paged KV cache of a layer: page size, layout, dtype, scales, and where in the pool the batch lies."""

    __pydantic_config__: ClassVar = STRICT

    block_size: int = option(16, "tokens per page", gt=0)
    layout: Layout = option("NHD", "memory order of a page: NHD (tokens, heads) or HND (heads, tokens)")
    kv_cache_dtype: KVCacheDType = option("auto", "dtype of the cache; auto: the layer's")
    k_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of K: a number, or one per KV head")
    v_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of V: a number, or one per KV head")
    q_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of Q: a number, or one per KV head")
    num_blocks: int | None = option(None, "pages in the pool; default: 1.5 times what the batch needs", gt=0)
    first_block: int | None = option(None, "lowest page the batch may own; default: 1", gt=0)

    def __post_init__(self) -> None:
        for name in ("k_scale", "v_scale", "q_scale"):
            scale = getattr(self, name)
            if any(s <= 0 for s in (scale if isinstance(scale, tuple) else (scale,))):
                raise SpecError("a scale must be positive", field=name, value=scale, allowed="give numbers above 0")
            refuse_beyond_float32(name, scale, is_factor=True)
        if self.first_block is not None and self.num_blocks is not None and self.first_block >= self.num_blocks:
            raise SpecError(
                f"the pool has only {self.num_blocks} pages",
                field="first_block",
                value=self.first_block,
                allowed="raise num_blocks or lower first_block",
            )
