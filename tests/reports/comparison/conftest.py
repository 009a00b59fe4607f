"""Hand-made runs with times: what one process a round measured, and nothing that was ever measured."""

import math
from random import Random

import pytest

from attncheck.reports.comparison.compare import compare_runs
from attncheck.reports.run_file.timings import Latency, Timing
from attncheck.reports.speeds.speed import Speed


@pytest.fixture
def around():
    """``around(1e6, rounds=10, spread=0.01, seed=1)``: medians of that many processes."""

    def medians(middle, *, rounds=10, spread=0.01, seed=0):
        drawn = Random(seed)
        return [middle * math.exp(drawn.gauss(0, spread)) for _ in range(rounds)]

    return medians


@pytest.fixture
def speed():
    """``speed(medians)``: as put together of a run; ``samples``: of every round."""

    def make(medians, *, case="smoke/edge", samples=(), **fields):
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
def compare(run_of):
    """``compare(records, records)``: two runs of these compared; keywords go to the comparison."""

    def compared(base, new, **options):
        return compare_runs(run_of(base), run_of(new), **options)

    return compared


@pytest.fixture
def at_level(graph):
    """``at_level("ALWAYS", measured="NEVER")``: a record of ``cudagraph``, failed where less is measured."""
    levels = ("NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS")

    def record(declared, *, measured, recorder="emulated", **fields):
        is_short = measured is not None and levels.index(measured) < levels.index(declared)
        found = {"declared": declared, "measured": measured, "recorder": recorder}
        return graph("failed" if is_short else "passed", found, **fields)

    return record
