"""Show that TRITON_ATTN loses keys of a layer with a window that is not causal.

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
PAGE, HEAD, SCALE, WINDOW = 16, 32, 0.2, 8


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: object) -> torch.Tensor:
    """Return the answer of vLLM's unified kernel for one request of one head, whose keys fill pages of a cache."""
    pages = -(-len(keys) // PAGE)
    cache = torch.zeros(2, pages * PAGE, 1, HEAD, dtype=query.dtype, device=DEVICE)
    cache[0, : len(keys), 0], cache[1, : len(keys), 0] = keys, values
    key_cache, value_cache = cache.view(2, pages, PAGE, 1, HEAD)
    output = torch.empty_like(query)[:, None]
    unified_attention(
        q=query[:, None],
        k=key_cache,
        v=value_cache,
        out=output,
        cu_seqlens_q=torch.tensor([0, len(query)], dtype=torch.int32, device=DEVICE),
        max_seqlen_q=len(query),
        seqused_k=torch.tensor([len(keys)], dtype=torch.int32, device=DEVICE),
        max_seqlen_k=len(keys),
        softmax_scale=SCALE,
        block_table=torch.arange(pages, dtype=torch.int32, device=DEVICE)[None],
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
        **options,
    )
    return output[:, 0].double()


def main() -> int:
    """Ask 24 rows over as many keys, causal and not, with a window of 8 keys, and compare with the right answer."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 24, HEAD, dtype=torch.float16, device=DEVICE)
    distance = torch.arange(24, device=DEVICE)[:, None] - torch.arange(24, device=DEVICE)
    scores, errors = SCALE * query.double() @ keys.double().T, {}
    for causal in (True, False):
        seen = (distance < WINDOW) & (distance >= 0 if causal else distance > -WINDOW)
        right = scores.masked_fill(~seen, float("-inf")).softmax(1) @ values.double()
        found = attend(query, keys, values, causal=causal, window_size=(WINDOW - 1, 0 if causal else WINDOW - 1))
        errors[causal] = (found - right).abs().amax(1)
        print(
            f"causal={causal}: {int((errors[causal] > 0.01).sum())} of 24 rows are wrong, "
            f"largest error {errors[causal].max().item():.1e}"
        )
    return 0 if errors[False].max() > 0.01 > errors[True].max() else 1


if __name__ == "__main__":
    sys.exit(main())
