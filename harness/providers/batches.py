"""The batches of questions, in plain numbers: from case files, from a fixed list, and drawn."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

import torch

from attncheck.cases.model import Case
from attncheck.reference import CommonAttentionMetadata

MAX_REQUESTS = 512
"""Larger batches of case files are left out: they test nothing more than smaller ones, and take minutes."""

DRAWN_BATCHES = 150
"""Number of batches drawn, including duplicates."""


@dataclass(frozen=True)
class ProviderBatch:
    """One step. Per request: new tokens and total tokens; ``padding_tokens`` follow those of the last request.

    Padding requests are trailing ones with 0 new and 0 total tokens. ``index_dtype``: dtype of every index tensor
    except ``slot_mapping``.
    """

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_size: int = 16
    padding_tokens: int = 0
    causal: bool = True
    index_dtype: torch.dtype = torch.int32

    def __str__(self) -> str:
        """Return ``name (q 1 5 / s 7 9, ...)``, which is enough to make the batch by hand."""
        parts = [f"q {_listed(self.query_lens)} / s {_listed(self.seq_lens)}"]
        parts += [f"{self.padding_tokens} padding tokens"] if self.padding_tokens else []
        parts += [] if self.causal else ["not causal"]
        parts += [] if self.index_dtype == torch.int32 else ["int64"]
        return f"{self.name} ({', '.join(parts)})"

    @property
    def num_reqs(self) -> int:
        """Requests, including padding."""
        return len(self.query_lens)

    @property
    def starts(self) -> tuple[int, ...]:
        """First token of each request, and the end of the last."""
        return tuple(accumulate(self.query_lens, initial=0))

    @property
    def num_tokens(self) -> int:
        """New tokens, without padding."""
        return sum(self.query_lens)

    @property
    def has_padding_requests(self) -> bool:
        """Whether a request has neither tokens nor context."""
        return any(q == s == 0 for q, s in zip(self.query_lens, self.seq_lens, strict=True))

    @property
    def size(self) -> tuple[int, int]:
        """Sort key that puts small batches first, so that the first failing one is the easiest to read."""
        return (self.num_reqs, sum(self.seq_lens))

    def offsets(self) -> torch.Tensor:
        """Return ``query_start_loc`` on the host."""
        return torch.tensor(self.starts, dtype=self.index_dtype)

    def metadata(self, device: torch.device) -> CommonAttentionMetadata:
        """Return the batch as common attention metadata: new tensors on every call, no two of which share storage."""
        lens = torch.tensor(self.seq_lens, dtype=self.index_dtype)
        new = torch.tensor(self.query_lens, dtype=self.index_dtype)
        width = max(1, -(-max(self.seq_lens) // self.block_size))
        blocks = torch.arange(self.num_reqs * width).view(self.num_reqs, width)
        # A permutation of the blocks, so that reading a wrong row or column of the table shows.
        table = 1 + (blocks * 7919 + 11) % max(self.num_reqs * width, 1)
        rows = torch.repeat_interleave(torch.arange(self.num_reqs), new.long())
        positions = (lens - new - self.offsets()[:-1])[rows] + torch.arange(self.num_tokens)
        slots = table[rows, positions // self.block_size] * self.block_size + positions % self.block_size
        padding = torch.full((self.padding_tokens,), -1, dtype=torch.int64)
        return CommonAttentionMetadata(
            query_start_loc=self.offsets().to(device, copy=True),
            query_start_loc_cpu=self.offsets(),
            seq_lens=lens.to(device, copy=True),
            seq_lens_cpu=lens.clone(),
            num_computed_tokens_cpu=lens - new,
            num_reqs=self.num_reqs,
            num_actual_tokens=self.num_tokens + self.padding_tokens,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens),
            block_table_tensor=table.to(device, self.index_dtype, copy=True),
            slot_mapping=torch.cat([slots, padding]).to(device),
            causal=self.causal,
        )


ALWAYS = (
    ProviderBatch("one decode", (1,), (9,), block_size=4),
    ProviderBatch("one prompt", (9,), (9,), block_size=4),
    ProviderBatch("mixed", (3, 4, 5), (8, 4, 15), block_size=4),
    ProviderBatch("decodes before prompts", (1, 1, 5, 7), (30, 5, 9, 7), block_size=4),
    ProviderBatch("drafts", (2, 2, 2), (12, 7, 40), block_size=4),
    ProviderBatch("drafts and a prompt", (2, 2, 1, 9), (12, 7, 4, 20), block_size=4),
    ProviderBatch("not causal", (3, 4, 5), (8, 4, 15), block_size=4, causal=False),
    ProviderBatch("padded", (2, 3, 0, 0), (5, 9, 0, 0), block_size=4, padding_tokens=3),
    ProviderBatch("padded drafts", (2, 2, 0, 0), (12, 7, 0, 0), block_size=4, padding_tokens=4),
    ProviderBatch("padded decodes", (1, 1, 0), (12, 7, 0), block_size=4, padding_tokens=1),
    ProviderBatch("padding requests alone", (3, 1, 0), (5, 9, 0), block_size=4),
    ProviderBatch("padding tokens alone", (2, 3), (5, 9), block_size=4, padding_tokens=3),
    ProviderBatch("pages of one token", (1, 1, 3), (1, 4, 5), block_size=1),
    ProviderBatch("long cut request", (2, 8, 2), (4, 10, 2), block_size=4),
    ProviderBatch("wide indices", (1, 5, 2), (7, 9, 2), block_size=4, index_dtype=torch.int64),
)
"""Batches for every provider and all suites; every known departure shows in one of them."""


def batches_of(cases: Iterable[Case]) -> list[ProviderBatch]:
    """Return the distinct batches of cases, small ones first.

    Batches with more than ``MAX_REQUESTS`` requests, or with more new tokens than tokens in a request, are left out.
    """
    found: dict[tuple[object, ...], ProviderBatch] = {}
    for case in cases:
        spec = case.batch
        spare = spec.padding.requests
        if spec.num_requests + spare > MAX_REQUESTS or any(r.context_len < 0 for r in spec.requests):
            continue
        queries = tuple(request.query_len for request in spec) + (0,) * spare
        lens = tuple(request.total_len for request in spec) + (0,) * spare
        batch = ProviderBatch(case.key, queries, lens, case.cache.block_size, spec.padding.tokens, case.layer.is_causal)
        found.setdefault((queries, lens, batch.block_size, batch.padding_tokens, batch.causal), batch)
    return sorted(found.values(), key=lambda batch: batch.size)


def _listed(numbers: tuple[int, ...]) -> str:
    shown = " ".join(map(str, numbers[:12]))
    return shown if len(numbers) <= 12 else f"{shown} ... {len(numbers)} in all"


def drawn_batches(seed: int, count: int = DRAWN_BATCHES) -> list[ProviderBatch]:
    """Draw at most ``count`` distinct batches, small ones first.

    Lengths lie near multiples of the block size, where edge cases are. Some batches are sorted decodes first, some
    padded, a few not causal, a few with int64 indices.
    """
    random = Random(seed)
    drawn = {_drawn_batch(random): None for _ in range(count)}
    distinct = sorted(drawn, key=lambda batch: batch.size)
    return [replace(batch, name=f"drawn {number}") for number, batch in enumerate(distinct, start=1)]


def _drawn_batch(random: Random) -> ProviderBatch:
    block_size = random.choice((1, 2, 4, 16))
    near_edges = [max(1, pages * block_size + step) for pages in range(1, 7) for step in (-1, 0, 1)]
    lengths = [*near_edges, *(1, 2, 3) * 6]
    contexts = [*near_edges, *[0] * 12, 1, 2, 3]
    requests = [(random.choice(lengths), random.choice(contexts)) for _ in range(random.randint(1, 8))]
    if random.random() < 0.5:
        requests.sort()
    spare = (0,) * random.choice((0, 0, 1, 3))
    return ProviderBatch(
        name="",
        query_lens=tuple(new for new, _ in requests) + spare,
        seq_lens=tuple(new + context for new, context in requests) + spare,
        block_size=block_size,
        padding_tokens=random.choice((0, 0, 1, 8)),
        causal=random.random() < 0.75,
        index_dtype=torch.int64 if random.random() < 0.25 else torch.int32,
    )
