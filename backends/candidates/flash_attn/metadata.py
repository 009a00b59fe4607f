"""A step as FlashAttention wants it: beside the lengths of keys their running sums, as if the keys were packed.

Must not know: caches, which library is called.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.contract import CommonAttentionMetadata
from attncheck.backends.paged_metadata import PagedBuilder, PagedMetadata


@dataclass
class PackedMetadata(PagedMetadata):
    """A step, with ``cu_seq_lens``: int32 ``[R + 1]``, on the device, 0 and the running sums of ``seq_lens``."""

    cu_seq_lens: Tensor = field(kw_only=True)


class PackedBuilder(PagedBuilder):
    """Makes them. The sums stand in one buffer, which the next ``build`` writes again: a graph reads it at each replay.

    No CUDA-graph level is promised: no graph was captured yet.
    """

    metadata_cls = PagedMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        room = 0 if vllm_config is None else vllm_config.scheduler_config.max_num_seqs
        self._sums = self._zeros(room)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PackedMetadata:
        step = super().build(common_prefix_len, common_attn_metadata, fast_build)
        num_reqs = len(common_attn_metadata.seq_lens)
        if len(self._sums) <= num_reqs:
            self._sums = self._zeros(num_reqs)
        torch.cumsum(common_attn_metadata.seq_lens, 0, dtype=torch.int32, out=self._sums[1 : num_reqs + 1])
        return PackedMetadata(**vars(step), cu_seq_lens=self._sums[: num_reqs + 1])

    def _zeros(self, num_reqs: int) -> Tensor:
        return torch.zeros(num_reqs + 1, dtype=torch.int32, device=self.device)
