"""Show that the CPU functions of Mamba-2's decodes ignore num_accepted_tokens, and mix the rows of requests.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm.model_executor.layers.mamba.ops.cpu.mamba_ssm import selective_state_update

HEADS, VALUES, SIZE = 2, 4, 8
SLOTS = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
"""Slots of two requests with two draft tokens each: the state after row t is in column t."""


def main() -> int:
    """Verify two draft tokens for each of two requests, as MambaMixer2.conv_ssm_forward does."""
    torch.manual_seed(0)
    before = torch.randn(7, HEADS, VALUES, SIZE)
    x, dt = torch.randn(6, HEADS, VALUES), torch.rand(6, HEADS)
    inner, outer = torch.randn(6, 1, SIZE), torch.randn(6, 1, SIZE)
    decay = -torch.rand(HEADS)
    failed = False
    for accepted in ([1, 1], [3, 2]):
        states, output = before.clone(), torch.zeros(6, HEADS, VALUES)
        selective_state_update(
            states,
            x,
            dt[:, :, None].expand(-1, -1, VALUES),
            decay[:, None, None].expand(-1, VALUES, SIZE),
            inner,
            outer,
            torch.zeros(HEADS, VALUES),
            dt_bias=torch.zeros(HEADS, VALUES),
            state_batch_indices=SLOTS,
            dst_state_batch_indices=SLOTS,
            out=output,
            num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
            cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32),
        )
        for request in range(2):
            state = before[SLOTS[request, accepted[request] - 1]]
            error = 0.0
            for row in range(3 * request, 3 * request + 3):
                state = state * (decay * dt[row]).exp()[:, None, None]
                state = state + (dt[row][:, None] * x[row])[:, :, None] * inner[row]
                error = max(error, float((output[row] - (state * outer[row]).sum(-1)).abs().max()))
            failed |= error > 0.01
            print(f"num_accepted_tokens {accepted}: request {request}: largest error {error:.2g}")
    return 0 if failed else 1


if __name__ == "__main__":
    sys.exit(main())
