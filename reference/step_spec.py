"""What a step gets besides its layer: the path, the batch of requests, and the paged cache.

The module imports no torch. ``cases`` validates YAML into these classes, as into those of ``spec``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from attncheck.errors import SpecError
from attncheck.reference.spec import STRICT, AttentionType, LayerSpec, option, refuse_beyond_float32


@dataclass(frozen=True, kw_only=True)
class FastPrefillOptions:
    """``fast_prefill``: only the rows that yield logits are computed."""

    __pydantic_config__: ClassVar = STRICT
    rows: int = option(1, "last rows of each request that are computed", gt=0)


@dataclass(frozen=True, kw_only=True)
class SpecDecodeOptions:
    """``spec_decode``: verification of draft tokens, every request with 1 to 1 + num_speculative_tokens rows."""

    __pydantic_config__: ClassVar = STRICT
    num_speculative_tokens: int = option(3, "most draft tokens per request", gt=0)


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """``tree``: draft tokens form a tree."""

    __pydantic_config__: ClassVar = STRICT
    parents: tuple[int, ...] = option((-1, 0, 0, 1), "parent of each new row, -1 for a root; parents come first")

    def __post_init__(self) -> None:
        for row, parent in enumerate(self.parents):
            if not -1 <= parent < row:
                raise SpecError(
                    f"row {row} names parent {parent}",
                    field="parents",
                    value=self.parents,
                    allowed="a parent is -1 or an earlier row",
                )


@dataclass(frozen=True, kw_only=True)
class SplitKVOptions:
    """``split_kv``: the keys are cut into parts, whose results are merged by their LSE."""

    __pydantic_config__: ClassVar = STRICT
    parts: int = option(2, "parts the keys are cut into", gt=0)


@dataclass(frozen=True, kw_only=True)
class DCPOptions:
    """``dcp`` and ``ranks``: decode context parallelism, the keys spread over ranks."""

    __pydantic_config__: ClassVar = STRICT
    size: int = option(2, "ranks", gt=0)
    interleave: int = option(1, "consecutive positions a rank holds", gt=0)


@dataclass(frozen=True, kw_only=True)
class PCPOptions:
    """``pcp``: prefill context parallelism, the rows of prompts spread over ranks in chunks."""

    __pydantic_config__: ClassVar = STRICT
    size: int = option(2, "ranks", gt=1)


@dataclass(frozen=True, kw_only=True)
class MicroBatchOptions:
    """``micro_batch``: the rows are cut at token positions and computed part by part."""

    __pydantic_config__: ClassVar = STRICT
    cuts: tuple[int, ...] = field(metadata={"description": "token positions where the batch is cut, increasing"})


@dataclass(frozen=True, kw_only=True)
class CausalConv1dOptions:
    """``causal_conv1d``: the short convolution of state-space layers."""

    __pydantic_config__: ClassVar = STRICT
    channels: int = option(64, "channels", gt=0)
    width: int = option(4, "taps", gt=0)
    activation: Literal["silu"] | None = option("silu", "activation after the convolution")
    bias: bool = option(True, "whether a bias is added")


IndexCacheDType = Literal["auto", "fp8_e4m3"]


@dataclass(frozen=True, kw_only=True)
class IndexerOptions:
    """``indexer``: the function that chooses the keys of sparse attention; the cache holds its keys alone."""

    __pydantic_config__: ClassVar = STRICT
    index_topk: int = option(16, "most keys of a row", gt=0)
    index_n_heads: int = option(4, "query heads of the indexer, which share one key", gt=0)
    index_head_dim: int = option(32, "size of its heads", gt=0)
    index_cache_dtype: IndexCacheDType = option(
        "auto", "dtype of its keys in the cache; auto: that of the layer; fp8_e4m3: a scale for each, FP8 queries"
    )


RecurrenceRule = Literal["mamba1", "mamba2", "gdn", "kda", "linear", "short_conv"]
StateDType = Literal["float32", "bfloat16"]
MambaCacheMode = Literal["none", "all"]

CHANNEL_RULES: tuple[RecurrenceRule, ...] = ("mamba1", "short_conv")
"""Rules whose heads are channels: a value is one number."""


@dataclass(frozen=True, kw_only=True)
class RecurrenceOptions:
    """``recurrence``: a layer with a state for each request instead of a KV cache.

    The layer has ``num_heads`` heads with a state of ``head_size_v`` times ``head_size`` numbers each, and
    ``num_kv_heads`` heads of keys. Mamba calls the latter groups, and has one head for each channel. A short
    convolution has one head for each channel, too, and ``head_size`` taps.
    """

    __pydantic_config__: ClassVar = STRICT
    rule: RecurrenceRule = field(metadata={"description": "how a row changes the state"})
    state_dtype: StateDType = option("float32", "dtype of the states in the cache; short_conv has that of the layer")
    qk_l2norm: bool = option(True, "gdn and kda: whether the layer divides queries and keys by their 2-norm")
    num_speculative_tokens: int = option(
        0, "most draft tokens of a decode; each request has a slot more for each", ge=0
    )
    mamba_cache_mode: MambaCacheMode = option(
        "none", "all: prefix caching keeps the state at the end of each block of cache.block_size tokens"
    )
    activation: Literal["silu"] | None = option("silu", "short_conv: activation after the convolution")
    bias: bool = option(True, "short_conv: whether a bias is added")

    def dtype_of_states(self, layer_dtype: str) -> str:
        """Return the dtype of the states. Those of a short convolution are inputs, and have the layer's."""
        return layer_dtype if self.rule == "short_conv" else self.state_dtype


PathOptions = (
    FastPrefillOptions
    | SpecDecodeOptions
    | TreeOptions
    | SplitKVOptions
    | DCPOptions
    | PCPOptions
    | MicroBatchOptions
    | CausalConv1dOptions
    | IndexerOptions
    | RecurrenceOptions
)

PATH_OPTIONS: Mapping[str, type[PathOptions] | None] = {
    "paged": None,
    "encoder_only": None,
    "cross": None,
    "mla": None,
    "fast_prefill": FastPrefillOptions,
    "spec_decode": SpecDecodeOptions,
    "tree": TreeOptions,
    "local": None,
    "cascade": None,
    "split_kv": SplitKVOptions,
    "dcp": DCPOptions,
    "ranks": DCPOptions,
    "pcp": PCPOptions,
    "micro_batch": MicroBatchOptions,
    "merge": None,
    "causal_conv1d": CausalConv1dOptions,
    "indexer": IndexerOptions,
    "recurrence": RecurrenceOptions,
}
"""The class of the options of every path, or None if it has none."""

PATHS: tuple[str, ...] = tuple(PATH_OPTIONS)


@dataclass(frozen=True, kw_only=True)
class PathSpec:
    """The path of a case: a name of :data:`PATHS` and, if the path has options, their values."""

    name: str = "paged"
    options: PathOptions | None = None


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
    mm_req_doc_ranges: tuple[tuple[int, int], ...] = option(
        (), "image spans, first and last position of each: its rows see all of its keys, later ones too"
    )
    rswa_prefix_len: int = option(
        0, "number of first keys that every later row sees, beyond layer.rswa_window too", ge=0, le=MAX_TOKENS
    )

    def __post_init__(self) -> None:
        if self.seq_len is None:
            object.__setattr__(self, "seq_len", self.query_len)
        self._check_doc_ranges()
        if self.shared_prefix > max(self.context_len, 0):
            raise SpecError(
                f"only the {max(self.context_len, 0)} tokens of context can be shared",
                field="shared_prefix",
                value=self.shared_prefix,
                allowed="lower it, or raise seq_len",
            )

    def _check_doc_ranges(self) -> None:
        """Raise unless each range has two positions or more, and lies behind the range before it."""
        behind = 0
        for number, (start, end) in enumerate(self.mm_req_doc_ranges):
            if not behind <= start < end <= MAX_TOKENS:
                raise SpecError(
                    f"range {number} is no [first, last] with first < last"
                    if start >= end
                    else f"range {number} begins before position {behind}, or ends too far behind",
                    field="mm_req_doc_ranges",
                    value=[start, end],
                    allowed="give the first and last position of each span, in order, without overlaps",
                )
            behind = end + 1

    @property
    def total_len(self) -> int:
        """``seq_len`` as a plain integer."""
        return self.query_len if self.seq_len is None else self.seq_len

    @property
    def context_len(self) -> int:
        """Number of tokens in the cache before this step; negative if there are more rows than keys."""
        return self.total_len - self.query_len

    def num_keys(self, layer: LayerSpec) -> int:
        """Return how many keys the rows attend to: those of the encoder in cross attention, else ``seq_len``."""
        is_cross = layer.attn_type == AttentionType.ENCODER_DECODER
        return (self.encoder_len or 0) if is_cross else self.total_len

    def num_rows(self, path: PathSpec) -> int:
        """Return how many rows are computed: the last ones in a fast prefill, else all new tokens."""
        options = path.options
        return min(options.rows, self.query_len) if isinstance(options, FastPrefillOptions) else self.query_len


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


KVCacheDType = Literal[
    "auto",
    "float16",
    "bfloat16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_per_token_head",
    "int8_per_token_head",
    "int4_per_token_head",
    "nvfp4",
]
REGISTERED = "registered"
"""The cache dtype that a backend registers under a name of its own, as plugins do by ``register_kv_cache_dtype``."""

FP8_CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""The caches of FP8 codes whose scales belong to the layer."""


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """How a cache stores a row, the numbers of one token and KV head: as codes, with scales that the row determines.

    A number is ``code * scale``. The scale of some numbers is ``absmax / largest``, where ``absmax`` is the largest
    magnitude among them.

    code: the numbers of the codes: integers from ``-largest`` to ``largest``, or those of a float format.
    bits: size of a code. If two codes share a byte, the first is in its low bits.
    group: number of values that share a scale. None: all values of a row.
    """

    code: Literal["int", "float8_e4m3fn", "float4_e2m1fn"]
    bits: int
    largest: float
    group: int | None = None

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale: a float32, or one float8_e4m3fn (in units of ``k_scale`` or ``v_scale``) for a group."""
        return 4 if self.group is None else 1

    def code_bytes(self, size: int) -> int:
        """Return the bytes of the codes of a row of ``size`` numbers."""
        return size * self.bits // 8

    def row_bytes(self, size: int) -> int:
        """Return the bytes of a row of ``size`` numbers: its codes, then its scales."""
        return self.code_bytes(size) + size // (self.group or size) * self.scale_bytes

    def divides(self, size: int) -> bool:
        """Return whether a row of ``size`` numbers fills whole bytes and groups."""
        return size % (self.group or 8 // self.bits) == 0


ROW_FORMATS: Mapping[str, RowFormat] = {
    "fp8_per_token_head": RowFormat(code="float8_e4m3fn", bits=8, largest=448.0),
    "int8_per_token_head": RowFormat(code="int", bits=8, largest=127.0),
    "int4_per_token_head": RowFormat(code="int", bits=4, largest=7.0),
    "nvfp4": RowFormat(code="float4_e2m1fn", bits=4, largest=6.0, group=16),
}
"""The caches that scale each row by itself. The first two are vLLM's formats.

vLLM's ``int4_per_token_head`` differs: it also rotates a row, and has codes from 0 to 15 with a zero point. Where
vLLM's classes store the scales of ``nvfp4`` is not defined here.
"""

REGISTERED_ROWS = RowFormat(code="int", bits=8, largest=1.0)
"""The rows of a :data:`REGISTERED` cache: 0 and one magnitude, with a sign. Most codes represent these exactly."""


def row_format_of(kv_cache_dtype: str) -> RowFormat | None:
    """Return the format of the rows that such a cache stores exactly, or None if it is defined for each number."""
    return REGISTERED_ROWS if kv_cache_dtype == REGISTERED else ROW_FORMATS.get(kv_cache_dtype)


Layout = Literal["NHD", "HND"]
PoolOrder = Literal["LB", "BL", "BHL", "LHB"]
"""Memory order of layers (L), blocks (B) and heads (H) outside of the other axes, as vLLM's ``KVCacheLayout`` begins.

With NHD or HND: LBNHC, LBHNC, BLNHC, BLHNC, BHLNC and LHBNC. Only in the first two do the pages of a layer follow one
another. If blocks come first, keys and values lie side by side in every logical shape.
"""
InputName = Literal["needles", "large_scores", "equal_scores", "negative_scores", "coordinates", "views"]
StrideForm = Literal["contiguous", "fused", "padded", "offset", "odd", "transposed"]
"""Memory layout of an operand ``[T, H, D]``. ``contiguous``. ``fused``: a slice of a tensor shared with other operands.
``padded``: unused memory after every row. ``offset``: contiguous, but not at the start of its memory. ``odd``: as
``offset``, with odd strides for dimensions of size 1. ``transposed``: one head after the other, as ``[H, T, D]``.
"""


@dataclass(frozen=True, kw_only=True)
class StridesSpec:
    """How the operands of ``forward`` lie in memory; the last dimension is contiguous in every form."""

    __pydantic_config__: ClassVar = STRICT

    query: StrideForm = option("fused", "memory of query")
    key: StrideForm = option("fused", "memory of key")
    value: StrideForm = option("fused", "memory of value")
    output: StrideForm = option("contiguous", "memory of output and output_lse; a fused one is padded")


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """The paged KV cache of a layer: page size, layout, dtype, scales, and where in the pool the batch lies."""

    __pydantic_config__: ClassVar = STRICT

    block_size: int = option(16, "tokens per page", gt=0)
    layout: Layout = option("NHD", "memory order of a page: NHD (tokens, heads) or HND (heads, tokens)")
    pool_order: PoolOrder = option(
        "LB", "memory order of layers (L), blocks (B) and heads (H): the first letters of vLLM's KVCacheLayout"
    )
    kv_cache_dtype: Literal[KVCacheDType, "registered"] = option(
        "auto", "dtype of the cache; auto: the layer's; registered: the one that the backend registers"
    )
    k_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of K: a number, or one per KV head")
    v_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of V: a number, or one per KV head")
    q_scale: float | tuple[float, ...] = option(1.0, "dequantisation factor of Q: a number, or one per KV head")
    num_blocks: int | None = option(None, "pages in the pool; default: 1.5 times what the batch needs", gt=0)
    first_block: int | None = option(None, "lowest page the batch may own; default: 1", gt=0)
    manager_block_size: int | None = option(
        None, "tokens per block of the cache manager (cache_config.block_size); default: block_size", gt=0
    )

    def __post_init__(self) -> None:
        if (self.manager_block_size or self.block_size) % self.block_size:
            raise SpecError(
                "a block of the cache manager is divided into pages",
                field="manager_block_size",
                value=self.manager_block_size,
                allowed=f"give a multiple of block_size {self.block_size}",
            )
        for name in ("k_scale", "v_scale", "q_scale"):
            scale = getattr(self, name)
            if any(s <= 0 for s in (scale if isinstance(scale, tuple) else (scale,))):
                raise SpecError("a scale must be positive", field=name, value=scale, allowed="give numbers above 0")
            refuse_beyond_float32(name, scale, is_factor=True)
        if self.first_block is not None and self.num_blocks is not None and self.first_block >= self.num_blocks:
            raise SpecError(
                f"the pool has only {self.num_blocks} pages",
                field="first_block",
                value=self.first_block,
                allowed="raise num_blocks or lower first_block",
            )

    @property
    def pages_per_block(self) -> int:
        """Pages in a block of the cache manager."""
        return (self.manager_block_size or self.block_size) // self.block_size

    @property
    def unplaced(self) -> "CacheSpec":
        """The cache without the size of the pool, and without the place of the batch in it."""
        return replace(self, num_blocks=None, first_block=None)
