"""Show that FLASH_ATTN_MLA leaves rows of padding requests unwritten in a tensor that it allocates.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 without a GPU of compute capability 9.x or without FA3.
"""

import sys

import torch

try:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
except ImportError:
    print("this build of vLLM has no FlashAttention")
    sys.exit(77)

PAGE, LATENT, ROTATED, HEADS, ROWS = 64, 512, 64, 16, 8


def main() -> int:
    """Call FA3 as forward_mqa does: a decode of one request and rows of padding, in memory that held NaN before."""
    if not torch.cuda.is_available() or not is_fa_version_supported(3):
        print("this machine cannot run FA3, which needs a GPU of compute capability 9.x")
        return 77
    torch.manual_seed(0)
    cache = torch.randn(4, PAGE, 1, LATENT + ROTATED, dtype=torch.bfloat16, device="cuda")
    query = torch.randn(ROWS, HEADS, LATENT + ROTATED, dtype=torch.bfloat16, device="cuda")
    starts = torch.tensor([0] + [1] * ROWS, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([40] + [0] * (ROWS - 1), dtype=torch.int32, device="cuda")
    # The allocator gives the memory of freed tensors to the next one of their size.
    used = [torch.full((ROWS, HEADS, LATENT), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(16)]
    del used
    output = flash_attn_varlen_func(
        q=query[..., LATENT:],
        k=cache[..., LATENT:],
        v=cache[..., :LATENT],
        q_v=query[..., :LATENT],
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=40,
        seqused_k=lengths,
        block_table=torch.ones(ROWS, 1, dtype=torch.int32, device="cuda"),
        softmax_scale=(LATENT + ROTATED) ** -0.5,
        causal=True,
        fa_version=3,
        num_splits=32,
    )
    real, padding = int(output[0].isnan().sum()), int(output[1:].isnan().sum())
    size = HEADS * LATENT
    print(f"NaN: {real} of {size} numbers of the real row, {padding} of {(ROWS - 1) * size} of padding rows")
    return 0 if padding and not real else 1


if __name__ == "__main__":
    sys.exit(main())
