"""Show that the decode kernel of AMX_MLA writes NaN into the row of a padding request.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 on a CPU without AVX512_BF16. Needs vLLM's CPU build, and
no AMX.
"""

import sys

import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.amx_mla import _expand_block_table

PAGE, ROW, LATENT, HEADS, SPLITS = 32, 576, 512, 4, 1


def main() -> int:
    """Decode one token of a request with 40 keys beside one of a padding request with 0, as forward_mqa does."""
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "decode_attention_cpu"):
        print("the kernels that vLLM loads on this CPU are without those of AMX_MLA")
        return 77
    torch.manual_seed(0)
    cache = torch.randn(4 * PAGE, 1, ROW).bfloat16()
    table = torch.tensor([[1, 2], [0, 0]], dtype=torch.int32)
    output = torch.zeros(2, HEADS, LATENT, dtype=torch.bfloat16)
    ops.cpu_mla_decode(
        torch.randn(2, HEADS, ROW).bfloat16(),
        cache,
        cache[..., :LATENT],
        output,
        None,
        None,
        None,
        torch.zeros(2, HEADS, SPLITS, LATENT + 1),
        _expand_block_table(table, PAGE),
        torch.arange(2),
        torch.tensor([40, 0]),
        ROW**-0.5,
        0.0,
        False,
        0,
        None,
        None,
    )
    real, padding = output.isnan().sum((1, 2)).tolist()
    print(f"NaN: {real} of {HEADS * LATENT} numbers of the real row, {padding} of {HEADS * LATENT} of the padding row")
    return 0 if padding and not real else 1


if __name__ == "__main__":
    sys.exit(main())
