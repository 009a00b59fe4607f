"""Show that TRITON_ATTN weighs an attention sink wrongly in a layer with ALiBi.

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
PAGE, HEAD, SCALE, SLOPE, SINK = 16, 32, 0.2, 0.25, 1.0


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
    """Ask three rows behind 20 keys, with and without a sink, and compare with ALiBi measured from two places."""
    torch.manual_seed(0)
    rows, count = 3, 23
    query = torch.randn(rows, HEAD, dtype=torch.float16, device=DEVICE)
    keys, values = torch.randn(2, count, HEAD, dtype=torch.float16, device=DEVICE)
    slopes, sinks = torch.full((1,), SLOPE, device=DEVICE), torch.full((1,), SINK, device=DEVICE)
    at, key_at = torch.arange(count - rows, count, device=DEVICE)[:, None], torch.arange(count, device=DEVICE)
    plain = SCALE * query.double() @ keys.double().T

    def truth(origin: torch.Tensor | int, sink: float) -> torch.Tensor:
        scores = (plain + SLOPE * (key_at - origin)).masked_fill(key_at > at, float("-inf"))
        last = torch.full((rows, 1), sink, dtype=torch.float64, device=DEVICE)
        return torch.cat([scores, last], 1).softmax(1)[:, :-1] @ values.double()

    options = {"causal": True, "window_size": (-1, -1), "alibi_slopes": slopes}
    errors = {}
    for what, sink, more in (("without a sink", float("-inf"), {}), ("with a sink", SINK, {"sinks": sinks})):
        found = attend(query, keys, values, **options, **more)
        for origin, place in (("the query", at), ("the end of the context", count - rows)):
            errors[what, origin] = (found - truth(place, sink)).abs().max().item()
            print(f"{what}, ALiBi measured from {origin}: largest error {errors[what, origin]:.1e}")
    return 0 if errors["with a sink", "the query"] > 0.01 > errors["without a sink", "the query"] else 1


if __name__ == "__main__":
    sys.exit(main())
