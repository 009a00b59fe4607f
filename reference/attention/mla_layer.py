"""The parameters of one layer of multi-head latent attention."""

import math
from dataclasses import dataclass

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.attention.params import AttentionParams
from attncheck.reference.spec import MODIFIERS, AttentionType, LayerSpec


@dataclass(frozen=True)
class MLAParams:
    """The parameters of one layer of multi-head latent attention (DeepSeek-V2, 2024). Hashable.

    num_heads: ``H``, query heads; all of them read the same latent row of a token.
    kv_lora_rank: ``L``, width of the latent part ``c`` of a cache row.
    qk_nope_head_dim: ``P``, width of a query or key head without rotary embedding; may be 0 if ``E`` is not.
    qk_rope_head_dim: ``E``, width with rotary embedding, shared by the heads of a key; may be 0 if ``P`` is not.
    v_head_dim: ``V``, width of a value or output head.
    scale: any finite number; ``None`` means ``(P + E) ** -0.5``, in the naive and in the absorbed form.
    causal: whether a row sees only its own key and earlier keys.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` (a ``ValueError``) with the name of the invalid field.

    >>> MLAParams(128, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=128).softmax_scale
    0.0625
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            size, least = getattr(self, name), int(not name.startswith("qk_"))
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ReferenceArgumentError(name, size, f"an integer >= {least}")
        if self.qk_head_dim == 0:
            raise ReferenceArgumentError("qk_nope_head_dim + qk_rope_head_dim", 0, "at least 1")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ReferenceArgumentError(
                "scale", self.scale, "a finite number, or None for (qk_nope_head_dim + qk_rope_head_dim) ** -0.5"
            )

    @property
    def qk_head_dim(self) -> int:
        """``P + E``: width of an unabsorbed query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_size(self) -> int:
        """``L + E``: width of a cache row, and of an absorbed query head."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """The factor on the scores; its default comes from ``P + E``, never from ``L + E``."""
        return float(self.qk_head_dim) ** -0.5 if self.scale is None else float(self.scale)

    @property
    def naive(self) -> AttentionParams:
        """Attention parameters of the naive form: keys of ``P + E``, values of ``V``, one KV head per query head."""
        heads, scale = self.num_heads, self.softmax_scale
        return AttentionParams(heads, heads, self.qk_head_dim, self.v_head_dim, scale=scale, causal=self.causal)

    @property
    def latent(self) -> AttentionParams:
        """Attention parameters of the absorbed form: one KV head of ``L + E``, values of ``L``."""
        heads, scale = self.num_heads, self.softmax_scale
        return AttentionParams(heads, 1, self.latent_size, self.kv_lora_rank, scale=scale, causal=self.causal)


def mla_params(layer: LayerSpec, *, causal: bool | None = None) -> MLAParams:
    """Return the parameters of a layer spec with ``mla``. ``causal`` overrides the layer's own flag for one call.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for settings that latent attention does not define:
    windows, soft cap, ALiBi, sinks, chunks, ``head_size_v``, attention types other than decoder.

    >>> from attncheck.reference.spec import MLASpec
    >>> sizes = MLASpec(kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=4, v_head_dim=8)
    >>> mla_params(LayerSpec(num_heads=4, num_kv_heads=1, head_size=36, mla=sizes)).softmax_scale
    0.25
    """
    if layer.mla is None:
        raise ReferenceArgumentError("layer.mla", None, "the sizes of latent attention; others have layer_params")
    for name in ("head_size_v", *MODIFIERS):
        if getattr(layer, name) not in (None, False):
            raise ReferenceArgumentError(
                f"layer.{name}", getattr(layer, name), "left out: not defined for latent attention"
            )
    if layer.attn_type != AttentionType.DECODER:
        raise ReferenceArgumentError("layer.attn_type", str(layer.attn_type), "decoder: only it has a latent cache")
    return MLAParams(
        num_heads=layer.num_heads,
        kv_lora_rank=layer.mla.kv_lora_rank,
        qk_nope_head_dim=layer.mla.qk_nope_head_dim,
        qk_rope_head_dim=layer.mla.qk_rope_head_dim,
        v_head_dim=layer.mla.v_head_dim,
        scale=layer.softmax_scale,
        causal=layer.is_causal if causal is None else causal,
    )


def require_mla_params(params: object) -> None:
    """Raise if ``params`` is not an :class:`MLAParams`."""
    if not isinstance(params, MLAParams):
        raise ReferenceArgumentError("params", params, "MLAParams")
