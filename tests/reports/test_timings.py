"""Times that a run file may hold: what cannot be one is refused where it is read."""

import pytest
from pydantic import ValidationError

from attncheck.reports.run_file.timings import Ceilings, Latency

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
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), "NaN"])
def test_a_time_is_a_number_above_nothing(field, value):
    assert Latency.model_validate(LATENCY).median_ns == 2
    with pytest.raises(ValidationError, match=field):
        Latency.model_validate(LATENCY | {field: value})


@pytest.mark.parametrize("field", ["moved_bytes", "flops"])
def test_work_is_not_negative(field):
    assert getattr(Latency.model_validate(LATENCY | {field: 0}), field) == 0
    with pytest.raises(ValidationError, match=field):
        Latency.model_validate(LATENCY | {field: -1})


@pytest.mark.parametrize("field", ["copy_bytes_per_s", "matmul_flops_per_s"])
def test_a_ceiling_divides(field):
    assert Ceilings.model_validate(CEILINGS).least_ns(1, 0) == 1
    with pytest.raises(ValidationError, match=field):
        Ceilings.model_validate(CEILINGS | {field: 0.0})
