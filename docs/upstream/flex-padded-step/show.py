"""Show that FLEX_ATTENTION's mask of a padded step reads behind the ids of its tokens.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs no GPU: the mask is evaluated without compiling it.
"""

import sys
from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flex_attention import FlexAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec

PAGE, HEAD, PAGES, TOKENS, PADDED = 16, 64, 8, 21, 40


def main() -> int:
    """Build the metadata of a request with 21 new tokens, padded to 40 as for a full graph; evaluate the mask."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda _parallel: 2,
        get_num_kv_heads=lambda _parallel: 1,
        get_head_size=lambda: HEAD,
        max_model_len=128,
        rswa_window=None,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=None,
        cache_config=SimpleNamespace(num_gpu_blocks=PAGES),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL, static_forward_context={}),
        attention_config=SimpleNamespace(
            flex_attn_block_m=None, flex_attn_block_n=None, flex_attn_q_block_size=None, flex_attn_kv_block_size=None
        ),
    )
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=HEAD, dtype=torch.float16)
    starts, lengths = torch.tensor([0, TOKENS, TOKENS], dtype=torch.int32), torch.tensor([30, 0], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=2,
        num_actual_tokens=PADDED,
        max_query_len=TOKENS,
        max_seq_len=30,
        block_table_tensor=torch.tensor([[1, 2], [0, 0]], dtype=torch.int32),
        slot_mapping=torch.arange(PAGE, PAGE + PADDED),
    )
    metadata = FlexAttentionMetadataBuilder(spec, [], config, torch.device("cpu")).build(0, step)
    rows, groups = metadata.num_actual_tokens, metadata.block_mask.kv_num_blocks.shape[-1]
    print(
        f"{rows} rows of the query; ids for {len(metadata.doc_ids)}; "
        f"blocks of keys for {groups * metadata.q_block_size}"
    )
    zero = torch.zeros((), dtype=torch.int64)
    for row in range(rows):
        try:
            metadata.mask_mod(zero, zero, torch.tensor(row), torch.tensor(PAGE))
        except IndexError as error:
            print(f"mask_mod of row {row}: IndexError: {error}")
            return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
