"""Show that linear attention takes a prompt of one token for a decode, and does not clear the state of its slot.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM and torch, and no GPU.
"""

import sys
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.mamba.linear.minimax_linear_attn import clear_linear_attention_cache_for_new_sequences
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.linear_attn import LinearAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

OLD_STATE = 7.0
SHAPE = (2, 4, 4)


def metadata_of(lengths: list[int]) -> object:
    """Return what the builder of linear attention makes of a step of prompts that begin, in slots 1, 2 and so on."""
    builder = object.__new__(LinearAttentionMetadataBuilder)
    builder.kv_cache_spec = MambaSpec(block_size=64, shapes=(SHAPE,), dtypes=(torch.float32,))
    builder.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(mamba_cache_mode="none"))
    lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=len(lengths),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        block_table_tensor=torch.arange(1, len(lengths) + 1, dtype=torch.int32)[:, None],
        slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
        is_prefilling=torch.ones(len(lengths), dtype=torch.bool),
    )
    return builder.build(common_prefix_len=0, common_attn_metadata=common)


def main() -> int:
    """Clear the states of prompts that begin, as the layer's forward does, and see which still have the old one."""
    kept = {}
    for lengths in ([2, 33], [1, 33], [1]):
        metadata = metadata_of(lengths)
        states = torch.full((len(lengths) + 1, *SHAPE), OLD_STATE)
        clear_linear_attention_cache_for_new_sequences(states, metadata.state_indices_tensor, metadata)
        kept[tuple(lengths)] = [bool(states[slot].any()) for slot in range(1, len(lengths) + 1)]
        words = ", ".join("the old one" if old else "zeros" for old in kept[tuple(lengths)])
        print(f"prompts of {lengths} tokens: {metadata.num_decodes} decodes; states before the step: {words}")
    return 0 if kept == {(2, 33): [False, False], (1, 33): [True, False], (1,): [True]} else 1


if __name__ == "__main__":
    sys.exit(main())
