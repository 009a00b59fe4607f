"""The batch: requests in order, padding, block table, and the path by which a backend is called.

Part of :mod:`attncheck.reference.spec`; imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from attncheck.errors import SpecError
from attncheck.reference.spec_fields import STRICT, option
from attncheck.reference.spec_paths import PathSpec

MAX_TOKENS = 2**31
"""Most tokens of a batch; a larger number is assumed to be a typing error."""

MAX_TABLE_ENTRIES = 2**20
"""Most entries of a block-table row besides its pages."""


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """``count`` equal requests of a batch. ``seq_len`` counts the new tokens too and defaults to ``query_len``."""

    __pydantic_config__: ClassVar = STRICT

    query_len: int = field(metadata={"description": "new tokens", "gt": 0, "le": MAX_TOKENS})
    seq_len: int | None = option(None, "tokens in the cache after this step; default: query_len", ge=0, le=MAX_TOKENS)
    count: int = option(1, "how many such requests", gt=0, le=MAX_TOKENS)
    encoder_len: int | None = option(None, "tokens of the encoder (cross attention)", ge=0, le=MAX_TOKENS)
    shared_prefix: int = option(0, "number of leading tokens whose pages all sharing requests have in common", ge=0)

    def __post_init__(self) -> None:
        if self.seq_len is None:
            object.__setattr__(self, "seq_len", self.query_len)
        if self.shared_prefix > max(self.context_len, 0):
            raise SpecError(
                f"only the {max(self.context_len, 0)} tokens of context can be shared",
                field="shared_prefix",
                value=self.shared_prefix,
                allowed="lower it, or raise seq_len",
            )

    @property
    def total_len(self) -> int:
        """``seq_len`` as a plain integer."""
        return self.query_len if self.seq_len is None else self.seq_len

    @property
    def context_len(self) -> int:
        """Number of tokens in the cache before this step; negative if there are more rows than keys."""
        return self.total_len - self.query_len


@dataclass(frozen=True, kw_only=True)
class PaddingSpec:
    """Padding as vLLM pads for CUDA graphs: trailing requests of query length 0, trailing tokens of slot -1."""

    __pydantic_config__: ClassVar = STRICT

    requests: int = option(0, "padding requests at the tail", ge=0, le=MAX_TOKENS)
    tokens: int = option(0, "padding tokens at the tail", ge=0, le=MAX_TOKENS)
    unmapped_tokens: int = option(
        0, "tokens behind those that num_actual_tokens counts and slot_mapping has an entry for", ge=0, le=MAX_TOKENS
    )
    key_rows: int = option(0, "rows of key and value behind those of the tokens", ge=0, le=MAX_TOKENS)

    @property
    def query_rows(self) -> int:
        """Number of query rows that belong to no request."""
        return self.tokens + self.unmapped_tokens


@dataclass(frozen=True, kw_only=True)
class BlockTableSpec:
    """What a block table has besides the pages of the requests."""

    __pydantic_config__: ClassVar = STRICT

    extra_columns: int = option(
        0, "columns behind those of the longest request and two more", ge=0, le=MAX_TABLE_ENTRIES
    )
    row_gap: int = option(
        0, "entries in memory between two rows, as of a slice of a wider table", ge=0, le=MAX_TABLE_ENTRIES
    )
    null_pages: bool = option(False, "whether pages that every row's window or chunk has left behind are page 0")


@dataclass(frozen=True, kw_only=True)
class BatchSpec:
    """The batch of one step: requests in order, then padding, and the path by which a backend is called."""

    requests: tuple[RequestSpec, ...]
    padding: PaddingSpec = PaddingSpec()
    block_table: BlockTableSpec = BlockTableSpec()
    path: PathSpec = PathSpec()

    def __post_init__(self) -> None:
        if not self.requests:
            raise SpecError("a batch needs a request", field="requests", value=self.requests, allowed="give one")
        tokens = sum(r.count * max(r.query_len, r.total_len, r.encoder_len or 0) for r in self.requests)
        tokens += self.padding.query_rows + self.padding.key_rows
        if tokens > MAX_TOKENS:
            raise SpecError(
                f"the batch holds {tokens} tokens",
                field="requests",
                value=len(self.requests),
                allowed=f"at most {MAX_TOKENS} tokens are allowed",
            )

    def __iter__(self) -> Iterator[RequestSpec]:
        """Yield every single request in order, with counts expanded."""
        for request in self.requests:
            for _ in range(request.count):
                yield request

    @property
    def num_requests(self) -> int:
        """Number of requests without padding."""
        return sum(r.count for r in self.requests)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens without padding."""
        return sum(r.count * r.query_len for r in self.requests)

    @property
    def max_query_len(self) -> int:
        """Longest query length of a request."""
        return max(r.query_len for r in self.requests)

    @property
    def max_seq_len(self) -> int:
        """Longest ``seq_len`` of a request."""
        return max(r.total_len for r in self.requests)
