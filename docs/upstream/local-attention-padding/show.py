"""Show that vLLM's virtual batches of local attention give a padding request a whole chunk of keys.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone.
"""

import sys

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

CHUNK, PAGE = 8, 2


def virtual_batches(pages: int) -> CommonAttentionMetadata:
    """Return the virtual batches of one real request and one padding request, with tables of ``pages`` pages."""
    starts, lengths = torch.tensor([0, 3, 3], dtype=torch.int32), torch.tensor([3, 0], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=2,
        num_actual_tokens=3,
        max_query_len=3,
        max_seq_len=3,
        block_table_tensor=torch.arange(2 * pages, dtype=torch.int32).view(2, pages),
        slot_mapping=torch.arange(3),
        seq_lens_cpu_upper_bound=lengths,
    )
    return make_local_attention_virtual_batches(CHUNK, batch, PAGE)[0]


def main() -> int:
    """Ask with a table as wide as a chunk, and with a narrower one."""
    local = virtual_batches(CHUNK // PAGE)
    print(
        f"a padding request of 0 keys becomes one of {local.seq_lens[-1].item()} keys "
        f"in pages {local.block_table_tensor[-1].tolist()}"
    )
    try:
        virtual_batches(CHUNK // PAGE - 2)
        refusal = ""
    except IndexError as error:
        refusal = str(error)
    print(f"with a table narrower than a chunk: {f'IndexError: {refusal}' if refusal else 'no error'}")
    return 0 if local.seq_lens[-1] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
