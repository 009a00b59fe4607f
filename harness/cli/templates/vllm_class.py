# mine.py
from dataclasses import dataclass

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
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
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.head_size_v != kv_cache_spec.head_size:
            raise NotImplementedError(f"head_size_v {kv_cache_spec.head_size_v}: Mine has values as wide as keys")

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        if common_attn_metadata.causal is not True:
            raise NotImplementedError("Mine attends causally")
        return Step(common_attn_metadata)


class Impl(AttentionImpl[Step]):
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ):
        # What is not done below is refused here: ignored, it would be a wrong answer.
        if alibi_slopes is not None or sliding_window is not None or logits_soft_cap:
            raise NotImplementedError("Mine has no ALiBi, no sliding window and no soft cap")
        if attn_type != AttentionType.DECODER or kv_cache_dtype != "auto":
            raise NotImplementedError(f"Mine is for decoders and their own dtype: {attn_type}, {kv_cache_dtype}")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale, self.kv_cache_dtype = head_size, scale, kv_cache_dtype

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        """The cache is [blocks, KV heads, block size, 2 * head size]; a slot of -1 stores nothing."""
        stored = slot_mapping >= 0
        slots, block_size = slot_mapping[stored], kv_cache.shape[2]
        rows = torch.cat([key, value], dim=-1)[: len(slot_mapping)][stored]
        kv_cache[slots // block_size, :, slots % block_size] = rows

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
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
            keys, values = held.split(self.head_size, dim=-1)  # [seq_len, KV heads, head size]
            grouped = query[rows].float().unflatten(1, (self.num_kv_heads, -1))
            scores = torch.einsum("qhgd,khd->hgqk", grouped, keys) * self.scale
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(context)
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            output[rows] = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2).to(output.dtype)
        return output
