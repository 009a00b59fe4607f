"""Show that vLLM's micro-batches lose fields of the batch they are cut from, `causal` among them.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone.
"""

import sys

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata


def main() -> int:
    """Cut a batch of two requests between them, and look at what the halves say."""
    starts, lengths = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=2,
        num_actual_tokens=5,
        max_query_len=3,
        max_seq_len=9,
        block_table_tensor=torch.zeros(2, 1, dtype=torch.int32),
        slot_mapping=torch.arange(5),
        causal=False,
        seq_lens_cpu_upper_bound=lengths,
        positions=torch.tensor([0, 1, 2, 7, 8]),
        is_prefilling=torch.tensor([True, False]),
        dcp_local_seq_lens=lengths,
        encoder_seq_lens=lengths,
    )
    halves = split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 3)), UBatchSlice(slice(1, 2), slice(3, 5))], batch)
    print(f"causal: False becomes {[half.causal for half in halves]}")
    for name in ("positions", "is_prefilling", "dcp_local_seq_lens", "encoder_seq_lens"):
        print(f"{name}: {getattr(batch, name).tolist()} becomes {[getattr(half, name) for half in halves]}")
    return 0 if all(half.causal is True for half in halves) else 1


if __name__ == "__main__":
    sys.exit(main())
