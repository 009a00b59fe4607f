"""The impl that runs the kernels of one attention layer in the first generation, and the layer that it may read.

Names and signatures are vLLM's.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any, Generic, Protocol

from torch import Tensor

from attncheck.reference.spec import AttentionType
from attncheck.reference.v0.metadata import TAttentionMetadata


class AttentionLayer(Protocol):
    """The attributes of a layer that the ``forward`` of its impl may read.

    Scales are float32 tensors of one element, or of one element per KV head. Each is a dequantisation factor
    (``value = code * scale``), and is 1.0 without quantisation. The ``_float`` attributes are copies on the host,
    because reading a tensor would synchronise.
    """

    _q_scale: Tensor
    _k_scale: Tensor
    _v_scale: Tensor
    _prob_scale: Tensor
    _q_scale_float: float
    _k_scale_float: float
    _v_scale_float: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any) -> Tensor:
        """Return the layer's attention over flat rows ``[tokens, heads * head_size]``, unflattened for the impl."""
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
        """Take these ten arguments, passed by position; raise for what the impl does not support.

        num_heads, num_kv_heads: query heads and KV heads (None means num_heads). Query head ``h`` reads KV head
            ``h // G``, where ``G = num_heads // num_kv_heads``.
        scale: factor on the scores, whatever the head size.
        alibi_slopes: one per query head; ``slope * (key position - query position)`` is added after scale and cap.
        sliding_window: ``w``: a query sees its own key and the ``w - 1`` keys before it. None for no window.
        logits_soft_cap: ``c``: a score becomes ``c * tanh(score / c)`` before the mask. None or 0 for no cap.
        kv_sharing_target_layer_name: another layer, whose cache is read and never written.

        Raise ``ValueError`` for an invalid value, ``NotImplementedError`` for what the kernels do not support.
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
        """Return the attention of the step's rows, ``[padded tokens, num_heads, value head size]``.

        query: ``[padded tokens, num_heads, head_size]``. key, value: ``[padded tokens, num_kv_heads, head size]``.
        kv_cache: one layer's cache in the backend's logical shape; empty in the profiling run.
        attn_metadata: None in the profiling run, which must read nothing and return finite values.
        output: if the backend has ``accept_output_buffer``, written in place and returned.
        output_scale: one float32; the output is written quantised, ``value / scale``.
        output_block_scale: written by the impl: the scales of a dynamic block quantisation of the output.
        """
        raise NotImplementedError

    def fused_output_quant_supported(self, quant_key: Hashable) -> bool:
        """Return whether ``forward`` can write its output quantised to this format; False unless overridden.

        quant_key: the target format as a value: dtype, scale (its dtype, static or dynamic, granularity), second scale,
            symmetry. ``QuantKey`` of the backends' contract is one such type; the default does not read it.

        An impl that returns True applies ``output_scale`` (static) or ``output_block_scale`` (dynamic).
        """
        return False


class MLAAttentionImpl(AttentionImpl[TAttentionMetadata], Generic[TAttentionMetadata]):
    """Runs multi-head latent attention: the cache has one latent row per token, shared by all query heads."""

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
        """Take the ten arguments of every impl, without defaults, then the sizes and the up-projection of the latent.

        ``head_size`` is the width of a cache row, ``kv_lora_rank + qk_rope_head_dim``. ``qk_head_dim`` is
        ``qk_nope_head_dim + qk_rope_head_dim``. ``kv_b_proj`` projects the latent to ``qk_nope_head_dim + v_head_dim``
        per head.
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
        """Return the attention of the step's rows, ``[tokens, num_heads * v_head_dim]``.

        hidden_states_or_cq: ``[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]`` after projection.
        kv_c_normed: ``[tokens, kv_lora_rank]``. k_pe: ``[tokens, 1, qk_rope_head_dim]``.
        """
        raise NotImplementedError
