"""Show that a CPU's GDN layer loses the rows of its convolution after a step with fewer drafts than the most.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys
from types import SimpleNamespace

import torch
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

WIDTH, DRAFTS, HEADS, SIZE = 4, 3, 2, 64
CHANNELS, STATE_LEN = 3 * HEADS * SIZE, WIDTH - 1 + DRAFTS
WEIGHT = torch.randn(CHANNELS, 1, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
SEEN: list[torch.Tensor] = []


def split(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keep the convolved rows, and split them as the layer does."""
    SEEN.append(rows.clone())
    return tuple(each.reshape(1, len(rows), HEADS, SIZE).contiguous() for each in rows.chunk(3, dim=-1))


def step(rows: torch.Tensor, accepted: int, history: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Run the layer's function for one request that verifies drafts, on its slots 1 to 4; return the convolved rows."""
    layer = SimpleNamespace(
        conv1d=SimpleNamespace(weight=WEIGHT, bias=None),
        activation=None,
        A_log=torch.zeros(HEADS),
        dt_bias=torch.zeros(HEADS).bfloat16(),
        rearrange_mixed_qkv=split,
    )
    metadata = SimpleNamespace(
        num_spec_decodes=1,
        spec_state_indices_tensor=torch.tensor([[1, 2, 3, 4]], dtype=torch.int32),
        spec_query_start_loc=torch.tensor([0, len(rows)], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([accepted], dtype=torch.int32),
    )
    gates = torch.zeros(len(rows), HEADS).bfloat16()
    gdn_attention._spec_forward(layer, metadata, rows, gates, gates, history, states, WIDTH, STATE_LEN)
    return SEEN.pop()


def run(lengths: list[int], accepted: list[int]) -> str:
    """Run each step with its rows and accepted drafts, and compare all outputs with one convolution."""
    torch.manual_seed(0)
    history = torch.zeros(5, CHANNELS, STATE_LEN, dtype=torch.bfloat16)
    states = torch.zeros(5, HEADS, SIZE, SIZE)
    kept = torch.zeros(WIDTH - 1, CHANNELS).bfloat16()
    worst, last = 0.0, 1
    for count, taken in zip(lengths, accepted, strict=True):
        rows = torch.randn(count, CHANNELS).bfloat16()
        before = torch.cat([kept, rows])
        right = torch.nn.functional.conv1d(before.t()[None].float(), WEIGHT.float(), groups=CHANNELS)[0].t()
        try:
            seen = step(rows, last, history, states)
        except RuntimeError as error:
            return f"RuntimeError: {error}"
        worst = max(worst, float((seen.float() - right).abs().max()))
        kept, last = before[taken : taken + WIDTH - 1], taken
    return f"largest error {worst:.2g}"


def main() -> int:
    """Run steps that are all full, a step without drafts before others, and one after many accepted drafts."""
    answers = {
        "steps of 4, 4 and 4 rows": run([4, 4, 4], [2, 4, 1]),
        "steps of 4, 2 and 4 rows": run([4, 2, 4], [1, 1, 1]),
        "a step of 1 row after 4 accepted": run([4, 1], [4, 1]),
    }
    for what, answer in answers.items():
        print(f"{what}: {answer}")
    full, ragged, after = answers.values()
    is_there = float(full.split()[-1]) < 0.1 and (after.startswith("Runtime") or float(ragged.split()[-1]) > 0.1)
    return 0 if is_there else 1


if __name__ == "__main__":
    sys.exit(main())
