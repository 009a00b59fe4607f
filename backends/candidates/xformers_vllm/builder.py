"""The builder of ``xformers_vllm``: decodes first, and the library's bias constructed from lists at every step.

Lengths are read back from the device twice per step; padding requests are part of the lists, with a query length of 0.
Nothing that it builds outlives a step, so no graph can be captured, and none is declared.
"""

from typing import Any

import torch

from attncheck.backends.candidates.xformers.availability import quiet_import
from attncheck.backends.candidates.xformers_vllm.metadata import XFormersAttentionMetadata
from attncheck.backends.contract import AttentionMetadataBuilder, CommonAttentionMetadata
from attncheck.reference import reorder_batch_to_split_decodes_and_prefills, split_decodes_and_prefills

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
