"""A step as our own candidates see it: the common metadata, its lengths on the host, and the builder that reads them.

Must not know: caches, how any candidate attends.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attncheck.backends.contract import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata
from attncheck.backends.refusals import refuse_cache


@dataclass(frozen=True)
class PagedMetadata:
    """One step for one group of layers: the common metadata, and its lengths as numbers on the host."""

    common: CommonAttentionMetadata
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    attention_chunk_size: int | None

    @property
    def num_rows(self) -> int:
        """Rows that belong to requests; padding stands behind them."""
        return self.query_start_loc[-1]

    @property
    def query_lens(self) -> tuple[int, ...]:
        """New tokens of each request."""
        return tuple(end - start for start, end in itertools.pairwise(self.query_start_loc))

    def requests(self) -> Iterator[tuple[int, int, int, int]]:
        """``(request, first row, end row, seq_len)`` of every request that has rows; padding requests have none."""
        bounds = zip(itertools.pairwise(self.query_start_loc), self.seq_lens, strict=True)
        for request, ((start, end), seq_len) in enumerate(bounds):
            if end > start:
                yield request, start, end, seq_len


class PagedBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Reads the lengths from their host twins: no synchronisation, and nothing that a graph could keep."""

    backend: ClassVar[type[AttentionBackend]]
    metadata_cls: ClassVar[type[PagedMetadata]]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_cache(self.backend, kv_cache_spec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """A shared prefix needs no treatment of its own: its pages are read through every request's table."""
        return self.metadata_cls(
            common=common_attn_metadata,
            query_start_loc=tuple(common_attn_metadata.query_start_loc_cpu.tolist()),
            seq_lens=tuple(common_attn_metadata.seq_lens_cpu.tolist()),
            attention_chunk_size=self.kv_cache_spec.attention_chunk_size,
        )
