"""Show which arguments vLLM's metadata utilities take without a check.

    python show.py

Exits 0 while at least one is taken, and 1 when all are refused.
"""

import sys
from collections.abc import Callable

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import utils
from vllm.v1.worker.ubatch_utils import UBatchSlice, slice_query_start_locs, split_attn_metadata

STARTS, LENGTHS = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([3, 9], dtype=torch.int32)


def batch() -> CommonAttentionMetadata:
    """Return a batch of two requests with 3 and 2 new tokens."""
    return CommonAttentionMetadata(
        query_start_loc=STARTS,
        query_start_loc_cpu=STARTS,
        seq_lens=LENGTHS,
        num_reqs=2,
        num_actual_tokens=5,
        max_query_len=3,
        max_seq_len=9,
        block_table_tensor=torch.zeros(2, 1, dtype=torch.int32),
        slot_mapping=torch.arange(5),
        seq_lens_cpu_upper_bound=LENGTHS,
    )


CALLS: dict[str, Callable[[], object]] = {
    "slice_query_start_locs: requests 1 to 5 of 2": lambda: slice_query_start_locs(STARTS, slice(1, 5)).tolist(),
    "split_attn_metadata: the first request with the tokens of both": lambda: (
        split_attn_metadata([UBatchSlice(slice(0, 1), slice(0, 5))], batch())[0].num_actual_tokens
    ),
    "split_decodes_and_prefills: a threshold of -1": lambda: utils.split_decodes_and_prefills(batch(), -1),
    "compute_causal_conv1d_metadata: start locations that decrease": lambda: utils.compute_causal_conv1d_metadata(
        torch.tensor([0, 9, 8]), device=torch.device("cpu")
    )[0][8]["tot"],
    "get_dcp_local_seq_lens: rank 5 of 2": lambda: utils.get_dcp_local_seq_lens(LENGTHS, 2, 5).tolist(),
    "get_dcp_local_seq_lens: a length of -3": lambda: utils.get_dcp_local_seq_lens(torch.tensor([-3]), 2, 0).tolist(),
}


def main() -> int:
    """Make each call, and print what it returns or raises."""
    taken = 0
    for what, call in CALLS.items():
        try:
            print(f"{what}: returns {call()}")
            taken += 1
        except Exception as error:
            print(f"{what}: refused, {type(error).__name__}: {error}")
    return 0 if taken else 1


if __name__ == "__main__":
    sys.exit(main())
