"""Correct bases of mutants: a CUDA graph can capture their uniform steps, for every supported layer and cache."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.candidates.torch_mla import TorchMLABackend, TorchMLABuilder, TorchMLAImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder, SDPAImpl
from attncheck.backends.contract import AttentionCGSupport, AttentionLayer, Conventions
from attncheck.backends.latent import LatentMetadata
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.backends.uniform import uniform_query_len


class PagedGraphImpl(SDPAImpl):
    """``torch_sdpa`` with its own float32 softmax, which supports sinks and a soft cap.

    Attributes hold what a mutant may need of the current step: its layer and metadata, the dtype of its rows, the page
    size, and whether heads precede tokens.
    """

    layer: AttentionLayer
    metadata: PagedMetadata
    dtype: torch.dtype
    block_size = 0
    is_hnd = False

    def attend(self, layer: AttentionLayer, *args: Any) -> None:
        query, _, _, caches, metadata, *_ = args
        self.layer, self.metadata, self.dtype = layer, metadata, query.dtype
        if caches is not None:
            self.block_size, self.is_hnd = caches[0].shape[1], caches[0].stride(1) < caches[0].stride(2)
        super().attend(layer, *args)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        num_rows, num_keys, group = query.shape[1], key.shape[1], self.num_heads // self.num_kv_heads
        if not num_keys:
            return query.new_zeros(*query.shape[:3], value.shape[-1])
        grouped = query.float().unflatten(2, (self.num_kv_heads, group))
        scores = torch.einsum("nqhgd,nkhd->nhgqk", grouped, key.float()).flatten(1, 2) * self.scale
        if self.logits_soft_cap is not None:
            scores = self.logits_soft_cap * (scores / self.logits_soft_cap).tanh()
        if is_causal:
            mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        scores = self.masked(scores)
        highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        if self.sinks is not None:
            sinks = self.sinks.to(query.device)[:, None, None]
            highest = torch.maximum(highest, sinks)
        weights = (scores - highest).exp()
        total = weights.sum(-1, keepdim=True)
        if self.sinks is not None:
            total = total + (sinks - highest).exp()
        weights = torch.where(total > 0, weights / total, 0.0)
        weights = weights.unflatten(1, (self.num_kv_heads, group))
        return torch.einsum("nhgqk,nkhd->nqhgd", weights, value.float()).flatten(2, 3).to(query.dtype)

    def masked(self, scores: Tensor) -> Tensor:
        """Return ``scores [n, heads, rows, keys]``; a mutant masks some of them."""
        return scores


class GraphPaged(SDPABackend):
    """Correct backend with sinks and a soft cap."""

    features = SDPABackend.features | {"sinks", "logits_soft_cap"}
    Impl: ClassVar[type[PagedGraphImpl]] = PagedGraphImpl
    Builder: ClassVar[type[SDPABuilder]] = SDPABuilder

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls) -> type[PagedGraphImpl]:
        return type("Impl", (cls.Impl,), {"backend": cls})

    @classmethod
    def get_builder_cls(cls) -> type[SDPABuilder]:
        return type("Builder", (cls.Builder,), {"backend": cls})


class LatentGraphImpl(TorchMLAImpl):
    """``torch_mla`` whose uniform steps read lengths and tables on the device."""

    def write(self, layer: AttentionLayer, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        has_slot, slots = (slot_mapping >= 0)[:, None], slot_mapping.clamp(min=0)
        place = slots // kv_cache.shape[1], slots % kv_cache.shape[1]
        num_rows = len(slot_mapping)
        new = torch.cat([kv_c[:num_rows], k_pe[:num_rows]], dim=-1).to(kv_cache.dtype)
        kv_cache[place] = torch.where(has_slot, new, kv_cache[place])

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: LatentMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        common, query_len = metadata.common, uniform_query_len(metadata, 8)
        if query_len is None:
            super().attend(layer, query, kv_cache, metadata, output, output_lse)
            return
        num_rows = common.num_reqs * query_len
        lens = common.seq_lens[:, None].long()
        position = torch.arange(common.block_table_tensor.shape[1] * kv_cache.shape[1], device=query.device)
        exists = position < self.num_seen(lens, metadata)
        table = common.block_table_tensor.masked_fill(~exists[:, :: kv_cache.shape[1]], 0)
        tokens = kv_cache[table].flatten(1, 2).float().masked_fill(~exists[..., None], 0)
        w_uk, w_uv = (each.float() for each in self.projections)
        rows = query[:num_rows].unflatten(0, (-1, query_len)).float()
        q_nope, q_pe = rows.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_latent = torch.cat([torch.einsum("nqhp,lhp->nqhl", q_nope, w_uk), q_pe], dim=-1)
        scores = torch.einsum("nqhl,nkl->nhqk", q_latent, tokens) * self.scale
        own = lens - query_len + torch.arange(query_len, device=query.device)
        seen = exists[:, None] & ((position <= own[..., None]) | (not common.causal))
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp()
        latent = torch.einsum("nhqk,nkl->nqhl", weights, tokens[..., : self.kv_lora_rank])
        out = torch.einsum("nqhl,lhv->nqhv", latent, w_uv)
        is_real = torch.arange(num_rows, device=query.device) < common.query_start_loc[-1]
        output[:num_rows] = out.flatten(0, 1).masked_fill(~is_real[:, None, None], 0).to(output.dtype)
        if output_lse is not None:
            output_lse[:num_rows] = lse.transpose(1, 2).flatten(0, 1)

    def num_seen(self, lens: Tensor, metadata: LatentMetadata) -> Tensor | int:
        """Return the number of keys read of each request: all ``lens [n, 1]``; a mutant reads fewer."""
        return lens


class LatentGraphBuilder(TorchMLABuilder):
    """Builder that declares uniform steps."""

    cudagraph_support = AttentionCGSupport.UNIFORM_BATCH


class GraphLatent(TorchMLABackend):
    """Correct latent backend without FP8 codes."""

    features = TorchMLABackend.features - {"fp8_kv"}
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32")
    conventions = Conventions(padded_rows="finite")
    Impl: ClassVar[type[LatentGraphImpl]] = LatentGraphImpl

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__.upper()

    @classmethod
    def get_impl_cls(cls) -> type[LatentGraphImpl]:
        return type("Impl", (cls.Impl,), {"backend": cls})

    @classmethod
    def get_builder_cls(cls) -> type[LatentGraphBuilder]:
        return type("Builder", (LatentGraphBuilder,), {"backend": cls})


class HostSplitImpl(PagedGraphImpl):
    """If :attr:`is_split`, computes only as many parts of ``part`` keys as the longest request of the step has."""

    part = 16

    @property
    def is_split(self) -> bool:
        """Whether this layer and step take the faulty branch."""
        raise NotImplementedError

    def masked(self, scores: Tensor) -> Tensor:
        if not self.is_split:
            return scores
        longest = max(self.metadata.seq_lens)  # a host number: a graph keeps its value at capture
        index = torch.arange(scores.shape[-1], device=scores.device)
        return scores.masked_fill(index >= -(-longest // self.part) * self.part, -torch.inf)
