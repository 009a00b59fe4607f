"""Runs as JUnit XML for CI systems: a test suite for each suite and backend, a test for each case and check.

Tests have the names of the pytest plugin, so that both share one history. A check with several rounds is one test, with
its worst round. XML 1.0 forbids most control characters, even escaped, so they are replaced by ``?``.
"""

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding, findings
from attncheck.reports.analysis.places import backend_file
from attncheck.reports.analysis.summary import WorstRound, case_results, worst_rounds
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import (
    UTILITIES,
    Crashed,
    Ended,
    Errored,
    Record,
    RecordKey,
    TimedOut,
    Unavailable,
    Unsupported,
    XFailed,
    timing_of,
)
from attncheck.reports.run_file.store import Run
from attncheck.reports.speeds.speed import Speed, speeds
from attncheck.reports.speeds.tables import time_unit
from attncheck.reports.terminal.run import story

_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not allow (its production 2)."""


def render_runs(runs: Sequence[Run], root: str = "") -> str:
    """Return one document of all ``runs``, ending in a newline.

    ``root``: the folder of the checkout; a test has the file of its backend as an attribute if that is below it.
    """
    document = ET.Element("testsuites", name="attncheck")
    for run in runs:
        for element in _suites(run, root):
            element.set("id", str(len(document)))
            document.append(element)
    for total in ("tests", "failures", "errors", "skipped"):
        document.set(total, str(sum(int(suite.get(total, "0")) for suite in document)))
    document.set("time", _seconds(sum(float(suite.get("time", "0")) for suite in document)))
    ET.indent(document)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(document, encoding="unicode") + "\n"


def _suites(run: Run, root: str) -> Iterator[ET.Element]:
    durations: dict[tuple[str, ...], float] = {}
    for record in run.records:
        durations[_test_of(record)] = durations.get(_test_of(record), 0.0) + record.duration_s
    latencies: dict[tuple[str, str], list[Speed]] = {}
    for speed in speeds(run.records):
        latencies.setdefault((speed.backend, speed.case), []).append(speed)
    groups: dict[tuple[str, str], list[WorstRound]] = {}
    for worst in worst_rounds(run.records):
        groups.setdefault((worst.record.suite, worst.record.backend), []).append(worst)
    found = {record.key: finding for finding in findings(run.records, run.header) for record in finding.records}
    for (suite, backend), members in groups.items():
        cases = [_case(each, run.header, durations[_test_of(each.record)], latencies, found) for each in members]
        if file := backend_file(members[0].record.backend_ref, root):
            for case in cases:
                case.set("file", _text(file))
        results = phrases.result_counts(case_results(each.record for each in members if each.record.check != UTILITIES))
        properties = [*_properties(run.header, backend), *([("cases", ", ".join(results))] if results else [])]
        yield _suite(f"{suite}.{backend}", run.header, cases, properties)
    faults = [("error of the run", error) for error in run.errors]
    if (warning := phrases.incomplete(run)) is not None:
        faults.append(("incomplete run", warning))
    if faults:
        yield _suite("run", run.header, [_fault(name, message) for name, message in faults], [])


def _test_of(record: Record) -> tuple[str, ...]:
    return record.suite, record.case_id, record.case_hash, record.backend, record.check


def _suite(
    name: str, header: RunHeader, cases: Sequence[ET.Element], properties: Sequence[tuple[str, str]]
) -> ET.Element:
    def holding(tag: str) -> str:
        return str(sum(case.find(tag) is not None for case in cases))

    suite = ET.Element(
        "testsuite",
        name=_text(name),
        tests=str(len(cases)),
        failures=holding("failure"),
        errors=holding("error"),
        skipped=holding("skipped"),
        time=_seconds(sum(float(case.get("time", "0")) for case in cases)),
        timestamp=_text(header.started.partition("+")[0]),
        hostname="localhost",  # the value that the schema prescribes for an unknown host
    )
    if properties:
        element = ET.SubElement(suite, "properties")
        for key, value in properties:
            ET.SubElement(element, "property", name=key, value=_text(value))
    suite.extend(cases)
    return suite


def _properties(header: RunHeader, backend: str) -> list[tuple[str, str]]:
    named = [*header.environment.model_dump(mode="json").items(), ("seed", header.seed), ("rounds", header.rounds)]
    info = next((each for each in header.backends if each.name == backend), None)
    if info is not None:
        named += [("backend_version", info.version), ("conventions", phrases.conventions(info))]
    return [(key, str(value)) for key, value in named if value not in (None, "")]


def _case(
    worst: WorstRound,
    header: RunHeader,
    duration_s: float,
    latencies: dict[tuple[str, str], list[Speed]],
    found: dict[RecordKey, Finding],
) -> ET.Element:
    record = worst.record
    finding = found.get(record.key)
    case = ET.Element(
        "testcase",
        classname=_text(f"attncheck.{record.suite}.{record.case_id}.{record.backend}"),
        name=_text(record.check),
        time=_seconds(duration_s),
    )
    kind = f"{record.outcome}: {finding.words}" if finding is not None else record.outcome  # tools group by type
    rounds = f"in {worst.short} of {worst.rounds} rounds: " if worst.rounds > 1 else ""
    happened = rounds + phrases.what_happened(record)
    match record:
        case Unsupported() | Unavailable():
            message = f"{record.outcome}: {'; '.join(record.reasons)}"
            _add(case, "skipped", record.outcome, message, message)
        case XFailed():
            message = f"did not pass, as expected: {record.reason}: {record.summary}"
            _add(case, "skipped", record.outcome, message, message)
        case Errored() | Crashed() | TimedOut():
            _add(case, "error", kind, happened, _story(record, header, finding))
        case _ if worst.short:
            _add(case, "failure", kind, happened, _story(record, header, finding))
        case _ if timing_of(record) is not None:
            printed = ET.SubElement(case, "system-out")
            printed.text = _text("\n".join(_times(latencies.get((record.backend, record.case), ()))))
        case _:
            pass
    return case


def _story(record: Record, header: RunHeader, finding: Finding | None) -> str:
    text = story(record, header, finding)
    case = header.case_by_name.get((record.suite, record.case_id))
    if case is not None:
        text = f"{case.description or case.id}: {case.shape}\n{text}"
    if finding is not None:
        facts = "; ".join(filter(None, [phrases.extent(finding), phrases.contrast(finding)]))
        text = f"finding: {finding.title} ({facts})\n{text}"
    if isinstance(record, Errored) and record.traceback:
        text += f"\n\n{record.traceback.rstrip()}"
    if isinstance(record, Ended) and record.output:
        text += f"\n\nthe end of what it printed:\n{record.output.rstrip()}"
    if isinstance(record, Ended) and record.native_stack:
        text += f"\n\nits stacks, by py-spy:\n{record.native_stack.rstrip()}"
    return text


def _times(found: Iterable[Speed]) -> Iterator[str]:
    for speed in found:
        unit = time_unit([speed.median_ns])
        rounds = phrases.plural(len(speed.rounds), "round")
        yield f"{speed.part}: median {unit.text(speed.median_ns)} {unit.name}, {rounds}"


def _fault(name: str, message: str) -> ET.Element:
    case = ET.Element("testcase", classname="attncheck.run", name=name, time=_seconds(0.0))
    _add(case, "error", "errored", message, message)
    return case


def _add(case: ET.Element, tag: str, kind: str, message: str, body: str) -> None:
    """Add an element; Jenkins shows ``message`` and ``body``, GitLab only ``body``."""
    ET.SubElement(case, tag, type=_text(kind), message=_text(message)).text = _text(body)


def _text(text: str) -> str:
    return _FORBIDDEN.sub("?", phrases.printable(text))


def _seconds(duration_s: float) -> str:
    return f"{duration_s:.6f}"
