"""``attncheck show``: describes one case, in words and pictures, or as YAML. Loads no torch."""

from dataclasses import MISSING, fields
from difflib import get_close_matches
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import SelectionError
from attncheck.harness.cli import completion
from attncheck.harness.cli import run_arguments as arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attncheck.cases.model import Case
    from attncheck.reference.spec import RequestSpec

SHOWN_REQUESTS = 12
"""Maximum rows of the table of requests."""
SHOWN_MASKS = 3
"""Maximum pictures of masks."""
MOST_ROWS = 2**14
"""Maximum rows of a request whose mask is drawn."""

_ALWAYS = ("dtype", "block_size", "layout")
"""Fields that are shown even at their defaults."""


def show(
    case: Annotated[str, typer.Argument(metavar="CASE", help="Its id or suite/id.", autocompletion=completion.cases)],
    suite: arguments.Suites = None,
    settings: arguments.Settings = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print the case as a complete case file.")] = False,
) -> int:
    """Show a case: layer, cache, requests, masks and checks.

    Without --suite, all built-in suites are searched, smoke first. If several cases match, the first one is shown and
    the others are listed.
    """
    from attncheck.harness.cli.output import terminal_width

    found = _find(case, suite or [], settings or [])
    if as_yaml:
        from attncheck.cases.yaml_text import case_yaml

        typer.echo(case_yaml(found[0]), nl=False)
    else:
        typer.echo("\n".join(case_lines(found[0], terminal_width())))
    if len(found) > 1:
        names = ", ".join(other.id for other in found[1:9])
        more = ", ..." if len(found) > 9 else ""
        typer.echo(f"{len(found)} cases match; this is the first. The others: {names}{more}", err=True)
    return 0


def _find(pattern: str, suites: list[str], settings: list[str]) -> "Sequence[Case]":
    """Return the cases that match.

    Raises:
        QuestionError: there is none, or a suite cannot be read.
    """
    from attncheck.cases.loader import load_suite, select, suite_names
    from attncheck.harness.run.selection import select_cases

    if not suites:
        found = next((name for name in suite_names() if select(load_suite(name), [pattern])), None)
        if found is None:
            close = get_close_matches(pattern, [each.id for name in suite_names() for each in load_suite(name)], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "for a case file, give --suite FILE"
            raise SelectionError(f"no case of the built-in suites matches {pattern!r}; {hint}")
        suites = [found]
    return select_cases(suites, [pattern], (), settings).cases


def case_lines(case: "Case", width: int) -> list[str]:
    """Return the description of a case for a terminal of ``width`` columns."""
    from attncheck.backends.declarations import needs_of
    from attncheck.harness.run.selection import checks_of, unanswered_reasons
    from attncheck.reports.terminal.columns import wrap

    path = case.batch.path
    about = {
        "layer": _fields(case.layer),
        "cache": _fields(case.cache) if case.layer.has_cache else "none",
        "path": " ".join(part for part in (path.name, _fields(path.options) if path.options else "") if part),
        "padding": _fields(case.batch.padding),
        "table": _fields(case.batch.block_table),
        "inputs": ", ".join(case.inputs or ()),
        "needs": ", ".join(needs_of(case.layer, case.cache, case.batch, frozenset())),
        "checks": ", ".join(checks_of(case, None)),
        "not examined": "; ".join(unanswered_reasons(case)),
        "hash": f"{case.hash}, from {case.origin}",
    }
    lines = [case.key, *([wrap(case.description, width=width)] if case.description else []), ""]
    lines += [wrap(f"{name:<8}{text}", width=width) for name, text in about.items() if text]
    return [*lines, "", *_requests(case), *_masks(case, width)]


def _fields(spec: object) -> str:
    """Return the fields of a dataclass that differ from their defaults, as ``name=value``."""
    given = {field.name: (getattr(spec, field.name), field.default) for field in fields(spec)}  # type: ignore[arg-type]
    return ", ".join(
        f"{name}={_word(value)}"
        for name, (value, default) in given.items()
        if default is MISSING or value != default or name in _ALWAYS
    )


def _word(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return f"({_fields(value)})" if hasattr(value, "__dataclass_fields__") else str(value)


def _requests(case: "Case") -> list[str]:
    from attncheck.harness.cli.mask_picture import num_keys
    from attncheck.reports.terminal.columns import table

    size, rows = case.cache.block_size, []
    extras = [name for name in ("encoder_len", "shared_prefix") if any(getattr(each, name) for each in case.batch)]
    for request in case.batch.requests:
        keys = num_keys(case.layer, request)
        pages = f"{-(-keys // size)}, {(keys - 1) % size + 1} of {size} in the last" if keys else "none"
        lengths = (request.count, request.query_len, request.context_len, request.total_len)
        others = [str(getattr(request, name)) for name in extras]
        rows.append([*map(str, lengths), *others, *([pages] if case.layer.has_cache else [])])
    headings = ["requests", "query_len", "context", "seq_len", *extras, *(["pages"] if case.layer.has_cache else [])]
    lines = table([headings, *rows[:SHOWN_REQUESTS]]).splitlines()
    left_out = len(rows) - SHOWN_REQUESTS
    return [*lines, *([f"and {left_out} more rows"] if left_out > 0 else [])]


def _masks(case: "Case", width: int) -> list[str]:
    """Return a picture of the mask for up to :data:`SHOWN_MASKS` distinct requests, largest first."""
    from attncheck.harness.cli.mask_picture import draw_mask, num_keys, num_rows
    from attncheck.reports.analysis.phrases import plural

    path = case.batch.path
    if path.name in ("merge", "causal_conv1d"):
        return []

    def size(request: "RequestSpec") -> tuple[int, int]:
        return num_rows(path, request), num_keys(case.layer, request)

    # The request with the most rows shows most of the mask.
    different = {(size(each), each.context_len): each for each in case.batch.requests}
    largest_first = sorted(different.values(), key=size, reverse=True)
    drawn = [each for each in largest_first if num_rows(path, each) <= MOST_ROWS][:SHOWN_MASKS]
    lines = ["", "mask: # visible, . hidden, + partly"] if drawn else []
    for request in drawn:
        lines += ["", *draw_mask(case.layer, path, request, width)]
    left_out = len(different) - len(drawn)
    return [*lines, *(["", f"not drawn: {plural(left_out, 'more mask')}"] if left_out else [])]
