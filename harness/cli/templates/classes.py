# mine.py
from dataclasses import dataclass

import torch

from attncheck.backends.contract import AttentionCGSupport
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

    request: torch.Tensor | None = None
    position: torch.Tensor | None = None


class Builder(PagedBuilder):
    backend, metadata_cls = Mine, Step
    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.request, self.position = (torch.zeros(most, dtype=torch.int64, device=device) for _ in range(2))

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        step, common = super().build(common_prefix_len, common_attn_metadata, fast_build), common_attn_metadata
        starts, num_rows = common.query_start_loc, common.num_actual_tokens
        row = torch.arange(num_rows, dtype=starts.dtype, device=starts.device)
        request = torch.searchsorted(starts[1:], row, right=True).clamp(max=common.num_reqs - 1)
        position = common.seq_lens[request] - starts[request + 1] + row
        step.request = self.request[:num_rows].copy_(request)
        step.position = self.position[:num_rows].copy_(position.masked_fill(row >= starts[-1], -1))
        return step


class Impl(PagedImpl):
    backend, metadata_cls = Mine, Step

    def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
        write_slots(layer, key, value, key_cache, value_cache, slot_mapping)

    def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
        table, page_size = metadata.common.block_table_tensor, caches[0].shape[1]
        hidden = torch.arange(table.shape[1] * page_size, device=table.device) > metadata.position[:, None]
        pages = table[metadata.request].masked_fill(hidden[:, ::page_size], 0)
        # Slots that a row does not see may hold NaN, which a weight of 0 would not keep out.
        held = [cache[pages].flatten(1, 2).float().masked_fill(hidden[..., None, None], 0) for cache in caches]
        grouped = query[: len(pages)].float().unflatten(1, (self.num_kv_heads, -1))
        scores = torch.einsum("thgd,tkhd->thgk", grouped, held[0]) * self.scale
        hidden = hidden[:, None, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
        output[: len(pages)] = torch.einsum("thgk,tkhd->thgd", weights, held[1]).flatten(1, 2).to(output.dtype)
