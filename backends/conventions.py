"""The accepted differences between correct backends, as a fixed set of fields.

For example, two correct kernels may measure an ALiBi bias from different positions, or leave padded rows in different
states. A backend declares its choice here. The harness compares accordingly, and every report shows the record. A new
kind of difference needs a new field here, not a flag in a backend.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from attncheck.reference.step_spec import PoolOrder, StridesSpec

LSEBase = Literal["e", "2"]
AlibiReference = Literal["query", "zero", "context"]
PaddedRows = Literal["untouched", "finite"]
OperandStrides = Literal["any", "rows"]
HostLens = Literal["upper_bound", "exact"]
CacheStrides = Literal["undeclared", "any", "blocks", "pages"]
TopkIndicesForm = Literal["positions", "slots"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """The declared choices of a backend; the defaults are the reference's.

    Raise ``ValueError`` for a value outside the allowed ones.
    """

    lse_base: LSEBase = "e"
    """Base of the log-sum-exp: natural (``e``), or ``2`` (the natural LSE divided by ln 2)."""

    alibi_reference: AlibiReference = "query"
    """The position from which ALiBi's distance is measured.

    ``query``: the query's position (``slope * (j - q)``). ``zero``: position 0 (``slope * j``). ``context``: the
    request's first new position (``slope * (j - context_len)``). The output is the same for all; the LSE is larger by
    ``slope * q`` for ``zero``, and by ``slope * (q - context_len)`` for ``context``.
    """

    pad_seq_len: int = 0
    """Required ``seq_lens`` entry of a padding request; some kernels cannot take 0."""

    padded_rows: PaddedRows = "finite"
    """State of output rows that belong to no request: left alone (``untouched``), or possibly written (``finite``)."""

    needs_finite_pool: bool = False
    """Whether cache slots that no request owns must be finite, because 0 * NaN reaches the output.

    The containment check then uses no NaN.
    """

    batch_invariant: bool = False
    """Whether a row has the same bits in every batch: beside other requests, in another order or on other pages, with
    padding, and in a larger CUDA graph. How its prompt is cut in chunks may change them."""

    sync_free_build: bool = False
    """Whether ``build`` never waits for the device."""

    deterministic: bool = True
    """Whether repeated calls with the same inputs return the same bits. False for kernels with atomic additions."""

    operand_strides: OperandStrides = "any"
    """Supported strides of query, key, value and output, whose last dimension is always contiguous.

    ``any``, or ``rows`` for those of vLLM's models: the heads of a row are adjacent in memory, and the output is
    contiguous.
    """

    host_lens: HostLens = "upper_bound"
    """What ``seq_lens_cpu`` and ``num_computed_tokens_cpu`` hold.

    ``upper_bound``: for decodes and drafts they may be above the lengths on the device, as vLLM's
    ``seq_lens_cpu_upper_bound``. attncheck refills host tensors after ``build``, as a runner that schedules
    asynchronously may. ``exact`` excludes both: an engine must pass exact lengths, and must leave host tensors
    unchanged until ``forward`` returns.
    """

    cache_strides: CacheStrides = "undeclared"
    """Supported strides of ``kv_cache``, beyond those of its layout, if several layers share a pool.

    ``any``: all. ``blocks``: dense blocks with any stride between them (vLLM's ``indexes_kv_by_block_stride``).
    ``pages``: none; the pages follow one another. ``undeclared``: the backend reads all strides, or raises.
    """

    topk_indices_form: TopkIndicesForm = "positions"
    """What ``topk_indices`` of sparse attention name: ``positions`` in the row's request, or ``slots`` of the cache.

    A slot is ``page * block_size + offset``, as FlashMLA takes it. vLLM's indexer returns positions, which its classes
    convert.
    """

    any_topk_indices: bool = False
    """Whether a row may name a key twice, which counts once, and have unused entries between others.

    The rows of an indexer do neither. Only a backend that declares this gets such rows.
    """

    @property
    def pool_orders(self) -> tuple[PoolOrder, ...]:
        """The values of ``cache.pool_order`` that ``cache_strides`` declares; only LB if undeclared."""
        match self.cache_strides:
            case "any":
                return get_args(PoolOrder)
            case "blocks":
                return ("LB", "BL")
            case "pages" | "undeclared":
                return ("LB",)

    def excluded_strides(self, strides: StridesSpec | None) -> str:
        """Return, as text, those of ``strides`` that a backend with these conventions is not given, or ""."""
        if self.operand_strides == "any" or strides is None:
            return ""
        heads = [name for name in ("query", "key", "value") if getattr(strides, name) == "transposed"]
        output = [] if strides.output in ("contiguous", "offset") else ["output"]
        return ", ".join(f"strides.{name} {getattr(strides, name)}" for name in (*heads, *output))

    def __post_init__(self) -> None:
        for name, allowed in (
            ("lse_base", get_args(LSEBase)),
            ("alibi_reference", get_args(AlibiReference)),
            ("padded_rows", get_args(PaddedRows)),
            ("operand_strides", get_args(OperandStrides)),
            ("host_lens", get_args(HostLens)),
            ("cache_strides", get_args(CacheStrides)),
            ("topk_indices_form", get_args(TopkIndicesForm)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        given: object = self.pad_seq_len  # the code that declares it may not be type-checked
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ValueError(f"pad_seq_len = {self.pad_seq_len!r}: must be an integer >= 0")
