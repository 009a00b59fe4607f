"""Failures grouped by cause: records of one backend that one fault explains form one finding.

Pure functions from records to frozen values. Records with equal ``finding`` text are grouped. If several causes fit a
record, the one that fits most cases of the backend wins. One wrong output makes several checks fail: such failures of
one case are in one finding. Failures that no known fault explains are split if keys of their cases separate them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from attncheck.reports.analysis.contrast import Contrast, Keys, Value, contrast_of, parts_of
from attncheck.reports.analysis.reasons import joined
from attncheck.reports.analysis.summary import worst_rounds
from attncheck.reports.analysis.support import REFUSED
from attncheck.reports.run_file.causes import (
    ON_EARLIER,
    UNEXPLAINED,
    UNKNOWN,
    cause_line,
    cause_of_end,
    died_at,
    is_fitted,
    likely_causes,
    perhaps,
    raised_at,
    restricted,
    restriction,
    symptom,
    with_ranges,
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
    RecordKey,
    TimedOut,
    XFailed,
    XPassed,
    is_out_of_time,
)

CONTRASTED = 200
"""Maximum findings of a backend for which each is compared with the passing cases; beyond it, none is."""

_OF_THE_OUTPUT = ("numerics", "lse", "features", "invariance", "containment", "cudagraph")
"""Checks that one wrong output can make fail, the nearest to the fault first."""

_NOT_FINITE = "only NaN and Inf leak"
_WITHOUT_GRAPH = "wrong without a graph, too"
_WRONG_ANSWER = "accepts it without an error, and its output is wrong"
"""Parts of what `containment`, `cudagraph` and `refusals` state."""

_FITTED = ("numerics", "lse")
"""Checks whose causes are references with a fault; other checks state what they observed."""

_WRITE = "cache_write"
"""The check whose failure may make every other check of its case fail."""

Short = Failed | Errored | Ended | XFailed | XPassed


@dataclass(frozen=True)
class Finding:
    """Records of one backend with one cause.

    ``example``: the record to show, that of the smallest case. ``case``: its case, or None if the run file does not
    describe it. ``contrast``: what the cases have in common that passing ones do not have, or None if nothing was
    found. ``is_confirmed``: whether a check observed the cause, or it fits two cases of another batch or layer with the
    same figures, and of the causes that fit some case, no other fits all.
    """

    backend: str
    words: str
    records: tuple[Short, ...]
    example: Short
    case: CaseInfo | None = None
    contrast: Contrast | None = None
    is_confirmed: bool = False

    @cached_property
    def checks(self) -> tuple[str, ...]:
        """The checks of its records, in their order, but `numerics` first."""
        checks = dict.fromkeys(record.check for record in self.records)
        return tuple(sorted(checks, key=lambda check: check != "numerics"))

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
                return self.words in _causes(self.example)
            case Errored():
                return bool(cause_line(raised_at(self.example.traceback)))
            case Crashed() | TimedOut():
                return not is_out_of_time(self.example) and any(map(cause_line, died_at(self.example.output)))
            case _:
                return False

    @property
    def is_inferred(self) -> bool:
        """Whether its cause is a fault that was tried and fits; other causes are what a check observed."""
        return any(self.words in _causes(record) and _is_inferred(record) for record in self.records)

    def meaning_of(self, record: Failed) -> str:
        """Return the meaning of one of its records, without causes that another case with this cause excludes."""
        return restricted(record.meaning or "", self.words, self._shared_causes)

    @cached_property
    def _shared_causes(self) -> frozenset[str]:
        """The causes without figures that fit in all cases which name this one."""
        causes = [frozenset(named) for each in self.records if self.words in (named := _causes(each))]
        return frozenset.intersection(*causes)

    @property
    def exit_status(self) -> int:
        """The exit status of a run with this finding alone: 0 if expected, 3 if attncheck is at fault, else 1."""
        if self.is_expected:
            return 0
        return 3 if isinstance(self.example, Errored) and self.example.stage == OURSELVES else 1

    @cached_property
    def title(self) -> str:
        """The cause or the symptom, with the figures and the rows that all its records share."""
        match self.example:
            case Failed() if named := self._named:
                cause = with_ranges(dict.fromkeys(cause for cause, _ in named))
                restrictions = {restriction(meaning) for _, meaning in named}
                if len(restrictions) == 1 and (rows := restrictions.pop()):
                    cause += f", in rows {rows}"
                return cause if self.is_confirmed else perhaps(cause)
            case Failed() if self.words == UNEXPLAINED:
                return ": ".join(filter(None, [UNEXPLAINED, self._description]))
            case Failed() if without_figures(symptom(self.example.summary)) == self.words:
                alike = [symptom(r.summary) for r in self.records if isinstance(r, Failed)]
                return joined(with_ranges(dict.fromkeys(each for each in alike if without_figures(each) == self.words)))
            case Errored():
                first = next(iter(self.example.message.strip().splitlines()), "")
                place = self.words.removesuffix(
                    f": {without_figures(first)}"
                )  # the words end with the message, figures removed
                return f"{place}: {first}" if first else self.words
            case _:
                return self.words

    @property
    def _named(self) -> list[tuple[str, str]]:
        """The cause of each record that names it, and the meaning that it begins."""
        named = [r for r in self.records if isinstance(r, Failed) and self.words in _causes(r)]
        meanings = map(self.meaning_of, named)
        return [(likely_causes(meaning)[0], meaning) for meaning in meanings]

    @property
    def _description(self) -> str:
        """What descriptions of all cases share, in words; "" if nothing."""
        meanings = [r.meaning or "" for r in self.records if isinstance(r, Failed) and r.check == "numerics"]
        clauses = [meaning.removeprefix(UNKNOWN).split("; ") for meaning in meanings]
        shared = [each for each in clauses[0] if all(each in others for others in clauses)] if clauses else []
        return "; ".join(each for each in shared if each != ON_EARLIER)


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
    for record, words in zip(short, _words(short), strict=True):
        groups.setdefault((record.backend, words), []).append(record)
    counts = Counter(backend for backend, _ in groups)
    found = []
    for (backend, words), members in groups.items():
        compared = own[backend] if counts[backend] <= CONTRASTED else ()
        found += _split(backend, words, members, compared, header.case_by_name)
    order = list(dict.fromkeys([info.name for info in header.backends] + [each.backend for each in found]))
    return tuple(sorted(found, key=lambda each: (order.index(each.backend), _rank(each), -len(each.records))))


def stated_cause(record: Failed, finding: Finding | None = None) -> str:
    """Return the cause of a failure as all reports print it, or "" if the check names none.

    ``finding``: the one that the record is in. A cause that is not confirmed there, or by no finding, is "perhaps". A
    cause of its own that the finding does not have may be how the other fault shows.
    """
    meaning = record.meaning or ""
    if not (causes := _causes(record)):
        return f"the cause is {meaning}" if meaning.startswith(UNKNOWN) else meaning
    if finding is None:
        return perhaps(meaning) if _is_inferred(record) else f"likely cause: {meaning}"
    if finding.words not in causes:
        return f"it may follow from another fault: {finding.title}"
    meaning = finding.meaning_of(record)
    return f"likely cause: {meaning}" if finding.is_confirmed else perhaps(meaning)


def _causes(record: Record) -> tuple[str, ...]:
    """Return the likely causes of a failure without their figures, or () if the check set the finding itself."""
    causes = tuple(map(without_figures, likely_causes(record.meaning))) if isinstance(record, Failed) else ()
    return causes if causes and isinstance(record, Failed) and record.finding == causes[0] else ()


def _is_inferred(record: Record) -> bool:
    """Return whether the cause of a failure is a fault that was tried and fits."""
    return record.check in _FITTED or (isinstance(record, Failed) and is_fitted(record.meaning))


def _distance(record: Record) -> int:
    """Return how far from the fault a check sees a wrong output; a cache that is written wrongly comes first."""
    order = (_WRITE, *_OF_THE_OUTPUT)
    return order.index(record.check) if record.check in order else len(order)


def _may_follow(record: Record) -> bool:
    """Return whether the record may fail only because an output of its case is wrong."""
    if not isinstance(record, Failed) or record.check not in _OF_THE_OUTPUT:
        return False
    stated = "; ".join(likely_causes(record.meaning))
    # A wrong output changes with finite values, too, and fails the step without a graph.
    return not stated or (_WITHOUT_GRAPH in stated if record.check == "cudagraph" else _NOT_FINITE not in stated)


def _words(short: Sequence[Short]) -> list[str]:
    """Return the words of the finding of each record."""
    votes = Counter((b, cause) for b, cause, _ in {(r.backend, c, r.case) for r in short for c in _causes(r)})
    ends: dict[tuple[str, str, str], Ended] = {}
    sources: dict[tuple[str, str], list[Short]] = {}
    for record in sorted(short, key=_distance):
        if isinstance(record, Ended):  # what ends the process in several checks of a case is one finding
            ends.setdefault((record.backend, record.case, cause_of_end(record.cause, "", "")), record)
        elif isinstance(record, Failed) and (record.check == _WRITE or (record.check in _FITTED and _causes(record))):
            sources.setdefault((record.backend, record.case), []).append(record)
    # A later step reads what an earlier one wrote, and it is enough that a case of the backend shows a wrong write.
    writes = {backend: first for (backend, _), (first, *_) in sources.items() if first.check == _WRITE}
    # A cause that shows only behind another fault of its cases may be how that one shows.
    proven = {(backend, cause) for (backend, _), (first, *_) in sources.items() for cause in _causes(first)}
    titles = _unexplained([r for r in short if isinstance(r, Failed) and (r.backend, r.case) not in sources])
    found = []
    for record in short:
        blamed: Short = record
        own = sources.get((record.backend, record.case), [])
        faults = [r for r in own if r is own[0] or any((r.backend, cause) in proven for cause in _causes(r))]
        if isinstance(record, Ended):
            blamed = ends[record.backend, record.case, cause_of_end(record.cause, "", "")]
        elif faults and record not in faults and (record in own or _may_follow(record)):
            blamed = min(faults, key=lambda each: (each.check == _WRITE, _distance(each)))
        elif not faults and isinstance(record, Failed) and record.check == "invariance":
            blamed = writes.get(record.backend, record)
        # Of several causes that fit, take the one that fits most cases of the backend.
        shared = max(_causes(blamed), key=lambda cause: votes[record.backend, cause], default=blamed.finding)
        words = titles.get(record.key, shared) if blamed is record else shared
        found.append(record.reason if isinstance(record, XFailed) else words)
    return found


def _unexplained(failed: Sequence[Failed]) -> dict[RecordKey, str]:
    """Return the words of failures that may follow a wrong output that nothing explains, by key.

    ``failed``: failures in cases without a named fault. Cases of one backend form one finding if their outputs are
    wrong, or if another check fails in them as it does in such a case.
    """
    following = [record for record in failed if _may_follow(record)]
    cases: dict[tuple[str, str], list[Failed]] = {}
    for record in following:
        cases.setdefault((record.backend, record.case), []).append(record)
    titles: dict[RecordKey, str] = {}
    for members in cases.values():
        nearest = min(members, key=_distance)
        titles |= dict.fromkeys((record.key for record in members), nearest.finding)
    wrong = {place for place, members in cases.items() if any(r.finding == UNEXPLAINED for r in members)}
    for backend in {backend for backend, _ in wrong}:
        shown = {r.finding for r in following if r.backend == backend and (backend, r.case) in wrong}
        own = [members for (name, _), members in cases.items() if name == backend]
        alike: list[list[Failed]] = []
        while len(found := [members for members in own if shown & {r.finding for r in members}]) > len(alike):
            alike = found
            shown |= {record.finding for members in found for record in members}
        group = [record for members in alike for record in members]
        # A wrong answer to an undeclared case, or in a later step, shows nothing new where a backend is wrong anyway.
        group += [r for r in failed if r.backend == backend and (r.check == "invariance" or _WRONG_ANSWER in r.finding)]
        # What `containment` reads says more than that no fault is known, if it does so in most of the cases.
        read = Counter(r.finding for r in group if r.check == "containment" and _causes(r))
        most = len({record.case for record in group}) / 2
        words = next((words for words, count in read.most_common(1) if count >= most), UNEXPLAINED)
        titles |= dict.fromkeys((record.key for record in group), words)
    return titles


def _rank(finding: Finding) -> int:
    if finding.is_expected:
        return 5
    if isinstance(finding.example, XPassed):
        return 4
    if finding.words == UNEXPLAINED:
        return 3  # it may follow from what other checks found, such as a cache that is not written
    if not finding.is_explained:
        return 2
    is_written_wrongly = isinstance(finding.example, Failed) and finding.example.check == _WRITE
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
    nearest = min(members, key=_distance).check
    wrong = list(dict.fromkeys(map(_case, members)))
    keys = {_case(record): keys_of_record(record, described) for record in (*members, *own)}
    right = [keys[case] for case in _passing(own, checks, nearest)]
    is_late = is_out_of_time(members[0])  # then the order of the cases decides, and what they have in common is chance
    contrast = None if is_late else contrast_of([keys[case] for case in wrong], right)

    def finding(records: Sequence[Short], contrast: Contrast | None) -> Finding:
        def rank(record: Short) -> tuple[bool, bool, bool, float]:
            causes = _causes(record)
            is_of_another = words not in (*causes, record.finding)
            is_of_another |= isinstance(record, Failed) and ON_EARLIER in (record.meaning or "")
            return isinstance(record, XPassed), is_of_another, causes[:1] != (words,), _size(keys[_case(record)])

        example = min(records, key=rank)
        named = [record for record in records if isinstance(record, Failed) and words in _causes(record)]
        confirming = {_differing(record, keys[_case(record)]) for record in named}
        figures = {cause for r in named for cause in likely_causes(r.meaning) if without_figures(cause) == words}
        left = set.intersection(*(set(_causes(record)) for record in named)) if named else set()
        is_fit = any(map(_is_inferred, named))
        is_confirmed = not is_fit or (len(confirming) > 1 and len(figures) == 1 and left == {words})
        case = described.get(_case(example))
        return Finding(backend, words, tuple(records), example, case, contrast, is_confirmed)

    if words == UNEXPLAINED:
        parts = parts_of([keys[case] for case in wrong], right)
        if parts and (contrast is None or contrast.exceptions or sum(p.cost for p, _ in parts) < contrast.cost):
            found = []
            for part, positions in parts:
                cases = {wrong[i] for i in positions}
                found.append(finding([r for r in members if _case(r) in cases], part))
            return found
    return [finding(members, contrast)]


def _case(record: Record) -> tuple[str, str]:
    return record.suite, record.case_id


def _differing(record: Record, keys: Keys) -> frozenset[tuple[str, Value]] | str:
    """Return the keys of the batch and the layer, without the dtype; the name of a case that is not described."""
    found = {(key, value) for key, value in keys.items() if key.startswith(("batch", "layer"))}
    return frozenset(pair for pair in found if pair[0] != "layer.dtype") if found else record.case


def _passing(own: Sequence[Record], checks: set[str], nearest: str) -> list[tuple[str, str]]:
    """Return the cases that passed ``nearest`` and all other ``checks`` that examined them.

    A refusal examines nothing.
    """
    outcomes: dict[tuple[str, str], list[Record]] = {}
    for record in own:
        is_refused = isinstance(record, Passed) and any(note.startswith(REFUSED) for note in record.notes)
        if record.check in checks and record.outcome in EXAMINED and not is_refused:
            outcomes.setdefault(_case(record), []).append(record)
    return [
        case
        for case, records in outcomes.items()
        if all(isinstance(record, Passed) for record in records) and any(record.check == nearest for record in records)
    ]


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
