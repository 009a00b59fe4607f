"""What two runs were made with that is not the same: machine, versions, what was asked, how it was timed.

Must not know: how runs are matched, how a difference is shown.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """``field`` of the environment, the question or a backend, and what it was in either run."""

    field: str
    base: str
    new: str
