"""Show that a prompt with padding rows behind it ends in a RuntimeError of torch in CPU_MLA.

    python show.py

Exits 0 while the defect is there, and 1 when it is gone. Needs vLLM's CPU build.
"""

import sys

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata, MLACommonPrefillMetadata
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

LATENT, ROTATED, NOPE, WIDTH, TOKENS, SCALE = 512, 64, 128, 128, 20, 0.1


class Projection(torch.nn.Linear):
    """vLLM's linear layers return the bias beside the rows."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the projected rows."""
        return super().forward(rows), None


def attend(padding: int) -> None:
    """Answer a prompt of ``TOKENS`` rows with ``padding`` rows and a padding request behind it."""
    impl = CPUMLAImpl(
        1,
        LATENT + ROTATED,
        SCALE,
        1,
        None,
        None,
        "auto",
        None,
        "decoder",
        None,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROTATED,
        qk_head_dim=NOPE + ROTATED,
        v_head_dim=WIDTH,
        kv_b_proj=Projection(LATENT, NOPE + WIDTH, bias=False),
    )
    starts = torch.tensor([0, TOKENS, TOKENS], dtype=torch.int32)  # the second request is padding
    backend = CPUSDPAMLAPrefillBackend(1, SCALE, LATENT, NOPE, ROTATED, WIDTH, None)
    prefill = MLACommonPrefillMetadata(torch.zeros(2, 2, dtype=torch.int32), starts, TOKENS, prefill_backend=backend)
    backend.prepare_metadata(prefill)
    rows = TOKENS + padding
    metadata = MLACommonMetadata(2, TOKENS, TOKENS, rows, starts, torch.full((rows,), -1), 0, 0, 2, prefill=prefill)
    impl.forward_mha(
        torch.randn(rows, 1, NOPE + ROTATED),
        torch.randn(rows, LATENT),
        torch.randn(rows, 1, ROTATED),
        torch.zeros(4, 16, LATENT + ROTATED),
        metadata,
        torch.tensor(1.0),
        torch.zeros(rows, WIDTH),
    )


@torch.no_grad()
def main() -> int:
    """Answer the prompt without padding rows, and with two."""
    torch.manual_seed(0)
    failed = {}
    for padding in (0, 2):
        try:
            attend(padding)
            what = ""
        except RuntimeError as error:
            what = str(error).splitlines()[0]
        failed[padding] = bool(what)
        print(f"{TOKENS} rows of a prompt and {padding} of padding: {f'RuntimeError: {what}' if what else 'an answer'}")
    return 0 if failed == {0: False, 2: True} else 1


if __name__ == "__main__":
    sys.exit(main())
