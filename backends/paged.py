"""Base classes of attncheck's own candidates: the cache shape, and all of ``forward`` but the attention.

A candidate derives from :class:`PagedBackend` and :class:`PagedImpl` (and from the metadata and builder of
:mod:`attncheck.backends.paged_metadata`), declares what it supports, and implements :meth:`PagedImpl.write` and
:meth:`PagedImpl.attend`. Refusals, the profiling call, and the order write-then-attend are implemented here.
"""

from abc import abstractmethod
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.base.coded_rows import CodedCache
from attncheck.backends.base.gathering import encode_fp8
from attncheck.backends.base.layer import (
    Call,
    CandidateBackend,
    CandidateImpl,
    refuse_layer,
    wrong_cache_dtype,
    wrong_shapes,
)
from attncheck.backends.caches.codecs import KVCacheCodec, packed_codec
from attncheck.backends.caches.packings import Packing, coded_rows_shape, packed_shape
from attncheck.backends.contract import AttentionLayer, AttentionType, QuantKey
from attncheck.backends.declarations import block_size_reason
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.impl import STATIC_FP8, LayerArguments
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.attention.cache import kv_cache_views
from attncheck.reference.attention.params import AttentionParams, window_pair
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, CacheSpec


class PagedBackend(CandidateBackend):
    """Backend whose cache has one of the usual packings; ``content`` if key and value head sizes differ."""

    packing: ClassVar[Packing] = "split_first"

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int | None = None,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        if reason := block_size_reason(cls, block_size):
            raise ValueError(f"{cls.get_name()}: {reason}")
        value_size = head_size if head_size_v is None else head_size_v
        if value_size != head_size and "head_size_v" not in cls.features:
            raise NotImplementedError(f"{cls.get_name()}: head_size_v {value_size} beside head_size {head_size}")
        if cache_dtype_str in ROW_FORMATS:
            return coded_rows_shape(cache_dtype_str, num_blocks, block_size, num_kv_heads, head_size, value_size)
        packing = cls.packing_of(head_size, value_size)
        return packed_shape(packing, num_blocks, block_size, num_kv_heads, head_size, value_size)

    @classmethod
    def packing_of(cls, head_size: int, head_size_v: int) -> Packing:
        """Return the packing; only ``content`` can hold keys and values of different sizes."""
        return cls.packing if head_size == head_size_v else "content"

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        return packed_codec(cls, layer, cache)


class PagedImpl(CandidateImpl[PagedMetadata]):
    """One layer. Attributes have vLLM's names; ``sliding_window`` is the pair of inclusive distances."""

    backend: ClassVar[type[PagedBackend]]
    _slopes: Tensor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the contract's arguments, ``sinks`` and ``head_size_v``; raise for what the backend does not declare."""
        given = LayerArguments(*args, **kwargs)
        refuse_layer(self.backend, given)
        self.chosen_kernels: set[str] = set()
        self.num_heads, self.num_kv_heads = given.num_heads, given.num_kv_heads
        self.head_size, self.head_size_v = given.head_size, given.head_size_v
        self.scale = given.scale
        self.attn_type = AttentionType(given.attn_type)
        self.has_cache = self.attn_type.has_cache
        self.alibi_slopes = None if given.alibi_slopes is None else tuple(given.alibi_slopes)
        self.given_sinks = given.sinks
        self.sinks = None if given.sinks is None else given.sinks.to(torch.float32)
        self._sink_logits = None if given.sinks is None else tuple(given.sinks.tolist())
        self._window_size = given.sliding_window
        self.sliding_window = window_pair(given.sliding_window, bidirectional=not self.attends_causally)
        self.logits_soft_cap = given.logits_soft_cap or None
        self.kv_cache_dtype = given.kv_cache_dtype
        self.kv_sharing_target_layer_name = given.kv_sharing_target_layer_name
        self.supports_quant_query_input = "fp8_query" in self.backend.features

    __init__.__signature__ = signature(LayerArguments.__init__)  # type: ignore[attr-defined]

    @property
    def attends_causally(self) -> bool:
        """Whether the layer is causal unless a step's metadata states otherwise."""
        return self.attn_type == AttentionType.DECODER

    def params(self, metadata: PagedMetadata) -> AttentionParams:
        """Return the layer's parameters for one step; the window is mirrored if the step is not causal."""
        causal = metadata.common.causal
        return AttentionParams(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            scale=self.scale,
            causal=causal,
            window=window_pair(self._window_size or metadata.rswa_window, bidirectional=not causal),
            logits_soft_cap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self._sink_logits,
            attn_chunk_size=metadata.attention_chunk_size,
        )

    def slopes_on(self, device: torch.device) -> Tensor | None:
        """Return ALiBi's slopes, float32 ``[num_heads]``; cached, since a CUDA graph cannot copy from the host."""
        if self.alibi_slopes is not None and (self._slopes is None or self._slopes.device != device):
            self._slopes = torch.tensor(self.alibi_slopes, dtype=torch.float32, device=device)
        return self._slopes

    def query_scale(self, layer: AttentionLayer) -> Tensor:
        """Return the scale of an FP8 query: one element, or ``[num_heads]`` if each KV head has its own."""
        scale = layer._q_scale
        return scale if scale.numel() == 1 else scale.repeat_interleave(self.num_heads // self.num_kv_heads)

    def fused_output_quant_supported(self, quant_key: QuantKey) -> bool:
        return "output_quant" in self.backend.features and quant_key == STATIC_FP8

    def attend_quantised(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
        output_scale: Tensor,
    ) -> None:
        """Run :meth:`attend` into float32, then store the codes (``x / output_scale``) as the rows of ``output``."""
        rows = slice(0, metadata.num_rows)
        plain = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        self.attend(layer, query, key, value, caches, metadata, plain, output_lse)
        output.view(torch.uint8)[rows] = encode_fp8(plain[rows], output_scale, output.dtype).view(torch.uint8)

    @abstractmethod
    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Store row ``t`` of ``key`` and ``value`` at slot ``slot_mapping[t]``; skip negative slots and extra rows.

        The caches are logical views ``[blocks, block size, num_kv_heads, head size]``, float8 if they hold codes.
        """

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        """Write the rows of all requests into ``output`` (and ``output_lse``); the cache already holds the new K/V.

        ``caches`` are the logical views of :meth:`write`, or None for encoder layers, whose ``key`` and ``value`` hold
        one row per query row.
        """

    def _run(self, call: Call[PagedMetadata]) -> None:
        is_coded = self.has_cache and self.kv_cache_dtype in ROW_FORMATS
        caches = self._cache_views(call.kv_cache) if self.has_cache and not is_coded else None
        writes = self.brings_writer and self.kv_sharing_target_layer_name is None
        if writes and caches is not None and call.key is not None and call.value is not None:
            self.write(call.layer, call.key, call.value, *caches, call.metadata.common.slot_mapping)
        if is_coded:
            caches = self._decoded_rows(call, writes=writes)
        operands = (call.layer, call.query, call.key, call.value, caches, call.metadata, call.output, call.output_lse)
        if call.output_scale is None:
            self.attend(*operands)
        else:
            self.attend_quantised(*operands, call.output_scale)

    def _decoded_rows(self, call: Call[PagedMetadata], *, writes: bool) -> tuple[Tensor, Tensor]:
        """Write the new rows as codes, and return all rows of the cache as numbers, as if it held float32."""
        units = call.layer._k_scale, call.layer._v_scale
        coded = CodedCache(call.kv_cache, self.kv_cache_dtype, (self.head_size, self.head_size_v), units)
        if writes and call.key is not None and call.value is not None:
            coded.write(call.key, call.value, call.metadata.common.slot_mapping)
        return coded.read()

    def _cache_views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        codes = FP8_DTYPES.get(self.kv_cache_dtype)
        stored = kv_cache if codes is None else kv_cache.view(codes)
        return kv_cache_views(stored, self.backend.packing_of(self.head_size, self.head_size_v), self.head_size)

    def _wrong_tensors(self, call: Call[PagedMetadata]) -> list[str]:
        key, value = call.key, call.value
        if self.kv_sharing_target_layer_name is not None:
            needed, key, value = 0, None, None
        else:  # one row per slot, or in an encoder per query row
            needed = len(call.metadata.common.slot_mapping) if self.has_cache else call.num_tokens
        wrong = wrong_shapes(
            ("query", call.query, call.num_tokens, (self.num_heads, self.head_size)),
            ("key", key, needed, (self.num_kv_heads, self.head_size)),
            ("value", value, needed, (self.num_kv_heads, self.head_size_v)),
            ("output", call.output, call.num_tokens, (self.num_heads, self.head_size_v)),
            ("output_lse", call.output_lse, call.num_tokens, (self.num_heads,)),
        )
        if needed:
            absent = [name for name, given in (("key", key), ("value", value)) if given is None]
            wrong += [f"{name} is None, but {needed} rows are needed" for name in absent]
        takes_scale = call.output_scale is not None and "output_quant" in self.backend.features
        if (call.output.dtype == STATIC_FP8.dtype) != takes_scale:
            wrong.append(f"output has dtype {call.output.dtype}, and output_scale is {call.output_scale}")
        if self.has_cache:
            wrong += self._wrong_cache(call.kv_cache, call.query.dtype)
        return wrong

    def _wrong_cache(self, kv_cache: Tensor, dtype: torch.dtype) -> list[str]:
        if kv_cache.numel() == 0:
            return ["kv_cache is empty"]
        return wrong_cache_dtype(self.backend, self.kv_cache_dtype, kv_cache.dtype, dtype)
