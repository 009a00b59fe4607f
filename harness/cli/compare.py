"""``attncheck compare``: differences between two runs. Reads run files, recomputes nothing, and loads no torch."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncheck.errors import QuestionError, shorten
from attncheck.harness.cli.output import Color, ColorChoice, refuse_input, terminal_width, use_color, write_output
from attncheck.reports.formats import FORMATS
from attncheck.reports.terminal.columns import Style

_RENDERERS = {name: form.render_comparison for name, form in FORMATS.items() if form.render_comparison is not None}
_ABOUT = [FORMATS[name].about_comparison for name in _RENDERERS]

if TYPE_CHECKING:  # type checkers do not support enums with computed members
    ComparisonFormat = str
else:
    ComparisonFormat = StrEnum("ComparisonFormat", {name: name for name in _RENDERERS})


def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="The run file to compare with.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The run file to check for regressions.")],
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'PATTERN: N%'",
            help="Fail only for slowdowns of N % or more in cases that match PATTERN: a suite, a shell pattern of "
            "suite/id, or nothing for all. PATTERN@PART applies to one part: forward, build, decode or prefill. May be "
            "repeated; the last match counts. Default: fail for every reported slowdown.",
        ),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OLD=NEW",
            help="Compare backend OLD of BASE with backend NEW of NEW. BASE and NEW may be one file. May be repeated.",
        ),
    ] = None,
    min_effect: Annotated[
        float,
        typer.Option(metavar="N", min=0, max=100, help="The smallest difference to report, in percent of the time."),
    ] = 1.0,
    allow_missing: Annotated[
        bool,
        typer.Option(
            "--allow-missing",
            help="Accept that NEW lacks cases, checks or backends of BASE, or that a run is incomplete.",
        ),
    ] = False,
    form: Annotated[
        ComparisonFormat,
        typer.Option("--format", help=f"{', '.join(_ABOUT[:-1])}, or {_ABOUT[-1]}."),
    ] = "terminal",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write to this file instead of stdout.")] = None,
    color: Color = ColorChoice.AUTO,
) -> int:
    """Compare two runs: times and changed outcomes.

    A time is slower, faster or the same. Exit code 1: an outcome is worse, a time is slower, or NEW lacks a check that
    BASE has. Times are compared by the rounds of `attncheck run --check timing --rounds N`: at least 5 in each run,
    usually 10. Two backends of one run show smaller differences than two runs, because their processes alternate:
    `attncheck compare RUN RUN --match OLD=NEW`.
    """
    from attncheck.reports.comparison.compare import ComparisonTerms, compare_runs
    from attncheck.reports.comparison.thresholds import parse_thresholds
    from attncheck.reports.run_file.store import read_run

    effect = min_effect / 100
    thresholds = parse_thresholds(fail_on or (), least=effect)
    terms = ComparisonTerms(effect=effect, thresholds=thresholds, allow_missing=allow_missing)
    backends = _pairs(match or ())
    compared = compare_runs(read_run(base), read_run(new), backends=backends, terms=terms)
    rendered = _RENDERERS[form](compared, Style(terminal_width(), output is None and use_color(color)))
    refuse_input(output, (base, new))
    write_output(rendered.text, output, is_summary=FORMATS[form].is_step_summary)
    typer.echo(rendered.log, nl=False)
    return 1 if compared.fails else 0


def _pairs(texts: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Return the pairs of backends that ``--match`` gives, as OLD to NEW.

    Raises:
        QuestionError: a text is not of the form OLD=NEW, or names a backend twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        one, equals, other = text.partition("=")
        if not (one and equals and other):
            raise QuestionError(f"--match {shorten(text)} is not understood; write OLD=NEW, names of two backends")
        if one in found or other in found.values():
            raise QuestionError(f"--match {shorten(text)}: a backend is matched once; {one} or {other} is already")
        found[one] = other
    return found
