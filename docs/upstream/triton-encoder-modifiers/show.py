"""Show that TRITON_ATTN's encoder attention ignores the soft cap and the ALiBi slopes that its impl was made with.

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
TOKENS, HEAD, SCALE, CAP, SLOPE = 9, 32, 0.5, 2.0, 0.5


def answer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **modifier: object) -> torch.Tensor:
    """Return the answer of vLLM's impl for one encoder request of one head."""
    impl = TritonAttentionImpl(
        1,
        HEAD,
        SCALE,
        1,
        modifier.get("alibi_slopes"),
        None,
        "auto",
        logits_soft_cap=modifier.get("logits_soft_cap"),
        attn_type="encoder_only",
    )
    metadata = SimpleNamespace(
        num_actual_tokens=TOKENS,
        max_query_len=TOKENS,
        query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32, device=DEVICE),
    )
    output = torch.empty_like(query)
    impl.forward(None, query, key, value, torch.empty(0), metadata, output)
    return output[:, 0].double()


def main() -> int:
    """Compare both with the right answer, and with the one of a layer that has neither."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(TOKENS, 1, HEAD, dtype=torch.float16, device=DEVICE) for _ in range(3))
    scores = SCALE * query[:, 0].double() @ key[:, 0].double().T
    places = torch.arange(TOKENS, device=DEVICE)
    right = {
        "logits_soft_cap": (CAP, CAP * torch.tanh(scores / CAP)),
        "alibi_slopes": ([SLOPE], scores - SLOPE * (places[:, None] - places).abs()),
    }
    plain = answer(query, key, value)
    ignored = []
    for name, (setting, changed) in right.items():
        found = answer(query, key, value, **{name: setting})
        error = (found - changed.softmax(1) @ value[:, 0].double()).abs().max().item()
        print(
            f"{name}={setting}: largest error {error:.2f}; "
            f"{'the same as' if torch.equal(found, plain) else 'differs from'} a layer without it"
        )
        ignored.append(torch.equal(found, plain))
    return 0 if all(ignored) else 1


if __name__ == "__main__":
    sys.exit(main())
