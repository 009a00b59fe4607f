"""Times that a run file may hold: what cannot be one is refused where it is read."""

import itertools
import math

import pytest
from pydantic import ValidationError

from attncheck.reports.run_file.timings import Ceilings, Latency, Timing
from attncheck.reports.speeds.speed import Speed

LATENCY = {
    "part": "forward",
    "clock": "host",
    "median_ns": 2.0,
    "low_ns": 1.0,
    "high_ns": 3.0,
    "samples_ns": (1, 2, 3),
    "is_settled": True,
}
CEILINGS = {"copy_bytes_per_s": 1e9, "matmul_flops_per_s": 1e12, "dtype": "float32"}


def test_times_work_and_ceilings_are_numbers_that_can_be_divided():
    assert Latency.model_validate(LATENCY).median_ns == 2
    assert Latency.model_validate(LATENCY | {"flops": 0, "moved_bytes": 0}).flops == 0
    assert Ceilings.model_validate(CEILINGS).least_ns(1, 0) == 1
    no_times = (0.0, -1.0, 1e31, 1e-31, 10**400, float("nan"), float("inf"), "NaN")
    for model, valid, names, values in (
        (Latency, LATENCY, ("median_ns", "low_ns", "high_ns"), no_times),
        (Latency, LATENCY, ("moved_bytes", "flops"), (-1, 2**63, 10**400)),
        (Ceilings, CEILINGS, ("copy_bytes_per_s", "matmul_flops_per_s"), (0.0,)),
    ):
        for name, value in itertools.product(names, values):
            with pytest.raises(ValidationError, match=name):
                model.model_validate(valid | {name: value})


def test_the_least_and_the_largest_times_and_work_can_be_put_together():
    for time_ns, rate, work in itertools.product((1e-30, 1e30), (1e-30, 1e30), (0, 1, 2**63 - 1)):
        latency = Latency.model_validate(
            LATENCY | {"median_ns": time_ns, "low_ns": time_ns, "high_ns": time_ns, "moved_bytes": work, "flops": work}
        )
        ceilings = Ceilings(copy_bytes_per_s=rate, matmul_flops_per_s=rate, dtype="float32")
        speed = Speed("a", "b", "forward", (latency,) * 2, (Timing(latencies=(latency,), ceilings=ceilings),) * 2)
        assert speed.median_ns == pytest.approx(time_ns)
        assert speed.bytes_per_s is not None
        assert math.isfinite(speed.bytes_per_s)
        assert (speed.roofline_share is None) == (work == 0)
