"""attncheck's own latent attention in Triton as a candidate. Imports no Triton before a layer runs.

A layer projects its queries into the latent space, runs the kernel, and projects the results back. The kernel reads
lengths, tables and starts from the model runner's tensors. Nothing waits for the device, and no shape depends on
lengths, so a captured graph is right for every batch that fits.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attncheck.backends.candidates.triton_unified.tiling import SplitScratch
from attncheck.backends.contract import AttentionCGSupport, AttentionLayer, CommonAttentionMetadata, Conventions
from attncheck.backends.interpreter import TritonBackend, is_interpreted
from attncheck.backends.latent import LatentBackend, LatentBuilder, LatentImpl, LatentMetadata
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec

LARGEST_RANK, LARGEST_ROTARY = 1024, 128
"""Maximum sizes: tiles of queries and keys must fit the memory of a multiprocessor."""

_PROGRAMS_PER_PROCESSOR = 4
"""Wanted programs per multiprocessor. Their tiles are large, so one or two run at once."""

_LINES = 64
"""Rows times heads per program of the largest tile."""

_MOST_SEGMENTS = 16
"""Maximum segments of one row's keys; the merging kernel holds all of them at once."""

_INTERPRETED_PROGRAMS, _INTERPRETED_SEGMENTS = 4, 2
"""Interpreted, there is no device to fill; these values still split the smallest batches, so that it is examined."""


class TritonMLABackend(TritonBackend, LatentBackend):
    """Backend for latent rows of up to 1024 elements and 128 rotated ones, any other size; one launch for any batch.

    The workspace of a layer is not used, because no context is up-projected.
    """

    conventions = Conventions(padded_rows="untouched", cache_strides="any", sync_free_build=True)

    get_name = staticmethod(lambda: "TRITON_MLA")

    get_impl_cls = staticmethod(lambda: TritonMLAImpl)

    get_builder_cls = staticmethod(lambda: TritonMLABuilder)

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unsupported_reasons(layer, cache, batch)
        if layer.mla is not None:
            reasons += size_reasons(layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim)
        return reasons


def size_reasons(kv_lora_rank: int, qk_rope_head_dim: int) -> list[str]:
    """Return why a cache row of these sizes is not supported."""
    sizes = (("kv_lora_rank", kv_lora_rank, LARGEST_RANK), ("qk_rope_head_dim", qk_rope_head_dim, LARGEST_ROTARY))
    return [f"{name} {size}: supported are sizes up to {limit}" for name, size, limit in sizes if size > limit]


@dataclass
class TritonMLAMetadata(LatentMetadata):
    """Metadata of one step. ``scratch``: memory for results of segments, or None if keys are not split.

    The lengths on the host are used only for refusals.
    """

    scratch: SplitScratch | None = None


class TritonMLABuilder(LatentBuilder):
    """Builder of :class:`TritonMLAMetadata` that never waits for the device."""

    backend = TritonMLABackend
    metadata_cls: ClassVar[type[PagedMetadata]] = TritonMLAMetadata
    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._scratch = _allocate(kv_cache_spec.head_size, torch.device(device))

    def own_fields(self, common: CommonAttentionMetadata) -> dict[str, Any]:
        return {**super().own_fields(common), "scratch": self._scratch}


def _allocate(width: int, device: torch.device) -> SplitScratch:
    """Return scratch for the programs that fill the device, for layers whose cache rows have ``width`` elements.

    A step with more results per segment fills the device without being split.
    """
    programs, most = _INTERPRETED_PROGRAMS, _INTERPRETED_SEGMENTS
    if not is_interpreted():
        programs = _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        most = _MOST_SEGMENTS
    lines = programs * _LINES
    out, lse = (torch.empty(size, dtype=torch.float32, device=device) for size in (lines * width, lines))
    return SplitScratch(out, lse, programs, most)


class TritonMLAImpl(LatentImpl):
    """One layer."""

    backend = TritonMLABackend

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if reasons := size_reasons(self.kv_lora_rank, self.qk_rope_head_dim):
            raise ValueError(f"{self.backend.get_name()}: {'; '.join(reasons)}")

    def write(self, layer: AttentionLayer, kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache

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
        from attncheck.backends.candidates.triton_mla.attention import latent_attention

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
