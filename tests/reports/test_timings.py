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


@pytest.mark.parametrize("field", ["median_ns", "low_ns", "high_ns"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1e31, 1e-31, 10**400, float("nan"), float("inf"), "NaN"])
def test_a_time_is_a_number_above_nothing(field, value):
    assert Latency.model_validate(LATENCY).median_ns == 2
    with pytest.raises(ValidationError, match=field):
        Latency.model_validate(LATENCY | {field: value})


@pytest.mark.parametrize("field", ["moved_bytes", "flops"])
def test_work_is_a_number_that_a_float_can_hold(field):
    assert getattr(Latency.model_validate(LATENCY | {field: 0}), field) == 0
    for value in (-1, 2**63, 10**400):
        with pytest.raises(ValidationError, match=field):
            Latency.model_validate(LATENCY | {field: value})


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


@pytest.mark.parametrize("field", ["copy_bytes_per_s", "matmul_flops_per_s"])
def test_a_ceiling_divides(field):
    assert Ceilings.model_validate(CEILINGS).least_ns(1, 0) == 1
    with pytest.raises(ValidationError, match=field):
        Ceilings.model_validate(CEILINGS | {field: 0.0})
