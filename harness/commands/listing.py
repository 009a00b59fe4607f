"""``attncheck list``: the names one can ask for. Loads no torch and no backend."""

from enum import StrEnum
from typing import Annotated

import typer


class What(StrEnum):
    """What can be listed."""

    BACKENDS = "backends"
    SUITES = "suites"
    CASES = "cases"
    CHECKS = "checks"


def list_names(
    what: Annotated[What | None, typer.Argument(help="Default: backends, suites and checks.")] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="The suites whose cases are listed. Default: smoke."),
    ] = None,
    case: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Only cases that match.")] = None,
) -> int:
    """List what can be examined, by name.

    Whether a backend can run on this machine is what `attncheck doctor` says.
    """
    if what is None and (suite or case):
        what = What.CASES
    tables = {What.BACKENDS: _backends, What.SUITES: _suites, What.CHECKS: _checks}
    if what == What.CASES:
        _cases(suite or ["smoke"], case or [])
    elif what is not None:
        tables[what]()
    else:
        for number, (name, table) in enumerate(tables.items()):
            typer.echo(("\n" if number else "") + name)
            table()
    return 0


def _print(rows: list[list[str]]) -> None:
    from tabulate import tabulate

    typer.echo(tabulate(rows, tablefmt="plain", disable_numparse=True))


def _backends() -> None:
    from attncheck.backends.registry import builtin_names, entry_points

    rows = [[name, "built in"] for name in builtin_names()]
    rows += [[name, f"entry point {point.value}"] for name, point in sorted(entry_points().items())]
    _print(rows)


def _suites() -> None:
    from attncheck.cases.loader import load_suite, suite_names

    suites = [load_suite(name) for name in suite_names()]
    _print([[suite.name, f"{len(suite)} cases", suite.description] for suite in suites])


def _cases(suites: list[str], patterns: list[str]) -> None:
    from attncheck.cases.grammar import format_batch
    from attncheck.cases.loader import load_suite, select

    for name in suites:
        for found in select(load_suite(name).cases, patterns):
            typer.echo(f"{found.key}  {format_batch(found.batch.requests)}")


def _checks() -> None:
    import textwrap

    from attncheck.reference.spec import CHECKS

    for name, info in CHECKS.items():
        for position, text in enumerate((info.establishes, f"cannot see: {info.cannot_see}")):
            lead = f"{'' if position else name:<13}"
            typer.echo(textwrap.fill(text, 100, initial_indent=lead, subsequent_indent=" " * 13))
