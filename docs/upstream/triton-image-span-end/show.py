"""Show that TRITON_ATTN counts keys behind a chunk that ends within an image span.

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
PAGE, HEAD, SCALE = 16, 32, 0.2


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
        causal=True,
        window_size=(-1, -1),
        q_descale=None,
        k_descale=None,
        v_descale=None,
        **options,
    )
    return output[:, 0].double()


def main() -> int:
    """Ask eight rows at the end of 20 keys, with an image span that ends with them, or 20 keys later."""
    torch.manual_seed(0)
    rows, count, first = 8, 20, 14
    query = torch.randn(rows, HEAD, dtype=torch.float16, device=DEVICE)
    keys, values = torch.randn(2, count, HEAD, dtype=torch.float16, device=DEVICE)
    at, key_at = torch.arange(count - rows, count, device=DEVICE)[:, None], torch.arange(count, device=DEVICE)
    hidden = (key_at > at) & ((at < first) | (key_at < first))
    scores = (SCALE * query.double() @ keys.double().T).masked_fill(hidden, float("-inf"))
    errors = {}
    for last in (count - 1, 2 * count - 1):
        found = attend(
            query, keys, values, mm_prefix_range=torch.tensor([[[first, last]]], dtype=torch.int32).to(DEVICE)
        )
        wrong = []
        for zeros in (0, 12):  # 20 keys in tiles of 32
            behind = torch.zeros(rows, zeros, dtype=torch.float64, device=DEVICE)
            behind.masked_fill_(at < first, float("-inf"))
            truth = torch.cat([scores, behind], 1).softmax(1)[:, :count] @ values.double()
            wrong.append((found - truth).abs().max().item())
        errors[last] = wrong
        print(f"span {first} to {last} of {count} keys: largest error {wrong[0]:.1e}, as 12 more zeros {wrong[1]:.1e}")
    return 0 if errors[2 * count - 1][0] > 0.01 > errors[count - 1][0] else 1


if __name__ == "__main__":
    sys.exit(main())
