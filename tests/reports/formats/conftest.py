"""Hand-made times: reports of every format are made of records alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Record
from attncheck.reports.speeds.speed import Speed, speeds


def latency(part: str, median_ns: float, **fields: Any) -> dict[str, Any]:
    samples = [round(median_ns * share) for share in (0.98, 1.0, 1.02, 1.0, 5.0)]
    found = {
        "part": part,
        "clock": "host" if part == "build" else "events",
        "median_ns": median_ns,
        "low_ns": median_ns * 0.98,
        "high_ns": median_ns * 1.02,
        "samples_ns": samples,
        "is_settled": True,
    }
    return found | fields


@pytest.fixture
def timed(make: Callable[..., Record]) -> Callable[..., Record]:
    """``timed({"forward": 1e6, "build": 5e4}, round=1)``: a passed timing with these medians, in nanoseconds.

    ``work``: fields of ``forward``'s latency besides; ``timing``: fields of the timing besides.
    """

    def build(
        medians: dict[str, float],
        *,
        work: dict[str, Any] | None = None,
        timing: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Record:
        latencies = [latency(part, ns, **(work or {} if part == "forward" else {})) for part, ns in medians.items()]
        return make("passed", check="timing", timing={"latencies": latencies} | (timing or {}), **fields)

    return build


@pytest.fixture
def rounds_of(timed: Callable[..., Record]) -> Callable[..., list[Record]]:
    """``rounds_of("Wrong", [1e6, 1.1e6])``: one record a round, of ``forward`` alone."""

    def build(backend: str, medians: Sequence[float], **fields: Any) -> list[Record]:
        return [timed({"forward": ns}, backend=backend, round=index, **fields) for index, ns in enumerate(medians)]

    return build


@pytest.fixture
def timing_header(header: RunHeader) -> RunHeader:
    return header.model_copy(update={"checks": ("numerics", "timing"), "rounds": 10})


@pytest.fixture
def speeds_of() -> Callable[..., tuple[Speed, ...]]:
    return lambda *records: speeds(records)
