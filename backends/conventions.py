"""Differences between right backends that are not bugs, as a closed record.

Two honest kernels may measure a bias from different places or leave padded rows in different states. A backend says
here which of the known choices it made; the harness compares accordingly and every report shows the record. Another
difference needs a change here, not a flag in a backend.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from attncheck.reference.spec import StridesSpec

LSEBase = Literal["e", "2"]
AlibiReference = Literal["query", "zero", "context"]
PaddedRows = Literal["untouched", "finite"]
OperandStrides = Literal["any", "rows"]


@dataclass(frozen=True, kw_only=True)
class Conventions:
    """The declared choices of a backend; the defaults are the reference's. ``ValueError`` for a value outside them."""

    lse_base: LSEBase = "e"
    """Base of the log-sum-exp: natural (``e``), or ``2`` (the natural one divided by ln 2)."""

    alibi_reference: AlibiReference = "query"
    """Where ALiBi's distance is measured from: the query's position (``slope * (j - q)``), position ``zero``
    (``slope * j``), or the request's first new position (``context``: ``slope * (j - context_len)``). The output is the
    same; the LSE is larger by ``slope * q``, or by ``slope * (q - context_len)``."""

    pad_seq_len: int = 0
    """What the ``seq_lens`` entry of a padding request must be; some kernels cannot take 0."""

    padded_rows: PaddedRows = "finite"
    """What happens to output rows of no request: left alone (``untouched``), or possibly written (``finite``)."""

    needs_finite_pool: bool = False
    """Whether slots nobody owns must be finite (0 * NaN reaches the output). Containment then uses no NaN."""

    batch_invariant: bool = False
    """Whether a row's bits depend on nothing but the row, its keys and the layer."""

    sync_free_build: bool = False
    """Whether ``build`` never waits for the device."""

    deterministic: bool = True
    """Whether the same question has the same bits each time; with atomic additions it has not."""

    operand_strides: OperandStrides = "any"
    """What strides query, key, value and output may have beside a contiguous last dimension: ``any``, or those of
    vLLM's models (``rows``), in which the heads of a row lie one behind the other, and the output is contiguous."""

    def excluded_strides(self, strides: StridesSpec | None) -> str:
        """Return those of ``strides`` that a backend of these conventions does not get."""
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
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        given: object = self.pad_seq_len  # whoever declares it need not be type-checked
        if isinstance(given, bool) or not isinstance(given, int) or given < 0:
            raise ValueError(f"pad_seq_len = {self.pad_seq_len!r}: must be an integer >= 0")
