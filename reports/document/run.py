"""The sections of a run by name, and those that a report has, in order."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from attncheck.reports.document.blocks import Block, Paragraph, SectionName
from attncheck.reports.document.circumstances import circumstances, conventions, unexamined
from attncheck.reports.document.failures import expected, failures, verdict
from attncheck.reports.document.graph_levels import graph_levels
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.document.support import support
from attncheck.reports.document.tables import functions, outcomes
from attncheck.reports.document.timings import timings


class Section(Protocol):
    """Returns the blocks of a run; not ``whole``: what the first screen has of them."""

    def __call__(self, run: RunValues, *, whole: bool) -> list[Block]: ...  # noqa: D102


SECTIONS: Mapping[SectionName, Section] = {
    "verdict": verdict,
    "table": outcomes,
    "failures": failures,
    "graph-levels": graph_levels,
    "support": support,
    "timings": timings,
    "functions": functions,
    "expected": expected,
    "unexamined": unexamined,
    "conventions": conventions,
    "circumstances": circumstances,
}


def blocks(run: RunValues, names: Sequence[SectionName], *, whole: bool) -> list[Block]:
    """Return the blocks of the named sections, in the order of the names."""
    return [block for name in names for block in SECTIONS[name](run, whole=whole)]


def chosen(run: RunValues, names: Sequence[SectionName]) -> list[Block]:
    """Return the blocks of the named sections, whole, or a sentence if the run has none of them."""
    return blocks(run, names, whole=True) or [Paragraph(f"The run has no {' and no '.join(names)}.")]
