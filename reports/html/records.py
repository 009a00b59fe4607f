"""All records of the page's runs as compact JSON, from which the page's script builds rows on demand.

Texts and contents that many records share are stored once and referred to by number. The JSON is safe within a
``<script>``: it cannot end the element, and control and formatting characters are removed.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding, stated_cause
from attncheck.reports.analysis.graph_levels import notes_of
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.header import CaseInfo
from attncheck.reports.run_file.records import (
    Crashed,
    Errored,
    Failed,
    Passed,
    Record,
    TimedOut,
    Unavailable,
    Unsupported,
    XFailed,
    XPassed,
    budget_share,
    graph_of,
    timing_of,
)
from attncheck.reports.run_file.timings import Latency, Timing
from attncheck.reports.speeds.tables import rate_unit, time_unit

SHARE = "error / allowed"
"""The name of the largest share of the error budget in a record's content."""

Content = dict[str, Any]
"""What a record states, by heading: a text, a tuple of texts, a dict of figures, or a table as a list of rows."""


def records_json(runs: Sequence[RunValues], names: Sequence[str]) -> str:
    """Return JSON of all records of the runs, which are called ``names``, for a ``<script>`` data element.

    ``groups``: of each backend and case, ``[run, backend, suite, case id, needs, about, records]``. A record is
    ``[check, outcome, round, seconds, content, parts of the command ...]``. Contents are indices into ``contents``,
    and all other members indices into ``texts``, except for case ids, rounds and seconds; so are lists in a content.
    """
    texts: dict[str, int] = {}
    contents: dict[str, int] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    groups: dict[tuple[str, str, str], list[Any]] = {}
    for run, name in zip(runs, names, strict=True):
        findings = {record.key: finding for finding in run.found.findings for record in finding.records}
        cases = {(case.suite, case.id): case for case in run.header.cases}
        for record in run.records:
            key = (name, record.backend, record.case)
            if key not in groups:
                about = _about(cases.get((record.suite, record.case_id)))
                needs = number(", ".join(record.needs))
                owner = [number(name), number(record.backend), number(record.suite)]
                groups[key] = [*owner, record.case_id, needs, number(about), []]
            # Commands differ in few places: stored in parts, most of each is stored once.
            command = re.split("(?= --case )|(?= --check )", repro_command(record, run.header))
            stated = _content(record, findings.get(record.key))
            # Many records share a text of a list, such as a note.
            content = clean_json({name: _numbered(value, number) for name, value in stated.items()})
            groups[key][-1].append(
                [
                    number(record.check),
                    number(record.outcome),
                    record.round,
                    float(f"{record.duration_s:.3g}"),
                    contents.setdefault(content, len(contents)),
                    *map(number, command),
                ]
            )
    data = {"share": SHARE, "texts": list(texts), "groups": list(groups.values())}
    members = [f'"{name}":{clean_json(value)}' for name, value in data.items()]
    members.append(f'"contents":[{",".join(contents)}]')
    # Within a script, only "<" could begin markup; escaped as \u003c it is the same JSON.
    return "{" + ",\n".join(members).replace("<", "\\u003c") + "}"


def _numbered(value: object, number: Callable[[str], int]) -> object:
    """Return a list of texts as their numbers, and any other value as it is."""
    return list(map(number, value)) if isinstance(value, tuple) else value


def _about(case: CaseInfo | None) -> str:
    return "" if case is None else ". ".join(filter(None, [case.shape, case.description]))


def _content(record: Record, finding: Finding | None) -> Content:
    """Return what a record states, without empty members."""
    content: Content = {"": _what(record), SHARE: _figure(budget_share(record))}
    content["finding"] = finding.title if finding else ""
    match record:
        case Passed():
            content |= {"notes": record.notes, "figures": _figures(record.figures)}
        case Failed():
            content |= {"cause": stated_cause(record, finding), "details": record.details}
            content |= {"figures": _figures(record.figures), "it printed": record.output}
        case Errored():
            message = "" if record.message in record.traceback else record.message
            content |= {"message": message, "traceback": record.traceback, "it printed": record.output}
        case Crashed() | TimedOut():
            content |= {"it printed": record.output, "its stacks": record.native_stack}
        case XFailed():
            content |= {"expected": record.reason}
    graph, timing = graph_of(record), timing_of(record)
    content |= _graph(graph) if graph else {}
    content |= _timing(timing) if timing else {}
    return {name: value for name, value in content.items() if value not in (None, "", (), [], {})}


def _what(record: Record) -> str:
    """Return one line on what happened, or why nothing was examined; "" if the record passed."""
    match record:
        case Passed():
            return ""
        case Unsupported() | Unavailable():
            left_out = "left out by attncheck: " if isinstance(record, Unsupported) and record.by == "attncheck" else ""
            return left_out + "; ".join(record.reasons)
        case XFailed():
            return f"{record.underlying}: {record.summary}"
        case Failed() | Errored() | Crashed() | TimedOut() | XPassed():
            return phrases.what_happened(record)


def _graph(graph: GraphLevels) -> Content:
    levels = f"declared {graph.declared}, measured {phrases.measured_level(graph.measured)}, {graph.recorder}"
    probes = [[probe.name, probe.level, phrases.probe_outcome(probe), probe.reason] for probe in graph.probes]
    return {
        "CUDA-graph level": levels,
        "notes on the level": notes_of(graph),
        "probes": [["probe", "level", "outcome", "reason"], *probes],
    }


def _timing(timing: Timing) -> Content:
    headings = ["part", "median", "interval", "samples", "least to most", "clock", "bytes", "operations", "settled"]
    kernels = [[kernel.name, str(kernel.count), _time(kernel.duration_ns)] for kernel in timing.kernels]
    content: Content = {"times": [headings, *map(_latency, timing.latencies)], "cache": timing.cache}
    if (ceilings := timing.ceilings) is not None:
        copy = rate_unit([ceilings.copy_bytes_per_s], "B")
        product = rate_unit([ceilings.matmul_flops_per_s], "FLOP")
        content["device"] = (
            f"copy {copy.text(ceilings.copy_bytes_per_s)} {copy.name}, "
            f"matmul of {ceilings.dtype} {product.text(ceilings.matmul_flops_per_s)} {product.name}"
        )
    content["state of the device"] = timing.device.model_dump(exclude_none=True) if timing.device else {}
    content["kernels"] = [["kernel", "launches", "all together"], *kernels] if kernels else []
    content["notes on the times"] = timing.notes
    return content


def _latency(latency: Latency) -> list[str]:
    samples = latency.samples_ns
    return [
        latency.part,
        _time(latency.median_ns),
        f"{_time(latency.low_ns)} to {_time(latency.high_ns)}",
        str(len(samples)),
        f"{_time(min(samples))} to {_time(max(samples))}" if samples else "-",
        latency.clock,
        "-" if latency.moved_bytes is None else f"{latency.moved_bytes:,}",
        "-" if latency.flops is None else f"{latency.flops:,}",
        "yes" if latency.is_settled else "no",
    ]


def _time(nanoseconds: float) -> str:
    unit = time_unit([nanoseconds])
    return f"{unit.text(nanoseconds)} {unit.name}"


def _figures(figures: Mapping[str, float]) -> dict[str, float | str | None]:
    return {name: _figure(value) for name, value in figures.items()}


def _figure(value: float | None) -> float | str | None:
    """Return a number with at most six digits; infinity and NaN become strings, since JSON lacks them."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def clean_json(value: object) -> str:
    """Return compact JSON, with every text in it cleaned, names included."""
    return json.dumps(_cleaned(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return phrases.printable(value)
        case dict():
            return {phrases.printable(name): _cleaned(member) for name, member in value.items()}
        case list() | tuple():
            return [_cleaned(member) for member in value]
        case _:
            return value
