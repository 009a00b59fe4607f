"""Definitions shared by all packages: layers, and the names of checks and features; ``step_spec`` has more.

The module imports no torch, so that listing, validating and reporting stay fast. Every field is defined once: ``cases``
validates YAML into these classes, backends check them in ``unsupported_reasons``, and ``reference`` derives its
parameters from them.

In order: names of checks, features and modifiers; helpers that describe fields for pydantic; the layer, whose
properties resolve defaults that need arithmetic (scale, slopes, sinks, window pair); CUDA-graph levels.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Literal

from attncheck.errors import SpecError


@dataclass(frozen=True)
class CheckInfo:
    """What a check establishes and what it cannot detect, one line each. ``applies_to``: the kind of code it examines.

    ``by_default``: where the check runs if the run and the case name no check.
    """

    establishes: str
    cannot_see: str
    applies_to: Literal["backend", "provider", "engine"] = "backend"
    by_default: Literal["everywhere", "on CUDA", "nowhere"] = "everywhere"


CHECKS: Mapping[str, CheckInfo] = {
    "numerics": CheckInfo(
        "every output row of every head is within the error budget of the float64 reference",
        "errors below the rounding of the layer's dtype, and keys whose weight is below it",
    ),
    "lse": CheckInfo(
        "the log-sum-exp is right, and -inf exactly where a row sees no key",
        "whether the backend uses the same LSE when it merges partial results itself",
    ),
    "cache_write": CheckInfo(
        "the mapped slots hold exactly the new K/V, no other byte of the cache changes, inputs are unchanged",
        "writes outside the cache",
    ),
    "containment": CheckInfo(
        "NaN, Inf and huge values in memory that the batch does not own do not change the output",
        "reads whose result is discarded",
    ),
    "features": CheckInfo(
        "another layer in the same process, with one modifier off or moved, gets its own right output",
        "state shared by layers that differ in something else",
    ),
    "determinism": CheckInfo(
        "equal inputs give equal bits in output, LSE and cache, on the same impl and on a new one",
        "differences between processes or machines",
    ),
    "invariance": CheckInfo(
        "right rows stay right with other strides, request orders, pages, padding, layers and earlier steps",
        "properties that no variation of a case changes, and rows that are wrong in the first step",
    ),
    "bitwise": CheckInfo(
        "which changes of a step keep the bits of its rows; with batch_invariant, all changes of the batch",
        "changes that a case does not allow, and other processes and machines",
        by_default="nowhere",
    ),
    "builder": CheckInfo(
        "build changes no shared metadata, waits for no device if that is declared, and works beside a second builder",
        "changes outside the common metadata",
    ),
    "streams": CheckInfo(
        "forward works in the order of the current stream, also if that is not the default stream",
        "work on another stream that ends early enough by chance, and the order of work in build",
        by_default="on CUDA",
    ),
    "cudagraph": CheckInfo(
        "the measured AttentionCGSupport level, from captures and replays, is at least the declared one",
        "batches larger than those of its probes, and work hidden from the recorder",
    ),
    "refusals": CheckInfo(
        "declared cases run; undeclared cases are refused, or computed correctly",
        "declarations that no case of the run needs",
    ),
    "timing": CheckInfo(
        "how long build and forward take, with the spread; every timed output is right",
        "other machines and sizes, and a backend that recognises attncheck's calls",
        by_default="nowhere",
    ),
    "utilities": CheckInfo(
        "metadata functions of a provider return and refuse the same as the reference, and change no argument",
        "batches that are neither in a suite nor drawn, and the speed of a function",
        applies_to="provider",
    ),
    "output": CheckInfo(
        "each row of each layer of a serving engine is attention over the true history of its request",
        "wrong queries, keys and values, which are the engine's own",
        applies_to="engine",
    ),
    "token": CheckInfo(
        "the model of an engine is given the next token of each request",
        "how tokens are sampled, and which drafts are accepted",
        applies_to="engine",
    ),
    "position": CheckInfo(
        "the model of an engine is given the position of each token",
        "the rotary embedding itself, and positions with more than one axis",
        applies_to="engine",
    ),
    "prefix_hit": CheckInfo(
        "a hit in the prefix cache maps blocks to which the same tokens were written",
        "prefixes that are computed again though they are cached",
        applies_to="engine",
    ),
    "count": CheckInfo(
        "the scheduler of an engine counts the tokens that were computed, without rejected drafts",
        "how it chooses requests",
        applies_to="engine",
    ),
    "write": CheckInfo(
        "each page that a step writes holds what the layer writes for its keys and values",
        "pages that the step should not write, until a row reads them",
        applies_to="engine",
    ),
}
"""All checks, in the order of reports. ``harness/checks`` has a module for each check of a backend."""

FORMER_CHECKS: Mapping[str, str] = {"claims": "refusals"}
"""Former names of checks, mapped to the current ones."""

BACKEND_CHECKS: tuple[str, ...] = tuple(name for name, info in CHECKS.items() if info.applies_to == "backend")
"""The checks that a case may name."""

DEFAULT_CHECKS: tuple[str, ...] = tuple(name for name in BACKEND_CHECKS if CHECKS[name].by_default == "everywhere")
"""The checks that run on every device if neither the case nor the run names any."""


def default_checks(device: str) -> tuple[str, ...]:
    """Return the checks that run on ``device`` if neither the case nor the run names any, in the order of reports."""
    places = ("everywhere",) if device in ("", "cpu") else ("everywhere", "on CUDA")
    return tuple(name for name in BACKEND_CHECKS if CHECKS[name].by_default in places)


@dataclass(frozen=True, kw_only=True)
class Modifier:
    """A field of a layer that changes its scores or hides keys. Its default in ``LayerSpec`` turns it off.

    ``feature``: the feature that a backend declares to support it. ``kind``: what its value is: the most ``keys`` that
    a row sees, one ``number`` for all heads, or one number ``per head``. ``ordinary``: a value that acts on rows of
    twenty keys. ``drawn``: the values that fuzzing draws; numbers per head are repeated over the heads.

    ``argument``: its name in the constructor of vLLM's impl, and the field of ``AttentionParams``. None if an impl does
    not get it: a chunk size is in the cache spec of the builder, and an engine splits batches for other backends.
    ``by_keyword``: the constructor gets it by name, and only for layers that have it. ``resolved``: the property of the
    layer with the numbers per head.

    ``from_query``: depends on the distance to the query. ``ignored``: the fault of ignoring it, for those that change
    scores. ``fewest_keys``: how many keys a row must see for this fault to change its output.
    """

    feature: str
    kind: Literal["keys", "number", "per head"]
    ordinary: Any
    drawn: tuple[Any, ...]
    argument: str | None = None
    by_keyword: bool = False
    resolved: str = ""
    from_query: bool = False
    ignored: str = ""
    fewest_keys: int = 2


MODIFIERS: Mapping[str, Modifier] = {
    "sliding_window": Modifier(
        feature="sliding_window",
        kind="keys",
        ordinary=9,
        drawn=(None, 1, 2, 8, 16, 17, 31, 64, 100),
        argument="sliding_window",
        from_query=True,
    ),
    "logits_soft_cap": Modifier(
        feature="logits_soft_cap",
        kind="number",
        ordinary=20.0,
        drawn=(None, 0.0, 5.0, 30.0),
        argument="logits_soft_cap",
        ignored="the soft cap is ignored",
    ),
    "alibi": Modifier(
        feature="alibi",
        kind="per head",
        ordinary=True,
        drawn=(False, True, (0.5, 0.03, 0.0, 0.2)),
        argument="alibi_slopes",
        resolved="alibi_slopes",
        from_query=True,
        ignored="the ALiBi bias is missing",
    ),
    "sinks": Modifier(
        feature="sinks",
        kind="per head",
        ordinary=True,
        drawn=(False, True, (2.0, -1.5, 0.0, 4.0)),
        argument="sinks",
        by_keyword=True,
        resolved="sink_logits",
        ignored="the sinks are ignored",
        fewest_keys=1,
    ),
    "attn_chunk_size": Modifier(feature="local", kind="keys", ordinary=7, drawn=(None, 8, 16, 32, 48), from_query=True),
}
"""The modifiers, by field of ``LayerSpec``. Latent attention defines none of them."""


def modifiers_of_kind(*kinds: str) -> tuple[str, ...]:
    """Return the names of the modifiers whose values are of one of these kinds."""
    return tuple(name for name, modifier in MODIFIERS.items() if modifier.kind in kinds)


FEATURES: tuple[str, ...] = (
    "sliding_window",
    "logits_soft_cap",
    "alibi",
    "alibi_sqrt",
    "alibi_non_causal",
    "sinks",
    "non_causal",
    "head_size_v",
    "lse",
    "cascade",
    "local",
    "kv_sharing",
    "fp8_kv",
    "fp8_per_head",
    "fp8_query",
    "output_quant",
    "mla",
    "tree",
    "tree_depth",
    "short_keys",
    "merge_nan",
    "mm_prefix",
    "rswa",
    "dcp",
    "sparse",
    "fp8_index",
)
"""Everything a backend may declare in ``features``."""

FORMS: tuple[str, ...] = (
    "attn_type",
    "dtype",
    "head_size",
    "block_size",
    "layout",
    "kv_cache_dtype",
    "group_size",
    "path",
    "rule",
    "state_dtype",
)
"""Sizes and forms of a layer and its cache by which cases are counted, besides the features they need."""


STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""Configuration that pydantic reads from a spec: no unknown key, no implicit conversion, no infinity or NaN."""

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Magnitudes between which float32 keeps its full precision (the normal numbers)."""


def positive(description: str) -> Any:
    """Return a required field that must be above 0."""
    return field(metadata={"description": description, "gt": 0})


def option(default: Any, description: str, **constraints: Any) -> Any:
    """Return a field with a default; ``constraints`` are pydantic's (gt, ge, le)."""
    return field(default=default, metadata={"description": description, **constraints})


def refuse_beyond_float32(name: str, given: float | tuple[float, ...], *, is_factor: bool = False) -> None:
    """Raise :class:`SpecError` if a number, or one of several, does not fit float32, the type that kernels take.

    ``is_factor``: the number is used as a divisor, so subnormal numbers are rejected too. An infinity is accepted.
    """
    least = _SMALLEST if is_factor else 0.0
    for number in given if isinstance(given, tuple) else (given,):
        if abs(number) < least or (math.isfinite(number) and abs(number) > _LARGEST):
            raise SpecError(
                "kernels are given it as float32, which cannot hold it",
                field=name,
                value=given,
                allowed=f"stay within {least:.2g} and {_LARGEST:.2g}" if is_factor else f"stay below {_LARGEST:.2g}",
            )


DType = Literal["float16", "bfloat16", "float32"]


class AttentionType(str, Enum):
    """Which keys a layer attends to; strings, as in vLLM, so that compiled graphs can carry them."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"

    def __str__(self) -> str:
        return self.value

    @property
    def has_cache(self) -> bool:
        """Whether such a layer reads a paged cache; encoders use the keys and values of the step itself."""
        return self in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)


@dataclass(frozen=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention: the sizes of the latent cache row and of the projections."""

    __pydantic_config__: ClassVar = STRICT

    kv_lora_rank: int = positive("width of the latent part of a cache row")
    qk_nope_head_dim: int = field(metadata={"description": "width of q and k without rotary embedding", "ge": 0})
    qk_rope_head_dim: int = field(metadata={"description": "width of q and k with rotary embedding", "ge": 0})
    v_head_dim: int = positive("width of a value head")
    workspace: int | None = option(None, "tokens of context gathered at once in a chunked prefill", gt=0)

    def __post_init__(self) -> None:
        if not self.qk_nope_head_dim + self.qk_rope_head_dim:
            raise SpecError(
                "query and key need a channel",
                field="qk_rope_head_dim",
                value=0,
                allowed="give qk_nope_head_dim or qk_rope_head_dim at least 1",
            )


@dataclass(frozen=True, kw_only=True)
class OutputQuantSpec:
    """Quantisation fused into attention's output (static, per tensor)."""

    __pydantic_config__: ClassVar = STRICT

    dtype: Literal["fp8_e4m3"] = option("fp8_e4m3", "dtype of the output")
    scale: float = field(metadata={"description": "dequantisation factor: code * scale is the value", "gt": 0})

    def __post_init__(self) -> None:
        refuse_beyond_float32("scale", self.scale, is_factor=True)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One attention layer: the arguments of the impl's constructor. The truth is computed from the same values."""

    __pydantic_config__: ClassVar = STRICT

    num_heads: int = positive("query heads")
    num_kv_heads: int = positive("key/value heads; divides num_heads")
    head_size: int = positive("head size of query and key")
    head_size_v: int | None = option(None, "head size of value and output; default: head_size", gt=0)
    dtype: DType = option("bfloat16", "dtype of query, key, value and output")
    scale: float | None = option(None, "multiplies the scores; default: head_size ** -0.5")
    attn_type: AttentionType = option(AttentionType.DECODER, "which keys the layer attends to")
    causal: bool | None = option(None, "a query sees no later key; default: true for decoder, else false")
    sliding_window: int | None = option(None, "a query sees at most this many keys, itself included", ge=1)
    logits_soft_cap: float | None = option(None, "cap: scores become cap * tanh(score / cap); 0 or null: off", ge=0)
    alibi: bool | tuple[float, ...] = option(False, "ALiBi slopes, one per query head; true: the published slopes")
    sinks: bool | tuple[float, ...] = option(False, "sink logits, one per query head; true: generated, all distinct")
    sinks_dtype: Literal["float32"] | None = option(None, "dtype of the sinks; default: dtype, as in vLLM")
    attn_chunk_size: int | None = option(None, "chunk size of local attention, in tokens", ge=1)
    rswa_window: int | None = option(
        None, "a query sees the first keys of its request (rswa_prefix_len), and at most this many more", ge=1
    )
    index_topk: int | None = option(
        None, "an indexer chooses the keys of each row, at most this many: topk_indices of the step", ge=1
    )
    kv_sharing: bool = option(False, "the layer reads another layer's cache and writes nothing")
    mla: MLASpec | None = option(None, "multi-head latent attention")
    output_quant: OutputQuantSpec | None = option(None, "quantisation fused into the output")
    query_quant: bool = option(False, "the query is FP8 codes: code * cache.q_scale is the value; needs an FP8 cache")

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
                field="num_kv_heads",
                value=self.num_kv_heads,
                allowed=f"it must divide num_heads {self.num_heads}",
            )
        for name in ("scale", *modifiers_of_kind("number", "per head")):
            refuse_beyond_float32(name, getattr(self, name) or 0.0)
        for name in modifiers_of_kind("per head"):
            given = getattr(self, name)
            if not isinstance(given, bool) and len(given) != self.num_heads:
                raise SpecError(
                    f"{len(given)} values for {self.num_heads} query heads",
                    field=name,
                    value=given,
                    allowed="give one a query head, or true",
                )
        given = () if isinstance(self.sinks, bool) else self.sinks
        held = zip(given, self.sink_logits or (), strict=False)
        if any(math.isinf(rounded) and math.isfinite(sink) for sink, rounded in held):
            raise SpecError(
                "the dtype of the sinks cannot hold them",
                field="sinks",
                value=self.sinks,
                allowed="give smaller ones, or sinks_dtype: float32",
            )
        if self.attn_type != AttentionType.DECODER:
            if self.causal:
                raise SpecError(
                    f"attention of type {self.attn_type} is not causal",
                    field="causal",
                    value=True,
                    allowed="leave causal out, or use attn_type: decoder",
                )
            if self.attn_chunk_size is not None:
                raise SpecError(
                    f"chunks are defined for decoder layers, not for {self.attn_type}",
                    field="attn_chunk_size",
                    value=self.attn_chunk_size,
                    allowed="leave attn_chunk_size out",
                )
        if self.rswa_window is not None:
            self._refuse_beside_rswa()
        if self.index_topk is not None:
            self._refuse_beside_indexer()
        if self.attn_type == AttentionType.ENCODER_DECODER:
            for name in self.position_modifiers:
                raise SpecError(
                    "in cross attention the positions of queries mean nothing",
                    field=name,
                    value=getattr(self, name),
                    allowed=f"leave {name} out",
                )
        if self.mla is not None:
            width = self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
            if self.num_kv_heads != 1 or self.head_size != width:
                raise SpecError(
                    f"a latent cache has one KV head of kv_lora_rank + qk_rope_head_dim = {width}",
                    field="mla",
                    value=f"num_kv_heads {self.num_kv_heads}, head_size {self.head_size}",
                    allowed=f"give num_kv_heads: 1, head_size: {width}",
                )

    def _refuse_beside_rswa(self) -> None:
        """Raise for what vLLM defines no order of masks with, or where its kernels have different ones."""
        for name in ("sliding_window", "attn_chunk_size", "mla"):
            if getattr(self, name) is not None:
                raise SpecError(
                    f"rswa_window is a window, and is not defined beside {name}",
                    field="rswa_window",
                    value=self.rswa_window,
                    allowed=f"leave {name} out, or leave rswa_window out",
                )
        if not self.is_causal:
            raise SpecError(
                "rswa_window is defined for causal decoder layers",
                field="rswa_window",
                value=self.rswa_window,
                allowed="leave rswa_window out, or leave causal and attn_type out",
            )

    def _refuse_beside_indexer(self) -> None:
        """Raise for other masks, and for ALiBi, whose queries are made for a span of keys."""
        for name in ("sliding_window", "attn_chunk_size", "rswa_window", "alibi"):
            if getattr(self, name) not in (None, False):
                raise SpecError(
                    f"the keys that an indexer chooses are not defined beside {name}",
                    field="index_topk",
                    value=self.index_topk,
                    allowed=f"leave {name} out, or leave index_topk out",
                )
        if not self.is_causal:
            raise SpecError(
                "an indexer chooses keys for causal decoder layers",
                field="index_topk",
                value=self.index_topk,
                allowed="leave index_topk out, or leave causal and attn_type out",
            )

    @property
    def has_cache(self) -> bool:
        """Whether the layer reads a paged cache; encoder layers use the keys and values of the step itself."""
        return AttentionType(self.attn_type).has_cache  # from Python the type may be given as its name

    @property
    def value_head_size(self) -> int:
        """``Dv``: head size of value and output."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores: ``scale``, or ``head_size ** -0.5`` (for MLA, of the unabsorbed head size)."""
        if self.scale is not None:
            return self.scale
        size = self.head_size if self.mla is None else self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim
        scale: float = float(size) ** -0.5
        return scale

    @property
    def is_causal(self) -> bool:
        """Whether a query sees no later key; only decoder layers can be causal."""
        return self.attn_type == AttentionType.DECODER if self.causal is None else self.causal

    @property
    def window(self) -> tuple[int, int]:
        """Inclusive distances (left, right); -1 is unlimited. W keys are (W-1, 0), or (W-1, W-1) if not causal."""
        if self.sliding_window is None:
            return (-1, -1)
        left = self.sliding_window - 1
        return (left, 0) if self.is_causal else (left, left)

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Names of the fields of :data:`MODIFIERS` that are on."""
        return tuple(name for name in MODIFIERS if getattr(self, name) not in (None, False))

    @property
    def position_modifiers(self) -> tuple[str, ...]:
        """The modifiers that depend on the distance between key and query."""
        return tuple(name for name in self.modifiers if MODIFIERS[name].from_query)

    @property
    def key_limits(self) -> tuple[int, ...]:
        """The values of the modifiers that hide keys: the most keys that a row sees by each."""
        return tuple(getattr(self, name) for name in self.modifiers if MODIFIERS[name].kind == "keys")

    @property
    def soft_cap(self) -> float | None:
        """The cap on the scores, or None if it is None or 0."""
        return self.logits_soft_cap or None

    @property
    def alibi_slopes(self) -> tuple[float, ...] | None:
        """One float32-representable slope per query head, or None."""
        if isinstance(self.alibi, bool):
            if not self.alibi:
                return None
            slopes = _published_alibi_slopes(self.num_heads)
            return tuple(_rounded(slopes[i], "float32") for i in _shuffled(self.num_heads))
        return tuple(_rounded(slope, "float32") for slope in self.alibi)

    @property
    def sink_logits(self) -> tuple[float, ...] | None:
        """One sink logit per query head, rounded to the dtype of the sinks; generated logits lie between 1 and 9.

        None without sinks.
        """
        if self.sinks is False:
            return None
        n, logits = self.num_heads, self.sinks
        if logits is True:
            logits = tuple(round((1.0 + 8.0 * (i + 0.5) / n) * 64) / 64 for i in _shuffled(n))
        return tuple(_rounded(sink, self.sinks_dtype or self.dtype) for sink in logits)


def _published_alibi_slopes(num_heads: int) -> list[float]:
    """Return the slopes of the ALiBi paper (Press et al. 2022): geometric for a power of two, interleaved otherwise."""

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** int(math.log2(num_heads))
    return geometric(power) + geometric(2 * power)[0::2][: num_heads - power]


def _shuffled(n: int) -> list[int]:
    """Return a fixed permutation of ``range(n)`` without monotone runs, so that reversed or shifted indices show."""
    stride = next((s for s in range(max(1, round(n * 0.618)), n) if math.gcd(s, n) == 1), 1)
    return [(1 + i * stride) % n for i in range(n)]


def _rounded(x: float, dtype: DType) -> float:
    """Return ``x`` rounded to the dtype in which kernels get it, ties to even; the reference must match.

    The result is infinite if ``x`` is beyond the range of ``dtype``, which must not happen for float32.
    """
    if dtype == "float16":
        try:
            (half,) = struct.unpack("e", struct.pack("e", x))
        except OverflowError:
            return math.copysign(math.inf, x)
        return float(half)
    (bits,) = struct.unpack("I", struct.pack("f", x))
    if dtype == "bfloat16":  # the upper half of a float32
        bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    (rounded,) = struct.unpack("f", struct.pack("I", bits))
    return float(rounded)


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
