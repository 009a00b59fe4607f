"""Show that CPU_ATTN's metadata builder of encoder-only layers writes into the step's slot mapping.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys
from types import SimpleNamespace

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import EncoderOnlyAttentionSpec

PAGE, HEAD, TOKENS = 32, 64, 4


def main() -> int:
    """Build the metadata of one request, with slots that lie in page 5."""
    current_platform.import_kernels()
    config = SimpleNamespace(
        parallel_config=None,
        model_config=SimpleNamespace(dtype=torch.float32, get_num_attention_heads=lambda _parallel: 1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    spec = EncoderOnlyAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=HEAD, dtype=torch.float32)
    starts, slots = torch.tensor([0, TOKENS], dtype=torch.int32), 5 * PAGE + torch.arange(TOKENS)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=TOKENS,
        max_query_len=TOKENS,
        max_seq_len=TOKENS,
        block_table_tensor=torch.tensor([[5]], dtype=torch.int32),
        slot_mapping=slots,
        causal=False,
        positions=torch.arange(TOKENS),
    )
    before = slots.tolist()
    CPUAttentionMetadataBuilder(spec, [], config, torch.device("cpu")).build(0, step)
    print(f"slot_mapping of the step before build: {before}, after: {slots.tolist()}")
    return 0 if slots.tolist() != before else 1


if __name__ == "__main__":
    sys.exit(main())
