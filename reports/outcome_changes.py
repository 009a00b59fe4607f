"""Which outcomes and CUDA-graph levels changed between two runs, and whether for the worse.

Must not know: how runs are matched, times, how a change is shown.
"""

from dataclasses import dataclass
from typing import Literal

from attncheck.reports.records import Outcome

Kind = Literal["worse", "better", "other"]

KINDS: tuple[Kind, ...] = ("worse", "better", "other")
"""In the order they are reported."""


@dataclass(frozen=True)
class OutcomeChange:
    """One check of one case of one backend that came out otherwise.

    ``backend``: its name, ``OLD -> NEW`` where backends of two names were matched. ``before``, ``after``: outcomes; they
    are equal where only a CUDA-graph level changed. ``what``: what changed, in one line: the reason of the record that
    fell short or was refused, the levels. It may hold what a backend said, unescaped.
    """

    backend: str
    case: str
    check: str
    before: Outcome
    after: Outcome
    kind: Kind
    what: str
