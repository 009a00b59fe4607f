"""One layer of the unified backend: maps the contract's arguments to those of the launches.

Nothing here depends on lengths, which a graph would freeze.
"""

from typing import Any

from torch import Tensor

from attncheck.backends.candidates.triton_unified.attention import ragged_attention, unified_attention
from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend, UnifiedMetadata
from attncheck.backends.candidates.triton_unified.cache import reshape_and_cache
from attncheck.backends.contract import AttentionLayer
from attncheck.backends.paged import PagedImpl
from attncheck.backends.paged_metadata import PagedMetadata


class UnifiedImpl(PagedImpl):
    """One layer."""

    backend = UnifiedBackend
    metadata_cls = UnifiedMetadata

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for size in (self.head_size, self.head_size_v):
            self.backend.validate_head_size(size)

    def write(
        self,
        layer: AttentionLayer,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, **scales)

    def attend(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
        output_scale: Tensor | None = None,
    ) -> None:
        common = metadata.common
        rows = slice(0, common.num_actual_tokens)
        given: dict[str, Any] = {
            "query_start_loc": common.query_start_loc,
            "max_query_len": common.max_query_len,
            "params": self.params(metadata),
            "alibi_slopes": self.slopes_on(query.device),
            "sinks": self.sinks,
            "output_lse": None if output_lse is None else output_lse[rows],
            "output_scale": output_scale,
        }
        if caches is not None:
            unified_attention(
                query[rows],
                *caches,
                output[rows],
                block_table=common.block_table_tensor,
                seq_lens=common.seq_lens,
                k_scale=layer._k_scale,
                v_scale=layer._v_scale,
                tree=metadata.tree,
                scratch=metadata.scratch if isinstance(metadata, UnifiedMetadata) else None,
                **given,
            )
        elif key is not None and value is not None:
            ragged_attention(query[rows], key, value, output[rows], **given)
        else:
            raise RuntimeError("neither a cache nor keys and values to attend to")

    def attend_quantised(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        caches: tuple[Tensor, Tensor] | None,
        metadata: PagedMetadata,
        output: Tensor,
        output_lse: Tensor | None,
        output_scale: Tensor,
    ) -> None:
        """Attend; the kernel itself stores the codes, only for rows of requests."""
        self.attend(layer, query, key, value, caches, metadata, output, output_lse, output_scale)
