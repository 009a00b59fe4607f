"""Show that lightning_attention takes exp(slope) times too much from earlier blocks and from kv_history.

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
from vllm.model_executor.layers.lightning_attn import lightning_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, ROWS, SIZE, BLOCK, CUT = 2, 260, 64, 256, 200


def recurrence(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """Return the outputs [H, T, D] of S = exp(-slope) S + k v^T, o = q S, as vLLM's decode kernel computes them."""
    state, rows = torch.zeros(HEADS, SIZE, SIZE, dtype=torch.float64, device=DEVICE), []
    for t in range(ROWS):
        state = state * (-slopes.double()).exp()[:, None, None] + key[:, t, :, None] * value[:, t, None, :]
        rows.append(torch.einsum("hk,hkv->hv", query[:, t], state))
    return torch.stack(rows, dim=1)


def main() -> int:
    """Run a prompt of more than one block, then the same prompt in two chunks."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, ROWS, SIZE, device=DEVICE) / 8 for _ in range(3))
    slopes = torch.tensor([0.84, 0.05], device=DEVICE)
    right = recurrence(*(rows[0].double() for rows in (query, key, value)), slopes)
    nothing = torch.zeros(1, HEADS, SIZE, SIZE, device=DEVICE)
    whole, _ = lightning_attention(query, key, value, slopes, kv_history=nothing)
    errors = (whole[0] - right).abs().amax(dim=(0, 2))
    print(f"largest output {float(right.abs().max()):.2f}")
    print(f"one prompt of {ROWS} rows, largest error: rows before {BLOCK}: {float(errors[:BLOCK].max()):.2g}, ", end="")
    print(f"later rows: {float(errors[BLOCK:].max()):.2g}")
    first, then = slice(0, CUT), slice(CUT, CUT + 1)
    _, after = lightning_attention(query[:, :, first], key[:, :, first], value[:, :, first], slopes, kv_history=nothing)
    history = after[:, :, -1].contiguous()
    row, _ = lightning_attention(query[:, :, then], key[:, :, then], value[:, :, then], slopes, kv_history=history)
    own = (query[0, :, CUT] * key[0, :, CUT]).sum(-1, keepdim=True) * value[0, :, CUT]
    factors = ((row[0, :, 0] - own) / (right[:, CUT] - own)).median(dim=1).values
    print(f"one row on the history of {CUT}: what it takes from the history, in right amounts: ", end="")
    print(", ".join(f"{float(factor):.4f}" for factor in factors), end="; exp(slope): ")
    print(", ".join(f"{float(slope.exp()):.4f}" for slope in slopes))
    return 0 if torch.allclose(factors.float(), slopes.exp(), rtol=1e-3) else 1


if __name__ == "__main__":
    sys.exit(main())
