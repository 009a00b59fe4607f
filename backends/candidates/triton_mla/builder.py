"""Metadata of the latent kernel: the step's tensors as they are, and scratch that lives as long as the builder.

Nothing is computed for the kernel, which reads lengths, tables and starts where the model runner put them; so whatever
a graph has captured is right for every batch that fits. Must not know: how anything is launched.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from attncheck.backends.candidates.triton_mla.backend import TritonMLABackend
from attncheck.backends.candidates.triton_unified.scratch import SplitScratch
from attncheck.backends.contract import AttentionCGSupport, CommonAttentionMetadata
from attncheck.backends.interpreter import is_interpreted
from attncheck.backends.latent import LatentBuilder, LatentMetadata
from attncheck.backends.paged_metadata import PagedMetadata

_PROGRAMS_PER_PROCESSOR = 4
"""Programs that are worth having for each multiprocessor: their tiles are large, so that one or two run at once."""

_LINES = 64
"""Rows times heads of a program, of the largest tile."""

_MOST_SEGMENTS = 16
"""Of one row's keys; what merges them holds all of them at once."""

_INTERPRETED_PROGRAMS, _INTERPRETED_SEGMENTS = 4, 2
"""Where there is nothing to be filled, the smallest batches are cut up all the same, so that it is examined."""


@dataclass
class TritonMLAMetadata(LatentMetadata):
    """A step. ``scratch``: for results of segments; None: keys are not cut into segments.

    The numbers on the host serve refusals alone.
    """

    scratch: SplitScratch | None = None


class TritonMLABuilder(LatentBuilder):
    """Makes them, without waiting for the device."""

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
    """Room for the results of as many programs as the device wants, of layers whose cache rows have ``width`` numbers.

    A step with more results a segment than that fills the device without being cut up.
    """
    programs, most = _INTERPRETED_PROGRAMS, _INTERPRETED_SEGMENTS
    if device.type == "cuda" and not is_interpreted():
        programs = _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
        most = _MOST_SEGMENTS
    lines = programs * _LINES
    out, lse = (torch.empty(size, dtype=torch.float32, device=device) for size in (lines * width, lines))
    return SplitScratch(out, lse, programs, most)
