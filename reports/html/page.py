"""Lay out the blocks of runs, charts and records as one self-contained page.

The page loads nothing. Its content security policy forbids that, and allows only its own script, by digest.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from importlib.util import find_spec
from itertools import pairwise
from pathlib import PurePath
from string import Template
from typing import NamedTuple

from attncheck.errors import MissingExtraError, QuestionError
from attncheck.reports.comparison.compare import compare_runs
from attncheck.reports.document import comparison
from attncheck.reports.document.bits import bits
from attncheck.reports.document.blocks import Block, Folded, Heading, Paragraph, Span, Text, plain
from attncheck.reports.document.failures import errors, expected, failure_blocks, verdict
from attncheck.reports.document.run import checks, circumstances, functions, kernels, suites, timings, unexamined
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.document.support import graph_levels, support_blocks
from attncheck.reports.html.charts import ratio_chart, speed_charts
from attncheck.reports.html.records import records_json
from attncheck.reports.html.text import Card, PageBlock, escaped, inline, render
from attncheck.reports.run_file.store import Run

EXTRA = "report"


def render_runs(runs: Sequence[Run]) -> str:
    """Return one self-contained HTML page of these runs, at least one; the first is compared with each of the others.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require_extra()
    values = [RunValues.of(run) for run in runs]
    names = _names(runs)
    compared = list(zip(runs[1:], names[1:], strict=True))
    parts = [_comparison(runs[0], run, f"comparison-{place}", name) for place, (run, name) in enumerate(compared)]
    parts += [_run(run, f"run-{place}", name) for place, (run, name) in enumerate(zip(values, names, strict=True))]
    title = f"attncheck: {', '.join(each.verdict for each in values)} ({', '.join(names)})"
    script = _file("page.js")
    return Template(_file("page.html")).substitute(
        policy=_policy(script),
        title=escaped(title),
        style=_file("page.css"),
        verdicts="\n".join(_banner(run, name) for run, name in zip(values, names, strict=True)),
        links="\n".join(_links(part) for part in parts) if len(parts) == 1 else "\n".join(map(_link, parts)),
        body="\n".join(_part(part, is_only=len(parts) == 1) for part in parts),
        records=records_json(values, names),
        script=script,
    )


def require_extra() -> None:
    """Raise MissingExtraError if a library that the page needs is not installed."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("a report as HTML", "matplotlib", EXTRA)


class Section(NamedTuple):
    """A heading of the page and the blocks below it."""

    heading: Text
    blocks: tuple[PageBlock, ...]


class Part(NamedTuple):
    """A run or a comparison. ``key``: the prefix of its sections in links."""

    key: str
    title: str
    sections: tuple[Section, ...]


def _run(run: RunValues, key: str, name: str) -> Part:
    findings = failure_blocks(run)
    declared, measured = _leading(support_blocks(run.header, run.present, run.found.support))
    speeds = timings(run, whole=True)
    blocks: list[PageBlock] = [Heading(2, "Verdicts"), *verdict(run, whole=True), *errors(run, whole=True)]
    blocks += [Heading(2, "Findings"), *map(Card, findings)] if findings else []
    if run.present:
        by_suite = Folded("By suite, with versions and conventions", (suites(run),))
        blocks += [Heading(2, "Checks"), checks(run, run.present, totals=True), *kernels(run), by_suite]
        blocks += [Folded("Declared features", declared), *measured]
    blocks += [*_folded(graph_levels(run, whole=True)), *bits(run, whole=True)]
    blocks += [*speeds[:1], *speed_charts(key, run.speeds), *speeds[1:]]
    blocks += [*functions(run, whole=True), *expected(run, whole=True), *unexamined(run, whole=True)]
    return Part(key, name, _sections([*blocks, *circumstances(run, whole=True)]))


def _comparison(base: Run, new: Run, key: str, name: str) -> Part:
    """Return the comparison of NEW, which is called ``name``, with BASE."""
    title = f"Comparison: {name} with {PurePath(base.path).name}"
    try:
        found = compare_runs(base, new)
    except QuestionError as error:
        blocks: list[PageBlock] = [Paragraph(Span(f"These runs cannot be compared: {error}", is_bold=True))]
    else:
        chart = [ratio_chart(key, found.speeds)] if found.speeds else []
        blocks = [comparison.closing(found), *chart, *comparison.compared(found, whole=True)]
    return Part(key, title, _sections([Heading(2, "Verdict"), *blocks]))


def _sections(blocks: Sequence[PageBlock]) -> tuple[Section, ...]:
    """Return the sections of a part. Each begins at a heading of level 2, as the first block must."""
    starts = [place for place, block in enumerate(blocks) if isinstance(block, Heading) and block.level == 2]
    sections = []
    for start, end in pairwise([*starts, len(blocks)]):
        heading, *content = blocks[start:end]
        if content and isinstance(heading, Heading):
            sections.append(Section(heading.text, tuple(content)))
    return tuple(sections)


def _leading(blocks: Sequence[Block]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Return the blocks before the first heading, and the others."""
    first = next((place for place, block in enumerate(blocks) if isinstance(block, Heading)), len(blocks))
    return tuple(blocks[:first]), tuple(blocks[first:])


def _folded(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks with each heading of level 3 and what follows it as a fold."""
    starts = [place for place, block in enumerate(blocks) if isinstance(block, Heading) and block.level == 3]
    folds = []
    for start, end in pairwise([*starts, len(blocks)]):
        heading = blocks[start]
        if isinstance(heading, Heading):
            folds.append(Folded(plain(heading.text), tuple(blocks[start + 1 : end])))
    return [*blocks[: starts[0] if starts else len(blocks)], *folds]


def _banner(run: RunValues, name: str) -> str:
    """Return the verdict of a run with its counts, and a warning if it was cut off."""
    word, _, counts = run.closing().partition(": ")
    tone = {"passed": "good", "failed": "bad"}.get(run.verdict, "warn")
    tone = "warn" if word != run.verdict else tone  # known faults
    warning = f'<p class="warning">{escaped(run.warning)}</p>' if run.warning else ""
    return (
        f'<section class="verdict"><p class="chip t-{tone}">{escaped(word)}</p><div><p>{escaped(counts)}</p>'
        f'<p class="small">{escaped(name)}, {escaped(run.header.started)}</p>{warning}</div></section>'
    )


def _link(part: Part) -> str:
    return f'<a href="#{part.key}">{escaped(part.title)}</a>'


def _links(part: Part) -> str:
    links = [f'<a href="#{part.key}-{place}">{inline(each.heading)}</a>' for place, each in enumerate(part.sections)]
    return "\n".join(links)


def _part(part: Part, *, is_only: bool) -> str:
    """Return all sections of a part, below a heading of its own if there are several."""
    heading = "" if is_only else f'<h2 class="part" id="{part.key}">{escaped(part.title)}</h2>\n'
    sections = [
        f'<section>\n<h2 id="{part.key}-{place}">{inline(each.heading)}</h2>\n{render(each.blocks)}\n</section>'
        for place, each in enumerate(part.sections)
    ]
    return heading + "\n".join(sections)


def _names(runs: Sequence[Run]) -> list[str]:
    """Return file names that differ: with folders if names are equal, and with numbers if paths are."""
    paths = [PurePath(run.path) for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{index}: {name}" for index, name in enumerate(names, start=1)]
    return names


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Inline styles are allowed because matplotlib writes styles into attributes.
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; "
        "form-action 'none'"
    )


def _file(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8")
