"""Show that CPU_ATTN leaves rows unwritten whose request has no key at all.

    python show.py

Exits 0 while this is so, and 1 when the rows are written. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, HEAD, ISA = 32, 64, "vec"


def main() -> int:
    """Ask one row of a request with no key and one row of a request with three, with an output that holds 7."""
    current_platform.import_kernels()
    torch.manual_seed(0)
    key_cache, value_cache = torch.randn(2, 1, 2 * PAGE, HEAD).chunk(2, dim=2)
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        2,
        1,
        1,
        HEAD,
        lengths,
        torch.float32,
        starts,
        causal=False,
        sliding_window_size=-1,
        isa=ISA,
        enable_kv_split=True,
    )
    output, pages = torch.full((2, 1, HEAD), 7.0), torch.tensor([[0], [1]], dtype=torch.int32)
    ops.cpu_attention_with_kv_cache(
        torch.randn(2, 1, HEAD),
        key_cache,
        value_cache,
        output,
        starts,
        lengths,
        HEAD**-0.5,
        False,
        None,
        -1,
        pages,
        0.0,
        schedule,
        None,
    )
    left = [int((row == 7.0).sum()) for row in output]
    print(f"numbers left as they were: {left[0]} of {HEAD} without a key, {left[1]} of {HEAD} with three keys")
    return 0 if left == [HEAD, 0] else 1


if __name__ == "__main__":
    sys.exit(main())
