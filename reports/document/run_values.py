"""What the sections of a run are made of: its records, and the values that several sections read."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.summary import RunSummary, summarise
from attncheck.reports.analysis.verdicts import RunFindings, run_findings
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import Speed, speeds


@dataclass(frozen=True)
class RunValues:
    """A run, and what its records come to.

    ``warning``: that it was cut off. ``path``: its file, "" if it has none. ``listing``: what lists all that a brief
    section leaves out.
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
        return self.summary.absent if self.summary.total.examined else ()

    @cached_property
    def present(self) -> tuple[str, ...]:
        """All other backends."""
        return tuple(name for name in self.summary.backends if name not in self.absent)

    def closing(self, *, claims: bool = False) -> str:
        """Return the verdict and the counts on one line, with ``claims`` the false claims too."""
        verdicts = self.found.verdicts if claims else ()
        return phrases.closing(self.summary, self.errors, complete=self.complete, verdicts=verdicts)
