"""Which cases and checks of ``smoke`` catch the most mutants a second: the order of ``attncheck run --within``.

    python benchmarks/telling.py [-j N] [--within 150] [--output cases/telling.json]
    python benchmarks/telling.py --show cases/telling.json

The mutants are those of :mod:`detection`. A mutant is examined with the cheapest checks on every case of ``smoke``, and
with dearer ones only if those catch nothing. Then pairs of a case and a check are chosen one by one: the next one
catches the most mutants that no earlier one catches, for each second that it takes on correct backends. Pairs that
catch nothing more are left out.

Mutants come in random order. When the time given by ``--within`` is over, each of the rest counts as caught by the
check and the case that its entry names; if it names no case of ``smoke``, it is left out. ``--show`` prints the share
of mutants caught after some seconds of a backend, as a Markdown table.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from detection import ALLOCATOR, comparable_mutants
from tabulate import tabulate

from attncheck.backends.mutants.catalogue import PREFIX, Mutant
from attncheck.cases.loader import load_suite
from attncheck.harness.cli.mutants import ExaminedGroup, examine_groups
from attncheck.harness.run.options import RunOptions
from attncheck.reference.spec import CHECKS, default_checks
from attncheck.reports.run_file.records import FALLEN_SHORT

SUITE = "smoke"
_DEAR = ("cudagraph", "invariance")
_CHEAPEST = ("refusals", "numerics", "lse")
STAGES = (
    _CHEAPEST,
    tuple(name for name in default_checks("cpu") if name not in (*_CHEAPEST, *_DEAR)),
    _DEAR,
)
"""Checks by their cost: those of a stage examine what the earlier ones do not catch."""

_PER_PROCESS = 6
"""Mutants of a process. They share its start, and the problems and truths of the cases."""

_PREPARATION_S = 0.02
"""Seconds to prepare a case, which the records do not include; measured on one core."""

AFTER_S = (1, 3, 10, 30, 60, 300)
"""Seconds of a backend for which the table has the share of mutants caught."""

Pair = tuple[str, str]
"""The id of a case, and a check."""

T = TypeVar("T", str, Pair)


def measure(jobs: int, within_s: float) -> dict[str, Any]:
    """Return the order of pairs, what it was made from, and the mutants that it catches in time."""
    deadline = time.monotonic() + within_s
    mutants = comparable_mutants()
    random.Random(0).shuffle(mutants)  # noqa: S311 (so that those left out are like the others)
    suite = load_suite(SUITE)
    caught: dict[str, set[Pair]] = {}
    with ThreadPoolExecutor(1) as pool:
        of_pairs = pool.submit(_seconds_of_pairs, sorted({mutant.base_ref for mutant in mutants}))
        for batch in _parts(mutants, jobs * _PER_PROCESS):
            if (found := _caught_in_time(batch, jobs, deadline)) is None:
                break
            caught |= found
        seconds, alarms = of_pairs.result()
    examined = sorted(caught)
    caught = _of_entries(mutants, seconds.keys()) | {name: pairs - alarms for name, pairs in caught.items()}
    order = order_of(caught, seconds)
    of_cases: defaultdict[str, float] = defaultdict(float)
    for (case, _), took in seconds.items():
        of_cases[case] += took
    by_case = {name: {case for case, _ in pairs} for name, pairs in caught.items()}
    in_suite = [(case.id, check) for case in suite.cases for check in CHECKS if (case.id, check) in seconds]
    left = [(pair, seconds[pair]) for pair in in_suite]
    return {
        "suite": suite.name,
        "digest": suite.hash,
        "cases": [case.id for case in suite.cases],
        "checks": [check for stage in STAGES for check in stage],
        "mutants": sorted(caught),
        "examined": examined,
        "left_out": sorted({mutant.name for mutant in mutants} - caught.keys()),
        "suite_seconds": round(sum(took for _, took in left), 1),
        "in_order_of_the_suite": caught_after(caught, left),
        "in_order_of_cases": caught_after(by_case, [(case, of_cases[case]) for case in order_of(by_case, of_cases)]),
        "in_this_order": caught_after(caught, [(pair, seconds[pair]) for pair in order]),
        "order": [f"{case} {check}" for case, check in order],
    }


def _of_entries(mutants: Sequence[Mutant], known: Iterable[Pair]) -> dict[str, set[Pair]]:
    """Return, by mutant, the one pair that its entry names; the test of the catalogue shows that it catches it."""
    named = {each.name: ((each.case or "").removeprefix(f"{SUITE}/"), each.check) for each in mutants}
    pairs = set(known)
    return {name: {(case, check)} for name, (case, check) in named.items() if check and (case, check) in pairs}


def _parts(values: Sequence[Mutant], size: int) -> list[Sequence[Mutant]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def _examined(groups: Sequence[ExaminedGroup], checks: Sequence[str], jobs: int) -> Iterator[ExaminedGroup]:
    """Yield each group with its run. Closing it ends the processes."""
    options = RunOptions(suites=(SUITE,), checks=tuple(checks), device="cpu")
    with tempfile.TemporaryDirectory() as folder, closing(examine_groups(groups, options, jobs, Path(folder))) as found:
        for group in found:
            if group.run is None:
                print(f"{', '.join(group.refs)}: {group.reason}", file=sys.stderr)
            yield group


def _seconds_of_pairs(bases: Sequence[str]) -> tuple[dict[Pair, float], set[Pair]]:
    """Return the mean seconds of each pair on correct backends, and the pairs with a false alarm."""
    took: defaultdict[Pair, list[float]] = defaultdict(list)
    alarms: set[Pair] = set()
    groups = [ExaminedGroup((base,), are_right=True) for base in bases]
    for group in _examined(groups, default_checks("cpu"), len(groups)):
        for record in group.run.records if group.run else ():
            if record.outcome in FALLEN_SHORT:
                print(f"false alarm: {record.backend}, {record.case}, {record.check}", file=sys.stderr)
                alarms.add((record.case_id, record.check))
            if record.outcome == "passed":
                took[record.case_id, record.check].append(record.duration_s)
    return {pair: _PREPARATION_S + sum(each) / len(each) for pair, each in took.items()}, alarms


def _caught_in_time(mutants: Sequence[Mutant], jobs: int, deadline: float) -> dict[str, set[Pair]] | None:
    """Return, by mutant that can be examined, the pairs that catch it; None if the time is over before."""
    caught: dict[str, set[Pair]] = {mutant.name: set() for mutant in mutants}
    for checks in STAGES:
        refs = [f"{PREFIX}{name}" for name, pairs in caught.items() if not pairs]
        groups = [ExaminedGroup(tuple(refs[first::jobs])) for first in range(min(jobs, len(refs)))]
        with closing(_examined(groups, checks, jobs)) as found:
            for group in found:
                if group.run is None:
                    caught = {name: pairs for name, pairs in caught.items() if f"{PREFIX}{name}" not in group.refs}
                for record in group.run.records if group.run else ():
                    if record.outcome in FALLEN_SHORT:
                        caught[record.backend_ref.removeprefix(PREFIX)].add((record.case_id, record.check))
                if time.monotonic() > deadline:
                    return None
    return caught


def order_of(caught: Mapping[str, set[T]], seconds: Mapping[T, float]) -> list[T]:
    """Return pairs, or cases, that together catch all of ``caught``, the most mutants a second first.

    ``caught``: by mutant, what catches it. A pair without ``seconds`` takes the mean.
    """
    mean_s = sum(seconds.values()) / len(seconds)
    by_pair: defaultdict[T, set[str]] = defaultdict(set)
    for name, pairs in sorted(caught.items()):
        for pair in sorted(pairs):
            by_pair[pair].add(name)
    order: list[T] = []
    while by_pair:
        best = max(by_pair, key=lambda pair: (len(by_pair[pair]) / seconds.get(pair, mean_s), len(by_pair[pair])))
        found = by_pair.pop(best)
        order.append(best)
        by_pair = defaultdict(set, {pair: left for pair, names in by_pair.items() if (left := names - found)})
    return order


def caught_after(caught: Mapping[str, set[T]], taken: Sequence[tuple[T, float]]) -> dict[str, int]:
    """Return how many mutants are caught within each of :data:`AFTER_S` by what is ``taken``, with its seconds."""
    after: dict[str, int] = {}
    for limit_s in AFTER_S:
        in_time: set[T] = set()
        spent_s = 0.0
        for pair, took in taken:
            spent_s += took
            if spent_s > limit_s:
                break
            in_time.add(pair)
        after[str(limit_s)] = sum(bool(pairs & in_time) for pairs in caught.values())
    return after


def table(measured: Mapping[str, Any]) -> str:
    """Return the shares of mutants caught in time as a Markdown table."""
    total = len(measured["mutants"])
    rows = {
        "the order of `--within`, at least": "in_this_order",
        "whole cases in the best order, at least": "in_order_of_cases",
        "the order of the suite, at least": "in_order_of_the_suite",
    }
    cells = [
        [name, *(f"{100 * count / total:.0f} %" for count in measured[key].values())] for name, key in rows.items()
    ]
    return str(
        tabulate(cells, headers=[f"caught of {total} within", *(f"{limit} s" for limit in AFTER_S)], tablefmt="github")
    )


def main() -> None:
    """Measure or read a result, and print it as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", "--jobs", type=int, default=multiprocessing.cpu_count(), help="processes at once")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="S", help="leave out what takes longer")
    parser.add_argument("--output", type=Path, help="file to write the result to, as JSON")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, but print this result")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return
    os.environ.update(ALLOCATOR)
    measured = measure(options.jobs, options.within)
    if options.output:
        options.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(table(measured))
    examined, counted = len(measured["examined"]), len(measured["mutants"])
    print(f"\n{counted} mutants, {examined} of them examined in time; {len(measured['left_out'])} left out")


if __name__ == "__main__":
    main()
