"""A mixed batch over pages for the attention kernel: random blocks, NaN in every slot of no request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.reference import AttentionParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Paged:
    """``lens``: (query_len, seq_len) of each request. Pages of 16 tokens; block 0 is of no request."""

    lens: Sequence[tuple[int, int]]
    params: AttentionParams
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        p, draw = self.params, torch.Generator().manual_seed(0)
        rows, width = sum(q for q, _ in self.lens), max(-(-s // 16) for _, s in self.lens)
        blocks = torch.randperm(width * len(self.lens), generator=draw) + 1
        self.block_table = blocks.reshape(-1, width).to(DEVICE, torch.int32)
        self.seq_lens = torch.tensor([s for _, s in self.lens], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, *(q for q, _ in self.lens)]).cumsum(0)
        self.query_start_loc = starts.to(DEVICE, torch.int32)
        self.query = torch.randn(rows, p.num_heads, p.head_size, generator=draw).to(DEVICE, self.dtype)
        owned = torch.zeros(len(blocks) + 1, 16, dtype=torch.bool)
        for request, (_, seq_len) in enumerate(self.lens):
            for position in range(seq_len):
                owned[self.block_table[request, position // 16], position % 16] = True
        shape = (*owned.shape, p.num_kv_heads, p.head_size)
        self.key_cache, self.value_cache = (
            torch.randn(shape, generator=draw).masked_fill(~owned[:, :, None, None], torch.nan).to(DEVICE, self.dtype)
            for _ in range(2)
        )

    def arguments(self) -> dict[str, Any]:
        return {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "max_query_len": max(q for q, _ in self.lens),
            "params": self.params,
        }

    def attend(self, **changed: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE of the kernel, NaN where it did not write."""
        from attncheck.backends.candidates.triton_unified.attention import unified_attention

        out = torch.full_like(self.query, torch.nan)
        lse = torch.full(self.query.shape[:2], torch.nan, device=DEVICE)
        arguments = {**self.arguments(), "output_lse": lse, **changed}
        unified_attention(self.query, self.key_cache, self.value_cache, out, **arguments)
        return out, lse


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    """``paged(lens, (num_heads, num_kv_heads, head_size), dtype=..., **of AttentionParams)``."""

    def make(
        lens: Sequence[tuple[int, int]],
        heads: tuple[int, int, int],
        *,
        dtype: torch.dtype = torch.float32,
        **given: Any,
    ) -> Paged:
        return Paged(lens, AttentionParams(*heads, **given), dtype)

    return make
