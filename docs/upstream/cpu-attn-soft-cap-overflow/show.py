"""Show that CPU_ATTN answers NaN where a score is more than 88.7 times the soft cap.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 on a CPU without AVX-512. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, HEAD, CAP, ISA = 32, 64, 0.5, "vec"


def answer_at(ratio: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vLLM's answer and the right one where one of two keys scores ``ratio`` soft caps."""
    keys, values = torch.zeros(2, 1, HEAD, dtype=dtype), torch.randn(2, 1, HEAD).to(dtype)
    keys[0, 0, 0] = ratio * CAP
    query = torch.zeros(1, 1, HEAD, dtype=dtype)
    query[0, 0, 0] = 1.0
    key_cache, value_cache = torch.zeros(1, 1, 2 * PAGE, HEAD, dtype=dtype).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(2), ISA)
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        1, 1, 1, HEAD, lengths, dtype, starts, causal=True, sliding_window_size=-1, isa=ISA, enable_kv_split=True
    )
    output = torch.empty(1, 1, HEAD, dtype=dtype)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    ops.cpu_attention_with_kv_cache(
        query, key_cache, value_cache, output, starts, lengths, 1.0, True, None, -1, pages, CAP, schedule, None
    )
    scores = CAP * torch.tanh(keys[:, 0].double() @ query[0, 0].double() / CAP)
    return output[0, 0], scores.softmax(0) @ values[:, 0].double()


def main() -> int:
    """Ask for a score below the limit, and for scores above it."""
    if not torch.cpu._is_avx512_supported():
        print("the kernels that vLLM loads on a CPU without AVX-512 lack this code")
        return 77
    current_platform.import_kernels()
    torch.manual_seed(0)
    shown = False
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for ratio in (80.0, 90.0, -90.0):
            answer, right = answer_at(ratio, dtype)
            is_finite = bool(torch.isfinite(answer).all())
            error = (answer.double() - right).abs().max().item()
            print(f"{dtype}, a score of {ratio:g} soft caps: {f'largest error {error:.1e}' if is_finite else 'NaN'}")
            shown = shown or not is_finite
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
