"""A mixed batch over pages for the attention kernel: random blocks, NaN in every slot of no request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.reference import AttentionParams, paged_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Paged:
    """``lens``: (query_len, seq_len) of each request. ``layout``: the order of a page in memory."""

    lens: Sequence[tuple[int, int]]
    params: AttentionParams
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    block_size: int = 16
    layout: str = "NHD"
    first_block: int = 1
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p, draw = self.params, torch.Generator().manual_seed(self.seed)
        rows, width = sum(q for q, _ in self.lens), max(1, *(-(-s // self.block_size) for _, s in self.lens))
        num_blocks = self.first_block + width * len(self.lens)
        blocks = torch.randperm(num_blocks - self.first_block, generator=draw) + self.first_block
        self.block_table = blocks.reshape(-1, width).to(DEVICE, torch.int32)
        self.seq_lens = torch.tensor([s for _, s in self.lens], dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, *(q for q, _ in self.lens)]).cumsum(0)
        self.query_start_loc = starts.to(DEVICE, torch.int32)
        self.query = torch.randn(rows, p.num_heads, p.head_size, generator=draw).to(DEVICE, self.dtype)
        owned = torch.zeros(num_blocks, self.block_size, dtype=torch.bool)
        for request, (_, seq_len) in enumerate(self.lens):
            for position in range(seq_len):
                page = self.block_table[request, position // self.block_size]
                owned[page, position % self.block_size] = True
        self.key_cache, self.value_cache = (
            self._cache(num_blocks, size, owned, draw) for size in (p.head_size, p.value_head_size)
        )

    def _cache(self, num_blocks: int, size: int, owned: Tensor, draw: torch.Generator) -> Tensor:
        shape = (num_blocks, self.block_size, self.params.num_kv_heads, size)
        dtype = self.cache_dtype or self.dtype
        values = torch.randn(shape, generator=draw).masked_fill(~owned[:, :, None, None], torch.nan).to(dtype)
        if self.layout == "HND":
            values = values.transpose(1, 2).contiguous().transpose(1, 2)
        return values.to(DEVICE)

    def arguments(self) -> dict[str, Any]:
        slopes, sinks = (
            None if given is None else torch.tensor(given, device=DEVICE)
            for given in (self.params.alibi_slopes, self.params.sinks)
        )
        return {
            "block_table": self.block_table,
            "seq_lens": self.seq_lens,
            "query_start_loc": self.query_start_loc,
            "max_query_len": max(q for q, _ in self.lens),
            "params": self.params,
            "alibi_slopes": slopes,
            "sinks": sinks,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            **self.extra,
        }

    def attend(self, **changed: Any) -> tuple[Tensor, Tensor]:
        """Output and LSE of the kernel, NaN where it did not write."""
        from attncheck.backends.candidates.triton_unified.attention import unified_attention

        out = self.query.new_full((*self.query.shape[:2], self.params.value_head_size), torch.nan)
        lse = torch.full(self.query.shape[:2], torch.nan, device=DEVICE)
        arguments = {**self.arguments(), "output_lse": lse, **changed}
        unified_attention(self.query, self.key_cache, self.value_cache, out, **arguments)
        return out, lse

    def truth(self, **options: Any) -> tuple[Tensor, Tensor]:
        scales = {
            name: scale for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)) if scale is not None
        }
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.seq_lens,
            self.query_start_loc,
            self.params,
            **scales,
            **options,
        )

    def assert_right(self, allowed: float = 1e-5, **changed: Any) -> None:
        """The kernel's answer is the reference's: ``allowed`` for the output, a few roundings for the LSE."""
        (out, lse), (truth, truth_lse) = self.attend(**changed), self.truth()
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=allowed)
        torch.testing.assert_close(lse.double(), truth_lse, rtol=2e-6, atol=5e-6)


@pytest.fixture(scope="session")
def paged() -> Callable[..., Paged]:
    """``paged(lens, num_heads, num_kv_heads, head_size, **of the batch and of AttentionParams)``."""

    def make(lens: Sequence[tuple[int, int]], heads: tuple[int, int, int] = (2, 1, 16), **given: Any) -> Paged:
        of_batch = {name: given.pop(name) for name in tuple(given) if name in Paged.__dataclass_fields__}
        return Paged(lens, AttentionParams(*heads, **given), **of_batch)

    return make
