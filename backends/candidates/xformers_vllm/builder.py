"""The metadata of ``xformers_vllm`` and its builder: decodes first, and the library's bias constructed at every step.

Lengths are read back from the device twice per step; padding requests are part of the lists, with a query length of 0.
Nothing that the builder constructs outlives a step, so no graph can be captured, and none is declared.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.candidates.xformers.backend import quiet_import
from attncheck.backends.contract import AttentionMetadataBuilder, CommonAttentionMetadata
from attncheck.reference import reorder_batch_to_split_decodes_and_prefills, split_decodes_and_prefills


@dataclass
class XFormersAttentionMetadata:
    """Metadata with vLLM's fields in vLLM's order; ``attn_bias`` is the library's bias for the decodes.

    The two views, of the leading decodes and of the prefills after them, are created on first access, in ``forward``,
    and their maxima are read from tensors. Each first access therefore waits for the device, and in a captured graph
    would freeze the values that it read.

    num_actual_tokens: rows of the step, padding included.
    query_start_loc: int32 ``[R + 1]``.
    seq_lens: int32 ``[R]``.
    block_table: int32 ``[R, pages]``.
    slot_mapping: int64 ``[num_actual_tokens]``.
    num_*: counts of the split into decodes (at most one new token) and prefills; 0 in a view, which has no views
        itself.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    attn_bias: Any = None
    _cached_prefill_metadata: "XFormersAttentionMetadata | None" = None
    _cached_decode_metadata: "XFormersAttentionMetadata | None" = None

    @property
    def prefill_metadata(self) -> "XFormersAttentionMetadata | None":
        """View of the requests from ``num_decodes`` on, with their own start locations; None if there are none."""
        if self.num_prefills == 0:
            return None
        if self._cached_prefill_metadata is None:
            starts = self.query_start_loc[self.num_decodes :]
            self._cached_prefill_metadata = self._view(
                self.num_prefill_tokens,
                starts - starts[0],
                slice(self.num_decodes, None),
                self.slot_mapping[self.num_decode_tokens :],
                None,
            )
        return self._cached_prefill_metadata

    @property
    def decode_metadata(self) -> "XFormersAttentionMetadata | None":
        """View of the first ``num_decodes`` requests; None if no row belongs to a decode."""
        if self.num_decode_tokens == 0:
            return None
        if self._cached_decode_metadata is None:
            self._cached_decode_metadata = self._view(
                self.num_decode_tokens,
                self.query_start_loc[: self.num_decodes + 1],
                slice(None, self.num_decodes),
                self.slot_mapping[: self.num_decode_tokens],
                self.attn_bias,
            )
        return self._cached_decode_metadata

    def _view(
        self, num_tokens: int, starts: Tensor, requests: slice, slot_mapping: Tensor, attn_bias: Any
    ) -> "XFormersAttentionMetadata":
        seq_lens = self.seq_lens[requests]
        return XFormersAttentionMetadata(
            num_actual_tokens=num_tokens,
            max_query_len=int((starts[1:] - starts[:-1]).max().item()),
            query_start_loc=starts,
            max_seq_len=int(seq_lens.max().item()),
            seq_lens=seq_lens,
            block_table=self.block_table[requests],
            slot_mapping=slot_mapping,
            attn_bias=attn_bias,
        )


_missing: ImportError | None = None
try:
    with quiet_import():
        from xformers.ops.fmha.attn_bias import PagedBlockDiagonalCausalWithOffsetPaddedKeysMask
except ImportError as error:
    _missing = error
XFORMERS_AVAILABLE = _missing is None


class XFormersAttentionMetadataBuilder(AttentionMetadataBuilder[XFormersAttentionMetadata]):
    """Builder with the contract's default graph level, NEVER."""

    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Store the settings; raise ImportError, with the reason, if the library cannot be imported."""
        if not XFORMERS_AVAILABLE:
            raise ImportError(f"xformers cannot be imported: {_missing}") from _missing
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self._num_decodes = 0
        self._num_decode_tokens = 0

    def reorder_batch(self, input_batch: Any, scheduler_output: Any) -> bool:
        """Move requests with one new token to the front; return whether any moved."""
        return reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output, decode_threshold=1)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> XFormersAttentionMetadata:
        """Build the step's metadata; a shared prefix is ignored. Decodes make this wait for the device twice."""
        common = common_attn_metadata
        num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = split_decodes_and_prefills(
            common, decode_threshold=1
        )
        self._num_decodes, self._num_decode_tokens = num_decodes, num_decode_tokens
        attn_bias = None
        if num_decodes > 0:
            starts, block_tables = common.query_start_loc[: num_decodes + 1], common.block_table_tensor[:num_decodes]
            attn_bias = PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
                q_seqlen=(starts[1:] - starts[:-1]).tolist(),
                kv_seqlen=common.seq_lens[:num_decodes].tolist(),
                page_size=self.block_size,
                block_tables=block_tables,
                device=block_tables.device,
            )
        return XFormersAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            num_prefills=num_prefills,
            num_decodes=num_decodes,
            attn_bias=attn_bias,
        )
