"""Which questions two runs have in common, and what only one of them asked.

A backend answers to the one of its name, or to the one it is told to. A case is the same question where its
``suite/id`` and its hash are: what was rewritten is asked anew.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from attncheck.errors import QuestionError, UnknownNameError
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.analysis.rounds import worst_rounds
from attncheck.reports.run_file.records import EXAMINED, Record
from attncheck.reports.run_file.store import Run

ARROW = "->"

_Questions = Mapping[tuple[str, str], Record]
"""The worst record of each case (``suite/id``) and check of one backend."""


@dataclass(frozen=True)
class OneSidedCases:
    """What only one run asked of ``backend``: these ``cases``; all there are where the other run lacks the backend.

    ``check``: empty where the other run lacks the cases; else it has the cases without this check. ``is_lost``: BASE
    examined something of them, which NEW has not.
    """

    backend: str
    cases: tuple[str, ...]
    is_whole: bool
    check: str = ""
    is_lost: bool = False


@dataclass(frozen=True)
class ComparedCounts:
    """How many cases and backends of BASE were compared. A case counts if every matched backend of BASE has it in NEW.

    ``of_cases``, ``of_backends``: how many BASE has; where BASE and NEW are one file, how many were to be compared.
    """

    cases: int
    of_cases: int
    backends: int
    of_backends: int


@dataclass(frozen=True)
class RunMatching:
    """What two runs have in common.

    ``backends``: names in BASE and NEW. ``answers``: both records of every check of every common case, the worst of all
    rounds, with the label of the backend. ``cases``: the common cases, with the backend's name in BASE. ``changed``:
    cases of one name and two hashes.
    """

    backends: Mapping[str, str]
    answers: tuple[tuple[str, Record, Record], ...]
    cases: frozenset[tuple[str, str]]
    only_base: tuple[OneSidedCases, ...]
    only_new: tuple[OneSidedCases, ...]
    changed: tuple[str, ...]
    compared: ComparedCounts


def label(base: str, new: str) -> str:
    """What a pair of backends is called."""
    return base if base == new else f"{base} {ARROW} {new}"


def match_runs(base: Run, new: Run, backends: Mapping[str, str]) -> RunMatching:
    """Match two runs. ``backends`` names the backend of NEW that answers to one of BASE, where names differ.

    Those it leaves out are matched by name, unless BASE and NEW are one file.

    Raises:
        QuestionError: a backend that its run does not have, a file compared with itself, or nothing in common.
    """
    matched = _match_backends(base, new, backends)
    before, after = _by_backend(base), _by_backend(new)
    answers: list[tuple[str, Record, Record]] = []
    cases: set[tuple[str, str]] = set()
    only: tuple[list[OneSidedCases], list[OneSidedCases]] = ([], [])
    changed: dict[str, None] = {}
    for one, other in matched.items():
        asked, asked_anew = before.get(one, {}), after.get(other, {})
        hashes, hashes_anew = _hashes(asked.values()), _hashes(asked_anew.values())
        if gone := {question: record for question, record in asked.items() if question[0] not in hashes_anew}:
            only[0].append(_one_sided(one, gone, is_lost=_has_examined(gone)))
        if come := {question: record for question, record in asked_anew.items() if question[0] not in hashes}:
            only[1].append(_one_sided(other, come))
        common = {case for case in hashes if hashes_anew.get(case) == hashes[case]}
        changed.update(dict.fromkeys(case for case in hashes if case in hashes_anew and case not in common))
        cases.update((one, case) for case in common)
        of_common = {question: record for question, record in asked.items() if question[0] in common}
        answers += [(label(one, other), of_common[q], asked_anew[q]) for q in of_common if q in asked_anew]
        only[0].extend(_lost_checks(one, {q: record for q, record in of_common.items() if q not in asked_anew}))
    if not is_one_file(base, new):
        only[0].extend(
            _one_sided(name, asked, is_whole=True, is_lost=name not in after and _has_examined(asked))
            for name, asked in before.items()
            if name not in matched
        )
        only[1].extend(
            _one_sided(name, asked, is_whole=True) for name, asked in after.items() if name not in matched.values()
        )
    if not cases:
        why = f"; {plural(len(changed), 'case')} of the same name changed" if changed else ""
        raise QuestionError(f"{base.path} and {new.path} have no case of a backend in common{why}")
    to_compare = {name: before.get(name, {}) for name in matched} if is_one_file(base, new) else before
    compared = _counts(to_compare, matched, cases)
    return RunMatching(
        matched, tuple(answers), frozenset(cases), tuple(only[0]), tuple(only[1]), tuple(changed), compared
    )


def _match_backends(base: Run, new: Run, told: Mapping[str, str]) -> dict[str, str]:
    """Names in BASE and NEW, in the order of BASE."""
    names = [info.name for info in base.header.backends]
    names_anew = [info.name for info in new.header.backends]
    for one, other in told.items():
        if one not in names:
            raise UnknownNameError(f"backend of {base.path}", one, names)
        if other not in names_anew:
            raise UnknownNameError(f"backend of {new.path}", other, names_anew)
    if is_one_file(base, new):
        if not told:
            raise QuestionError(f"{base.path} is BASE and NEW; --match OLD=NEW says which of its backends are compared")
        return dict(told)
    taken = set(told.values())
    by_name = {name: name for name in names if name in names_anew and name not in taken}
    return {name: told.get(name, name) for name in names if name in told or name in by_name}


def is_one_file(base: Run, new: Run) -> bool:
    """Whether both sides are the same run."""
    return Path(base.path).resolve() == Path(new.path).resolve()


def _by_backend(run: Run) -> dict[str, dict[tuple[str, str], Record]]:
    """The worst record of each case (``suite/id``) and check of each backend; every backend of the header is there."""
    found: dict[str, dict[tuple[str, str], Record]] = {info.name: {} for info in run.header.backends}
    for worst in worst_rounds(run.records):
        record = worst.record
        found.setdefault(record.backend, {})[record.case, record.check] = record
    return found


def _hashes(records: Iterable[Record]) -> dict[str, str]:
    return {record.case: record.case_hash for record in records}


def _lost_checks(name: str, missing: _Questions) -> Iterator[OneSidedCases]:
    """Yield each check of ``missing``, which NEW did not make of cases that it has."""
    for check in dict.fromkeys(check for _, check in missing):
        cases = {question: record for question, record in missing.items() if question[1] == check}
        yield _one_sided(name, cases, check=check, is_lost=_has_examined(cases))


def _has_examined(asked: _Questions) -> bool:
    return any(record.outcome in EXAMINED for record in asked.values())


def _one_sided(
    name: str, asked: _Questions, *, is_whole: bool = False, check: str = "", is_lost: bool = False
) -> OneSidedCases:
    return OneSidedCases(name, tuple(dict.fromkeys(case for case, _ in asked)), is_whole, check, is_lost)


def _counts(
    base: Mapping[str, _Questions], matched: Collection[str], compared: Collection[tuple[str, str]]
) -> ComparedCounts:
    """``matched``: backends as BASE names them; ``compared``: those of them and their common cases."""
    owners: dict[str, set[str]] = {}
    for name, asked in base.items():
        for case, _ in asked:
            owners.setdefault(case, set()).add(name)
    shared = {case: names.intersection(matched) for case, names in owners.items()}
    whole = sum(bool(names) and all((name, case) in compared for name in names) for case, names in shared.items())
    return ComparedCounts(whole, len(owners), len({name for name, _ in compared}), len(base))
