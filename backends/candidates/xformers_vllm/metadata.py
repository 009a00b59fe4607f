"""Metadata of a step of ``xformers_vllm``, with two views: the leading decodes, and the prefills after them.

The views are created on first access, in ``forward``, and their maxima are read from tensors. Each first access
therefore waits for the device, and in a captured graph would freeze the values that it read.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass
class XFormersAttentionMetadata:
    """Metadata with vLLM's fields in vLLM's order; ``attn_bias`` is the library's bias for the decodes.

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
