"""The impl of ``xformers_vllm``: prefills by a unified kernel with all modifiers, decodes by the library with none.

The library's paged bias has neither window nor soft cap, and the decode call passes neither, although the constructor
accepts both. Attributes have vLLM's names.
"""

from typing import Any, ClassVar

from torch import Size, Tensor

from attncheck.backends.candidates.triton_unified.attention import unified_attention
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.candidates.xformers.backend import quiet_import
from attncheck.backends.candidates.xformers.impl import UNIFIED, grouped_operands, operator_for
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend
from attncheck.backends.candidates.xformers_vllm.builder import XFormersAttentionMetadata
from attncheck.backends.contract import AttentionImpl, AttentionLayer, AttentionType
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.impl import LayerArguments
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = LayerArguments(*args, **kwargs)
        if given.kv_sharing_target_layer_name is not None:
            raise NotImplementedError("XFormersAttentionImpl: KV sharing is not supported")
        if given.alibi_slopes is not None:
            raise NotImplementedError("XFormersAttentionImpl: ALiBi is not supported")
        if given.sinks is not None:
            raise NotImplementedError("XFormersAttentionImpl: sinks are not supported")
        if given.head_size_v != given.head_size:
            raise NotImplementedError(f"XFormersAttentionImpl: head_size_v {given.head_size_v} is not supported")
        if given.attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"XFormersAttentionImpl: attn_type {given.attn_type}: only decoder is supported")
        XFormersAttentionBackend.validate_head_size(given.head_size)
        self.chosen_kernels: set[str] = set()
        self._dispatched: set[Size] = set()
        self.num_heads, self.num_kv_heads, self.head_size = given.num_heads, given.num_kv_heads, given.head_size
        self.num_queries_per_kv = given.num_heads // given.num_kv_heads
        self.scale = float(given.scale)
        self.kv_cache_dtype = given.kv_cache_dtype
        self.alibi_slopes = given.alibi_slopes
        self.kv_sharing_target_layer_name = given.kv_sharing_target_layer_name
        self.sliding_window = (-1, -1) if given.sliding_window is None else (given.sliding_window - 1, 0)
        self.logits_soft_cap = given.logits_soft_cap or 0

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
        code_dtype = FP8_DTYPES.get(self.kv_cache_dtype)
        key_cache, value_cache = (kv_cache if code_dtype is None else kv_cache.view(code_dtype)).unbind(0)
        k_scale, v_scale = layer._k_scale, layer._v_scale
        if key is not None and value is not None:
            slots = attn_metadata.slot_mapping
            reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale)
        num_decode_tokens = attn_metadata.num_decode_tokens
        if (prefill := attn_metadata.prefill_metadata) is not None:
            rows = slice(num_decode_tokens, attn_metadata.num_actual_tokens)
            unified_attention(
                query[rows],
                key_cache,
                value_cache,
                output[rows],
                block_table=prefill.block_table,
                seq_lens=prefill.seq_lens,
                query_start_loc=prefill.query_start_loc,
                max_query_len=prefill.max_query_len,
                params=self._params(),
                k_scale=k_scale,
                v_scale=v_scale,
            )
            self.chosen_kernels.add(UNIFIED)
        if (decode := attn_metadata.decode_metadata) is not None:
            decode_query = query[:num_decode_tokens]
            out = self._decode(decode_query, kv_cache[0], kv_cache[1], decode)
            output[:num_decode_tokens].copy_(out.view(decode_query.shape))
        return output

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
        grouped, key, value = grouped_operands(query, key_cache, value_cache)
        bias = decode.attn_bias
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
