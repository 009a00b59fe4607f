"""Show that TRITON_ATTN writes NaN into the row of a padding request where it merges parts of a decode.

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
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, HEAD, SEGMENTS = 16, 32, 16


def main() -> int:
    """Decode one token of a request with 40 keys beside a row of padding, as a captured graph does."""
    torch.manual_seed(0)
    cache = torch.randn(2, 4, PAGE, 1, HEAD, dtype=torch.float16, device=DEVICE)
    query, output = torch.randn(2, 1, HEAD, dtype=torch.float16, device=DEVICE), torch.zeros(2, 1, HEAD, device=DEVICE)
    unified_attention(
        q=query,
        k=cache[0],
        v=cache[1],
        out=output,
        cu_seqlens_q=torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE),
        max_seqlen_q=1,
        seqused_k=torch.tensor([40, 0], dtype=torch.int32, device=DEVICE),
        max_seqlen_k=40,
        softmax_scale=HEAD**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=torch.tensor([[1, 2, 3], [0, 0, 0]], dtype=torch.int32, device=DEVICE),
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        seq_threshold_3D=8,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.zeros(2, 1, SEGMENTS, HEAD, device=DEVICE),
        softmax_segm_max=torch.zeros(2, 1, SEGMENTS, device=DEVICE),
        softmax_segm_expsum=torch.zeros(2, 1, SEGMENTS, device=DEVICE),
    )
    wrong = output.isnan().sum((1, 2)).tolist()
    print(f"NaN: {wrong[0]} of {HEAD} numbers of the real row, {wrong[1]} of {HEAD} of the padding row")
    return 0 if wrong[1] and not wrong[0] else 1


if __name__ == "__main__":
    sys.exit(main())
