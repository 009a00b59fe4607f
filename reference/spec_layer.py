"""The attention layer: its sizes and modifiers, and the numbers they resolve to.

Defaults that need arithmetic (scale, slopes, sinks, window pair) are properties of :class:`LayerSpec`, the only place
that resolves them. Part of :mod:`attncheck.reference.spec`; imports no torch.
"""

import math
import struct
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal

from attncheck.errors import SpecError
from attncheck.reference.spec_fields import STRICT, option, positive, refuse_beyond_float32
from attncheck.reference.spec_names import MODIFIERS

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
    kv_sharing: bool = option(False, "the layer reads another layer's cache and writes nothing")
    mla: MLASpec | None = option(None, "multi-head latent attention")
    output_quant: OutputQuantSpec | None = option(None, "quantisation fused into the output")

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
                field="num_kv_heads",
                value=self.num_kv_heads,
                allowed=f"it must divide num_heads {self.num_heads}",
            )
        for name in ("scale", "logits_soft_cap", "alibi", "sinks"):
            refuse_beyond_float32(name, getattr(self, name) or 0.0)
        for name in ("alibi", "sinks"):
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
