"""Definitions shared by all packages: layers, caches, batches, paths, and the names of checks and features.

The module imports no torch, so that listing, validating and reporting stay fast. Every field is defined once: ``cases``
validates YAML into these classes, backends check them in ``unsupported_reasons``, and ``reference`` derives its
parameters from them.

In order: names of checks, features and modifiers; helpers that describe fields for pydantic; the layer, whose
properties resolve defaults that need arithmetic (scale, slopes, sinks, window pair); paths; the batch; the cache.
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
    applies_to: Literal["backend", "provider"] = "backend"
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


@dataclass(frozen=True, kw_only=True)
class FastPrefillOptions:
    """``fast_prefill``: only the rows that yield logits are computed."""

    __pydantic_config__: ClassVar = STRICT
    rows: int = option(1, "last rows of each request that are computed", gt=0)


@dataclass(frozen=True, kw_only=True)
class SpecDecodeOptions:
    """``spec_decode``: verification of draft tokens, every request with 1 to 1 + num_speculative_tokens rows."""

    __pydantic_config__: ClassVar = STRICT
    num_speculative_tokens: int = option(3, "most draft tokens per request", gt=0)


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """``tree``: draft tokens form a tree."""

    __pydantic_config__: ClassVar = STRICT
    parents: tuple[int, ...] = option((-1, 0, 0, 1), "parent of each new row, -1 for a root; parents come first")

    def __post_init__(self) -> None:
        for row, parent in enumerate(self.parents):
            if not -1 <= parent < row:
                raise SpecError(
                    f"row {row} names parent {parent}",
                    field="parents",
                    value=self.parents,
                    allowed="a parent is -1 or an earlier row",
                )


@dataclass(frozen=True, kw_only=True)
class SplitKVOptions:
    """``split_kv``: the keys are cut into parts, whose results are merged by their LSE."""

    __pydantic_config__: ClassVar = STRICT
    parts: int = option(2, "parts the keys are cut into", gt=0)


@dataclass(frozen=True, kw_only=True)
class DCPOptions:
    """``dcp`` and ``ranks``: decode context parallelism, the keys spread over ranks."""

    __pydantic_config__: ClassVar = STRICT
    size: int = option(2, "ranks", gt=0)
    interleave: int = option(1, "consecutive positions a rank holds", gt=0)


@dataclass(frozen=True, kw_only=True)
class PCPOptions:
    """``pcp``: prefill context parallelism, the rows of prompts spread over ranks in chunks."""

    __pydantic_config__: ClassVar = STRICT
    size: int = option(2, "ranks", gt=1)


@dataclass(frozen=True, kw_only=True)
class MicroBatchOptions:
    """``micro_batch``: the rows are cut at token positions and computed part by part."""

    __pydantic_config__: ClassVar = STRICT
    cuts: tuple[int, ...] = field(metadata={"description": "token positions where the batch is cut, increasing"})


@dataclass(frozen=True, kw_only=True)
class CausalConv1dOptions:
    """``causal_conv1d``: the short convolution of state-space layers."""

    __pydantic_config__: ClassVar = STRICT
    channels: int = option(64, "channels", gt=0)
    width: int = option(4, "taps", gt=0)
    activation: Literal["silu"] | None = option("silu", "activation after the convolution")
    bias: bool = option(True, "whether a bias is added")


RecurrenceRule = Literal["mamba1", "mamba2", "gdn", "kda", "linear"]
StateDType = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class RecurrenceOptions:
    """``recurrence``: a layer with a state for each request instead of a KV cache.

    The layer has ``num_heads`` heads with a state of ``head_size_v`` times ``head_size`` numbers each, and
    ``num_kv_heads`` heads of keys. Mamba calls the latter groups, and has one head for each channel.
    """

    __pydantic_config__: ClassVar = STRICT
    rule: RecurrenceRule = field(metadata={"description": "how a row changes the state"})
    state_dtype: StateDType = option("float32", "dtype of the states in the cache")
    qk_l2norm: bool = option(True, "gdn and kda: whether the layer divides queries and keys by their 2-norm")
    num_speculative_tokens: int = option(
        0, "most draft tokens of a decode; each request has a slot more for each", ge=0
    )


PathOptions = (
    FastPrefillOptions
    | SpecDecodeOptions
    | TreeOptions
    | SplitKVOptions
    | DCPOptions
    | PCPOptions
    | MicroBatchOptions
    | CausalConv1dOptions
    | RecurrenceOptions
)

PATH_OPTIONS: Mapping[str, type[PathOptions] | None] = {
    "paged": None,
    "encoder_only": None,
    "cross": None,
    "mla": None,
    "fast_prefill": FastPrefillOptions,
    "spec_decode": SpecDecodeOptions,
    "tree": TreeOptions,
    "local": None,
    "cascade": None,
    "split_kv": SplitKVOptions,
    "dcp": DCPOptions,
    "ranks": DCPOptions,
    "pcp": PCPOptions,
    "micro_batch": MicroBatchOptions,
    "merge": None,
    "causal_conv1d": CausalConv1dOptions,
    "recurrence": RecurrenceOptions,
}
"""The class of the options of every path, or None if it has none."""

PATHS: tuple[str, ...] = tuple(PATH_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class PathSpec:
    """The path of a case: a name of :data:`PATHS` and, if the path has options, their values."""

    name: str = "paged"
    options: PathOptions | None = None


MAX_TOKENS = 2**31
"""Most tokens of a batch; a larger number is assumed to be a typing error."""

MAX_TABLE_ENTRIES = 2**20
"""Most entries of a block-table row besides its pages."""


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """``count`` equal requests of a batch. ``seq_len`` counts the new tokens too and defaults to ``query_len``."""

    __pydantic_config__: ClassVar = STRICT

    query_len: int = field(metadata={"description": "new tokens", "gt": 0, "le": MAX_TOKENS})
    seq_len: int | None = option(None, "tokens in the cache after this step; default: query_len", ge=0, le=MAX_TOKENS)
    count: int = option(1, "how many such requests", gt=0, le=MAX_TOKENS)
    encoder_len: int | None = option(None, "tokens of the encoder (cross attention)", ge=0, le=MAX_TOKENS)
    shared_prefix: int = option(0, "number of leading tokens whose pages all sharing requests have in common", ge=0)
    mm_req_doc_ranges: tuple[tuple[int, int], ...] = option(
        (), "image spans, first and last position of each: its rows see all of its keys, later ones too"
    )
    rswa_prefix_len: int = option(
        0, "number of first keys that every later row sees, beyond layer.rswa_window too", ge=0, le=MAX_TOKENS
    )

    def __post_init__(self) -> None:
        if self.seq_len is None:
            object.__setattr__(self, "seq_len", self.query_len)
        self._check_doc_ranges()
        if self.shared_prefix > max(self.context_len, 0):
            raise SpecError(
                f"only the {max(self.context_len, 0)} tokens of context can be shared",
                field="shared_prefix",
                value=self.shared_prefix,
                allowed="lower it, or raise seq_len",
            )

    def _check_doc_ranges(self) -> None:
        """Raise unless each range has two positions or more, and lies behind the range before it."""
        behind = 0
        for number, (start, end) in enumerate(self.mm_req_doc_ranges):
            if not behind <= start < end <= MAX_TOKENS:
                raise SpecError(
                    f"range {number} is no [first, last] with first < last"
                    if start >= end
                    else f"range {number} begins before position {behind}, or ends too far behind",
                    field="mm_req_doc_ranges",
                    value=[start, end],
                    allowed="give the first and last position of each span, in order, without overlaps",
                )
            behind = end + 1

    @property
    def total_len(self) -> int:
        """``seq_len`` as a plain integer."""
        return self.query_len if self.seq_len is None else self.seq_len

    @property
    def context_len(self) -> int:
        """Number of tokens in the cache before this step; negative if there are more rows than keys."""
        return self.total_len - self.query_len

    def num_keys(self, layer: LayerSpec) -> int:
        """Return how many keys the rows attend to: those of the encoder in cross attention, else ``seq_len``."""
        is_cross = layer.attn_type == AttentionType.ENCODER_DECODER
        return (self.encoder_len or 0) if is_cross else self.total_len

    def num_rows(self, path: PathSpec) -> int:
        """Return how many rows are computed: the last ones in a fast prefill, else all new tokens."""
        options = path.options
        return min(options.rows, self.query_len) if isinstance(options, FastPrefillOptions) else self.query_len


@dataclass(frozen=True, kw_only=True)
class PaddingSpec:
    """Padding as vLLM pads for CUDA graphs: trailing requests of query length 0, trailing tokens of slot -1."""

    __pydantic_config__: ClassVar = STRICT

    requests: int = option(0, "padding requests at the tail", ge=0, le=MAX_TOKENS)
    tokens: int = option(0, "padding tokens at the tail", ge=0, le=MAX_TOKENS)
    unmapped_tokens: int = option(
        0, "tokens behind those that num_actual_tokens counts and slot_mapping has an entry for", ge=0, le=MAX_TOKENS
    )
    key_rows: int = option(0, "rows of key and value behind those of the tokens", ge=0, le=MAX_TOKENS)

    @property
    def query_rows(self) -> int:
        """Number of query rows that belong to no request."""
        return self.tokens + self.unmapped_tokens


@dataclass(frozen=True, kw_only=True)
class BlockTableSpec:
    """What a block table has besides the pages of the requests."""

    __pydantic_config__: ClassVar = STRICT

    extra_columns: int = option(
        0, "columns behind those of the longest request and two more", ge=0, le=MAX_TABLE_ENTRIES
    )
    row_gap: int = option(
        0, "entries in memory between two rows, as of a slice of a wider table", ge=0, le=MAX_TABLE_ENTRIES
    )
    null_pages: bool = option(False, "whether pages that every row's window or chunk has left behind are page 0")


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The batch of one step: requests in order, then padding, and the path by which a backend is called."""

    requests: tuple[RequestSpec, ...]
    padding: PaddingSpec = PaddingSpec()
    block_table: BlockTableSpec = BlockTableSpec()
    path: PathSpec = PathSpec()

    def __post_init__(self) -> None:
        if not self.requests:
            raise SpecError("a batch needs a request", field="requests", value=self.requests, allowed="give one")
        tokens = sum(r.count * max(r.query_len, r.total_len, r.encoder_len or 0) for r in self.requests)
        tokens += self.padding.query_rows + self.padding.key_rows
        if tokens > MAX_TOKENS:
            raise SpecError(
                f"the batch holds {tokens} tokens",
                field="requests",
                value=len(self.requests),
                allowed=f"at most {MAX_TOKENS} tokens are allowed",
            )

    def __iter__(self) -> Iterator[RequestSpec]:
        """Yield every single request in order, with counts expanded."""
        for request in self.requests:
            for _ in range(request.count):
                yield request

    @property
    def num_requests(self) -> int:
        """Number of requests without padding."""
        return sum(r.count for r in self.requests)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens without padding."""
        return sum(r.count * r.query_len for r in self.requests)

    @property
    def max_query_len(self) -> int:
        """Longest query length of a request."""
        return max(r.query_len for r in self.requests)

    @property
    def max_seq_len(self) -> int:
        """Longest ``seq_len`` of a request."""
        return max(r.total_len for r in self.requests)


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


KVCacheDType = Literal[
    "auto",
    "float16",
    "bfloat16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
]
FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""The caches of FP8 codes whose scales belong to the layer."""


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How a cache stores a row, the numbers of one token and KV head: as codes, with scales that the row determines.

    A number is ``code * scale``. The scale of some numbers is ``absmax / largest``, where ``absmax`` is the largest
    magnitude among them.

    code: the numbers of the codes: integers from ``-largest`` to ``largest``, or those of a float format.
    bits: size of a code. If two codes share a byte, the first is in its low bits.
    group: number of values that share a scale. None: all values of a row.
    """

    code: Literal["int", "float8_e4m3fn", "float4_e2m1fn"]
    bits: int
    largest: float
    group: int | None = None

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale: a float32, or one float8_e4m3fn (in units of ``k_scale`` or ``v_scale``) for a group."""
        return 4 if self.group is None else 1

    def code_bytes(self, size: int) -> int:
        """Return the bytes of the codes of a row of ``size`` numbers."""
        return size * self.bits // 8

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a row of ``size`` numbers: its codes, then its scales."""
        return self.code_bytes(size) + size // (self.group or size) * self.scale_bytes

    def divides(self, size: int) -> bool:
        """Return whether a row of ``size`` numbers fills whole bytes and groups."""
        return size % (self.group or 8 // self.bits) == 0


ROW_FORMATS: Mapping[str, RowFormat] = {
    "fp8_per_token_head": RowFormat(code="float8_e4m3fn", bits=8, largest=448.0),
    "int8_per_token_head": RowFormat(code="int", bits=8, largest=127.0),
    "int4_per_token_head": RowFormat(code="int", bits=4, largest=7.0),
    "nvfp4": RowFormat(code="float4_e2m1fn", bits=4, largest=6.0, group=16),
}
"""The caches that scale each row by itself. The first two are vLLM's formats.

vLLM's ``int4_per_token_head`` differs: it also rotates a row, and has codes from 0 to 15 with a zero point. Where
vLLM's classes store the scales of ``nvfp4`` is not defined here.
"""

Layout = Literal["NHD", "HND"]
PoolOrder = Literal["LB", "BL", "BHL", "LHB"]
"""Memory order of layers (L), blocks (B) and heads (H) outside of the other axes, as vLLM's ``KVCacheLayout`` begins.

With NHD or HND: LBNHC, LBHNC, BLNHC, BLHNC, BHLNC and LHBNC. Only in the first two do the pages of a layer follow one
another. If blocks come first, keys and values lie side by side in every logical shape.
"""
InputName = Literal["needles", "large_scores", "equal_scores", "negative_scores", "coordinates", "views"]
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
    output: StrideForm = option("contiguous", "memory of output and output_lse; a fused one is padded")


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The paged KV cache of a layer: page size, layout, dtype, scales, and where in the pool the batch lies."""

    __pydantic_config__: ClassVar = STRICT

    block_size: int = option(16, "tokens per page", gt=0)
    layout: Layout = option("NHD", "memory order of a page: NHD (tokens, heads) or HND (heads, tokens)")
    pool_order: PoolOrder = option(
        "LB", "memory order of layers (L), blocks (B) and heads (H): the first letters of vLLM's KVCacheLayout"
    )
    kv_cache_dtype: KVCacheDType = option("auto", "dtype of the cache; auto: the layer's")
    k_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of K: a number, or one per KV head")
    v_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of V: a number, or one per KV head")
    q_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of Q: a number, or one per KV head")
    num_blocks: int | None = option(None, "pages in the pool; default: 1.5 times what the batch needs", gt=0)
    first_block: int | None = option(None, "lowest page the batch may own; default: 1", gt=0)
    manager_block_size: int | None = option(
        None, "tokens per block of the cache manager (cache_config.block_size); default: block_size", gt=0
    )

    def __post_init__(self) -> None:
        if (self.manager_block_size or self.block_size) % self.block_size:
            raise SpecError(
                "a block of the cache manager is divided into pages",
                field="manager_block_size",
                value=self.manager_block_size,
                allowed=f"give a multiple of block_size {self.block_size}",
            )
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

    @property
    def pages_per_block(self) -> int:
        """Pages in a block of the cache manager."""
        return (self.manager_block_size or self.block_size) // self.block_size

    @property
    def unplaced(self) -> "CacheSpec":
        """The cache without the size of the pool, and without the place of the batch in it."""
        return replace(self, num_blocks=None, first_block=None)
