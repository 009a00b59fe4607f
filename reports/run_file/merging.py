"""Merge run files that are shards of one run, made on equal machines.

Different headers, a missing shard, and records that contradict each other are errors.
"""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from attncheck.errors import RunFileError
from attncheck.reports.run_file.header import BackendInfo, RunHeader
from attncheck.reports.run_file.records import Record, RecordKey
from attncheck.reports.run_file.store import Run, lacking_in_words

_OF_ONE_RUN = frozenset({"started", "command", "notes"})
"""Header fields that may differ between parts of one run, in addition to ``shard``."""

_SHOWN = 3
"""Number of changed files of a backend that a message names."""

_OF_ONE_TIME = frozenset({"duration_s"})
"""Record fields that may differ between two records of the same check."""


def merge_runs(runs: Sequence[Run]) -> Run:
    """Return the run whose parts are ``runs``, with its records in the order of an undivided run.

    Raises:
        RunFileError: a run was cut off or lacks records, or differs in its header from the first; a shard is missing;
            two runs have different records of one check.
    """
    first = runs[0]
    for run in runs:
        if run.footer is None:
            raise RunFileError(run.path, "is incomplete; run that shard again")
        if run.lacking:
            raise RunFileError(run.path, f"is incomplete: {lacking_in_words(run)}; run that shard again")
        _refuse_other_question(first, run)
    _refuse_missing(runs)
    headers = [run.header for run in runs]
    notes = tuple(dict.fromkeys(note for header in headers for note in header.notes))
    started = min(header.started for header in headers)
    cases = tuple(case.model_copy(update={"shard": 0}) for case in first.header.cases)
    header = first.header.model_copy(update={"shard": "", "cases": cases, "notes": notes, "started": started})
    footers = [run.footer for run in runs if run.footer is not None]
    errors = tuple(dict.fromkeys(error for footer in footers for error in footer.errors))
    last = max(footers, key=lambda footer: footer.finished)
    records = _in_order(header, _joined(runs))
    merged = Run(first.path, header, records, last.model_copy(update={"errors": errors}))
    if merged.lacking:
        raise RunFileError(first.path, f"with the other shards, {lacking_in_words(merged)}")
    return merged


def question_differences(header: RunHeader, other: RunHeader) -> list[str]:
    """Return the fields in which the headers of two runs or shards differ, with both values if they are short."""
    return sorted(_differences(_asked(header), _asked(other), _OF_ONE_RUN))


def _refuse_other_question(first: Run, run: Run) -> None:
    headers = _asked(first.header), _asked(run.header)
    if differences := sorted(_differences(*headers, _OF_ONE_RUN | {"shard"})):
        raise RunFileError(
            run.path,
            f"is not a shard of the run of {first.path}: they differ in {', '.join(differences)}; "
            "`attncheck compare` compares two runs",
        )


def _asked(header: RunHeader) -> RunHeader:
    """Return ``header`` without what follows from its cases, checks, backends and shard."""
    suites = tuple(suite.model_copy(update={"cases": 0}) for suite in header.suites)
    cases = tuple(case.model_copy(update={"checks": (), "backends": (), "shard": 0}) for case in header.cases)
    return header.model_copy(update={"suites": suites, "cases": cases})


def _differences(one: BaseModel, other: BaseModel, but: Iterable[str]) -> list[str]:
    """Return the fields in which two values differ, with both values if they are short."""
    found = []
    for name in type(one).model_fields.keys() - but:
        was, now = getattr(one, name), getattr(other, name)
        if was == now:
            continue
        if name == "backends" and len(was) == len(now):
            found += _backend_differences(was, now)
        elif isinstance(was, BaseModel) and isinstance(now, BaseModel):
            found += [f"{name}.{each}" for each in _differences(was, now, ())]
        else:
            is_short = not isinstance(was, tuple | dict) and not isinstance(now, tuple | dict)
            found.append(f"{name} ({was!r} and {now!r})" if is_short else name)
    return found


def _backend_differences(were: Sequence[BackendInfo], are: Sequence[BackendInfo]) -> list[str]:
    """Return the changed files of the backends, or ``backends`` if they differ otherwise.

    A file that one run alone has loaded is no difference: a process loads more where it also does other work, and the
    change of a file that now imports another one shows by itself.
    """
    if [each.model_copy(update={"files": {}}) for each in were] != [
        each.model_copy(update={"files": {}}) for each in are
    ]:
        return ["backends"]
    found = []
    for was, now in zip(were, are, strict=True):
        changed = sorted(name for name, digest in was.files.items() if now.files.get(name, digest) != digest)
        found += [f"the file {name} of backend {was.name}" for name in changed[:_SHOWN]]
        if len(changed) > _SHOWN:
            found.append(f"{len(changed) - _SHOWN} more files of backend {was.name}")
    return found


def _refuse_missing(runs: Sequence[Run]) -> None:
    """Raise RunFileError if a shard is missing; a run without a shard has all cases."""
    shards = {run.header.shard: run for run in runs}
    if "" in shards:
        return
    counts = {shard.partition("/")[2]: run for shard, run in shards.items()}
    if len(counts) > 1:
        one, other = list(counts)[:2]
        raise RunFileError(
            counts[other].path,
            f"is one of {other} shards, and {counts[one].path} is one of {one}; merge shards of one run",
        )
    (count,) = counts
    missing = [f"{number}/{count}" for number in range(1, int(count) + 1) if f"{number}/{count}" not in shards]
    if missing:
        which = f"shard {missing[0]} is" if len(missing) == 1 else f"shards {', '.join(missing)} are"
        raise RunFileError(runs[0].path, f"{which} missing: the runs to merge have {', '.join(sorted(shards))}")


def _joined(runs: Sequence[Run]) -> dict[RecordKey, Record]:
    found: dict[RecordKey, tuple[Run, Record]] = {}
    for run in runs:
        for record in run.records:
            before, known = found.setdefault(record.key, (run, record))
            if known is not record and (differences := sorted(_record_differences(known, record))):
                raise RunFileError(
                    run.path, f"contradicts {before.path}: {record.key} differs in {', '.join(differences)}"
                )
    return {key: record for key, (_, record) in found.items()}


def _record_differences(one: Record, other: Record) -> list[str]:
    if one.outcome != other.outcome:
        return [f"outcome ({one.outcome} and {other.outcome})"]
    return _differences(one, other, _OF_ONE_TIME)


def _in_order(header: RunHeader, records: dict[RecordKey, Record]) -> tuple[Record, ...]:
    """Return the records by round, backend, case and check, each in the order of the header."""
    backends = {backend.name: index for index, backend in enumerate(header.backends)}
    cases = {(case.suite, case.id): index for index, case in enumerate(header.cases)}
    checks = {check: index for index, check in enumerate(header.checks)}

    def place(record: Record) -> tuple[int, ...]:
        case = cases.get((record.suite, record.case_id), len(cases))
        return record.round, backends[record.backend], case, checks[record.check]

    return tuple(sorted(records.values(), key=place))
