"""Hand-made runs with times: what one process a round measured, and nothing that was ever measured."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from attncheck.reports.comparison.compare import RunComparison, compare_runs
from attncheck.reports.run_file.header import BackendInfo, RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run, read_run
from attncheck.reports.run_file.timings import Latency, Timing
from attncheck.reports.speeds.speed import Speed

BACKENDS = ("reference", "Wrong", "fast")

Medians = Sequence[float]


def latency(median_ns: float, *, part: str = "forward", clock: str = "host", samples: Sequence[int] = ()) -> Latency:
    around = samples or [round(median_ns * (1 + 0.001 * step)) for step in (-2, -1, 0, 1, 2)]
    return Latency.model_validate(
        {
            "part": part,
            "clock": clock,
            "median_ns": median_ns,
            "low_ns": median_ns,
            "high_ns": median_ns,
            "samples_ns": tuple(around),
            "is_settled": True,
        }
    )


@pytest.fixture
def around() -> Callable[..., list[float]]:
    """``around(1e6, rounds=10, spread=0.01, seed=1)``: medians of that many processes."""

    def medians(middle: float, *, rounds: int = 10, spread: float = 0.01, seed: int = 0) -> list[float]:
        drawn = Random(seed)
        return [middle * math.exp(drawn.gauss(0, spread)) for _ in range(rounds)]

    return medians


@pytest.fixture
def speed() -> Callable[..., Speed]:
    """``speed(medians)``: as put together of a run."""

    def make(medians: Medians, *, case: str = "smoke/edge", part: str = "forward", **fields: Any) -> Speed:
        backend, cache = fields.pop("backend", "reference"), fields.pop("cache", "warm")
        rounds = tuple(latency(median, part=part, **fields) for median in medians)
        timings = tuple(Timing(latencies=(each,), cache=cache) for each in rounds)
        return Speed(backend, case, rounds[0].part, rounds, timings)

    return make


@pytest.fixture
def timed(make: Callable[..., Record]) -> Callable[..., list[Record]]:
    """``timed(medians, build=medians, case_id="b", backend="fast")``: a record of the check ``timing`` a round."""

    def records(
        forward: Medians, *, build: Medians = (), timing: dict[str, Any] | None = None, **fields: Any
    ) -> list[Record]:
        def one(index: int) -> Record:
            latencies = [latency(forward[index])]
            latencies += [latency(build[index], part="build")] if build else []
            data = {"latencies": [each.model_dump(mode="json") for each in latencies]} | (timing or {})
            return make("passed", check="timing", round=index, figures={}, timing=data, **fields)

        return [one(index) for index in range(len(forward))]

    return records


@pytest.fixture
def run_of(tmp_path: Path, header: RunHeader, write_run: Callable[..., Path]) -> Callable[..., Run]:
    """``run_of(records, name="new.jsonl", seed=1)``: the run as read from a file; other fields are of the header."""

    def run(records: Sequence[Record], *, name: str = "", is_cut: bool = False, **fields: Any) -> Run:
        infos = [BackendInfo(name=each, ref=each, version="0.1.0") for each in BACKENDS]
        named = {record.backend for record in records}
        described: dict[str, Any] = {
            "backends": tuple(info for info in infos if info.name in named),
            "checks": ("numerics", "cudagraph", "timing"),
            "rounds": 1 + max((record.round for record in records), default=0),
        }
        whole = header.model_copy(update=described | fields)
        digest = whole.environment.digest
        path = tmp_path / (name or f"run-{len(list(tmp_path.iterdir()))}.jsonl")
        same = {"environment": digest, "seed": whole.seed}
        write_run(path, whole, *(record.model_copy(update=same) for record in records))
        if is_cut:
            path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        return read_run(path)

    return run


@pytest.fixture
def compare(run_of: Callable[..., Run]) -> Callable[..., RunComparison]:
    """``compare(records, records)``: two runs of these compared; keywords go to the comparison."""

    def compared(base: Sequence[Record], new: Sequence[Record], **options: Any) -> RunComparison:
        return compare_runs(run_of(base), run_of(new), **options)

    return compared


@pytest.fixture
def at_level(graph: Callable[..., Record]) -> Callable[..., Record]:
    """``at_level("ALWAYS", measured="NEVER")``: a record of ``cudagraph``, failed where less is measured."""
    levels = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")

    def record(declared: str, *, measured: str | None, recorder: str = "emulated", **fields: Any) -> Record:
        is_short = measured is not None and levels.index(measured) < levels.index(declared)
        found = {"declared": declared, "measured": measured, "recorder": recorder}
        return graph("failed" if is_short else "passed", found, **fields)

    return record
