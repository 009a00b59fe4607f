"""attncheck's own latent attention in Triton as a candidate: its declarations and metadata. Imports no Triton.

The kernel reads lengths, tables and starts from the model runner's tensors. No values are precomputed for it, so a
captured graph is right for every batch that fits.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from attncheck.backends.candidates.triton_unified.tiling import SplitScratch
from attncheck.backends.candidates.triton_unified.triton_backend import TritonBackend
from attncheck.backends.contract import AttentionCGSupport, CommonAttentionMetadata, Conventions
from attncheck.backends.interpreter import is_interpreted
from attncheck.backends.latent import LatentBackend, LatentBuilder, LatentMetadata
from attncheck.backends.paged_metadata import PagedMetadata
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.triton_mla.impl import TritonMLAImpl

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

    conventions = Conventions(padded_rows="untouched", sync_free_build=True)

    get_name = staticmethod(lambda: "TRITON_MLA")

    @staticmethod
    def get_impl_cls() -> type["TritonMLAImpl"]:
        from attncheck.backends.candidates.triton_mla.impl import TritonMLAImpl

        return TritonMLAImpl

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

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        metadata: Any = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made: TritonMLAMetadata = replace(metadata, scratch=self._scratch)
        return made


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
