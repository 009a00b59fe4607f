"""Show that xformers' paged operator refuses a batch in which one request is padding.

    python show.py

Exits 0 while this is so, and 1 when the batch is taken. Asks the operator alone, so that no GPU is needed.
"""

import sys

import torch
from xformers.ops import fmha
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalCausalWithOffsetPaddedKeysMask,
    PagedBlockDiagonalCausalWithOffsetPaddedKeysMask,
)

PAGE, HEAD = 64, 32


def refusals(query_lens: list[int], key_lens: list[int]) -> list[str]:
    """Return why the operator takes no batch of these lengths, leaving out reasons of this machine."""
    tables = torch.arange(len(query_lens), dtype=torch.int32)[:, None]
    bias = BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=query_lens, kv_padding=PAGE, kv_seqlen=key_lens
    ).make_paged(block_tables=tables, page_size=PAGE, paged_type=PagedBlockDiagonalCausalWithOffsetPaddedKeysMask)
    query = torch.empty(1, sum(query_lens), 1, 1, HEAD, dtype=torch.float16)
    cache = torch.empty(1, len(query_lens) * PAGE, 1, 1, HEAD, dtype=torch.float16)
    inputs = fmha.Inputs(query=query, key=cache, value=cache, attn_bias=bias)
    return [reason for reason in fmha.triton_splitk.FwOp.not_supported_reasons(inputs) if "query len" in reason]


def main() -> int:
    """Ask for two decodes, and for one decode beside a padding request of no token."""
    full, padded = refusals([1, 1], [40, 9]), refusals([1, 0], [40, 0])
    print(f"query lengths 1 and 1: {full or 'taken'}")
    print(f"query lengths 1 and 0: {padded or 'taken'}")
    return 0 if padded and not full else 1


if __name__ == "__main__":
    sys.exit(main())
