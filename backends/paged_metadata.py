"""A step as our own candidates see it: the common metadata, its lengths on the host, and the builder that reads them.

Must not know: caches, how any candidate attends.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attncheck.backends.base.draft_trees import tree_of
from attncheck.backends.base.refusals import refuse_cache, refuse_tree
from attncheck.backends.contract import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class PagedMetadata:
    """One step for one group of layers: the common metadata, and its lengths as numbers on the host.

    ``tree``: bool ``[Q, Q]``, which new key each row of a request of Q rows may see; None: no tree. Not frozen, since
    vLLM's wrapper for fast prefill takes its fields over into an object of a derived class.
    """

    common: CommonAttentionMetadata
    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    attention_chunk_size: int | None
    tree: torch.Tensor | None = None
    common_prefix_len: int = 0

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
    """Reads the lengths from their host twins: no synchronisation, but numbers that a graph would freeze.

    So the level is ``NEVER``, unless a candidate reads the tensors of ``common`` instead and says so.
    """

    backend: ClassVar[type[AttentionBackend]]
    metadata_cls: ClassVar[type[PagedMetadata]]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_cache(self.backend, kv_cache_spec)
        self._tree = tree_of(vllm_config, device)
        refuse_tree(self.backend, self._tree)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """A shared prefix may be treated on its own; it need not, since every request's table names its pages."""
        return self.metadata_cls(
            common=common_attn_metadata,
            query_start_loc=tuple(common_attn_metadata.query_start_loc_cpu.tolist()),
            seq_lens=tuple(common_attn_metadata.seq_lens_cpu.tolist()),
            attention_chunk_size=self.kv_cache_spec.attention_chunk_size,
            tree=self._tree,
            common_prefix_len=common_prefix_len,
        )
