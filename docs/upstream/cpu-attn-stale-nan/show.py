"""Show that CPU_ATTN lets a NaN behind a request's last key reach every row of the request.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, HEAD, KEYS, ISA = 32, 64, 5, "vec"


def attend(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the answer of vLLM's kernel for one query of one head over the first ``KEYS`` rows of one page."""
    cache = torch.zeros(2, 1, 2 * PAGE, HEAD)  # pages, heads, keys and values, head size
    key_cache, value_cache = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys[:, None], values[:, None], key_cache, value_cache, torch.arange(PAGE) + PAGE, ISA
    )
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([KEYS], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        1,
        1,
        1,
        HEAD,
        lengths,
        torch.float32,
        starts,
        causal=True,
        sliding_window_size=-1,
        isa=ISA,
        enable_kv_split=True,
    )
    query, output = torch.ones(1, 1, HEAD), torch.empty(1, 1, HEAD)
    pages = torch.tensor([[1]], dtype=torch.int32)
    ops.cpu_attention_with_kv_cache(
        query, key_cache, value_cache, output, starts, lengths, HEAD**-0.5, True, None, -1, pages, 0.0, schedule, None
    )
    return output


def main() -> int:
    """Compare a clean page with one whose first slot behind the last key holds something else."""
    current_platform.import_kernels()
    torch.manual_seed(0)
    keys, values = torch.randn(PAGE, HEAD), torch.randn(PAGE, HEAD)
    clean = attend(keys, values)
    shown = False
    for what, left in {"NaN": float("nan"), "infinity": float("inf"), "1e30": 1e30}.items():
        stale = values.clone()
        stale[KEYS:] = left
        answer = attend(keys, stale)
        wrong = int((~torch.isfinite(answer)).sum())
        print(
            f"{what} in V behind the last key: {wrong} of {HEAD} numbers of the answer are not finite, "
            f"{'equal to' if torch.equal(answer, clean) else 'differs from'} the clean page's"
        )
        shown = shown or wrong > 0
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
