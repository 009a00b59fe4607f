"""Show that TRITON_ATTN_DIFFKV says it supports attention that is not causal, and always masks causally.

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
from types import SimpleNamespace

from vllm.v1.attention.backends.triton_attn_diffkv import TritonAttentionDiffKVBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, HEAD, SCALE, TOKENS = 16, 32, 0.2, 9


def main() -> int:
    """Ask a request that is not causal, and compare with the right answer and with the causal one."""
    torch.manual_seed(0)
    backend = TritonAttentionDiffKVBackend
    backend.set_head_size_v(HEAD)
    impl = backend.get_impl_cls()(1, HEAD, SCALE, 1, None, None, "auto")
    query, keys, values = torch.randn(3, TOKENS, 1, HEAD, dtype=torch.float16, device=DEVICE)
    cache = torch.zeros(1, 1, PAGE, 2 * HEAD, dtype=torch.float16, device=DEVICE)
    cache[0, 0, :TOKENS, :HEAD], cache[0, 0, :TOKENS, HEAD:] = keys[:, 0], values[:, 0]
    one = torch.ones((), device=DEVICE)
    metadata = SimpleNamespace(
        num_actual_tokens=TOKENS,
        max_query_len=TOKENS,
        max_seq_len=TOKENS,
        query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32, device=DEVICE),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        causal=False,
        seq_threshold_3D=0,
        num_par_softmax_segments=16,
        softmax_segm_output=torch.zeros(1, 1, 16, HEAD, device=DEVICE),
        softmax_segm_max=torch.zeros(1, 1, 16, device=DEVICE),
        softmax_segm_expsum=torch.zeros(1, 1, 16, device=DEVICE),
    )
    output = torch.empty_like(query)
    impl.forward(
        SimpleNamespace(_q_scale=one, _k_scale=one, _v_scale=one), query, keys, values, cache, metadata, output
    )
    scores = SCALE * query[:, 0].double() @ keys[:, 0].double().T
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=DEVICE).triu(1)
    truths = {"not causal": scores, "causal": scores.masked_fill(hidden, float("-inf"))}
    errors = {
        what: (output[:, 0].double() - seen.softmax(1) @ values[:, 0].double()).abs().max().item()
        for what, seen in truths.items()
    }
    print(
        f"supports_non_causal(): {backend.supports_non_causal()}; metadata.causal: False; "
        + ", ".join(f"error to the {what} answer {error:.1e}" for what, error in errors.items())
    )
    return 0 if backend.supports_non_causal() and errors["not causal"] > 0.01 > errors["causal"] else 1


if __name__ == "__main__":
    sys.exit(main())
