# mine.py
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata
from attncheck.backends.paged import PagedBackend, PagedImpl
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata
from attncheck.backends.uniform import write_slots


class Mine(PagedBackend):
    """Causal attention in which every row looks its own keys up: one graph serves decodes and prompts alike."""

    get_name = staticmethod(lambda: "MINE")
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)


@dataclass
class Step(PagedMetadata):
    """``request`` and ``position`` of every row: ``[rows]``; a padding row has position -1 and sees no key."""

    request: Tensor | None = None
    position: Tensor | None = None


class Builder(PagedBuilder):
    backend, metadata_cls = Mine, Step
    cudagraph_support = AttentionCGSupport.ALWAYS
    has_exact_lens = False  # positions are computed on the device, so build need not wait for it

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.request, self.position = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        step, common = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        assert isinstance(step, Step)
        starts, num_rows = common.query_start_loc, common.num_actual_tokens
        row = torch.arange(num_rows, dtype=starts.dtype, device=starts.device)
        request = torch.searchsorted(starts[1:], row, right=True).clamp(max=common.num_reqs - 1)
        position = common.seq_lens[request] - starts[request + 1] + row
        step.request = self.request[:num_rows].copy_(request)
        step.position = self.position[:num_rows].copy_(position.masked_fill(row >= starts[-1], -1))
        return step


class Impl(PagedImpl):
    backend, metadata_cls = Mine, Step

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        write_slots(layer, key, value, key_cache, value_cache, slot_mapping)

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
        # These hold for a decoder, the only kind of layer that this class declares.
        assert isinstance(metadata, Step)
        assert caches is not None
        assert metadata.request is not None
        assert metadata.position is not None
        table, page_size = metadata.common.block_table_tensor, caches[0].shape[1]
        hidden = torch.arange(table.shape[1] * page_size, device=table.device) > metadata.position[:, None]
        pages = table[metadata.request].masked_fill(hidden[:, ::page_size], 0)
        # Slots that a row does not see may hold NaN, which a weight of 0 would not keep out.
        held = [cache[pages].flatten(1, 2).float().masked_fill(hidden[..., None, None], 0) for cache in caches]
        shape = (len(pages), self.num_kv_heads, -1, self.head_size)  # [rows, KV heads, group, head size]
        grouped = query[: len(pages)].float().reshape(shape)
        scores = torch.einsum("thgd,tkhd->thgk", grouped, held[0]) * self.scale
        hidden = hidden[:, None, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
        output[: len(pages)] = torch.einsum("thgk,tkhd->thgd", weights, held[1]).flatten(1, 2).to(output.dtype)
