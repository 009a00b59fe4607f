"""Base classes of attncheck's own candidates: the cache shape, and all of ``forward`` but the attention.

A candidate derives from :class:`PagedBackend` and :class:`PagedImpl` (and from the metadata and builder of
:mod:`attncheck.backends.paged_metadata`), declares what it supports, and implements :meth:`PagedImpl.write` and
:meth:`PagedImpl.attend`. Refusals, the profiling call, and the order write-then-attend are implemented here.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from attncheck.backends.base.gathering import encode_fp8
from attncheck.backends.base.refusals import refuse_layer, refuse_undeclared_call, wrong_cache_dtype
from attncheck.backends.caches.codecs import KVCacheCodec, packed_codec
from attncheck.backends.caches.packings import Packing, packed_shape
from attncheck.backends.contract import AttentionBackend, AttentionImpl, AttentionLayer, AttentionType, QuantKey
from attncheck.backends.declarations import block_size_reason
from attncheck.backends.dtypes import DTYPES, FP8_DTYPES
from attncheck.backends.impl import STATIC_FP8
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.attention.cache import kv_cache_views
from attncheck.reference.attention.params import AttentionParams, window_pair
from attncheck.reference.spec import CacheSpec, LayerSpec


class PagedBackend(AttentionBackend):
    """Backend whose cache has one of the usual packings; ``content`` if key and value head sizes differ."""

    accept_output_buffer = True
    supported_dtypes: ClassVar[Sequence[torch.dtype]] = tuple(DTYPES.values())
    packing: ClassVar[Packing] = "split_first"
    supported_layouts: ClassVar[tuple[str, ...]] = ("NHD", "HND")

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int | None = None
    ) -> tuple[int, ...]:
        if reason := block_size_reason(cls, block_size):
            raise ValueError(f"{cls.get_name()}: {reason}")
        value_size = head_size if head_size_v is None else head_size_v
        if value_size != head_size and "head_size_v" not in cls.features:
            raise NotImplementedError(f"{cls.get_name()}: head_size_v {value_size} beside head_size {head_size}")
        packing = cls.packing_of(head_size, value_size)
        return packed_shape(packing, num_blocks, block_size, num_kv_heads, head_size, value_size)

    @classmethod
    def packing_of(cls, head_size: int, head_size_v: int) -> Packing:
        """Return the packing; only ``content`` can hold keys and values of different sizes."""
        return cls.packing if head_size == head_size_v else "content"

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        return packed_codec(cls, layer, cache)


class PagedImpl(AttentionImpl[PagedMetadata]):
    """One layer. Attributes have vLLM's names; ``sliding_window`` is the pair of inclusive distances."""

    backend: ClassVar[type[PagedBackend]]
    metadata_cls: ClassVar[type[PagedMetadata]]
    _slopes: Tensor | None = None

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
        *,
        sinks: Tensor | None = None,
        head_size_v: int | None = None,
    ) -> None:
        self.chosen_kernels: set[str] = set()
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size_v = head_size if head_size_v is None else head_size_v
        refuse_layer(
            self.backend,
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=self.num_kv_heads,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=sinks,
            head_size_v=self.head_size_v,
        )
        self.attn_type = AttentionType(attn_type)
        self.has_cache = self.attn_type.has_cache
        self.alibi_slopes = None if alibi_slopes is None else tuple(alibi_slopes)
        self.given_sinks, self.sinks = sinks, None if sinks is None else sinks.to(torch.float32)
        self._sink_logits = None if sinks is None else tuple(sinks.tolist())
        self._window_size = sliding_window
        self.sliding_window = window_pair(sliding_window, bidirectional=not self.attends_causally)
        self.logits_soft_cap = logits_soft_cap or None
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name

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
            window=window_pair(self._window_size, bidirectional=not causal),
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

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
        *,
        output_lse: Tensor | None = None,
    ) -> Tensor:
        if output is None:
            raise ValueError(f"{self.backend.get_name()}: output is None, but the caller must allocate it")
        if attn_metadata is None:  # profiling: there is no cache and no batch
            return output.zero_()
        self._refuse_wrong_step(query, key, value, kv_cache, attn_metadata, output, output_lse, output_scale)
        is_fp8 = self.has_cache and self.kv_cache_dtype in FP8_DTYPES
        refuse_undeclared_call(
            self.backend,
            attn_type=self.attn_type,
            causal=attn_metadata.common.causal,
            has_alibi=self.alibi_slopes is not None,
            query_lens=attn_metadata.query_lens,
            seq_lens=attn_metadata.seq_lens,
            has_per_head_scales=is_fp8 and max(layer._k_scale.numel(), layer._v_scale.numel()) > 1,
            has_output_scale=output_scale is not None,
            has_output_block_scale=output_block_scale is not None,
            has_output_lse=output_lse is not None,
        )
        caches = self._cache_views(kv_cache) if self.has_cache else None
        writes = caches is not None and self.brings_writer and self.kv_sharing_target_layer_name is None
        if writes and caches is not None and key is not None and value is not None:
            self.write(layer, key, value, *caches, attn_metadata.common.slot_mapping)
        if output_scale is None:
            self.attend(layer, query, key, value, caches, attn_metadata, output, output_lse)
        else:
            self.attend_quantised(layer, query, key, value, caches, attn_metadata, output, output_lse, output_scale)
        return output

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

    def _cache_views(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        codes = FP8_DTYPES.get(self.kv_cache_dtype)
        stored = kv_cache if codes is None else kv_cache.view(codes)
        return kv_cache_views(stored, self.backend.packing_of(self.head_size, self.head_size_v), self.head_size)

    def _refuse_wrong_step(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
        output_scale: Tensor | None,
    ) -> None:
        name = self.backend.get_name()
        if not isinstance(metadata, self.metadata_cls):
            given, own = type(metadata).__qualname__, self.metadata_cls.__qualname__
            raise TypeError(f"{name}: attn_metadata is a {given}, not a {own}")
        tokens = metadata.common.num_actual_tokens
        wrong = []
        takes_scale = output_scale is not None and "output_quant" in self.backend.features
        if (output.dtype == STATIC_FP8.dtype) != takes_scale:
            wrong.append(f"output has dtype {output.dtype}, and output_scale is {output_scale}")
        if tokens > query.shape[0]:
            wrong.append(f"num_actual_tokens {tokens} exceeds the {query.shape[0]} rows of query")
        if metadata.num_rows > tokens:
            wrong.append(f"query_start_loc ends at {metadata.num_rows}, beyond num_actual_tokens {tokens}")
        if query.shape[1:] != (self.num_heads, self.head_size):
            wrong.append(f"query has shape {tuple(query.shape)}, not [tokens, {self.num_heads}, {self.head_size}]")
        if query.dtype not in self.backend.get_supported_dtypes():
            supported = ", ".join(map(str, self.backend.get_supported_dtypes()))
            wrong.append(f"query has dtype {query.dtype}: supported are {supported}")
        if output.shape[0] < tokens or output.shape[1:] != (self.num_heads, self.head_size_v):
            wrong.append(
                f"output has shape {tuple(output.shape)}, not [{tokens}+, {self.num_heads}, {self.head_size_v}]"
            )
        if output_lse is not None and (output_lse.shape[0] < tokens or output_lse.shape[1:] != (self.num_heads,)):
            wrong.append(f"output_lse has shape {tuple(output_lse.shape)}, not [{tokens}+, {self.num_heads}]")
        wrong += self._wrong_keys(key, value, metadata)
        if self.has_cache:
            wrong += self._wrong_cache(kv_cache, query.dtype)
        if wrong:
            raise ValueError(f"{name}: {'; '.join(wrong)}")

    def _wrong_keys(self, key: Tensor | None, value: Tensor | None, metadata: PagedMetadata) -> list[str]:
        """Return what is wrong with key and value; they need one row per slot, or in an encoder per query row."""
        if self.kv_sharing_target_layer_name is not None:
            return []
        needed = len(metadata.common.slot_mapping) if self.has_cache else metadata.num_rows
        wrong = []
        for name, given, size in (("key", key, self.head_size), ("value", value, self.head_size_v)):
            if given is None:
                if needed:
                    wrong.append(f"{name} is None, but {needed} rows are needed")
            elif given.shape[0] < needed or given.shape[1:] != (self.num_kv_heads, size):
                wrong.append(f"{name} has shape {tuple(given.shape)}, not [{needed}+, {self.num_kv_heads}, {size}]")
        return wrong

    def _wrong_cache(self, kv_cache: Tensor, dtype: torch.dtype) -> list[str]:
        if kv_cache.numel() == 0:
            return ["kv_cache is empty"]
        return wrong_cache_dtype(self.backend, self.kv_cache_dtype, kv_cache.dtype, dtype)
