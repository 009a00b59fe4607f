"""A probe as data: graphs that are captured, and the steps that are made with them."""

from dataclasses import dataclass, replace
from typing import Literal

from attncheck.reference.spec import AttentionCGSupport

Lengths = tuple[int, int]
"""(query_len, seq_len) of one request."""


@dataclass(frozen=True)
class Bucket:
    """The shape of one captured graph. ``query_len``: of every request; None: any that come to ``num_tokens``."""

    num_reqs: int
    num_tokens: int
    query_len: int | None

    @property
    def dummy_query_lens(self) -> tuple[int, ...]:
        """Query lengths at capture: the tokens shared out, what is left over to the last request."""
        each, rest = divmod(self.num_tokens, self.num_reqs)
        return (*[each] * (self.num_reqs - 1), each + rest)

    def part(self, number: int) -> "Bucket":
        """Return one of so many micro-batches of equal size."""
        return replace(self, num_reqs=self.num_reqs // number, num_tokens=self.num_tokens // number)

    def __str__(self) -> str:
        rows = "mixed" if self.query_len is None else f"of {self.query_len}"
        return f"{self.num_reqs} requests {rows}, {self.num_tokens} tokens"


@dataclass(frozen=True)
class ProbeStep:
    """One step: by the graph of ``bucket`` (an index; None: without a graph).

    ``draft_index``: metadata come from ``build_for_drafting`` with this index; None: from ``build``. ``gains_pages``: a
    step of the same requests comes before, in which each had a page less; its answers are not judged.
    """

    requests: tuple[Lengths, ...]
    bucket: int | None = 0
    draft_index: int | None = None
    gains_pages: bool = False


@dataclass(frozen=True)
class Probe:
    """Buckets captured in order with one impl, then steps in order. ``establishes`` completes "shows that ...".

    ``dummy_lens``: what stands in ``seq_lens`` at capture: the query length, or as older engines do, the maximum.
    ``drafts``: speculated tokens the builder's config speaks of. ``num_builders``: all of them build every step from
    one common metadata, and each has graphs of its own. ``num_micro_batches``: the batch is cut in so many, each with
    a builder of its own; all metadata are built before one graph serves them one after another.
    """

    name: str
    level: AttentionCGSupport
    establishes: str
    buckets: tuple[Bucket, ...]
    turns: tuple[ProbeStep, ...]
    dummy_lens: Literal["shortest", "longest"] = "shortest"
    drafts: int = 0
    num_builders: int = 1
    num_micro_batches: int = 1
