"""Run files from strangers: read or refused, and what was read is shown by every format as text and nothing else."""

import gzip
import json
import lzma
import xml.etree.ElementTree as ET
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutations import answered, damaged, obeyed, reshaped, try_inputs, written

from attncheck.errors import QuestionError
from attncheck.harness.run.expectations import expectations_text
from attncheck.reports.analysis.measured import measured_run, subjects
from attncheck.reports.analysis.recommendation import known_needs, recommend
from attncheck.reports.comparison.compare import compare_runs
from attncheck.reports.formats import FORMATS
from attncheck.reports.run_file.header import CaseInfo, Environment, RunHeader
from attncheck.reports.run_file.merging import merge_runs
from attncheck.reports.run_file.records import OUTCOMES, Record
from attncheck.reports.run_file.store import Run, read_run
from attncheck.reports.speeds.speed import forward_times
from attncheck.reports.terminal.columns import Style
from attncheck.reports.terminal.recommendation import render_recommendation

LATENCY = {"clock": "host", "median_ns": 1e3, "low_ns": 900, "high_ns": 1100, "samples_ns": [900, 1000, 1100]}
TIMING = {
    "latencies": [
        LATENCY | {"part": "forward", "is_settled": True, "moved_bytes": 4096, "flops": 512},
        LATENCY | {"part": "build", "is_settled": False},
    ],
    "ceilings": {"copy_bytes_per_s": 1e12, "matmul_flops_per_s": 1e14, "dtype": "float16"},
    "kernels": [{"name": "flash", "count": 2, "duration_ns": 700.0}],
    "device": {"sm_clock_mhz": 1980, "max_sm_clock_mhz": 1980, "temperature_c": 45, "throttle_reasons": ["power"]},
    "overhead": {"empty_ns": 40, "replay_ns": 5},
    "notes": ["a note"],
}
GRAPH = {
    "declared": "ALWAYS",
    "measured": "UNIFORM_BATCH",
    "recorder": "emulated",
    "probes": [{"name": "shrinking batch", "level": "ALWAYS", "outcome": "failed", "reason": "row 3 differs"}],
    "notes": ["a note"],
}
TRACE = 'Traceback:\n  File "mine.py", line 12, in forward\n'
STYLE = Style(100)
PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [(".gz", gzip.compress), (".xz", partial(lzma.compress, preset=0))]


@pytest.fixture
def base(header: RunHeader, make_record: Callable[..., Record], write_run: Callable[..., Path], tmp_path: Path) -> Path:
    """A run file with every outcome, times and graph levels."""
    wrong = partial(make_record, backend="Wrong")
    records = [wrong(outcome, case_id=f"case-{outcome}") for outcome in OUTCOMES]
    records += [make_record("passed", check="timing", timing=TIMING, round=each) for each in (0, 1)]
    records += [wrong("passed", check="timing", timing=TIMING, round=each) for each in (0, 1)]
    records += [
        wrong("failed", check="cudagraph", graph=GRAPH, needs=["sinks", "head_size=64"]),
        wrong("errored", check="lse", traceback=TRACE, output="printed", message="no\nsuch kernel"),
        wrong("failed", check="utilities", suite="utilities", case_id="split", details=[TRACE], meaning="a cause"),
    ]
    whole = header.model_copy(
        update={
            "rounds": 2,
            "checks": ("numerics", "lse", "timing", "cudagraph", "utilities"),
            "suites": (*header.suites, header.suites[0].model_copy(update={"name": "utilities"})),
            "cases": tuple(
                CaseInfo(suite="smoke", id=each.case_id, shape="4 heads", description="one", keys={"cache.size": 16})
                for each in records
            ),
            "command": ("attncheck", "run"),
            "notes": ("a note",),
        }
    )
    return write_run(tmp_path / "base.jsonl", whole, *records, errors=("an error",))


def _fitted(lines: list[Any]) -> list[Any]:
    """Return ``lines`` with the digest of the environment in the records, and the right counts in the footer."""
    header, *records, footer = lines
    digest = Environment(**header["environment"]).digest
    outcomes = [record["outcome"] for record in records]
    counts = {outcome: outcomes.count(outcome) for outcome in outcomes}
    return [header, *(record | {"environment": digest} for record in records), footer | {"counts": counts}]


def _shown(run: Run, base: Run, chance: Random) -> str:
    """Return the run, or its comparison with ``base``, in one of the formats, or what another command makes of it."""
    form = FORMATS[chance.choice(list(FORMATS))]
    if form is FORMATS["html"] and chance.random() < 0.9:  # a page takes a hundred times as long as any other format
        form = FORMATS["json"]
    match chance.randrange(6):
        case 0:
            return expectations_text(run)
        case 1:
            return repr(merge_runs([run, run]))
        case 2:
            members = subjects([measured_run(run, "run", forward_times(run))])
            needs = known_needs(members)[:2]
            return render_recommendation("a device", needs, recommend(needs, members), STYLE)
        case 3 if form.render_comparison is not None:
            return "".join(form.render_comparison(compare_runs(base, run), STYLE))
        case _:
            return "".join(form.render_runs([run], STYLE))


@pytest.mark.parametrize("count", [150, pytest.param(4_000, marks=pytest.mark.slow)])
def test_whatever_a_run_file_holds(base: Path, tmp_path: Path, count: int) -> None:
    lines = [json.loads(line) for line in base.read_bytes().splitlines()]
    known = read_run(base)

    def check(chance: Random) -> None:
        if chance.random() < 0.3:
            data = damaged(chance, [base.read_bytes()])
        else:
            changed = reshaped(chance, lines)
            with suppress(AttributeError, KeyError, TypeError, ValueError):  # it has lost what is fitted
                changed = _fitted(changed)
            each_line = changed if isinstance(changed, list) else [changed]
            data = b"".join(written(chance, line) + b"\n" for line in each_line)
        ending, pack = chance.choice([("", bytes)] * 8 + PACKED)
        data = pack(data)
        if ending and chance.random() < 0.7:
            data = damaged(chance, [data])
        run = answered(read_run, tmp_path / f"any.jsonl{ending}", data)
        with suppress(QuestionError):
            if run is not None:
                text = _shown(run, known, chance)
                assert not obeyed(text)
                if text.startswith("<!doctype"):
                    assert text.count("<script") == text.count("</script") == 2
                    assert "<img" not in text
                if text.startswith("<?xml"):
                    assert ET.fromstring(text).tag == "testsuites"

    try_inputs(check, count)
