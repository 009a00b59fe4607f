"""A run that examined nothing of somebody asked for by name has not passed: the question was wrong.

Must not know: how records come about.
"""

from collections.abc import Sequence

from attncheck.errors import SelectionError
from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.summary import summarise
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record


def refuse_empty_run(records: Sequence[Record], header: RunHeader, *, by_name: bool) -> None:
    """A backend asked for by name of which not one case was examined was a wrong question; so is a run of nothing.

    That a case was refused as declared (``claims``) is no examination of the case, unless nothing else was asked.

    Raises:
        SelectionError: nothing was examined, or, ``by_name``, nothing of one of the backends or providers.
    """
    only_claims = header.checks == ("claims",)
    summary = summarise([record for record in records if only_claims or record.check != "claims"])
    for backend in header.backends if by_name else ():
        tally = summary.by_backend.get(backend.name)
        if tally is None or not tally.examined:
            gap = next((gap for gap in summary.gaps if gap.backend == backend.name), None)
            why = f": {phrases.gap_reasons(gap)}" if gap else ""
            if backend.name in summary.providers:
                raise SelectionError(f"provider {backend.name!r} offers none of these functions")
            raise SelectionError(f"not one case of backend {backend.name!r} was examined{why}")
    if not summary.total.examined:
        raise SelectionError("nothing was examined; the table says why")
