"""The records of a run, and the values that several sections of a report read."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.summary import RunSummary, not_reached, summarise
from attncheck.reports.analysis.verdicts import RunFindings, run_findings
from attncheck.reports.document.blocks import Item, SectionName
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import OUTCOMES, UTILITIES, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import Speed, speeds


@dataclass(frozen=True)
class RunValues:
    """A run, and what its records come to.

    ``warning``: that it was cut off. ``reader``: the command that reports the run from its file, "" if it has none.
    ``listing``: what prints every section whole.
    """

    header: RunHeader
    records: Sequence[Record]
    errors: Sequence[str] = ()
    complete: bool = True
    warning: str = ""
    reader: str = ""
    finished: str = ""
    listing: str = "--verbose"

    @classmethod
    def of(cls, run: Run) -> "RunValues":
        """Return the values of a run that was read from a file."""
        finished = run.footer.finished if run.footer else ""
        warning = phrases.incomplete(run) or ""
        reader = f"attncheck report {shlex.quote(run.path)}"
        return cls(run.header, run.records, run.errors, run.complete, warning, reader, finished)

    def in_full(self, name: SectionName, *others: SectionName) -> tuple[Item, ...]:
        """Return lines with the option and the command that print a section whole, and the names of others."""
        command = f", or {self.reader} --section {name}" if self.reader else ""
        more = [Item(f"as well: {', '.join(f'--section {each}' for each in others)}")] if others and self.reader else []
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
    def left(self) -> dict[str, tuple[int, Counter[str]]]:
        """What the time left out of each backend; those that left nothing out have no entry."""
        return not_reached(self.records)

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """Backends that cannot run on this machine; none if no backend was examined."""
        if not self.summary.total.examined:
            return ()
        outcomes = {
            name: {outcome for outcome, _ in self.summary.by_backend[name].counts} for name in self.summary.backends
        }
        return tuple(name for name, found in outcomes.items() if found == {"unavailable"} and name not in self.left)

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

    @property
    def verdict(self) -> str:
        """``passed``, ``failed``, ``not examined``, or ``unfinished`` if the run ended early and has not failed."""
        verdict: str = "failed" if self.errors else self.summary.verdict
        return verdict if self.complete or verdict == "failed" else "unfinished"

    def closing(self) -> str:
        """Return the verdict and the counts on one line.

        ``errors`` fail a run whatever its records are. The results of cases are counted only for a single backend.
        """
        known = sum(each.known for each in self.found.verdicts)
        sizes = [*self._backend_counts(), *self._function_counts()]
        sizes += [phrases.plural(len(self.errors), "error")] if self.errors else []
        rounds = self.summary.most_rounds
        worst = f" (the worst of {rounds} rounds counts)" if rounds > 1 else ""
        words = phrases.verdict_words(self.verdict, known, is_partial=bool(self.left))
        return f"{words}: {'; '.join(sizes)}{worst}"

    def _backend_counts(self) -> list[str]:
        """Return the number of backends with each verdict, or of a single one's cases by result; [] without any."""
        verdicts = Counter(each.verdict for each in self.found.verdicts)
        if UTILITIES not in self.header.checks:  # the header lists providers as backends, too
            verdicts["not examined"] += len(self.header.backends) - verdicts.total()  # some may have no record
        elif not verdicts:
            return []
        sizes = [phrases.plural(verdicts.total(), "backend"), phrases.plural(self.summary.cases, "case")]
        if verdicts.total() > 1:
            words = [f"{verdicts[word]} {word}" for word in ("failed", "passed", "not examined") if verdicts[word]]
            sizes[0] += f" ({', '.join(words)})"
        elif self.found.verdicts:
            sizes[1] += f": {', '.join(phrases.result_counts(self.found.verdicts[0].results))}"
        return [", ".join(sizes)]

    def _function_counts(self) -> list[str]:
        """Return the number of functions of providers with each outcome; [] without providers."""
        if not self.summary.providers:
            return []
        outcomes = Counter(record.outcome for record in self.records if record.check == UTILITIES)
        counts = [f"{outcomes[outcome]} {outcome}" for outcome in OUTCOMES if outcomes[outcome]]
        providers = phrases.plural(len(self.summary.providers), "provider")
        functions = phrases.plural(self.summary.functions, "function")
        return [f"{providers}, {functions}: {', '.join(counts)}"]
