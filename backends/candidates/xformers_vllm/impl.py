"""The impl of ``xformers_vllm``: prefills by a unified kernel with all modifiers, decodes by the library with none.

The library's paged bias has neither window nor soft cap, and the decode call passes neither, although the constructor
accepts both. Attributes have vLLM's names.
"""

from typing import ClassVar

from torch import Size, Tensor

from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.candidates.xformers.availability import quiet_import
from attncheck.backends.candidates.xformers.impl import UNIFIED
from attncheck.backends.candidates.xformers.operator import operator_for
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend
from attncheck.backends.candidates.xformers_vllm.metadata import XFormersAttentionMetadata
from attncheck.backends.contract import AttentionImpl, AttentionLayer, AttentionType
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.reference.attention.params import AttentionParams

with quiet_import():
    from xformers.ops.fmha import Inputs, memory_efficient_attention_forward
    from xformers.ops.fmha.dispatch import _dispatch_fw


class XFormersAttentionImpl(AttentionImpl[XFormersAttentionMetadata]):
    """One layer.

    The constructor also accepts head counts that do not divide and FP8 caches; a step shows the result.
    """

    names_operator: ClassVar[bool] = True
    """Whether the operator is passed, or left to the library's dispatch."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None:
        if kv_sharing_target_layer_name is not None:
            raise NotImplementedError("XFormersAttentionImpl: KV sharing is not supported")
        if alibi_slopes is not None:
            raise NotImplementedError("XFormersAttentionImpl: ALiBi is not supported")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"XFormersAttentionImpl: attn_type {attn_type}: only decoder is supported")
        XFormersAttentionBackend.validate_head_size(head_size)
        self.chosen_kernels: set[str] = set()
        self._dispatched: set[Size] = set()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.alibi_slopes = alibi_slopes
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
        self.logits_soft_cap = 0 if logits_soft_cap is None else logits_soft_cap

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: XFormersAttentionMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output is None:
            raise ValueError("XFormersAttentionImpl: output must be provided")
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("XFormersAttentionImpl: a quantised output is not supported")
        if attn_metadata is None:
            return output
        key_cache, value_cache = kv_cache.unbind(0)
        code_dtype = FP8_DTYPES.get(self.kv_cache_dtype)
        if key is not None and value is not None:
            self._write(layer, key, value, key_cache, value_cache, attn_metadata.slot_mapping)
        num_decode_tokens = attn_metadata.num_decode_tokens
        if (prefill := attn_metadata.prefill_metadata) is not None:
            rows = slice(num_decode_tokens, attn_metadata.num_actual_tokens)
            unified_attention(
                query[rows],
                key_cache if code_dtype is None else key_cache.view(code_dtype),
                value_cache if code_dtype is None else value_cache.view(code_dtype),
                output[rows],
                block_table=prefill.block_table,
                seq_lens=prefill.seq_lens,
                query_start_loc=prefill.query_start_loc,
                max_query_len=prefill.max_query_len,
                params=self._params(),
                k_scale=None if code_dtype is None else layer._k_scale,
                v_scale=None if code_dtype is None else layer._v_scale,
            )
            self.chosen_kernels.add(UNIFIED)
        if (decode := attn_metadata.decode_metadata) is not None:
            decode_query = query[:num_decode_tokens]
            out = self._decode(decode_query, key_cache, value_cache, decode)
            output[:num_decode_tokens].copy_(out.view(decode_query.shape))
        return output

    def _write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        code_dtype = FP8_DTYPES.get(self.kv_cache_dtype)
        if code_dtype is None:
            reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        else:
            reshape_and_cache(
                key,
                value,
                key_cache.view(code_dtype),
                value_cache.view(code_dtype),
                slot_mapping,
                k_scale=layer._k_scale,
                v_scale=layer._v_scale,
            )

    def _params(self) -> AttentionParams:
        return AttentionParams(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            scale=self.scale,
            window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
        )

    def _decode(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, decode: XFormersAttentionMetadata
    ) -> Tensor:
        """Return the library's attention, in its query shape, over each half of the cache as one run of tokens."""
        kv_heads, group, head_size = self.num_kv_heads, self.num_queries_per_kv, self.head_size
        key, value = (
            cache.view(1, -1, kv_heads, 1, head_size).expand(-1, -1, -1, group, -1)
            for cache in (key_cache, value_cache)
        )
        grouped, bias = query.view(1, -1, kv_heads, group, head_size), decode.attn_bias
        operator = operator_for(key_cache.shape[1]) if self.names_operator else None
        result: Tensor = memory_efficient_attention_forward(
            grouped, key, value, attn_bias=bias, p=0.0, scale=self.scale, op=operator
        )
        if grouped.shape not in self._dispatched:  # the choice depends on the shape only, and takes a while
            self._dispatched.add(grouped.shape)
            operator = operator or _dispatch_fw(Inputs(grouped, key, value, bias, 0.0, self.scale), False)
            self.chosen_kernels.add(operator.NAME)
        return result


class XFormersAutoImpl(XFormersAttentionImpl):
    """The same impl with vLLM's own call, which names no operator."""

    names_operator = False
