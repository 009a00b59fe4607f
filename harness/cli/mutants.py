"""The command ``mutants``: which checks detect which mutants."""

import itertools
import json
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from tabulate import tabulate

from attncheck.backends.mutants.catalogue import PREFIX, Mutant, catalogue
from attncheck.errors import BackendUnavailableError, QuestionError, SelectionError
from attncheck.harness.cli.common import interruptible, print_stderr
from attncheck.harness.cli.options import Given, read_options, with_options
from attncheck.harness.run.options import RunOptions
from attncheck.reference.spec import CHECKS
from attncheck.reports.analysis.phrases import plural
from attncheck.reports.run_file.causes import UNEXPLAINED, likely_causes
from attncheck.reports.run_file.records import FALLEN_SHORT, Failed, Record, Unavailable, Unsupported
from attncheck.reports.run_file.store import Run, read_run, refuse_existing, write_run

if TYPE_CHECKING:
    from attncheck.harness.run.selection import Shard

# The kill matrix: which check catches which mutant and with which diagnosis, as text and as JSON.

Diagnosis = Literal["right", "wrong", "absent", ""]
"""Whether the report named the mutant's cause; empty if the mutant survives or its entry has no cause."""


@dataclass(frozen=True)
class MutantResult:
    """The result for one mutant.

    ``checks``: the checks that catch it. ``causes``: the first likely causes in its records.
    ``missing``: why it was not examined; empty if it was.
    """

    mutant: Mutant
    checks: tuple[str, ...] = ()
    diagnosis: Diagnosis = ""
    causes: str = ""
    missing: str = ""


@dataclass(frozen=True)
class KillMatrix:
    """Mutants of a run against its checks. ``false_alarms``: by reference, the checks that a correct backend failed."""

    checks: tuple[str, ...]
    results: tuple[MutantResult, ...]
    false_alarms: Mapping[str, tuple[str, ...]]

    @property
    def examined(self) -> tuple[MutantResult, ...]:
        """The mutants that were examined."""
        return tuple(result for result in self.results if not result.missing)

    @property
    def survivors(self) -> tuple[MutantResult, ...]:
        """The mutants that no check catches."""
        return tuple(result for result in self.examined if not result.checks)

    @property
    def is_clean(self) -> bool:
        """Whether every mutant was examined and caught, and every correct backend passed."""
        return not any(self.false_alarms.values()) and all(result.checks for result in self.results)

    def alone(self, check: str) -> tuple[str, ...]:
        """Return the mutants that only ``check`` catches."""
        return tuple(result.mutant.name for result in self.results if result.checks == (check,))

    def diagnosed(self, how: Diagnosis) -> tuple[MutantResult, ...]:
        """Return the mutants with this diagnosis."""
        return tuple(result for result in self.results if result.diagnosis == how)


def kill_matrix(
    records: Iterable[Record],
    mutants: Sequence[Mutant],
    right: Sequence[str],
    checks: Sequence[str],
    missing: Mapping[str, str],
) -> KillMatrix:
    """Return the matrix of ``records``.

    ``right``: references of correct backends. ``missing``: by reference, why a mutant was not examined. A mutant on
    which no check ran counts as missing too.
    """
    by_ref: dict[str, list[Record]] = {}
    not_run: dict[str, str] = {}
    for record in records:
        if isinstance(record, Unsupported | Unavailable):
            not_run.setdefault(record.backend_ref, f"no check ran on it: {record.reasons[0]}")
        else:
            by_ref.setdefault(record.backend_ref, []).append(record)
    why = {mutant.ref: "no case of the suites was run" for mutant in mutants} | not_run | dict(missing)
    results = tuple(
        _result(mutant, found, checks)
        if (found := by_ref.get(mutant.ref))
        else MutantResult(mutant, missing=why[mutant.ref])
        for mutant in mutants
    )
    alarms = {ref: _short_checks(by_ref[ref], checks) for ref in right if ref in by_ref}
    return KillMatrix(tuple(checks), results, alarms)


def _short_checks(records: Iterable[Record], checks: Sequence[str]) -> tuple[str, ...]:
    short = {record.check for record in records if record.outcome in FALLEN_SHORT}
    return tuple(check for check in checks if check in short)


def _result(mutant: Mutant, records: Sequence[Record], checks: Sequence[str]) -> MutantResult:
    killing = [record for record in records if record.outcome in FALLEN_SHORT]
    causes = _first_words(killing) if killing else ""
    diagnosis: Diagnosis = ""
    if killing and mutant.cause is not None:
        diagnosis = "absent" if not causes else "right" if re.search(mutant.cause, causes, re.IGNORECASE) else "wrong"
    return MutantResult(mutant, _short_checks(killing, checks), diagnosis, causes)


def _first_words(killing: Sequence[Record]) -> str:
    """Return the first likely causes in these records, else the summary of the first one.

    Empty if the first record reports wrong rows without a cause.
    """
    for record in killing:
        if isinstance(record, Failed) and likely_causes(record.meaning):
            return record.meaning or ""
    first = killing[0]
    if isinstance(first, Failed):
        return "" if first.finding == UNEXPLAINED else first.summary
    return str(getattr(first, "finding", ""))


def as_text(matrix: KillMatrix) -> str:
    """Return the matrix as text: a row per mutant, the score, the survivors, and the value of each check."""
    parts = [_rows(matrix), _score(matrix)]
    if matrix.survivors:
        rows = [[each.mutant.name, each.mutant.kind, each.mutant.fault] for each in matrix.survivors]
        parts.append(f"survivors\n{_table(rows)}")
    if gone := [result for result in matrix.results if result.missing]:
        parts.append(f"not examined\n{_table([[each.mutant.name, each.missing] for each in gone])}")
    parts.append(_worth(matrix))
    parts.append(_causes(matrix))
    alarms = [f"  {ref}: {', '.join(checks)}" for ref, checks in matrix.false_alarms.items() if checks]
    examined = ", ".join(matrix.false_alarms) or "any right backend: none was examined"
    parts.append("\n".join(["false alarms", *alarms]) if alarms else f"no false alarm of {examined}")
    return "\n\n".join(part for part in parts if part)


def as_json(matrix: KillMatrix) -> dict[str, Any]:
    """Return the matrix as a JSON object."""
    return {
        "checks": {
            check: {
                "catches": sum(check in each.checks for each in matrix.results),
                "alone": list(matrix.alone(check)),
            }
            for check in matrix.checks
        },
        "examined": len(matrix.examined),
        "caught": len(matrix.examined) - len(matrix.survivors),
        "false_alarms": {ref: list(checks) for ref, checks in matrix.false_alarms.items()},
        "mutants": [
            {
                "name": each.mutant.name,
                "kind": each.mutant.kind,
                "caught_by": list(each.checks),
                "diagnosis": each.diagnosis or None,
                "likely_cause": each.causes or None,
                "not_examined": each.missing or None,
            }
            for each in matrix.results
        ],
    }


def _table(rows: list[list[str]]) -> str:
    return indent(tabulate(rows, tablefmt="plain", disable_numparse=True), "  ")


def _rows(matrix: KillMatrix) -> str:
    legend = ", ".join(f"{number} {check}" for number, check in enumerate(matrix.checks, 1))
    header = ["", *(str(number) for number in range(1, len(matrix.checks) + 1)), "likely cause"]
    rows = [
        [each.mutant.name, *("x" if check in each.checks else "." for check in matrix.checks), each.diagnosis]
        for each in matrix.examined
    ]
    table = tabulate([header, *rows], tablefmt="plain", disable_numparse=True)
    return f"x: the check catches the mutant; checks: {legend}\n{table}"


def _score(matrix: KillMatrix) -> str:
    examined, caught = len(matrix.examined), len(matrix.examined) - len(matrix.survivors)
    share = f", {100 * caught / examined:.1f} %" if examined else ""
    return f"caught: {caught} of {plural(examined, 'mutant')}{share}"


def _worth(matrix: KillMatrix) -> str:
    """Return a line for each check: how many mutants it catches, and which of them no other check catches."""
    lines = []
    for check in matrix.checks:
        catches = sum(check in each.checks for each in matrix.results)
        alone = matrix.alone(check)
        what = f"{len(alone)} that nothing else catches" if alone else "none that nothing else catches"
        some = f": {', '.join(alone[:3])}{', ...' if len(alone) > 3 else ''}" if alone else ""
        lines.append([check, str(catches), f"{what}{some}"])
    return f"each check: mutants it catches\n{_table(lines)}"


def _causes(matrix: KillMatrix) -> str:
    judged = [each for each in matrix.results if each.diagnosis]
    if not judged:
        return ""
    counts = {how: len(matrix.diagnosed(how)) for how in ("right", "wrong", "absent")}
    lines = [f"likely cause, of {len(judged)} caught: {', '.join(f'{how} {count}' for how, count in counts.items())}"]
    lines += [f"  {each.mutant.name} wrong: {each.causes}" for each in matrix.diagnosed("wrong")]
    return "\n".join(lines)


# Examines mutants in groups; each group has its own process and shares problems and truths. Loads no torch.

T = TypeVar("T")

_MOST = 10
"""Maximum mutants in a group. Larger groups share the start of a process, smaller ones balance the load."""


@dataclass(frozen=True)
class ExaminedGroup:
    """Backends or providers that one process examines.

    ``are_right``: whether they are the correct bases of mutants. ``checks``, ``keys``: replace those of the run's
    options, unless empty. ``run``: the result, or None if there is none because of ``reason``.
    """

    refs: tuple[str, ...]
    are_providers: bool = False
    are_right: bool = False
    checks: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    run: Run | None = None
    reason: str = ""


def groups_of(mutants: Sequence[Mutant]) -> list[ExaminedGroup]:
    """Return ``mutants`` grouped by base, and each base as a group of its own."""
    groups: list[ExaminedGroup] = []
    for _, found in itertools.groupby(sorted(mutants, key=lambda mutant: mutant.base), lambda mutant: mutant.base):
        same = list(found)
        are_providers = same[0].is_provider
        count = -(-len(same) // _MOST)
        groups += [ExaminedGroup(tuple(each.ref for each in same[n::count]), are_providers) for n in range(count)]
        groups.append(ExaminedGroup((same[0].base_ref,), are_providers, are_right=True))
    return groups


def examine_groups(
    groups: Sequence[ExaminedGroup], options: RunOptions, jobs: int, folder: Path
) -> Iterator[ExaminedGroup]:
    """Examine ``groups`` as ``options`` specifies, in ``jobs`` processes at once, and yield each when it is finished.

    ``folder``: an empty folder for run files.
    """
    stopped = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        try:
            tasks = [
                pool.submit(_examine_group, group, options, folder / str(n), stopped) for n, group in enumerate(groups)
            ]
            for future in as_completed(tasks):
                yield future.result()
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _examine_group(group: ExaminedGroup, options: RunOptions, folder: Path, stopped: threading.Event) -> ExaminedGroup:
    """Examine the group in a process of its own, with run files in ``folder``, and return the result.

    If a member ends the process, the whole group is examined as `attncheck run` does, which records the crash. If
    ``stopped`` is set, BrokenProcessPool is raised instead.
    """
    folder.mkdir()
    run_options = _options_of(group, options, folder / "run.jsonl")
    try:
        reason = _apart(run_options)
    except BrokenProcessPool:
        if stopped.is_set():
            raise
        run_options = replace(run_options, in_process=False, jobs=1, output=folder / "apart.jsonl")
        reason = _apart(run_options)
    run = read_run(run_options.output) if not reason and run_options.output is not None else None
    return replace(group, run=run, reason=reason)


def _apart(options: RunOptions) -> str:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_examine_silently, options).result()


def joined(runs: Iterable[Run]) -> Run | None:
    """Return one run with all records of ``runs``, or None if there are no runs."""
    parts = list(runs)
    if not parts:
        return None
    headers = [run.header for run in parts]
    # A mutant's checks end at its first failure, so how many records are due is not known: no case announces any.
    undue = {"checks": (), "backends": ()}
    header = headers[0].model_copy(
        update={
            "suites": _unique((each.name, each) for header in headers for each in header.suites),
            "cases": _unique(
                ((each.suite, each.id), each.model_copy(update=undue)) for header in headers for each in header.cases
            ),
            "checks": _unique((each, each) for header in headers for each in header.checks),
            "backends": _unique((each.ref, each) for header in headers for each in header.backends),
            "notes": _unique((each, each) for header in headers for each in header.notes),
        }
    )
    return Run("mutants", header, tuple(record for run in parts for record in run.records))


def _unique(pairs: Iterable[tuple[Hashable, T]]) -> tuple[T, ...]:
    return tuple(dict(pairs).values())


def _options_of(group: ExaminedGroup, options: RunOptions, output: Path) -> RunOptions:
    return replace(
        options,
        backends=() if group.are_providers else group.refs,
        providers=group.refs if group.are_providers else (),
        checks=group.checks or options.checks,
        keys=group.keys or options.keys,
        until_failure="" if group.are_right else options.until_failure,
        in_process=True,
        output=output,
    )


def _examine_silently(options: RunOptions) -> str:
    """Run the examination in this fresh process, and discard what mutants print.

    Returns why it is impossible, or an empty string if it was done.
    """
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    from attncheck.backends.interpreter import required_environment
    from attncheck.harness.run.preparation import choose_device

    os.environ.update(required_environment(choose_device(options.device)))  # must be set before Triton is imported
    from attncheck.harness.cli.run import execute_run

    try:
        execute_run(options, see=lambda _record: None)
    except (QuestionError, BackendUnavailableError) as error:
        return str(error)
    return ""


# `attncheck mutants`: which faults the suites catch in deliberately broken backends. Loads no torch.


class MatrixFormat(StrEnum):
    """Output format of the matrix."""

    terminal = "terminal"
    json = "json"


@with_options(
    *("suites", "cases", "shard", "jobs", "device", "seed", "output"),
    shard={"help": "Part I of N of the mutants, with all cases. --from shows the run files of all parts."},
    jobs={"help": "Number of processes at once. Default: auto, which is as many as cores and memory allow."},
    output={"help": "The run file to write, which must not exist. Default: none is written.", "metavar": "FILE"},
)
def mutants(
    context: typer.Context,
    given: Given,
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Names, or shell patterns of them. Default: all.", show_default=False),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help="Examine only mutants of this kind of fault, such as window. May be repeated."
        ),
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Show run files of this command, such as those of its shards; examine nothing.",
        ),
    ] = None,
    form: Annotated[MatrixFormat, typer.Option("--format", help="Text, or JSON.")] = MatrixFormat.terminal,
) -> int:
    """Show which checks detect which mutants.

    A mutant is a correct backend with one deliberate fault. The result shows how many faults the suites detect. Each
    check of a mutant runs until its first failure. The correct backends are examined as well. Exit code 0: every mutant
    is caught, and every correct backend passes; 1: a mutant survives, or a correct backend fails.
    """
    began = time.monotonic()
    asked = read_options(given, until_failure="check", command=tuple(context.obj or ()))
    chosen = choose_mutants(catalogue(), names or (), kind or (), asked.shard)
    if runs:
        matrix = _matrix([read_run(path) for path in runs], chosen, {}, is_part=True)
    else:
        context.with_resource(interruptible())
        options = replace(asked, shard=None, jobs=None, output=None)
        matrix = _examine_mutants(chosen, options, asked.jobs, asked.output)
    typer.echo(json.dumps(as_json(matrix), indent=2) if form == MatrixFormat.json else as_text(matrix))
    if form != MatrixFormat.json and not runs:
        typer.echo(f"\n{time.monotonic() - began:.0f} s" + (f", run file: {asked.output}" if asked.output else ""))
    if not matrix.examined:
        raise SelectionError("no mutant was examined; see the reasons above")
    return 0 if matrix.is_clean else 1


def choose_mutants(
    known: Sequence[Mutant], patterns: Sequence[str], kinds: Sequence[str], shard: "Shard | None"
) -> list[Mutant]:
    """Return the mutants that match the names or patterns and the kinds, and are in the shard.

    Raises:
        SelectionError: no mutant matches a pattern or a kind, or none is left.
    """
    for pattern in patterns:
        if not any(fnmatchcase(mutant.name, pattern) for mutant in known):
            raise SelectionError(f"no mutant matches {pattern!r}; the names are in backends/mutants/*.yaml")
    all_kinds = sorted({mutant.kind for mutant in known})
    for kind in kinds:
        if kind not in all_kinds:
            raise SelectionError(f"no mutant is of kind {kind!r}; known are {', '.join(all_kinds)}")
    found = [
        mutant
        for mutant in known
        if (not patterns or any(fnmatchcase(mutant.name, pattern) for pattern in patterns))
        and (not kinds or mutant.kind in kinds)
    ]
    found = found if shard is None else found[shard.number - 1 :: shard.count]
    if not found:
        raise SelectionError("no mutant is left; give fewer filters, or fewer parts")
    return found


def _examine_mutants(
    chosen: Sequence[Mutant], options: RunOptions, jobs: int | None, output: Path | None
) -> KillMatrix:
    from attncheck.harness.workers.pool import default_jobs

    options.select()  # raise errors of the options before any process starts
    if output is not None:
        refuse_existing(output)
    runs: list[Run] = []
    missing: dict[str, str] = {}
    done = 0
    with tempfile.TemporaryDirectory(prefix="attncheck-mutants-") as folder:
        groups = groups_of(chosen)
        for group in examine_groups(groups, options, jobs or default_jobs(), Path(folder)):
            if group.run is None:
                missing |= dict.fromkeys(group.refs, group.reason)
            else:
                runs.append(group.run)
            done += 0 if group.are_right else len(group.refs)
            print_stderr(f"{done} of {len(chosen)} mutants")
    if (run := joined(runs)) is not None and output is not None:
        write_run(output, run.header, run.records, [error for each in runs for error in each.errors])
    return _matrix(runs, chosen, missing)


def _matrix(
    runs: Sequence[Run], chosen: Sequence[Mutant], missing: dict[str, str], *, is_part: bool = False
) -> KillMatrix:
    """Return the matrix of ``runs``; ``is_part``: only of the mutants that they examined.

    Raises:
        QuestionError: a case of the suites cannot be examined.
    """
    for error in (error for run in runs for error in run.errors):
        raise QuestionError(error)
    refs = [backend.ref for run in runs for backend in run.header.backends]
    made = {check for run in runs for check in run.header.checks}
    return kill_matrix(
        [record for run in runs for record in run.records],
        [mutant for mutant in chosen if mutant.ref in refs or not is_part],
        [ref for ref in dict.fromkeys(refs) if not ref.startswith(PREFIX)],
        [check for check in CHECKS if check in made],
        missing,
    )
