"""The records of a run, and the values that several sections of a report read."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.summary import RunSummary, summarise
from attncheck.reports.analysis.verdicts import RunFindings, run_findings
from attncheck.reports.document.blocks import Item, SectionName
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import UTILITIES, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import Speed, speeds


@dataclass(frozen=True)
class RunValues:
    """A run, and what its records come to.

    ``warning``: that it was cut off. ``path``: its file, "" if it has none. ``listing``: what prints every
    section whole.
    """

    header: RunHeader
    records: Sequence[Record]
    errors: Sequence[str] = ()
    complete: bool = True
    warning: str = ""
    path: str = ""
    finished: str = ""
    listing: str = "--verbose"

    @classmethod
    def of(cls, run: Run) -> "RunValues":
        """Return the values of a run that was read from a file."""
        finished = run.footer.finished if run.footer else ""
        warning = phrases.incomplete(run) or ""
        return cls(run.header, run.records, run.errors, run.complete, warning, run.path, finished)

    def in_full(self, name: SectionName, *others: SectionName) -> tuple[Item, ...]:
        """Return lines with the option and the command that print a section whole, and the names of others."""
        command = f", or attncheck report {shlex.quote(self.path)} --section {name}" if self.path else ""
        more = [Item(f"as well: {', '.join(f'--section {each}' for each in others)}")] if others and self.path else []
        return (Item(f"in full: {self.listing}{command}", is_whole=True), *more)

    @cached_property
    def summary(self) -> RunSummary:
        """Counts of the records."""
        return summarise(self.records, checks=self.header.checks)

    @cached_property
    def found(self) -> RunFindings:
        """Findings and verdicts."""
        return run_findings(self.records, self.header)

    @cached_property
    def speeds(self) -> tuple[Speed, ...]:
        """The measured times."""
        return speeds(self.records)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Backends that cannot run on this machine; none if no backend was examined."""
        if not self.summary.total.examined:
            return ()
        outcomes = {
            name: {outcome for outcome, _ in self.summary.by_backend[name].counts} for name in self.summary.backends
        }
        return tuple(name for name, found in outcomes.items() if found == {"unavailable"})

    @cached_property
    def present(self) -> tuple[str, ...]:
        """All other backends."""
        return tuple(name for name in self.summary.backends if name not in self.absent)

    @cached_property
    def silent(self) -> dict[str, str]:
        """Backends without any examination, and the reasons."""
        names = [each.backend for each in self.found.verdicts if each.verdict == "not examined"]
        gaps = [(gap.backend, phrases.gap_reasons(gap)) for gap in self.summary.gaps]
        return {name: "; ".join(dict.fromkeys(why for backend, why in gaps if backend == name)) for name in names}

    def closing(self) -> str:
        """Return the verdict and the counts on one line."""
        has_providers = UTILITIES in self.header.checks
        count = 0 if has_providers else len(self.header.backends)  # the header lists providers as backends, too
        return phrases.closing(self.summary, self.errors, complete=self.complete, num_backends=count)
