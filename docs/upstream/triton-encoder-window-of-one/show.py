"""Show that TRITON_ATTN's encoder attention takes a window of one key for no window at all.

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

from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, HEAD, SCALE = 9, 32, 0.5


def main() -> int:
    """Compare windows of one and of two keys to either side with the right answers."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(TOKENS, 1, HEAD, dtype=torch.float16, device=DEVICE) for _ in range(3))
    scores = SCALE * query[:, 0].double() @ key[:, 0].double().T
    places = torch.arange(TOKENS, device=DEVICE)
    metadata = SimpleNamespace(
        num_actual_tokens=TOKENS,
        max_query_len=TOKENS,
        query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32, device=DEVICE),
    )
    errors, unwindowed = {}, scores.softmax(1) @ value[:, 0].double()
    for window in (1, 2):
        impl = TritonAttentionImpl(1, HEAD, SCALE, 1, None, window, "auto", attn_type="encoder_only")
        output = torch.empty_like(query)
        impl.forward(None, query, key, value, torch.empty(0), metadata, output)
        seen = (places[:, None] - places).abs() < window
        right = scores.masked_fill(~seen, float("-inf")).softmax(1) @ value[:, 0].double()
        found = output[:, 0].double()
        errors[window] = (found - right).abs().max().item()
        print(
            f"sliding_window={window}: largest error {errors[window]:.1e}, "
            f"to an answer without a window {(found - unwindowed).abs().max().item():.1e}"
        )
    return 0 if errors[1] > 0.1 and errors[2] < 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
