"""Hand-made runs with times: what one process a round measured, and nothing that was ever measured."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from attncheck.reports.comparison.compare import RunComparison, compare_runs
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.run_file.timings import Latency, Timing
from attncheck.reports.speeds.speed import Speed


@pytest.fixture
def around() -> Callable[..., list[float]]:
    """``around(1e6, rounds=10, spread=0.01, seed=1)``: medians of that many processes."""

    def medians(middle: float, *, rounds: int = 10, spread: float = 0.01, seed: int = 0) -> list[float]:
        drawn = Random(seed)
        return [middle * math.exp(drawn.gauss(0, spread)) for _ in range(rounds)]

    return medians


@pytest.fixture
def speed() -> Callable[..., Speed]:
    """``speed(medians)``: as put together of a run; ``samples``: of every round."""

    def make(
        medians: Sequence[float], *, case: str = "smoke/edge", samples: Sequence[int] = (), **fields: Any
    ) -> Speed:
        backend, cache = fields.pop("backend", "reference"), fields.pop("cache", "warm")
        of_all = {"part": "forward", "clock": "host", "is_settled": True} | fields
        rounds = []
        for median in medians:
            around = samples or [round(median * (1 + 0.001 * step)) for step in (-2, -1, 0, 1, 2)]
            times = {"median_ns": median, "low_ns": median, "high_ns": median, "samples_ns": around}
            rounds.append(Latency.model_validate(of_all | times))
        timings = tuple(Timing(latencies=(each,), cache=cache) for each in rounds)
        return Speed(backend, case, rounds[0].part, tuple(rounds), timings)

    return make


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
