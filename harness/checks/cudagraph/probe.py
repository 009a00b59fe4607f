"""A probe as data: the graphs to capture, and the steps to run with them."""

from dataclasses import dataclass, replace
from typing import Literal

from attncheck.reference.spec import AttentionCGSupport
from attncheck.reports.analysis.phrases import plural

Lengths = tuple[int, int]
"""(query_len, seq_len) of one request."""


DRAFT_UPDATE = "supports_draft_decode_metadata_update"
"""vLLM's claim that ``update_draft_decode_metadata`` in a graph makes ``build`` between its replays unnecessary."""

BLOCK_TABLE = "supports_update_block_table"
"""vLLM's claim that ``update_block_table`` makes metadata right that were built from another block table."""


@dataclass(frozen=True)
class Bucket:
    """The shape of one captured graph. ``query_len``: that of every request, or None for any that fit the tokens."""

    num_reqs: int
    num_tokens: int
    query_len: int | None

    @property
    def dummy_query_lens(self) -> tuple[int, ...]:
        """Query lengths at capture: the tokens divided equally, with the remainder added to the last request."""
        each, rest = divmod(self.num_tokens, self.num_reqs)
        return (*[each] * (self.num_reqs - 1), each + rest)

    def part(self, number: int) -> "Bucket":
        """Return the bucket of one of ``number`` micro-batches of equal size."""
        return replace(self, num_reqs=self.num_reqs // number, num_tokens=self.num_tokens // number)

    def __str__(self) -> str:
        rows = "in all" if self.query_len is None else "each"
        tokens = self.num_tokens if self.query_len is None else self.query_len
        return f"{plural(self.num_reqs, 'request')} of {plural(tokens, 'token')} {rows}"


@dataclass(frozen=True)
class ProbeStep:
    """One step. ``bucket``: the index of the graph's bucket, or None for a step without a graph.

    ``draft_index``: build metadata by ``build_for_drafting`` with this index, or by ``build`` if None. ``gains_pages``:
    first run a step of the same requests with one page less each, whose output is not judged.
    """

    requests: tuple[Lengths, ...]
    bucket: int | None = 0
    draft_index: int | None = None
    gains_pages: bool = False


@dataclass(frozen=True)
class Probe:
    """Buckets to capture in order with one impl, then steps in order. ``establishes`` completes "shows that ...".

    ``dummy_lens``: ``seq_lens`` at capture, either the query lengths or, as in older engines, the maximum. ``drafts``:
    number of speculative tokens in the builder's config. ``num_builders``: number of builders that build each step from
    the same common metadata, each with its own graphs. ``num_micro_batches``: number of parts of the batch, each with
    its own builder; all metadata are built before one graph runs all parts. ``claim``: the claim that the
    probe examines instead of its level, or "".
    """

    name: str
    level: AttentionCGSupport
    establishes: str
    buckets: tuple[Bucket, ...]
    turns: tuple[ProbeStep, ...]
    dummy_lens: Literal["shortest", "longest"] = "shortest"
    drafts: int = 0
    claim: str = ""
    num_builders: int = 1
    num_micro_batches: int = 1
