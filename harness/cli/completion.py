"""Shell completion for names of backends, suites, cases and checks. Loads no torch.

In a list separated by commas, the last word is completed. A word that looks like a path gets no completions, so that
the shell completes file names.
"""

from collections.abc import Iterable

import typer


def backends(incomplete: str) -> list[str]:
    """Return the registered backends that begin with ``incomplete``."""
    from attncheck.backends.registry import known_names

    return _beginning(incomplete, known_names())


def suites(incomplete: str) -> list[str]:
    """Return the built-in suites that begin with ``incomplete``."""
    from attncheck.cases.loader import suite_names

    return _in_list(incomplete, suite_names())


def checks(incomplete: str) -> list[str]:
    """Return the checks that begin with ``incomplete``."""
    from attncheck.reference.spec import CHECKS

    return _in_list(incomplete, CHECKS)


def cases(context: typer.Context, incomplete: str) -> list[str]:
    """Return the cases that begin with ``incomplete``, of the suites given so far, or of ``smoke``.

    Suites that cannot be read are skipped.
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
    """Complete the last name of a list separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(last, names)]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
