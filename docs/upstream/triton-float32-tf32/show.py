"""Show that TRITON_ATTN multiplies the float32 numbers of a float32 layer in TF32.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 without a CUDA GPU: an interpreter multiplies in float32.
"""

import sys

import torch

if not torch.cuda.is_available():
    print("this machine has no CUDA GPU; Triton's interpreter multiplies in float32")
    sys.exit(77)
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

PAGE, HEAD, TOKENS = 16, 64, 64


def main() -> int:
    """Attend a prompt, and compare its error to float64 with that of torch's float32 products."""
    torch.manual_seed(0)
    pages = TOKENS // PAGE
    query, keys, values = torch.randn(3, TOKENS, 1, HEAD, device="cuda")
    output = torch.zeros_like(query)
    unified_attention(
        q=query,
        k=keys.view(pages, PAGE, 1, HEAD),
        v=values.view(pages, PAGE, 1, HEAD),
        out=output,
        cu_seqlens_q=torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda"),
        max_seqlen_q=TOKENS,
        seqused_k=torch.tensor([TOKENS], dtype=torch.int32, device="cuda"),
        max_seqlen_k=TOKENS,
        softmax_scale=HEAD**-0.5,
        causal=True,
        window_size=(-1, -1),
        block_table=torch.arange(pages, dtype=torch.int32, device="cuda")[None],
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    errors = {
        "TRITON_ATTN": (output[:, 0].double() - attend(query, keys, values, torch.float64)).abs().max().item(),
        "torch in float32": (
            attend(query, keys, values, torch.float32).double() - attend(query, keys, values, torch.float64)
        )
        .abs()
        .max()
        .item(),
    }
    print("; ".join(f"error of {name}: {error:.1e}" for name, error in errors.items()))
    return 0 if errors["TRITON_ATTN"] > 1e-4 > 10 * errors["torch in float32"] else 1


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return causal attention of one head, [TOKENS, HEAD], with products in ``dtype``."""
    query, keys, values = (tensor[:, 0].to(dtype) for tensor in (query, keys, values))
    scores = query @ keys.T * HEAD**-0.5
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="cuda").triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(1) @ values


if __name__ == "__main__":
    sys.exit(main())
