"""Base classes of attncheck's own candidates for multi-head latent attention: all of ``forward`` but the attention.

As in vLLM, such a backend serves only layers with a latent cache. A candidate derives from :class:`LatentBackend` and
:class:`LatentImpl`, and implements :meth:`LatentImpl.write` and :meth:`LatentImpl.attend`.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.base.layer import Call, CandidateBackend, CandidateImpl, refuse_layer, wrong_shapes
from attncheck.backends.caches.packings import packed_shape
from attncheck.backends.contract import (
    AttentionLayer,
    CommonAttentionMetadata,
    Conventions,
    MLAAttentionImpl,
)
from attncheck.backends.declarations import block_size_reason
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.backends.impl import LatentArguments
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.reference.attention.mla import MLAParams


class LatentBackend(CandidateBackend):
    """Backend with one cache row per token: the latent part, then the rotated part.

    A row has no heads, so both layouts are the same.
    """

    features = frozenset({"mla", "lse", "non_causal", "short_keys", "fp8_kv"})
    conventions = Conventions(padded_rows="untouched")
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

    def own_fields(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        return {"workspace": self.kv_cache_spec.chunked_prefill_workspace_size}


class LatentImpl(CandidateImpl[LatentMetadata], MLAAttentionImpl[LatentMetadata]):
    """One layer.

    ``w_uk [L, H, P]`` and ``w_uv [L, H, V]`` are split from ``kv_b_proj`` after its weights are loaded.
    """

    backend: ClassVar[type[LatentBackend]]
    metadata_cls: ClassVar[type[PagedMetadata]] = LatentMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the contract's arguments for a latent layer; raise for what the backend does not declare."""
        given = LatentArguments(*args, **kwargs)
        refuse_layer(self.backend, given)
        cached = given.kv_lora_rank + given.qk_rope_head_dim
        projected = given.num_heads * (given.qk_nope_head_dim + given.v_head_dim), given.kv_lora_rank
        weight = tuple(given.kv_b_proj.weight.shape)
        wrong = []
        if (given.num_kv_heads, given.head_size) != (1, cached):
            found = f"num_kv_heads {given.num_kv_heads}, head_size {given.head_size}"
            wrong.append(f"{found}: a latent cache has 1 and {cached}")
        if given.qk_head_dim != given.qk_nope_head_dim + given.qk_rope_head_dim:
            sizes = f"{given.qk_nope_head_dim} + {given.qk_rope_head_dim}"
            wrong.append(f"qk_head_dim {given.qk_head_dim} is not {sizes}")
        if weight != projected:
            wrong.append(f"kv_b_proj.weight has shape {weight}, not {projected}")
        if wrong:
            raise ValueError(f"{self.backend.get_name()}: {'; '.join(wrong)}")
        self.num_heads, self.scale, self.kv_cache_dtype = given.num_heads, given.scale, given.kv_cache_dtype
        self.kv_lora_rank, self.v_head_dim = given.kv_lora_rank, given.v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = given.qk_nope_head_dim, given.qk_rope_head_dim
        self.kv_b_proj = given.kv_b_proj
        self._projections: tuple[Tensor, Tensor] | None = None

    __init__.__signature__ = signature(LatentArguments.__init__)  # type: ignore[attr-defined]

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

    def _run(self, call: Call[LatentMetadata]) -> None:
        codes = FP8_DTYPES.get(self.kv_cache_dtype)
        rows = call.kv_cache if codes is None else call.kv_cache.view(codes)
        if call.key is not None and call.value is not None:
            self.write(call.layer, call.key, call.value[:, 0], rows, call.metadata.common.slot_mapping)
        out = call.output.unflatten(1, (self.num_heads, self.v_head_dim))
        self.attend(call.layer, call.query, rows, call.metadata, out, call.output_lse)

    def _wrong_tensors(self, call: Call[LatentMetadata]) -> list[str]:
        w_uk, _ = self.projections
        heads, slots = self.num_heads, len(call.metadata.common.slot_mapping)
        size, cached = self.qk_nope_head_dim + self.qk_rope_head_dim, self.kv_lora_rank + self.qk_rope_head_dim
        wrong = wrong_shapes(
            ("query", call.query, call.num_tokens, (heads, size)),
            ("kv_c_normed", call.key, slots, (self.kv_lora_rank,)),
            ("k_pe", call.value, slots, (1, self.qk_rope_head_dim)),
            ("output", call.output, call.num_tokens, (heads * self.v_head_dim,)),
            ("output_lse", call.output_lse, call.num_tokens, (heads,)),
        )
        if (call.key is None) != (call.value is None):
            wrong.append("one of kv_c_normed and k_pe is None")
        if call.query.dtype != w_uk.dtype:
            wrong.append(f"query has dtype {call.query.dtype}, the weights {w_uk.dtype}")
        if call.kv_cache.dim() != 3 or call.kv_cache.shape[-1] != cached:
            wrong.append(f"kv_cache has shape {tuple(call.kv_cache.shape)}, not [blocks, block size, {cached}]")
        return wrong
