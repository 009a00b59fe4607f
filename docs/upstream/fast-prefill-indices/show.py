"""Show that vLLM's fast prefill takes logits indices that are not the last tokens of their request.

    python show.py

Exits 0 while this is so, and 1 when they are refused or answered rightly.
"""

import sys

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_kv_sharing_fast_prefill_common_attn_metadata


def main() -> int:
    """Ask for the logits of the first of four tokens of a request, and look at the position that is computed."""
    starts, lengths = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=1,
        num_actual_tokens=4,
        max_query_len=4,
        max_seq_len=4,
        block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(4),
        logits_indices_padded=torch.tensor([0]),
        num_logits_indices=1,
        max_logits_per_req=1,
        seq_lens_cpu_upper_bound=lengths,
    )
    try:
        made = make_kv_sharing_fast_prefill_common_attn_metadata(batch)
    except (AssertionError, ValueError) as error:
        print(f"refused: {error}")
        return 1
    rows, keys = int(made.query_start_loc[-1]), int(made.seq_lens[0])
    print(
        f"asked for token 0, which sees 1 key; the metadata describe {rows} row at position {keys - rows}, "
        f"which sees {keys} keys"
    )
    return 0 if keys - rows != 0 else 1


if __name__ == "__main__":
    sys.exit(main())
