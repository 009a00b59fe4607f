"""Base classes of attncheck's own candidates for multi-head latent attention: all of ``forward`` but the attention.

As in vLLM, such a backend serves only layers with a latent cache. A candidate derives from :class:`LatentBackend` and
:class:`LatentImpl`, and implements :meth:`LatentImpl.write` and :meth:`LatentImpl.attend`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.base.refusals import refuse_layer, refuse_undeclared_call
from attncheck.backends.caches.packings import packed_shape
from attncheck.backends.contract import (
    AttentionBackend,
    AttentionLayer,
    AttentionType,
    CommonAttentionMetadata,
    Conventions,
    MLAAttentionImpl,
)
from attncheck.backends.declarations import block_size_reason
from attncheck.backends.dtypes import DTYPES, FP8_DTYPES
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.attention.mla import MLAParams


class LatentBackend(AttentionBackend):
    """Backend with one cache row per token: the latent part, then the rotated part.

    A row has no heads, so both layouts are the same.
    """

    accept_output_buffer = True
    features = frozenset({"mla", "lse", "non_causal", "short_keys", "fp8_kv"})
    conventions = Conventions(padded_rows="untouched")
    supported_dtypes: ClassVar[Sequence[torch.dtype]] = tuple(DTYPES.values())
    supported_layouts: ClassVar[tuple[str, ...]] = ("NHD", "HND")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto", "float16", "bfloat16", "float32", *FP8_DTYPES)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        if reason := block_size_reason(cls, block_size):
            raise ValueError(f"{cls.get_name()}: {reason}")
        if num_kv_heads != 1:
            raise ValueError(f"{cls.get_name()}: num_kv_heads {num_kv_heads}: a latent cache has one")
        return packed_shape("latent", num_blocks, block_size, num_kv_heads, head_size, head_size)


@dataclass
class LatentMetadata(PagedMetadata):
    """Metadata of one step over a latent cache.

    ``workspace`` is the number of context tokens to up-project at once; None means all of them.
    """

    workspace: int | None = None


class LatentBuilder(PagedBuilder):
    """Builder of :class:`LatentMetadata`."""

    metadata_cls: ClassVar[type[PagedMetadata]] = LatentMetadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        metadata: Any = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made: PagedMetadata = replace(metadata, workspace=self.kv_cache_spec.chunked_prefill_workspace_size)
        return made


class LatentImpl(MLAAttentionImpl[LatentMetadata]):
    """One layer.

    ``w_uk [L, H, P]`` and ``w_uv [L, H, V]`` are split from ``kv_b_proj`` after its weights are loaded.
    """

    backend: ClassVar[type[LatentBackend]]

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
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,
    ) -> None:
        refuse_layer(
            self.backend,
            num_heads=num_heads,
            head_size=head_size,
            scale=scale,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            kv_cache_dtype=kv_cache_dtype,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            sinks=None,
            head_size_v=head_size,
        )
        cached, projected = kv_lora_rank + qk_rope_head_dim, num_heads * (qk_nope_head_dim + v_head_dim)
        wrong = []
        if num_kv_heads != 1 or head_size != cached:
            wrong.append(f"num_kv_heads {num_kv_heads}, head_size {head_size}: a latent cache has 1 and {cached}")
        if qk_head_dim != qk_nope_head_dim + qk_rope_head_dim:
            wrong.append(f"qk_head_dim {qk_head_dim} is not {qk_nope_head_dim} + {qk_rope_head_dim}")
        if kv_b_proj.weight.shape != (projected, kv_lora_rank):
            shape = tuple(kv_b_proj.weight.shape)
            wrong.append(f"kv_b_proj.weight has shape {shape}, not ({projected}, {kv_lora_rank})")
        if wrong:
            raise ValueError(f"{self.backend.get_name()}: {'; '.join(wrong)}")
        self.num_heads, self.scale, self.kv_cache_dtype = num_heads, scale, kv_cache_dtype
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.kv_b_proj = kv_b_proj
        self._projections: tuple[Tensor, Tensor] | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Split the projections; called once, after the weights are loaded and before the first step."""
        weight = self.kv_b_proj.weight.to(act_dtype)
        heads_LHx = weight.unflatten(0, (self.num_heads, -1)).permute(2, 0, 1)
        w_uk, w_uv = heads_LHx.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        self._projections = w_uk.contiguous(), w_uv.contiguous()

    @property
    def projections(self) -> tuple[Tensor, Tensor]:
        """``w_uk`` and ``w_uv``."""
        if self._projections is None:
            raise RuntimeError(f"{self.backend.get_name()}: forward before process_weights_after_loading")
        return self._projections

    def params(self, metadata: LatentMetadata) -> MLAParams:
        """Return the layer's parameters for one step."""
        return MLAParams(
            num_heads=self.num_heads,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.scale,
            causal=metadata.common.causal,
        )

    def forward(
        self,
        layer: AttentionLayer,
        hidden_states_or_cq: Tensor,
        kv_c_normed: Tensor | None,
        k_pe: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: LatentMetadata | None,
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
        self._refuse_wrong_step(hidden_states_or_cq, kv_c_normed, k_pe, kv_cache, attn_metadata, output, output_lse)
        refuse_undeclared_call(
            self.backend,
            attn_type=AttentionType.DECODER,
            causal=attn_metadata.common.causal,
            has_alibi=False,
            query_lens=attn_metadata.query_lens,
            seq_lens=attn_metadata.seq_lens,
            has_per_head_scales=False,
            has_output_scale=output_scale is not None,
            has_output_block_scale=output_block_scale is not None,
            has_output_lse=output_lse is not None,
        )
        codes = FP8_DTYPES.get(self.kv_cache_dtype)
        rows = kv_cache if codes is None else kv_cache.view(codes)
        if kv_c_normed is not None and k_pe is not None:
            self.write(layer, kv_c_normed, k_pe[:, 0], rows, attn_metadata.common.slot_mapping)
        out = output.unflatten(1, (self.num_heads, self.v_head_dim))
        self.attend(layer, hidden_states_or_cq, rows, attn_metadata, out, output_lse)
        return output

    @abstractmethod
    def write(self, layer: AttentionLayer, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store row ``t`` of ``kv_c [n, L]`` and ``k_pe [n, E]`` at slot ``slot_mapping[t]``; skip negative slots.

        The cache is ``[blocks, block size, L + E]``, float8 if it holds codes.
        """

    @abstractmethod
    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: LatentMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        """Write the rows of all requests into ``output [tokens, H, V]``; the cache already holds the new rows."""

    def _refuse_wrong_step(
        self,
        query: Tensor,
        kv_c_normed: Tensor | None,
        k_pe: Tensor | None,
        kv_cache: Tensor,
        metadata: LatentMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        name, heads = self.backend.get_name(), self.num_heads
        if not isinstance(metadata, LatentMetadata):
            raise TypeError(f"{name}: attn_metadata is a {type(metadata).__qualname__}, not a LatentMetadata")
        w_uk, _ = self.projections
        tokens, slots = metadata.common.num_actual_tokens, len(metadata.common.slot_mapping)
        size, cached = self.qk_nope_head_dim + self.qk_rope_head_dim, self.kv_lora_rank + self.qk_rope_head_dim
        wanted: tuple[tuple[str, Tensor | None, int, tuple[int, ...]], ...] = (
            ("query", query, tokens, (heads, size)),
            ("kv_c_normed", kv_c_normed, slots, (self.kv_lora_rank,)),
            ("k_pe", k_pe, slots, (1, self.qk_rope_head_dim)),
            ("output", output, tokens, (heads * self.v_head_dim,)),
            ("output_lse", output_lse, tokens, (heads,)),
        )
        wrong = [
            f"{label} has shape {tuple(given.shape)}, not ({rows}+, {', '.join(map(str, shape))})"
            for label, given, rows, shape in wanted
            if given is not None and (given.shape[0] < rows or given.shape[1:] != shape)
        ]
        if (kv_c_normed is None) != (k_pe is None):
            wrong.append("one of kv_c_normed and k_pe is None")
        if metadata.num_rows > tokens:
            wrong.append(f"query_start_loc ends at {metadata.num_rows}, beyond num_actual_tokens {tokens}")
        if query.dtype not in self.backend.get_supported_dtypes():
            wrong.append(f"query has dtype {query.dtype}")
        if query.dtype != w_uk.dtype:
            wrong.append(f"query has dtype {query.dtype}, the weights {w_uk.dtype}")
        if kv_cache.dim() != 3 or kv_cache.shape[-1] != cached:
            wrong.append(f"kv_cache has shape {tuple(kv_cache.shape)}, not (blocks, block size, {cached})")
        if wrong:
            raise ValueError(f"{name}: {'; '.join(wrong)}")
