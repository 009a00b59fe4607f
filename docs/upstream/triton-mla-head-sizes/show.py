"""Show that TRITON_MLA declares any head size, and that the metadata of its steps take three sizes alone.

    python show.py

Exits 0 while the two differ, and 1 when they do not. Needs vLLM; no kernel runs.
"""

import sys

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend


def main() -> int:
    """Compare what the class declares with what the metadata take, for three sizes."""
    starts, differ = torch.tensor([0, 1], dtype=torch.int32), False
    for size in (288, 320, 576):
        declared, refusal = TritonMLABackend.supports_head_size(size), ""
        try:
            MLACommonMetadata(1, 1, 1, 1, starts, torch.tensor([0]), 1, 1, 0, head_dim=size)
        except ValueError as error:
            refusal = f"ValueError: {error}"
        print(f"head size {size}: supports_head_size is {declared}; the metadata: {refusal or 'taken'}")
        differ = differ or declared == bool(refusal)
    return 0 if differ else 1


if __name__ == "__main__":
    sys.exit(main())
