"""Show that TRITON_MLA writes NaN into the row of a padding request where it merges the parts of a decode.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 where the kernels cannot be run. Without a GPU, Triton's
interpreter runs them.
"""

import os
import sys

import torch

if not torch.cuda.is_available():  # Triton's interpreter runs the kernels, once vLLM has taken Triton for usable
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    backends["cpu"] = Backend(BaseBackend, DriverBase)
    import vllm.triton_utils

    del backends["cpu"]
    if not vllm.triton_utils.HAS_TRITON:
        print("this build of vLLM does not find Triton here; the kernels cannot be run")
        sys.exit(77)
from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, LATENT, ROTATED, HEADS, SPLITS = 16, 256, 64, 2, 1


def main() -> int:
    """Decode one token of a request with 40 keys beside one of a padding request with 0, as a captured graph does."""
    torch.manual_seed(0)
    cache = torch.randn(4, PAGE, 1, LATENT + ROTATED, dtype=torch.float16, device=DEVICE)
    query = torch.randn(2, HEADS, LATENT + ROTATED, dtype=torch.float16, device=DEVICE)
    output = torch.zeros(2, HEADS, LATENT, dtype=torch.float16, device=DEVICE)
    decode_attention_fwd(
        query,
        cache,
        cache[..., :LATENT],
        output,
        torch.zeros(2, HEADS, dtype=torch.float16, device=DEVICE),
        torch.tensor([[1, 2, 3], [0, 0, 0]], dtype=torch.int32, device=DEVICE),
        torch.tensor([40, 0], dtype=torch.int32, device=DEVICE),
        torch.zeros(2, HEADS, SPLITS, LATENT + 1, device=DEVICE),
        SPLITS,
        (LATENT + ROTATED) ** -0.5,
        PAGE,
        is_mla=True,
    )
    wrong, size = output.isnan().sum((1, 2)).tolist(), HEADS * LATENT
    print(f"NaN: {wrong[0]} of {size} numbers of the real row, {wrong[1]} of {size} of the padding row")
    return 0 if wrong[1] and not wrong[0] else 1


if __name__ == "__main__":
    sys.exit(main())
