"""One layer of latent attention: projects queries into the latent space, runs the kernel, projects its results back.

Nothing waits for the device, and no shape depends on lengths.
"""

from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_mla.attention import latent_attention
from attncheck.backends.candidates.triton_mla.backend import TritonMLABackend, TritonMLAMetadata, size_reasons
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.contract import AttentionLayer
from attncheck.backends.latent import LatentImpl, LatentMetadata


class TritonMLAImpl(LatentImpl):
    """One layer."""

    backend = TritonMLABackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reasons := size_reasons(self.kv_lora_rank, self.qk_rope_head_dim):
            raise ValueError(f"{self.backend.get_name()}: {'; '.join(reasons)}")

    def write(self, layer: AttentionLayer, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        # The two parts of a row are passed as key and value of one head, adjacent and with one scale.
        latent, rotary = kv_cache.unsqueeze(2).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        scale = layer._k_scale
        reshape_and_cache(kv_c[:, None], k_pe[:, None], latent, rotary, slot_mapping, k_scale=scale, v_scale=scale)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        kv_cache: Tensor,
        metadata: LatentMetadata,
        output: Tensor,
        output_lse: Tensor | None,
    ) -> None:
        common, rows = metadata.common, metadata.common.num_actual_tokens
        w_uk_LHP, w_uv_LHV = self.projections
        q_nope, q_pe = query[:rows].split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent_HTL = torch.bmm(q_nope.transpose(0, 1), w_uk_LHP.permute(1, 2, 0))
        seen_HTL = torch.empty_like(latent_HTL)
        latent_attention(
            latent_HTL.transpose(0, 1),
            q_pe,
            kv_cache,
            seen_HTL.transpose(0, 1),
            block_table=common.block_table_tensor,
            seq_lens=common.seq_lens,
            query_start_loc=common.query_start_loc,
            max_query_len=common.max_query_len,
            scale=self.scale,
            causal=common.causal,
            k_scale=layer._k_scale,
            output_lse=None if output_lse is None else output_lse[:rows],
            scratch=metadata.scratch if isinstance(metadata, TritonMLAMetadata) else None,
        )
        out_THV = torch.bmm(seen_HTL, w_uv_LHV.transpose(0, 1)).transpose(0, 1)
        # Rows of no request are undefined in ``seen_HTL``; their outputs stay unchanged.
        is_real = torch.arange(rows, device=output.device) < common.query_start_loc[-1]
        output[:rows] = torch.where(is_real[:, None, None], out_THV, output[:rows])
