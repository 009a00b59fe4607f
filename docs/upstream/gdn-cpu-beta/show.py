"""Show that fused_gdn_gating_cpu rounds beta three times in layers with few heads, and once in others.

    python show.py

Exits 0 while the defect is there, 1 when it is gone, and 77 where the operator is missing. Needs vLLM's CPU build.
"""

import sys

import torch
import vllm._custom_ops as ops


def worst(heads: int) -> tuple[float, bool]:
    """Return the largest relative error of beta, and whether it equals 1 / (1 + exp(-b)) with each result rounded."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bits = bits[bits.float().abs() <= 8]  # NaN is left out, too
    b = bits[: len(bits) // heads * heads].view(-1, heads)
    zeros = torch.zeros(heads)
    _, beta = ops.fused_gdn_gating_cpu(A_log=zeros, a=torch.zeros_like(b), b=b, dt_bias=zeros.bfloat16())
    right = torch.sigmoid(b.double())
    stepwise = 1 / (1 + (-b).exp())  # torch rounds each result to bfloat16
    return float(((beta[0].double() - right) / right).abs().max()), bool((beta[0] == stepwise).all())


def main() -> int:
    """Compute beta for 16 and for 32 value heads."""
    if not hasattr(torch.ops._C, "fused_gdn_gating_cpu"):
        print("this build of vLLM has no fused_gdn_gating_cpu")
        return 77
    errors = {}
    for heads in (16, 32):
        errors[heads], is_stepwise = worst(heads)
        print(f"{heads} heads: largest relative error {errors[heads]:.4f}; each result rounded: {is_stepwise}")
    print(f"rounding once: {2**-8:.4f}")
    return 0 if errors[16] > 1.5 * errors[32] else 1


if __name__ == "__main__":
    sys.exit(main())
