"""``attncheck list``: names of backends, suites, cases and checks. Loads no torch and no backend."""

import textwrap
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.harness.cli import completion
from attncheck.harness.cli import run_arguments as arguments

if TYPE_CHECKING:
    from attncheck.reference.spec import BatchSpec


class Listable(StrEnum):
    """What can be listed."""

    BACKENDS = "backends"
    SUITES = "suites"
    CASES = "cases"
    CHECKS = "checks"


def list_names(
    what: Annotated[Listable | None, typer.Argument(help="Default: backends, suites and checks.")] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="List only these suites, or their cases, separated by commas. May be repeated. Default: all built-in "
            "suites; for cases, smoke.",
            autocompletion=completion.suites,
        ),
    ] = None,
    case: arguments.Cases = None,
    keywords: arguments.Keywords = None,
) -> int:
    """List the names of backends, suites, cases or checks.

    `attncheck doctor` shows which backends can run on this machine.
    """
    if what is None and (suite or case or keywords):
        what = Listable.CASES
    tables = {Listable.BACKENDS: _backends, Listable.SUITES: lambda: _suites(suite or []), Listable.CHECKS: _checks}
    if what == Listable.CASES:
        _cases(suite or [], case or [], keywords or "")
    elif what is not None:
        tables[what]()
    else:
        for number, (name, table) in enumerate(tables.items()):
            typer.echo(("\n" if number else "") + name)
            table()
    return 0


def _print(rows: list[list[str]]) -> None:
    from tabulate import tabulate

    from attncheck.harness.cli.output import terminal_width

    lead = sum(max(len(row[column]) for row in rows) + 2 for column in range(len(rows[0]) - 1))
    folded = [[*row[:-1], textwrap.fill(row[-1], max(terminal_width() - lead, 20))] for row in rows]
    typer.echo(tabulate(folded, tablefmt="plain", disable_numparse=True))


def _backends() -> None:
    from attncheck.backends.registry import FAMILIES, ONLY_NAMED, builtin_names, entry_points

    rows = [[name, "built in"] for name in builtin_names()]
    rows += [[name, "built in; run when named"] for name in sorted(ONLY_NAMED - FAMILIES.keys())]
    rows += [[name, f"built in; run when one is named, such as {example}"] for name, example in FAMILIES.items()]
    rows += [[name, f"entry point {point.value}"] for name, point in sorted(entry_points().items())]
    _print(rows)


def _suites(names: list[str]) -> None:
    from attncheck.cases.loader import load_suite, suite_names
    from attncheck.harness.run.patterns import split_commas
    from attncheck.reports.analysis.phrases import plural

    suites = [load_suite(name) for name in split_commas(names) or suite_names()]
    _print([[suite.name, plural(len(suite), "case"), suite.description] for suite in suites])


def _cases(suites: list[str], patterns: list[str], keywords: str) -> None:
    from attncheck.harness.run.selection import select_cases

    for found in select_cases(suites or ["smoke"], patterns, keywords=keywords).cases:
        typer.echo(f"{found.key}  {_batch(found.batch)}")


def _batch(batch: "BatchSpec") -> str:
    """Return the batch as a string of the batch grammar, or a summary if the grammar cannot express it."""
    from attncheck.cases.grammar import format_batch
    from attncheck.errors import SpecError

    try:
        return format_batch(batch.requests)
    except SpecError:
        return f"{batch.num_requests} requests, {batch.num_tokens} new tokens, up to {batch.max_seq_len} long"


def _checks() -> None:
    from attncheck.reference.spec import CHECKS

    rows = []
    for name, info in CHECKS.items():
        rows += [[name, info.establishes], ["", f"does not detect: {info.cannot_see}"]]
        if info.by_default == "nowhere":
            rows.append(["", f"runs only if it is named, as by --check {name}"])
        elif info.by_default == "on CUDA":
            rows.append(["", "needs a CUDA device"])
    _print(rows)
