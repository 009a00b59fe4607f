"""Show that the decode kernel of CPU_MLA ignores the stride of the block table's rows.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

PAGE, ROW, LATENT = 16, 576, 512


def attend(query: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the answer of vLLM's kernel for one decode of one head per request."""
    output = torch.zeros(len(query), 1, LATENT)
    ops.mla_decode_kvcache_cpu(output, query, cache, ROW**-0.5, table, lengths)
    return output


def main() -> int:
    """Decode two requests, once with a block table of its own and once with a slice of a wider table."""
    current_platform.import_kernels()
    torch.manual_seed(0)
    cache, query = torch.randn(8, PAGE, ROW), torch.randn(2, 1, ROW)
    lengths = torch.tensor([2 * PAGE, 2 * PAGE], dtype=torch.int32)
    wide = torch.tensor([[1, 2, 5, 6], [3, 4, 7, 0]], dtype=torch.int32)
    sliced, whole = wide[:, :2], wide[:, :2].contiguous()
    answer, right = attend(query, cache, sliced, lengths), attend(query, cache, whole, lengths)
    packed = wide.flatten()[:4].view(2, 2)  # the entries in memory, taken for rows without a gap
    misread = attend(query, cache, packed, lengths)
    for request in range(2):
        error = (answer[request] - right[request]).abs().max().item()
        print(
            f"request {request}, pages {whole[request].tolist()}: error {error:.1e}; the answer "
            f"{'equals' if torch.equal(answer[request], misread[request]) else 'differs from'} "
            f"that of pages {packed[request].tolist()}"
        )
    return 0 if not torch.equal(answer[1], right[1]) else 1


if __name__ == "__main__":
    sys.exit(main())
