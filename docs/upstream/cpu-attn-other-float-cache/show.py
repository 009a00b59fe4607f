"""Show that CPU_ATTN's writer takes a cache of another float dtype for the layer's own, and writes past its end.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, HEAD, ISA = 32, 64, "vec"


def main() -> int:
    """Write one float32 row to the last slot of a bfloat16 cache that lies before other memory."""
    current_platform.import_kernels()
    size = 2 * PAGE * HEAD
    memory = torch.zeros(4 * size, dtype=torch.bfloat16)  # the cache, and three times as much behind it
    key_cache, value_cache = memory[:size].view(1, 1, 2 * PAGE, HEAD).chunk(2, dim=2)
    row = torch.ones(1, 1, HEAD)
    try:
        ops.cpu_attn_reshape_and_cache(
            row, row, key_cache, value_cache, torch.tensor([PAGE - 1]), ISA, kv_cache_dtype="bfloat16"
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        print(f"the writer refuses it: {error}")
        return 1
    behind = int((memory[size:] != 0).sum())
    read = value_cache[0, 0, PAGE - 1].float()
    print(f"{behind} numbers behind the cache were changed; the slot holds {int((read == 1).sum())} of {HEAD} values")
    return 0 if behind else 1


if __name__ == "__main__":
    sys.exit(main())
