"""``--last-failed``: restricts a run to what failed in the newest kept run. Loads no torch."""

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from attncheck.cases.keys import split_variant
from attncheck.errors import SelectionError
from attncheck.harness.cli.run_options import RunOptions
from attncheck.reports.run_file.records import FALLEN_SHORT, UTILITIES, Record
from attncheck.reports.run_file.store import read_run


def only_failed(options: RunOptions, path: Path) -> RunOptions:
    """Return ``options`` for the cases, backends, providers and functions that failed in the run of ``path``.

    If ``options`` name backends or suites, only those of them remain. All remaining cases run on all remaining
    backends, with the checks of ``options``; if these name none, with those that failed.

    Raises:
        SelectionError: nothing failed, or nothing that ``options`` name.
        RunFileError: the run cannot be read.
    """
    run = read_run(path)
    # A candidate that was given as a Python object has no name to give on the command line.
    short = [each for each in run.records if each.outcome in FALLEN_SHORT and not each.backend_ref.startswith("<")]
    if not short:
        raise SelectionError(f"--last-failed: everything passed in the newest run, {path}; leave the option out")
    short = [each for each in short if _is_named(each, run.header.suite_ref(each.suite), options)]
    if not short:
        raise SelectionError(f"--last-failed: these backends and suites passed in the newest run, {path}")
    cases = [each for each in short if each.check != UTILITIES]
    functions = [each for each in short if each.check == UTILITIES]
    suites = tuple(dict.fromkeys(run.header.suite_ref(each.suite) for each in cases))
    names = [
        each.case_id for each in functions if any(fnmatchcase(each.case_id, own) for own in options.functions or "*")
    ]
    return replace(
        options,
        backends=tuple(dict.fromkeys(each.backend_ref for each in cases)),
        providers=tuple(dict.fromkeys(each.backend_ref for each in functions)),
        suites=suites or options.suites,
        keys=tuple(dict.fromkeys(each.case for each in cases)),
        checks=options.checks or tuple(dict.fromkeys(each.check for each in short)),
        functions=tuple(names),
    )


def _is_named(record: Record, suite: str, options: RunOptions) -> bool:
    """Return whether ``options`` include the backend and the suite of ``record``; ``suite``: its reference."""
    backends, suites = {record.backend, record.backend_ref}, {record.suite, suite, split_variant(suite)[0]}
    return not (
        (options.backends and backends.isdisjoint(options.backends))
        or (options.suites and suites.isdisjoint(options.suites))
    )
