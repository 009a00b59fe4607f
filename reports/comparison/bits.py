"""Cases whose first step has the same bits in two runs, and how far two different outputs are from the truth."""

from collections.abc import Iterable
from dataclasses import dataclass

from attncheck.reports.run_file.records import Record, bits_of, budget_share


@dataclass(frozen=True)
class BitsPair:
    """One case of a pair of backends, whose inputs are equal in both runs.

    ``rows_moved``: the rows with other bits, of ``rows``; None if only that they differ is known. ``shares``: the worst
    error of each, as a share of the budget; None if ``numerics`` has no figure.
    """

    backend: str
    case: str
    rows: int
    rows_moved: int | None
    shares: tuple[float | None, float | None]


def compare_bits(answers: Iterable[tuple[str, Record, Record]]) -> tuple[BitsPair, ...]:
    """Return the pairs of records with digests. ``answers``: (label of the backend, record in BASE, record in NEW)."""
    answers = list(answers)
    shares = {
        (backend, base.case): (budget_share(base), budget_share(new))
        for backend, base, new in answers
        if base.check == "numerics"
    }
    pairs = []
    for backend, base, new in answers:
        one, other = bits_of(base), bits_of(new)
        if one is None or other is None or base.seed != new.seed:
            continue
        of_case = shares.get((backend, base.case), (None, None))
        rows = int(getattr(base, "figures", {}).get("rows", 0))
        pairs.append(BitsPair(backend, base.case, rows, one.differing_rows(other), of_case))
    return tuple(pairs)
