"""How many wrong backends attncheck catches, and how many the tests of three other projects would.

    python benchmarks/detection.py [-j N] [--output docs/detection.json]
    python benchmarks/detection.py --show docs/detection.json

The wrong backends are the mutants of attncheck's own catalogue, so the figure shows what attncheck finds of the faults
that its authors know. Mutants of metadata utilities are left out, since the other tests run backends alone, and so are
those of Triton kernels, which a CPU interprets too slowly for batches of that size. The rules and batches of the others
are those of :mod:`other_tests`. A mutant is examined until a check catches it: first with the check and the case that
its entry names, then with all of ``smoke``, then with every suite. ``--show`` prints the kept result as a Markdown
table.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from tabulate import tabulate

from attncheck.backends.mutants.catalogue import Mutant, catalogue
from attncheck.cases.loader import suite_names
from attncheck.harness.cli.mutants import ExaminedGroup, examine_groups, groups_of
from attncheck.harness.run.options import RunOptions
from attncheck.reports.run_file.records import FALLEN_SHORT

T = TypeVar("T")

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}
"""Settings of glibc for the processes: memory is kept for the next tensor, which halves the time of large batches."""

OTHERS = ("vLLM", "FlashInfer-Bench", "FlashAttention")
_AT_ONCE = 32
"""Maximum mutants per process. They share the start of the process, and the problems and truths of the cases."""


def comparable_mutants() -> list[Mutant]:
    """Return the mutants that every compared test can run on a CPU; those tests call attention to all keys alone."""
    fast = [each for each in catalogue() if not each.is_provider and not each.base.startswith("triton")]
    return [each for each in fast if each.area not in ("functions", "sparse", "state")]


def measure(jobs: int) -> dict[str, Any]:
    """Return the names of the mutants, those that each way of testing catches, and the seconds each way takes."""
    mutants = comparable_mutants()
    names = [mutant.name for mutant in mutants]
    began = time.monotonic()
    smoke = _caught(mutants, [], jobs)
    after_smoke = time.monotonic()
    missed = [mutant for mutant in mutants if mutant.name not in smoke]
    every = smoke | (_caught(missed, suite_names(), jobs) if missed else set())
    after_all = time.monotonic()
    others = _found_by_others([mutant.ref for mutant in mutants], jobs)
    caught = {project: sorted(others[project]) for project in OTHERS}
    caught |= {"smoke": sorted(smoke), "every suite": sorted(every)}
    ends = {
        "smoke": after_smoke - began,
        "every suite": after_all - after_smoke,
        "others": time.monotonic() - after_all,
    }
    return {"mutants": names, "caught": caught, "seconds": {name: round(took, 1) for name, took in ends.items()}}


def _caught(mutants: Sequence[Mutant], suites: Sequence[str], jobs: int) -> set[str]:
    """Return the names of the mutants that a check of attncheck catches; without ``suites``, ``smoke`` runs."""
    options = RunOptions(suites=tuple(suites) or ("smoke",), device="cpu", until_failure="backend")
    caught = _caught_in(_groups_of_entries(mutants, options), options, jobs)
    rest = groups_of([mutant for mutant in mutants if mutant.name not in caught])
    # Correct backends guard against false alarms. The default suite suffices for them.
    right = [group for group in groups_of(mutants) if group.are_right and not suites]
    return caught | _caught_in([*right, *(group for group in rest if not group.are_right)], options, jobs)


def _groups_of_entries(mutants: Sequence[Mutant], options: RunOptions) -> list[ExaminedGroup]:
    """Return groups that are examined only with the checks and cases that the entries of their mutants name."""
    known = {f"{case.suite}/{case.id}" for case in options.select().cases}
    with_check = sorted(
        (mutant.case if mutant.case in known else "", mutant.check, mutant.ref)
        for mutant in mutants
        # Faults of graphs show in nearly every case.
        if mutant.check and (mutant.case is None or mutant.case in known or mutant.check == "cudagraph")
    )
    groups = []
    for has_case, entries in itertools.groupby(with_check, lambda entry: bool(entry[0])):
        for part in _parts(list(entries)):
            cases, checks, refs = (tuple(dict.fromkeys(column)) for column in zip(*part, strict=True))
            groups.append(ExaminedGroup(refs, checks=checks, keys=cases if has_case else ()))
    return groups


def _parts(values: Sequence[T]) -> list[Sequence[T]]:
    return [values[first : first + _AT_ONCE] for first in range(0, len(values), _AT_ONCE)]


def _caught_in(groups: Sequence[ExaminedGroup], options: RunOptions, jobs: int) -> set[str]:
    """Return the names of the mutants in ``groups`` that are caught."""
    caught: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for group in examine_groups(groups, options, jobs, Path(folder)):
            if group.run is None:
                raise SystemExit(f"{', '.join(group.refs)}: {group.reason}")
            short = {record.backend_ref for record in group.run.records if record.outcome in FALLEN_SHORT}
            if short and group.are_right:
                raise SystemExit(f"false alarm: {', '.join(short)}")
            caught |= {ref.partition(":")[2] for ref in short}
    return caught


def _found_by_others(refs: Sequence[str], jobs: int) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {project: set() for project in OTHERS}
    with ThreadPoolExecutor(jobs) as pool:
        for group in pool.map(_found_in, _parts(refs)):
            for ref, projects in group.items():
                for project in projects:
                    found[project].add(ref.partition(":")[2])
    return found


def _found_in(refs: Sequence[str]) -> dict[str, set[str]]:
    """Return, by mutant, the projects whose tests find it. A mutant that ends the test process counts as found."""
    try:
        return _in_a_process(refs, OTHERS)
    except BrokenProcessPool:
        if len(refs) > 1:
            half = len(refs) // 2
            return _found_in(refs[:half]) | _found_in(refs[half:])
    found: set[str] = set()
    for project in OTHERS:
        try:
            found |= _in_a_process(refs, (project,)).get(refs[0], set())
        except BrokenProcessPool:
            found.add(project)
    return {refs[0]: found}


def _in_a_process(refs: Sequence[str], wanted: Sequence[str]) -> dict[str, set[str]]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_try_others, refs, wanted).result()


def _try_others(refs: Sequence[str], wanted: Sequence[str]) -> dict[str, set[str]]:
    """Return, by mutant, the projects in ``wanted`` whose tests find it; mutants that cannot be loaded are left out."""
    import torch
    from other_tests import other_tests

    from attncheck.errors import BackendUnavailableError
    from attncheck.harness.run.backend_loading import load_backend
    from attncheck.harness.run.outcomes import BackendDescription

    torch.set_num_threads(1)
    tests = list(other_tests())
    found: dict[str, set[str]] = {}
    for ref in refs:
        try:
            backend = load_backend(ref)
        except BackendUnavailableError:
            continue
        if isinstance(backend, BackendDescription):
            continue
        projects: set[str] = set()
        for test in tests:
            if test.project in wanted and test.project not in projects and test.finds(backend.backend):
                projects.add(test.project)
        found[ref] = projects
    return found


def table(measured: dict[str, Any]) -> str:
    """Return the result as a Markdown table."""
    total = len(measured["mutants"])
    caught = {name: set(found) for name, found in measured["caught"].items()}
    rows = {
        "vLLM's backend test (1e-2, named batches, a cache of zeros)": caught["vLLM"],
        "FlashInfer-Bench's rule (share of elements within 1e-2)": caught["FlashInfer-Bench"],
        "FlashAttention's rule (twice the error of plain torch)": caught["FlashAttention"],
        "these three together": set().union(*(caught[project] for project in OTHERS)),
        "attncheck, suite `smoke`": caught["smoke"],
        "attncheck, every suite": caught["every suite"],
    }
    cells = [[name, len(found), f"{100 * len(found) / total:.0f} %"] for name, found in rows.items()]
    return str(tabulate(cells, headers=["tested by", f"caught of {total}", "share"], tablefmt="github"))


def main() -> None:
    """Measure or read a result, and print it as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-j", "--jobs", type=int, default=multiprocessing.cpu_count(), help="processes at once")
    parser.add_argument("--output", type=Path, help="file to write the result to, as JSON")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, but print this result")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return
    os.environ.update(ALLOCATOR)
    measured = measure(options.jobs)
    if options.output:
        options.output.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    print(table(measured))
    print(f"\nseconds: {measured['seconds']}")


if __name__ == "__main__":
    main()
