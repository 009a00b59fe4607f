"""What runs the kernels of one attention layer in the first generation: the impl, and the layer it may read.

Names and signatures are vLLM's.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, Protocol

from torch import Tensor

from attncheck.reference.spec import AttentionType
from attncheck.reference.v0.metadata import TAttentionMetadata


class AttentionLayer(Protocol):
    """The part of a layer that the ``forward`` of its impl may look at.

    Scales are float32 tensors of one element, or of one per KV head; each dequantises (``value = code * scale``) and is
    1.0 where nothing is quantised. The ``_float`` twins are host copies, since reading a tensor would synchronise.
    """

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _prob_scale: Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Tensor:
        """The layer's attention over flat rows ``[tokens, heads * head_size]``; the impl sees them unflattened."""
        ...


class AttentionImpl(ABC, Generic[TAttentionMetadata]):
    """Runs the kernels of one attention layer."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        """Called with these ten by position; what the impl cannot do is refused here.

        num_kv_heads: None is num_heads. Of ``G = num_heads // num_kv_heads`` neighbouring query heads, all read the
            same KV head: ``h // G``.
        scale: factor of the scores, whatever the head size.
        alibi_slopes: for every query head; ``slope * (key position - query position)`` is added after scale and cap.
        sliding_window: ``w``: a query sees its own key and the ``w - 1`` before it; None: no window.
        logits_soft_cap: ``c``: a score becomes ``c * tanh(score / c)`` before the mask; None or 0: no cap.
        kv_sharing_target_layer_name: another layer, whose cache is read and never written.

        ``ValueError`` for a value that means nothing, ``NotImplementedError`` for what the kernels cannot do.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TAttentionMetadata,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's rows; ``[padded tokens, num_heads, value head size]``.

        query: ``[padded tokens, num_heads, head_size]``. key, value: ``[padded tokens, num_kv_heads, head size]``.
        kv_cache: one layer's cache in the backend's logical shape; empty in the profiling run.
        attn_metadata: None in the profiling run: read nothing, return finite values.
        output: where the backend has ``accept_output_buffer``: written in place and returned.
        output_scale: one float32; the output is written quantised, ``value / scale``.
        output_block_scale: written by the impl: the scales of a dynamic block quantisation of the output.
        """
        raise NotImplementedError

    def fused_output_quant_supported(self, quant_key: Hashable) -> bool:
        """Whether ``forward`` can write its output quantised to this target; False unless overridden.

        quant_key: the target format as a value: dtype, scale (its dtype, whether it is static, what shares one), second
            scale, symmetry. ``QuantKey`` of the backends' contract is one; the default reads nothing of it.

        An impl that answers True honours ``output_scale`` (static) or ``output_block_scale`` (dynamic).
        """
        return False


class MLAAttentionImpl(AttentionImpl[TAttentionMetadata], Generic[TAttentionMetadata]):
    """Runs multi-head latent attention: a cache of one latent row a token, which all query heads share."""

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
    ) -> None:
        """The ten arguments of every impl, without defaults; then the sizes, and the up-projection of the latent.

        ``head_size`` is the width of a cache row, ``kv_lora_rank + qk_rope_head_dim``; ``qk_head_dim`` is
        ``qk_nope_head_dim + qk_rope_head_dim``; ``kv_b_proj`` expands the latent to ``qk_nope_head_dim + v_head_dim``
        a head.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: TAttentionMetadata,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of the step's rows; ``[tokens, num_heads * v_head_dim]``.

        hidden_states_or_cq: ``[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]``, once projected.
        kv_c_normed: ``[tokens, kv_lora_rank]``. k_pe: ``[tokens, 1, qk_rope_head_dim]``.
        """
        raise NotImplementedError
