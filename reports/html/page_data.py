"""All records of the page's runs as compact JSON, from which the page's scripts build rows on demand.

Values that many records share (reasons, needs, levels) are stored once and referred to by number. The JSON is safe
within a ``<script>``: it cannot end the element, and control and formatting characters are removed.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.findings import Finding, stated_cause
from attncheck.reports.analysis.graph_levels import notes_of
from attncheck.reports.analysis.repro import repro_command
from attncheck.reports.document.run_values import RunValues
from attncheck.reports.html.needs import STANDINGS, known_needs, need_answers, needed_cases
from attncheck.reports.html.safe_text import clean_json
from attncheck.reports.run_file.records import (
    OUTCOMES,
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
from attncheck.reports.speeds.speed import Speed
from attncheck.reports.speeds.tables import case_id, fastest_of_cases, suite_of

Json = dict[str, Any]


class _Pool:
    """Distinct values in the order of first use; each has a number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of ``text``, adding it if it is new."""
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        """All texts, by number."""
        return list(self._numbers)

    @property
    def json(self) -> str:
        """All values, which are JSON already, as one JSON list."""
        return f"[{','.join(self._numbers)}]"


def page_data(runs: Sequence[RunValues], names: Sequence[str]) -> str:
    """Return JSON of all records and speeds of the runs, which are called ``names``, for a ``<script>`` data element.

    ``groups``: of each backend and case, ``[run, backend, suite, case id, needs, count, false claims, records]``; count
    and claims as in :class:`attncheck.reports.html.needs.NeededCase`, None for functions. A record is
    ``[check, outcome, round, seconds, body, repro command]``. ``cases``: of the headers, ``[run, suite, case id, shape,
    description]``. ``answers``: of each backend and need, ``[run, backend, need, standing, words]``. ``findings``:
    ``[run, backend, title, cases]``. ``speeds``: ``[run, backend, suite, case id, part, median, low, high, rounds,
    spread, bytes a second, flops a second, share of the roofline, whether it is the fastest]``, times in nanoseconds.
    Backends, suites, checks, needs, repro commands and bodies are indices into lists of these names; counts, standings,
    words, titles and shapes are indices into ``texts``. ``standings``: headings by standing, best first.
    """
    pools = {kind: _Pool() for kind in ("backends", "suites", "checks", "needs", "repros", "texts")}
    bodies = _Pool()
    groups: dict[tuple[int, str, str], list[Any]] = {}
    for index, run in enumerate(runs):
        findings = {record.key: finding for finding in run.found.findings for record in finding.records}
        for record in run.records:
            key = (index, record.backend, record.case)
            if key not in groups:
                where = [pools["backends"].number(record.backend), pools["suites"].number(record.suite)]
                needs = pools["needs"].number(", ".join(record.needs))
                groups[key] = [index, *where, record.case_id, needs, None, None, []]
            groups[key][-1].append(
                [
                    pools["checks"].number(record.check),
                    OUTCOMES.index(record.outcome),
                    record.round,
                    round(record.duration_s, 6),
                    bodies.number(clean_json(_body(record, findings.get(record.key)))),
                    pools["repros"].number(repro_command(record, run.header)),
                ]
            )
    answers: list[list[Any]] = []
    for index, run in enumerate(runs):
        cases = needed_cases(run.found)
        for case in cases:
            claims = pools["needs"].number(", ".join(sorted(case.false)))
            groups[index, case.backend, case.case][5:7] = [pools["texts"].number(case.count), claims]
        results = need_answers(known_needs(run.records, run.header), run.found, cases, run.header)
        answers += [
            [index, pools["backends"].number(backend), need, *map(pools["texts"].number, (each.standing, each.words))]
            for (backend, need), each in results.items()
        ]
    described = [
        [index, pools["suites"].number(case.suite), case.id, pools["texts"].number(case.shape), case.description]
        for index, run in enumerate(runs)
        for case in run.header.cases
    ]
    blamed = [
        [index, pools["backends"].number(each.backend), pools["texts"].number(each.title), list(each.cases)]
        for index, run in enumerate(runs)
        for each in run.found.findings
    ]
    rows = [row for index, run in enumerate(runs) for row in _speed_rows(index, run.speeds, pools)]
    members = {
        "runs": clean_json(names),
        "outcomes": clean_json(OUTCOMES),
        "standings": clean_json(dict(STANDINGS)),
        **{kind: clean_json(pool.texts) for kind, pool in pools.items()},
        "bodies": bodies.json,
        "groups": clean_json(list(groups.values())),
        "cases": clean_json(described),
        "answers": clean_json(answers),
        "findings": clean_json(blamed),
        "speeds": clean_json(rows),
    }
    # Within a script, only "<" could begin markup; escaped as \u003c it is the same JSON.
    return "{" + ",\n".join(f'"{name}":{text}' for name, text in members.items()).replace("<", "\\u003c") + "}"


def _speed_rows(index: int, found: Sequence[Speed], pools: Mapping[str, _Pool]) -> list[list[Any]]:
    first = fastest_of_cases(found)
    return [
        [
            index,
            pools["backends"].number(speed.backend),
            pools["suites"].number(suite_of(speed)),
            case_id(speed),
            speed.part,
            _figure(speed.median_ns),
            _figure(speed.interval_ns[0]),
            _figure(speed.interval_ns[1]),
            len(speed.rounds),
            _figure(speed.spread),
            _figure(speed.bytes_per_s),
            _figure(speed.flops_per_s),
            _figure(speed.roofline_share),
            int(first[speed.case, speed.part] == speed.backend),
        ]
        for speed in found
    ]


def _body(record: Record, finding: Finding | None) -> Json:
    """Return the fields that only this kind of record has, without empty ones."""
    body: Json = {"graph": _graph(record), "timing": _timing(timing_of(record))}
    body["share"] = _figure(budget_share(record))
    match record:
        case Passed():
            body |= {"notes": record.notes, "figures": _figures(record.figures)}
        case Failed():
            body |= {
                "what": phrases.what_happened(record),
                "meaning": stated_cause(record, finding),
                "details": record.details,
                "figures": _figures(record.figures),
            }
        case Errored():
            body |= {"what": phrases.what_happened(record), "trail": record.traceback}
            body |= {} if record.message in record.traceback else {"message": record.message}
        case Crashed() | TimedOut():
            body |= {"what": phrases.what_happened(record), "trail": record.output + record.native_stack}
        case Unsupported() | Unavailable():
            body |= {"reasons": record.reasons, "by": record.by if isinstance(record, Unsupported) else ""}
        case XFailed():
            body |= {"what": f"{record.underlying}: {record.summary}", "expected": record.reason}
        case XPassed():
            body |= {"what": phrases.what_happened(record)}
    return {name: value for name, value in body.items() if value not in (None, "", (), {})}


def _graph(record: Record) -> Json | None:
    if (graph := graph_of(record)) is None:
        return None
    return {
        "declared": graph.declared,
        "measured": phrases.measured_level(graph.measured),
        "recorder": graph.recorder,
        "probes": [[probe.name, probe.level, phrases.probe_outcome(probe), probe.reason] for probe in graph.probes],
        "notes": notes_of(graph),
    }


def _timing(timing: Timing | None) -> Json | None:
    if timing is None:
        return None
    ceilings, device = timing.ceilings, timing.device
    return {
        "cache": timing.cache,
        "parts": [_latency(latency) for latency in timing.latencies],
        "ceilings": ceilings and [ceilings.copy_bytes_per_s, ceilings.matmul_flops_per_s, ceilings.dtype],
        "device": device and device.model_dump(exclude_none=True),
        "kernels": [[kernel.name, kernel.count, kernel.duration_ns] for kernel in timing.kernels],
        "notes": timing.notes,
    }


def _latency(latency: Latency) -> list[Any]:
    """Return one part; its samples become their number and the quantiles at 0, 25, 50, 75 and 100 %."""
    ordered = sorted(latency.samples_ns)
    last = len(ordered) - 1
    return [
        latency.part,
        latency.clock,
        _figure(latency.median_ns),
        _figure(latency.low_ns),
        _figure(latency.high_ns),
        len(ordered),
        [ordered[round(last * quarter / 4)] for quarter in range(5)] if ordered else [],
        int(latency.is_settled),
        latency.moved_bytes,
        latency.flops,
    ]


def _figures(figures: Mapping[str, float]) -> dict[str, float | str | None]:
    return {name: _figure(value) for name, value in figures.items()}


def _figure(value: float | None) -> float | str | None:
    """Return a number with at most six digits; infinity and NaN become strings, since JSON lacks them."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
