"""Values of the check ``bitwise`` in a record: up to which change of a step the bits of its rows stay equal."""

from typing import Literal, get_args

from attncheck.reports.run_file.timings import Count, RunFileValue

BITWISE = "bitwise"
"""The check whose records have bits."""

Rung = Literal["repetition", "pages", "order", "neighbours", "padding", "graph", "chunks", "decode", "splits"]

RUNGS: tuple[Rung, ...] = get_args(Rung)
"""The changes of a step, lowest rung first: reports name the first one that changes a bit."""

CLAIMED: frozenset[Rung] = frozenset({"repetition", "pages", "order", "neighbours", "padding", "graph"})
"""The rungs that ``batch_invariant`` promises.

vLLM's page on batch invariance: "the output of a model is deterministic and independent of the batch size or the order
of requests in a batch". Pages, padding and the size of a graph follow from the batch. How a prompt is cut does not.
"""


class RungResult(RunFileValue):
    """What one change of the step did to the bits.

    ``rows``: the number of compared rows. ``rows_moved``: how many of them have other bits.
    ``ulps``: the largest difference in units in the last place, None where one value is NaN; ``row``, ``head``: its
    place. ``reason``: why the change could not be examined, or the backend raised.
    """

    name: Rung
    outcome: Literal["equal", "differs", "not examined"]
    rows: Count = 0
    rows_moved: Count = 0
    ulps: Count | None = 0
    row: Count = 0
    head: Count = 0
    reason: str = ""


class Bits(RunFileValue):
    """The rungs of a case in the order of :data:`RUNGS`, and digests of the output of its first step.

    ``digest``: of all rows in the layer's dtype, in hex. ``row_digests``: :data:`DIGEST_LENGTH` characters for each
    row; empty if the case has too many rows.
    """

    rungs: tuple[RungResult, ...]
    digest: str
    row_digests: str = ""

    @property
    def first_broken(self) -> RungResult | None:
        """The lowest rung on which bits differ, or None."""
        return next((rung for rung in self.rungs if rung.outcome == "differs"), None)

    @property
    def level(self) -> str:
        """The highest rung with equal bits below the first one that differs; "none" if there is none."""
        broken = self.first_broken
        below = self.rungs if broken is None else self.rungs[: self.rungs.index(broken)]
        return next((rung.name for rung in reversed(below) if rung.outcome == "equal"), "none")

    def differing_rows(self, other: "Bits") -> int | None:
        """Return how many rows of the first step differ from those of ``other``; None if that is not known."""
        if self.digest == other.digest:
            return 0
        starts = range(0, min(len(self.row_digests), len(other.row_digests)), DIGEST_LENGTH)
        pairs = ((each.row_digests[start : start + DIGEST_LENGTH] for each in (self, other)) for start in starts)
        return sum(mine != theirs for mine, theirs in pairs) or None


DIGEST_LENGTH = 4
"""Characters of the digest of a row: 24 bits in base64."""
