"""Failures grouped by cause: records of one backend that one fault explains form one finding.

Pure functions from records to frozen values. Records with equal ``finding`` text are grouped. If several causes fit a
record, the one that fits most records of the backend wins. Failures that no known fault explains are split if keys of
their cases separate them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from attncheck.reports.analysis.contrast import Contrast, Keys, contrast_of, parts_of
from attncheck.reports.analysis.reasons import joined
from attncheck.reports.analysis.rounds import worst_rounds
from attncheck.reports.run_file.causes import (
    UNEXPLAINED,
    UNKNOWN,
    cause_line,
    cause_of_end,
    died_at,
    likely_causes,
    raised_at,
    symptom,
    without_figures,
)
from attncheck.reports.run_file.header import CaseInfo, RunHeader
from attncheck.reports.run_file.records import (
    EXAMINED,
    OURSELVES,
    UTILITIES,
    Crashed,
    Ended,
    Errored,
    Failed,
    Passed,
    Record,
    TimedOut,
    XFailed,
    XPassed,
    is_out_of_time,
)

CONTRASTED = 200
"""Maximum findings of a backend for which each is compared with the passing cases; beyond it, none is."""

_OF_THE_OUTPUT = frozenset({"lse", "features", "invariance"})
"""Checks of an output that `numerics` judges as well."""

Short = Failed | Errored | Ended | XFailed | XPassed


@dataclass(frozen=True)
class Finding:
    """Records of one backend with one cause.

    ``example``: the record to show, that of the smallest case. ``case``: its case, or None if the run file does not
    describe it. ``contrast``: what the cases have in common that passing ones do not have, or None if nothing was
    found.
    """

    backend: str
    words: str
    records: tuple[Short, ...]
    example: Short
    case: CaseInfo | None = None
    contrast: Contrast | None = None

    @cached_property
    def checks(self) -> tuple[str, ...]:
        """The checks of its records, in their order."""
        return tuple(dict.fromkeys(record.check for record in self.records))

    @cached_property
    def cases(self) -> tuple[str, ...]:
        """``suite/id`` of its cases, in the order of the records."""
        return tuple(dict.fromkeys(record.case for record in self.records))

    @property
    def is_expected(self) -> bool:
        """Whether the run expected the failure, so that it does not fail the run."""
        return isinstance(self.example, XFailed)

    @property
    def is_explained(self) -> bool:
        """Whether a likely cause or a line of the author's code is known."""
        match self.example:
            case Failed():
                return bool(likely_causes(self.example.meaning)) and self.words != UNEXPLAINED
            case Errored():
                return bool(cause_line(raised_at(self.example.traceback)))
            case Crashed() | TimedOut():
                return not is_out_of_time(self.example) and any(map(cause_line, died_at(self.example.output)))
            case _:
                return False

    @property
    def exit_status(self) -> int:
        """The exit status of a run with this finding alone: 0 if expected, 3 if attncheck is at fault, else 1."""
        if self.is_expected:
            return 0
        return 3 if isinstance(self.example, Errored) and self.example.stage == OURSELVES else 1

    @property
    def title(self) -> str:
        """The cause, with the figures of the example."""
        match self.example:
            case Failed(meaning=str(meaning)) if self.is_explained:
                causes = likely_causes(meaning)
                return next((cause for cause in causes if without_figures(cause) == self.words), causes[0])
            case Failed(meaning=str(meaning)) if self.words == UNEXPLAINED and meaning.startswith(UNKNOWN):
                return f"{UNEXPLAINED}: {meaning.removeprefix(UNKNOWN)}"
            case Failed() if without_figures(seen := symptom(self.example.summary)) == self.words:
                return joined(seen)
            case Errored():
                first = next(iter(self.example.message.strip().splitlines()), "")
                place = self.words.removesuffix(
                    f": {without_figures(first)}"
                )  # the words end with the message, figures removed
                return f"{place}: {first}" if first else self.words
            case _:
                return self.words


def findings(records: Sequence[Record], header: RunHeader) -> tuple[Finding, ...]:
    """Return the findings of a run, backends in the header's order; within a backend, explained first, expected last.

    A check repeated in several rounds counts once, with its worst outcome.
    """
    of_backends = [each.record for each in worst_rounds(records) if each.record.check != UTILITIES]
    own: dict[str, list[Record]] = {}
    for record in of_backends:
        own.setdefault(record.backend, []).append(record)
    groups: dict[tuple[str, str], list[Short]] = {}
    short = [record for record in of_backends if isinstance(record, Short)]
    votes = Counter((record.backend, cause) for record in short for cause in _causes(record))
    of_output = {_place(record): record for record in short if record.check == "numerics" and _causes(record)}
    ends: dict[tuple[tuple[str, str, str], str], Ended] = {}
    for record in short:
        # If the output of the same case is explained, an unexplained LSE, feature or step has the same cause.
        blamed = of_output.get(_place(record), record) if _may_follow(record) else record
        if isinstance(record, Ended):  # what ends the process in several checks of a case is one finding
            blamed = ends.setdefault((_place(record), cause_of_end(record.cause, "", "")), record)
        # Of several causes that fit, take the one that fits most records of the backend.
        shared = max(_causes(blamed), key=lambda cause: votes[record.backend, cause], default=blamed.finding)
        words = record.reason if isinstance(record, XFailed) else shared
        groups.setdefault((record.backend, words), []).append(record)
    counts = Counter(backend for backend, _ in groups)
    found = []
    for (backend, words), members in groups.items():
        compared = own[backend] if counts[backend] <= CONTRASTED else ()
        found += _split(backend, words, members, compared, header.case_by_name)
    order = list(dict.fromkeys([info.name for info in header.backends] + [each.backend for each in found]))
    return tuple(sorted(found, key=lambda each: (order.index(each.backend), _rank(each), -len(each.records))))


def _causes(record: Record) -> tuple[str, ...]:
    """Return the likely causes of a failure without their figures, or () if the check set the finding itself."""
    causes = tuple(map(without_figures, likely_causes(record.meaning))) if isinstance(record, Failed) else ()
    return causes if causes and isinstance(record, Failed) and record.finding == causes[0] else ()


def _place(record: Record) -> tuple[str, str, str]:
    return record.backend, record.suite, record.case_id


def _may_follow(record: Record) -> bool:
    """Return whether the record may fail only because the output of its case is wrong: it names no cause of its own."""
    return isinstance(record, Failed) and record.check in _OF_THE_OUTPUT and not likely_causes(record.meaning)


def _rank(finding: Finding) -> int:
    if finding.is_expected:
        return 5
    if isinstance(finding.example, XPassed):
        return 4
    if finding.words == UNEXPLAINED:
        return 3  # it may follow from what other checks found, such as a cache that is not written
    if not finding.is_explained:
        return 2
    is_written_wrongly = isinstance(finding.example, Failed) and finding.example.check == "cache_write"
    return 0 if is_written_wrongly else 1  # an output may be wrong because the cache is


def _split(
    backend: str,
    words: str,
    members: Sequence[Short],
    own: Sequence[Record],
    described: Mapping[tuple[str, str], CaseInfo],
) -> list[Finding]:
    """Return the records as one finding, or as several if they are unexplained and keys of their cases separate them.

    ``own``: the records of the backend to compare them with.
    """
    checks = {record.check for record in members}
    wrong = list(dict.fromkeys((record.suite, record.case_id) for record in members))
    keys = {(record.suite, record.case_id): keys_of_record(record, described) for record in (*members, *own)}
    right = [keys[case] for case in _passing(own, checks)]
    is_late = is_out_of_time(members[0])  # then the order of the cases decides, and what they have in common is chance
    contrast = None if is_late else contrast_of([keys[case] for case in wrong], right)

    def finding(records: Sequence[Short], contrast: Contrast | None) -> Finding:
        example = min(
            records,
            key=lambda record: (
                isinstance(record, XPassed),
                _may_follow(record),
                _size(keys[record.suite, record.case_id]),
            ),
        )
        case = described.get((example.suite, example.case_id))
        return Finding(backend, words, tuple(records), example, case, contrast)

    if words == UNEXPLAINED:
        parts = parts_of([keys[case] for case in wrong], right)
        if parts and (contrast is None or contrast.exceptions or sum(p.cost for p, _ in parts) < contrast.cost):
            found = []
            for part, positions in parts:
                cases = {wrong[i] for i in positions}
                found.append(finding([r for r in members if (r.suite, r.case_id) in cases], part))
            return found
    return [finding(members, contrast)]


def _passing(own: Sequence[Record], checks: set[str]) -> list[tuple[str, str]]:
    """Return the cases that at least one of the checks examined, and that passed all of those that did."""
    outcomes: dict[tuple[str, str], list[Record]] = {}
    for record in own:
        if record.check in checks and record.outcome in EXAMINED:
            outcomes.setdefault((record.suite, record.case_id), []).append(record)
    return [case for case, records in outcomes.items() if all(isinstance(record, Passed) for record in records)]


def keys_of_record(record: Record, described: Mapping[tuple[str, str], CaseInfo]) -> Keys:
    """Return the keys of a record's case, or its features and forms if the run file does not describe cases."""
    case = described.get((record.suite, record.case_id))
    if case is not None:
        return case.keys
    pairs = (need.partition("=") for need in record.needs)
    return {name: value if is_form else True for name, is_form, value in pairs}


def _size(keys: Keys) -> float:
    """Return an estimate of the work of a case, used to choose the smallest example."""
    size = 1.0
    for name in ("batch.num_requests", "batch.max_seq_len", "layer.num_heads", "layer.head_size"):
        value = keys.get(name)
        size *= value if isinstance(value, int | float) else 1.0
    return size


def by_check(finding: Finding) -> Iterator[tuple[XFailed, int]]:
    """Yield the first record of each check of an expected finding, and the number of further ones."""
    for check in finding.checks:
        first, *further = [each for each in finding.records if each.check == check and isinstance(each, XFailed)]
        yield first, len(further)
