"""Show that CPU_ATTN leaves the output as it was where it is called without metadata.

    python show.py

Exits 0 while this is so, and 1 when the output is filled. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl


def main() -> int:
    """Call forward as a profiling run does, with an output that holds NaN."""
    impl = object.__new__(CPUAttentionBackendImpl)
    row, output = torch.ones(1, 1, 64), torch.full((1, 1, 64), float("nan"))
    impl.forward(None, row, row, row, torch.empty(0), None, output)
    left = int(output.isnan().sum())
    print(f"without metadata, {left} of 64 numbers of the output are what they were before")
    return 0 if left else 1


if __name__ == "__main__":
    sys.exit(main())
