"""A run as SARIF 2.1.0, for code scanning: one result for each finding, and a rule for each check.

An expected finding is a note that is suppressed. What was not examined is no result, and no pass: it is a notification
of the invocation, as are errors of the run and of attncheck itself. Terms are those of the OASIS standard, and the
required keys those of GitHub's code scanning, which wants a place of each result and descriptions of each rule.
"""

import json
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import PurePath
from typing import Any, Literal
from urllib.parse import quote

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding
from attncheck.reports.analysis.places import place_to_show
from attncheck.reports.analysis.repro import repeat_line
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import FALLEN_SHORT, OURSELVES, UTILITIES, Errored, Record, XFailed
from attncheck.reports.run_file.store import Run

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
INSTALLED = "INSTALLED"
"""The base of files that are no part of the checkout: the folder that attncheck is installed in."""

Level = Literal["error", "warning", "note"]
Json = dict[str, Any]


def render_run(run: Run, root: str = "") -> str:
    """Return the document of a run, ending in a newline. ``root``: the folder of the checkout, for paths of files."""
    values = RunValues.of(run)
    results = _results(values, root)
    used = dict.fromkeys((*run.header.checks, *(result["ruleId"] for result in results)))
    document = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "attncheck",
                        "version": run.header.environment.attncheck,
                        "rules": list(map(_rule, used)),
                    }
                },
                "invocations": [_invocation(values)],
                "originalUriBaseIds": {INSTALLED: {"description": {"text": "the folder with the package attncheck"}}},
                "columnKind": "unicodeCodePoints",
                "results": results,
            }
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _rule(check: str) -> Json:
    text = f"The check {check} of attncheck did not pass. `attncheck list checks` prints what it examines."
    return {
        "id": check,
        "shortDescription": {"text": f"check {check}"},
        "fullDescription": {"text": text},
        "help": {"text": text},
        "defaultConfiguration": {"level": "error"},
    }


def _results(run: RunValues, root: str) -> list[Json]:
    found = []
    marks: set[str] = set()
    for finding in run.found.findings:
        if not _is_ours(finding.example):
            check = finding.checks[0]
            mark = _mark([finding.backend, check, finding.words], marks)
            found.append(_result(check, finding.example, _message(finding, run), mark, run.header, root))
    for record in run.records:
        if record.check == UTILITIES and (isinstance(record, XFailed) or record.outcome in FALLEN_SHORT):
            lines = [f"{record.backend}: {record.case_id}: {record.outcome}", _what_happened(record)]
            lines.append(repeat_line(record, run.header))
            mark = _mark([record.backend, record.check, record.case_id], marks)
            found.append(_result(record.check, record, lines, mark, run.header, root))
    return found


def _message(finding: Finding, run: RunValues) -> list[str]:
    record = finding.example
    rounds = phrases.rounds_short(run.summary, record)
    return [
        f"{finding.backend}: {finding.title}",
        phrases.extent(finding),
        *filter(None, [phrases.contrast(finding)]),
        f"{record.case}: {_what_happened(record)}" + (f" ({rounds})" if rounds else ""),
        *filter(None, [repeat_line(record, run.header)]),
    ]


def _what_happened(record: Record) -> str:
    if isinstance(record, XFailed):
        return f"{record.underlying}, as expected: {record.summary}"
    return phrases.what_happened(record)


def _result(rule: str, record: Record, lines: Sequence[str], mark: str, header: RunHeader, root: str) -> Json:
    is_expected = isinstance(record, XFailed)
    result: Json = {
        "ruleId": rule,
        "level": "note" if is_expected else "error",
        "message": {"text": phrases.printable("\n".join(lines))},
        "locations": [_location(record, header, root)],
        # GitHub recognises a result by the second; for a file of the checkout, it would compute another from the line.
        "partialFingerprints": {"attncheckFinding/v1": mark, "primaryLocationLineHash": f"{mark}:1"},
    }
    if isinstance(record, XFailed):
        result["suppressions"] = [{"kind": "external", "justification": phrases.printable(record.reason)}]
    return result


def _mark(parts: Sequence[str], marks: set[str]) -> str:
    """Return 16 hex digits that are equal for the same finding of another run, and add them to ``marks``.

    ``parts``: the backend, the check and the cause without figures, or the function. Findings that have all of these
    in common, as two that nothing explains, are numbered.
    """
    number = 1
    while (mark := sha256("\0".join([*parts, str(number)]).encode()).hexdigest()[:16]) in marks:
        number += 1
    marks.add(mark)
    return mark


def _location(record: Record, header: RunHeader, root: str) -> Json:
    """Return the place: a file of the checkout, or else the file of the suite, which a built-in one has in attncheck.

    A function of a provider has no case file; its batches are those of the first suite.
    """
    file, line = place_to_show(record, header, root)
    name = record.suite
    if record.check == UTILITIES:
        name = next((suite.name for suite in header.suites if suite.name != UTILITIES), name)
    suite = header.suite_ref(name).partition("{")[0]
    if file:
        artifact = {"uri": quote(file)}
    elif suite.endswith((".yaml", ".yml")):
        path = posixpath.normpath(suite)
        if path.startswith("../"):  # it is outside of the checkout, which a relative address must not leave
            path = posixpath.normpath(posixpath.join(root, path))
        artifact = {"uri": PurePath(path).as_uri() if path.startswith("/") else quote(path)}
    else:
        artifact = {"uri": quote(f"attncheck/cases/suites/{suite}.yaml"), "uriBaseId": INSTALLED}
    # GitHub wants a line, also where only the file is known.
    return {
        "physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line or 1}},
        "logicalLocations": [{"fullyQualifiedName": phrases.one_line(f"{record.backend}/{record.case}")}],
    }


def _invocation(run: RunValues) -> Json:
    notifications = list(_notifications(run))
    is_ours = any(map(_is_ours, run.records))
    is_blank = not run.summary.total.examined
    found: Json = {
        "executionSuccessful": run.complete and not run.errors and not is_ours and not is_blank,
        "toolExecutionNotifications": notifications,
    }
    for key, time in (("startTimeUtc", run.header.started), ("endTimeUtc", run.finished)):
        with suppress(ValueError):  # without a footer, or in a file that is no run of ours
            found[key] = datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    # The run file does not have the exit code. Where these facts do not decide it, it is left out.
    if run.complete and is_ours:
        found["exitCode"] = 3
    elif run.complete and run.summary.short:
        found["exitCode"] = 1
    elif run.complete and not run.errors and is_blank:
        found["exitCode"] = 2
    elif run.complete and not run.errors and not run.silent:
        found["exitCode"] = 0
    return found


def _notifications(run: RunValues) -> Iterator[Json]:
    for error in (*run.errors, *([run.warning] if run.warning else [])):
        yield _notification("error", "run", error)
    for record in run.records:
        if _is_ours(record):
            yield _notification(
                "error", "attncheck", f"{record.backend}, {record.case}: {phrases.what_happened(record)}"
            )
    for backend, reasons in run.silent.items():
        yield _notification("warning", "not-examined", f"{backend}: nothing was examined: {reasons}")
    for gap in run.summary.gaps:
        if gap.backend not in run.silent:
            extent = f"{phrases.gap(gap, len(run.header.checks))} {phrases.gap_outcome(gap)}"
            level: Level = "note" if gap.outcome == "unsupported" else "warning"
            yield _notification(level, "not-examined", f"{gap.backend}: {extent}: {phrases.gap_reasons(gap)}")


def _notification(level: Level, kind: str, text: str) -> Json:
    return {"level": level, "descriptor": {"id": kind}, "message": {"text": phrases.printable(text)}}


def _is_ours(record: Record) -> bool:
    """Return whether attncheck itself failed, which states nothing about the backend."""
    return isinstance(record, Errored) and record.stage == OURSELVES
