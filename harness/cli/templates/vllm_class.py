# mine.py
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)


class Mine(AttentionBackend):
    """Causal attention. To declare more, override vLLM's ``supports_*`` methods."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto"]
    forward_includes_kv_cache_update = False

    get_name = staticmethod(lambda: "CUSTOM")  # the name of AttentionBackendEnum that is left for such classes
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)


@dataclass
class Step:
    """What ``forward`` needs of a step."""

    common: CommonAttentionMetadata


class Builder(AttentionMetadataBuilder[Step]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.head_size_v != kv_cache_spec.head_size:
            raise NotImplementedError(f"head_size_v {kv_cache_spec.head_size_v}: Mine has values as wide as keys")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        if common_attn_metadata.causal is not True:
            raise NotImplementedError("Mine attends causally")
        return Step(common_attn_metadata)


class Impl(AttentionImpl[Step]):
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
    ) -> None:
        # What is not done below is refused here: ignored, it would be a wrong answer.
        if alibi_slopes is not None or sliding_window is not None or logits_soft_cap:
            raise NotImplementedError("Mine has no ALiBi, no sliding window and no soft cap")
        if attn_type != AttentionType.DECODER or kv_cache_dtype != "auto":
            raise NotImplementedError(f"Mine is for decoders and their own dtype: {attn_type}, {kv_cache_dtype}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale, self.kv_cache_dtype = head_size, scale, kv_cache_dtype

    def do_kv_cache_update(
        self, layer: AttentionLayer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """The cache is [blocks, KV heads, block size, 2 * head size]; a slot of -1 stores nothing."""
        stored = slot_mapping >= 0
        slots, block_size = slot_mapping[stored], kv_cache.shape[2]
        rows = torch.cat([key, value], dim=-1)[: len(slot_mapping)][stored]
        kv_cache[slots // block_size, :, slots % block_size] = rows

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Step | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        assert output is not None  # the caller allocates it
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("Mine does not quantise its output")
        if attn_metadata is None:  # the profiling run, which has no cache
            return output.fill_(0)
        common, block_size = attn_metadata.common, kv_cache.shape[2]
        starts = common.query_start_loc.tolist()
        for request, seq_len in enumerate(common.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            if rows.start == rows.stop:  # a padding request
                continue
            context = seq_len - (rows.stop - rows.start)
            blocks = common.block_table_tensor[request, : -(-seq_len // block_size)].long()
            held = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].float()
            keys, values = held[..., : self.head_size], held[..., self.head_size :]  # [seq_len, KV heads, head size]
            shape = (-1, self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_size)
            grouped = query[rows].float().reshape(shape)
            scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * self.scale
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(context)
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            output[rows] = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2).to(output.dtype)
        return output
