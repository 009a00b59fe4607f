"""Faults in a captured graph that only layers, caches or steps of one kind show."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.torch_sdpa import SDPABuilder
from attncheck.backends.contract import AttentionLayer, CommonAttentionMetadata
from attncheck.backends.latent import LatentMetadata
from attncheck.backends.mutants.graph_bases import (
    GraphLatent,
    GraphPaged,
    HostSplitImpl,
    LatentGraphImpl,
    PagedGraphImpl,
)
from attncheck.backends.paged_metadata import PagedMetadata

# One modifier, or one modifier together with another property.


class WindowBranchAtCapture(GraphPaged):
    """Drops a window that no request of the step exceeds: a graph keeps that choice of its dummies."""

    class Impl(PagedGraphImpl):
        def params(self, metadata: PagedMetadata) -> Any:
            params = super().params(metadata)
            is_short = self._window_size is not None and max(metadata.seq_lens) <= self._window_size
            return replace(params, window=(-1, -1)) if is_short else params


class WindowOfPages32(GraphPaged):
    """With a window and pages of 32 tokens, a graph keeps the number of splits of its capture."""

    class Impl(HostSplitImpl):
        @property
        def is_split(self) -> bool:
            return self._window_size is not None and self.block_size == 32


class WindowVerifiedInHalf(GraphPaged):
    """With a window in float16, a graph that verifies drafts keeps the number of splits of its capture."""

    class Impl(HostSplitImpl):
        @property
        def is_split(self) -> bool:
            is_half = self.dtype == torch.float16
            return self._window_size is not None and is_half and self.metadata.common.max_query_len > 1


class ALiBiOfTheDummies(GraphPaged):
    """ALiBi's table has a column for each key of the longest request at capture; later keys use the last column."""

    class Impl(PagedGraphImpl):
        def masked(self, scores: Tensor) -> Tensor:
            slopes = self.slopes_on(scores.device)
            if slopes is None:
                return scores
            index = torch.arange(scores.shape[-1], device=scores.device)
            return scores + slopes[:, None, None] * (index.clamp(max=max(self.metadata.seq_lens)) - index)


class ALiBiWorkspace(GraphPaged):
    """ALiBi's bias has a workspace that a larger step replaces: earlier graphs use freed memory."""

    class Impl(PagedGraphImpl):
        workspace: Tensor | None = None

        def masked(self, scores: Tensor) -> Tensor:
            if self.alibi_slopes is None:
                return scores
            if self.workspace is None or self.workspace.numel() < scores.numel():
                self.workspace = torch.empty_like(scores)
            return self.workspace.flatten()[: scores.numel()].view_as(scores).copy_(scores)


class SinksInHalf(GraphPaged):
    """With sinks in float16, a graph keeps the number of splits of its capture."""

    class Impl(HostSplitImpl):
        @property
        def is_split(self) -> bool:
            return self.sinks is not None and self.dtype == torch.float16


class LongUnderACapInHND(GraphPaged):
    """With a soft cap and heads before tokens, the capture decides whether 512 keys are enough."""

    class Impl(HostSplitImpl):
        part = 512

        @property
        def is_split(self) -> bool:
            return self.logits_soft_cap is not None and self.is_hnd


class CodesInOneSplit(GraphPaged):
    """A cache of FP8 codes is read in parts of 256 keys, as many as the longest request at capture has."""

    class Impl(HostSplitImpl):
        part = 256

        @property
        def is_split(self) -> bool:
            return self.kv_cache_dtype.startswith("fp8")


class ScaleAsNumber(GraphPaged):
    """Every step reads the scale of an FP8 cache back from the device."""

    class Impl(PagedGraphImpl):
        def masked(self, scores: Tensor) -> Tensor:
            is_fp8 = self.kv_cache_dtype.startswith("fp8")
            return scores * (float(self.layer._k_scale.max()) / self.layer._k_scale.max()) if is_fp8 else scores


class SharedCacheOfTheCapture(GraphPaged):
    """A layer that reads another's cache reuses a split plan, which a graph never updates."""

    class Impl(HostSplitImpl):
        @property
        def is_split(self) -> bool:
            return self.kv_sharing_target_layer_name is not None


# A latent cache.


class LatentSplits(GraphLatent):
    """Computes as many parts of 256 keys as the longest request at capture has."""

    class Impl(LatentGraphImpl):
        def num_seen(self, lens: Tensor, metadata: LatentMetadata) -> Tensor | int:
            return lens.clamp(max=-(-max(metadata.seq_lens) // 256) * 256)


class LatentDraftsInHalf(GraphLatent):
    """In float16, a graph that verifies drafts looks at no more pages than its dummies have."""

    class Impl(LatentGraphImpl):
        def num_seen(self, lens: Tensor, metadata: LatentMetadata) -> Tensor | int:
            is_split = self.projections[0].dtype == torch.float16 and metadata.common.max_query_len > 1
            return lens.clamp(max=-(-max(metadata.seq_lens) // 32) * 32) if is_split else lens


# Consecutive steps, and batches that are built before an earlier one has run.


class GrowsWithAnError(GraphPaged):
    """The first step with more rows than any before raises, and allocates room for the next one."""

    class Impl(PagedGraphImpl):
        rows = 0

        def attend(self, layer: AttentionLayer, query: Tensor, *args: Any) -> None:
            if len(query) > self.rows:
                self.rows = len(query)
                raise RuntimeError(f"the workspace had no room for {len(query)} rows, and has it now")
            super().attend(layer, query, *args)


class KeepsKnownRequests(GraphPaged):
    """Copies a row of the table only if its first page changed: pages that a request gains are missing."""

    class Builder(SDPABuilder):
        table: Tensor | None = None

        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> PagedMetadata:
            common, new = common_attn_metadata, common_attn_metadata.block_table_tensor
            if self.table is None:
                most = self.vllm_config.scheduler_config.max_num_seqs
                self.table = torch.full((most, new.shape[1]), -1, dtype=torch.int32, device=self.device)
            own = self.table[: len(new), : new.shape[1]]
            own.copy_(torch.where(own[:, :1] == new[:, :1], own, new))
            return super().build(common_prefix_len, replace(common, block_table_tensor=own), fast_build)


class ClearsLengthsAtCapture(GraphPaged):
    """Sets the lengths on the host to 0 if no request has computed tokens, which holds at capture."""

    class Builder(SDPABuilder):
        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> PagedMetadata:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            return replace(metadata, common=common_attn_metadata)

    class Impl(PagedGraphImpl):
        def attend(self, layer: AttentionLayer, *args: Any) -> None:
            super().attend(layer, *args)
            common = self.metadata.common
            if not bool(common.num_computed_tokens_cpu.any()):
                common.seq_lens_cpu.zero_()


class PadsLengthsBehind(GraphPaged):
    """Pads the lengths to a multiple of eight requests, in memory beyond that of a step with fewer."""

    class Impl(PagedGraphImpl):
        def attend(self, layer: AttentionLayer, *args: Any) -> None:
            super().attend(layer, *args)
            lens = self.metadata.common.seq_lens
            room = lens.untyped_storage().nbytes() // lens.itemsize
            padded = min(room, -(-len(lens) // 8) * 8)
            lens.as_strided((padded,), (1,), 0)[len(lens) :].fill_(1)


class PlansForCaptures(SDPABuilder):
    """Builder that copies the lengths of every step with a captured shape into the buffer of that shape."""

    plans: dict[int, Tensor]

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> PagedMetadata:
        lens = common_attn_metadata.seq_lens
        self.plans.setdefault(len(lens), torch.zeros_like(lens))
        return self.build(0, common_attn_metadata)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        common, plan = common_attn_metadata, self.plans.get(common_attn_metadata.num_reqs)
        if plan is not None:
            common = replace(common, seq_lens=plan.copy_(common.seq_lens))
        return super().build(common_prefix_len, common, fast_build)


class BuildersShareAPlan(GraphPaged):
    """The builders of a layer share the plans of captured shapes: a second micro-batch overwrites one."""

    class Builder(PlansForCaptures):
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
            self.plans = layer.__dict__.setdefault("plans", {})
