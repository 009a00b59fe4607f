"""What a shell completes after an option: names of backends, suites, cases and checks. Loads no torch.

A word after a comma is completed as the first one is. Nothing is offered for what looks like a path: the shell then
completes names of files.
"""

from collections.abc import Iterable

import typer


def backends(incomplete: str) -> list[str]:
    """Return the registered backends that begin so."""
    from attncheck.backends.registry import known_names

    return _beginning(incomplete, known_names())


def suites(incomplete: str) -> list[str]:
    """Return the built-in suites that begin so."""
    from attncheck.cases.loader import suite_names

    return _in_list(incomplete, suite_names())


def checks(incomplete: str) -> list[str]:
    """Return the checks that begin so."""
    from attncheck.reference.spec_names import CHECKS

    return _in_list(incomplete, CHECKS)


def cases(context: typer.Context, incomplete: str) -> list[str]:
    """Return the cases that begin so, of the suites that the command line names so far, else of ``smoke``.

    A suite that cannot be read has no cases to offer.
    """
    from attncheck.cases.loader import load_suite
    from attncheck.errors import QuestionError
    from attncheck.harness.run.patterns import split_commas

    names: list[str] = []
    for suite in split_commas(context.params.get("suite") or ["smoke"]):
        try:
            names += [name for case in load_suite(suite) for name in (case.id, case.key)]
        except QuestionError:
            continue
    return _in_list(incomplete, names)


def _in_list(incomplete: str, names: Iterable[str]) -> list[str]:
    """Complete the last of the names that commas separate."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(last, names)]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
