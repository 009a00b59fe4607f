"""Verdicts and failures: a line for each backend, then its findings with one example each.

In brief, a finding has the lines of its example; whole, it has its details, traceback and output.
"""

from collections import Counter
from collections.abc import Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding, by_check, stated_cause
from attncheck.reports.analysis.reasons import named
from attncheck.reports.analysis.repro import repeat_line, repro_command, sanitizer_command
from attncheck.reports.document.blocks import (
    Block,
    Code,
    Colour,
    Heading,
    Item,
    Items,
    Paragraph,
    Span,
    Text,
    listed,
    table,
)
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.causes import died_at, last_words, native_frames, raised_at
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import UTILITIES, Ended, Errored, Failed, Record

SHOWN_CASES = 12
"""Maximum cases of a whole finding that are named; the run file has all of them."""
SHOWN_FINDINGS = 3
"""Maximum findings of a run shown with their example in brief."""
LISTED_FINDINGS = 7
"""Maximum further findings shown in brief by their cause and command."""
SHOWN_DETAILS = 3
"""Maximum lines of details of such an example."""
SHOWN_FUNCTIONS = 3
"""Maximum failing functions shown in brief."""
SHOWN_EXPECTED = 5
"""Maximum expected findings shown in brief."""
SHOWN_FEATURES = 3
"""Maximum declared features without a case shown in brief."""
PRINTED_WIDTH = 280
"""Maximum characters of a line that a process printed, in brief."""

_COLOURS: dict[str, Colour] = {"failed": "red", "passed": "green"}
"""Colours of verdicts; a backend that passed with known faults is yellow."""


def verdict(run: RunValues, *, whole: bool) -> list[Block]:
    """Return a line for each backend, with its false claims and what it could declare below.

    Backends without a verdict share a line; in brief, those that cannot run on the machine have one of their own.
    """
    lines = []
    left = run.left
    for each in run.found.verdicts:
        if each.verdict == "not examined":
            continue
        below: list[Text] = (
            [Span(f"declared but wrong: {phrases.claims(each)}", is_bold=True, colour="red")]
            if each.false_claims
            else []
        )
        if each.backend in left:
            below.append(f"not reached in time: {phrases.not_reached(*left[each.backend], each.results.total())}")
        else:  # a case that was not reached may need them
            below += _not_needed(each.not_needed, whole=whole)
        below += [f"could be declared: {', '.join(each.could_declare)}"] if each.could_declare else []
        words = phrases.verdict_words(each.verdict, each.known, is_partial=each.backend in left)
        word = Span(words, is_bold=True, colour=_COLOURS.get(words, "yellow"), is_loud=True)
        text = (Span(f"{phrases.one_line(each.backend)}: ", is_bold=True), word, f": {phrases.verdict_counts(each)}")
        lines.append(Item(text, tuple(map(Item, below))))
    absent = [] if whole else [name for name in run.silent if name in run.absent]
    others = [name for name in run.silent if name not in absent]
    for names, why in ((others, ""), (absent, " (unavailable; see `attncheck doctor`)")):
        lines += [Item(f"not examined: {', '.join(map(phrases.one_line, names))}{why}")] if names else []
    return [Items(tuple(lines))] if lines else []


def _not_needed(features: Sequence[str], *, whole: bool) -> list[Text]:
    """Return a line on declared features that no examined case needs; [] without any."""
    if not features:
        return []
    names = named(features, None if whole else SHOWN_FEATURES)
    return [f"declared, but needed by no examined case: {names}"]


def failures(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the findings that fail the run, and the failing functions of providers."""
    if not whole:
        return [*_few_findings(run), *_few_functions(run)]
    shown = failure_blocks(run)
    return [Heading(2, "Findings"), *(block for blocks in shown for block in blocks)] if shown else []


def failure_blocks(run: RunValues) -> list[list[Block]]:
    """Return the blocks of each finding that fails the run, and of each failing function, whole."""
    blocks = [_whole_finding(finding, run) for finding in _failing(run)]
    return blocks + [_whole_function(record, run.header) for record in _failing_functions(run)]


def _failing(run: RunValues) -> list[Finding]:
    return [finding for finding in run.found.findings if not finding.is_expected]


def _failing_functions(run: RunValues) -> list[Record]:
    return [record for record in run.summary.short if record.check == UTILITIES]


def expected(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the expected findings: one record a check and the number of others, or in brief one line each."""
    found = [finding for finding in run.found.findings if finding.is_expected]
    if whole:
        blocks = [block for finding in found for block in _whole_expected(finding)]
        return [Heading(2, "Expected findings"), *blocks] if blocks else []
    lines = [
        Item(f"expected: {phrases.one_line(f'{each.backend}: {phrases.extent(each)}: {each.title}')}")
        for each in found[:SHOWN_EXPECTED]
    ]
    if more := len(found) - len(lines):
        lines.append(Item(f"and {phrases.plural(more, 'more expected finding')}"))
    return [Items(tuple(lines), is_cut=True)] if lines else []


def _few_findings(run: RunValues) -> list[Block]:
    """Return findings in brief, the first of each backend first: a few with an example, some in two lines."""
    total = Counter(finding.backend for finding in _failing(run))
    place: Counter[str] = Counter()
    numbered = []
    for finding in _failing(run):
        place[finding.backend] += 1
        numbered.append((place[finding.backend], finding))
    numbered.sort(key=lambda each: each[0])
    shown: list[Block] = []
    others = []
    for number, finding in numbered[: SHOWN_FINDINGS + LISTED_FINDINGS]:
        title = f"finding {number} of {total[finding.backend]}"
        if len(shown) < SHOWN_FINDINGS:
            story = story_items(finding.example, run.header, finding, most_details=SHOWN_DETAILS)
            stated = (finding.title, f"likely cause: {finding.title}")
            story = tuple(item for item in story if item.text not in stated)
            shown.append(
                Items(tuple(_facts(finding, run, story)), (Span(title, colour="red"), f", {_heading(finding)}"))
            )
        else:
            text = (Span(title, colour="red"), f", {_heading(finding)}: {phrases.extent(finding)}")
            others.append(Item(text, _repeat(finding.example, run.header)))
    others += _more(len(numbered) - len(shown) - len(others), "more finding", run)
    return [*shown, Items(tuple(others))] if others else shown


def _few_functions(run: RunValues) -> list[Block]:
    found = _failing_functions(run)
    shown: list[Block] = []
    for record in found[:SHOWN_FUNCTIONS]:
        who = f"  {phrases.one_line(record.backend)}  {phrases.one_line(record.case_id)}"
        shown.append(Items(story_items(record, run.header), (Span(record.outcome, colour="red"), who)))
    more = _more(len(found) - len(shown), "more function", run)
    return [*shown, Items(tuple(more))] if more else shown


def _more(count: int, noun: str, run: RunValues) -> list[Item]:
    return [Item(f"and {phrases.plural(count, noun)}", run.in_full("failures"))] if count else []


def _heading(finding: Finding) -> str:
    return f"{phrases.one_line(finding.backend)}: {phrases.one_line(finding.title)}"


def _facts(finding: Finding, run: RunValues, example: Sequence[Item], cases: Sequence[Item] = ()) -> list[Item]:
    """Return extent, what the cases have in common, ``cases``, and the example with the lines of ``example`` below."""
    rounds = phrases.rounds_short(run.summary, finding.example)
    below = [Item(finding.case.shape)] if finding.case else []
    word = "case" if len(finding.cases) == 1 else "example"
    return [
        Item(f"{phrases.extent(finding)}; {phrases.consequence(finding, run.header)}"),
        *([Item(contrast)] if (contrast := phrases.contrast(finding)) else []),
        *cases,
        Item(f"{word}: {phrases.example(finding)}{f' ({rounds})' if rounds else ''}", (*below, *example)),
    ]


def _whole_finding(finding: Finding, run: RunValues) -> list[Block]:
    """Return a heading, the facts with at most :data:`SHOWN_CASES` cases, and all details of the example."""
    cases = []
    if len(finding.cases) > 1:
        cases.append(Item(f"cases: {named(finding.cases, SHOWN_CASES)}"))
    return [
        Heading(3, f"{finding.backend}: {phrases.cut(finding.title, 200)}"),
        Items(tuple(_facts(finding, run, [_outcome(finding.example)], cases))),
        *_details(finding.example, run.header, finding),
    ]


def _whole_function(record: Record, header: RunHeader) -> list[Block]:
    return [Heading(3, f"{record.backend}: {record.case_id}"), Items((_outcome(record),)), *_details(record, header)]


def _outcome(record: Record) -> Item:
    return Item((Span(record.outcome, is_bold=True, colour="red"), f": {phrases.what_happened(record)}"))


def _details(record: Record, header: RunHeader, finding: Finding | None = None) -> list[Block]:
    blocks: list[Block] = []
    if isinstance(record, Failed):
        blocks += [Code(each) if "\n" in each.strip() else Items((Item(each),)) for each in record.details]
        blocks += [Paragraph(phrases.sentence(cause))] if (cause := stated_cause(record, finding)) else []
    if isinstance(record, Errored):
        blocks.append(Code(record.traceback or record.message))
    if isinstance(record, Ended | Failed | Errored) and record.output:
        blocks += [Paragraph("The end of what it printed:"), Code(record.output)]
    if isinstance(record, Ended) and record.native_stack:
        blocks += [Paragraph("Its stacks, by py-spy:"), Code(record.native_stack)]
    commands = "\n".join(filter(None, [repro_command(record, header), sanitizer_command(record, header)]))
    return [*blocks, Paragraph("Repeat:"), Code(commands, "sh")] if commands else blocks


def _whole_expected(finding: Finding) -> list[Block]:
    rows = []
    for first, further in by_check(finding):
        more = f" and {phrases.plural(further, 'more case')}" if further else ""
        rows.append([first.check, f"{first.case}{more}", first.underlying, first.summary])
    return [
        Heading(3, f"{finding.backend}: {finding.title}"),
        table(["check", "case", "outcome", "what happened"], rows),
    ]


def story_items(
    record: Record, header: RunHeader | None = None, finding: Finding | None = None, *, most_details: int | None = None
) -> tuple[Item, ...]:
    """Return what happened to a record that did not pass, its likely cause, and the command that repeats it.

    ``finding``: the finding of the record. ``most_details``: maximum lines of details of a failure, or None for all.
    """
    lines = [phrases.what_happened(record)]
    if isinstance(record, Failed):
        details = [line for detail in record.details for line in detail.splitlines()]
        lines += details[:most_details]
        more = len(details[most_details:]) if most_details else 0
        lines += [f"and {phrases.plural(more, 'more line')}"] if more else []
        lines += [cause] if (cause := stated_cause(record, finding)) else []
    if isinstance(record, Errored) and (place := raised_at(record.traceback)):
        lines.append(place)
    if isinstance(record, Ended):
        lines += died_at(record.output)
        lines += [f"in {phrases.one_line(frame)}" for frame in native_frames(record.native_stack)]
    # Paths stay unbroken, so that they can be copied.
    items = [Item(line, is_whole=line.startswith("File ")) for line in lines]
    words = last_words(record.output) if isinstance(record, Ended | Failed | Errored) else ()
    shown = tuple(Item(phrases.cut(phrases.one_line(word), PRINTED_WIDTH)) for word in words)
    items += [Item("printed last:", shown)] if shown else []
    items += _repeat(record, header)
    sanitizer = sanitizer_command(record, header)
    return (*items, *([Item(f"or: {sanitizer}", is_whole=True)] if sanitizer else []))


def _repeat(record: Record, header: RunHeader | None) -> tuple[Item, ...]:
    line = repeat_line(record, header)
    return (Item(line, is_whole=True),) if line else ()


def errors(run: RunValues, *, whole: bool) -> list[Block]:
    """Return the errors of the run itself."""
    if not whole:
        return listed([f"error: {error}" for error in run.errors])
    return [Heading(2, "Errors of the run"), *listed(run.errors)] if run.errors else []
