"""Show that TRITON_ATTN's metadata builder writes 1 into the step's seq_lens when it builds for a capture.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs no GPU: the builder launches no kernel.
"""

import sys
from types import SimpleNamespace

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec

PAGE, HEAD, REQUESTS = 16, 64, 3


def seq_lens_after(builder_class: type) -> list[int]:
    """Return seq_lens of the step, which were 40, 7 and 25, after ``build_for_cudagraph_capture``."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda _parallel: 2,
        get_num_kv_heads=lambda _parallel: 1,
        get_head_size=lambda: HEAD,
        rswa_window=None,
    )
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=[1, 2, 4], static_forward_context={}
    )
    config = SimpleNamespace(model_config=model, parallel_config=None, compilation_config=compilation)
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=HEAD, dtype=torch.float16)
    starts, lengths = torch.arange(REQUESTS + 1, dtype=torch.int32), torch.tensor([40, 7, 25], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=REQUESTS,
        num_actual_tokens=REQUESTS,
        max_query_len=1,
        max_seq_len=40,
        block_table_tensor=torch.zeros(REQUESTS, 3, dtype=torch.int32),
        slot_mapping=torch.zeros(REQUESTS, dtype=torch.int64),
    )
    builder_class(spec, [], config, torch.device("cpu")).build_for_cudagraph_capture(step)
    return lengths.tolist()


def main() -> int:
    """Build for a capture with the builders of TRITON_ATTN and TRITON_ATTN_DIFFKV."""
    after = {
        "TRITON_ATTN": seq_lens_after(TritonAttentionMetadataBuilder),
        "TRITON_ATTN_DIFFKV": seq_lens_after(TritonAttentionDiffKVMetadataBuilder),
    }
    for name, lengths in after.items():
        print(f"{name}: seq_lens of the step before: [40, 7, 25], after: {lengths}")
    return 0 if any(lengths != [40, 7, 25] for lengths in after.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
