"""What a finding measured is in its record, in the field of the same name."""

from dataclasses import dataclass, fields
from typing import Any

import pytest
from pydantic import ValidationError

from attncheck.harness.checks.findings import Broken, Finding, Holds, Measurements, NotExamined
from attncheck.harness.run.outcomes import Circumstances, record_of
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.records import (
    Failed,
    Passed,
    Record,
    XFailed,
    XPassed,
    chosen_kernels_of,
    graph_of,
    timing_of,
)
from attncheck.reports.run_file.timings import Timing

LEVELS = GraphLevels(declared="ALWAYS", measured=None, recorder="cuda")
TIMING = Timing(latencies=())
KERNELS = ("flash", "math")
MEASURED: dict[str, Any] = {"graph": LEVELS, "chosen_kernels": KERNELS, "timing": TIMING}


@dataclass(frozen=True)
class Question:
    suite: str = "smoke"
    id: str = "one"
    hash: str = "0123456789ab"


@dataclass(frozen=True)
class Backend:
    name: str = "a"
    ref: str = "a"
    version: str = ""
    features: frozenset[str] = frozenset()


def recorded(finding: Finding) -> Record:
    circumstances = Circumstances(seed=0, environment="abcdefabcdef", attncheck_version="0.1.0")
    return record_of(circumstances, Question(), Backend(), "cudagraph", finding, 0.5)


@pytest.mark.parametrize("outcome", [Passed, Failed, XFailed, XPassed])
def test_every_measurement_has_a_field_in_records(outcome: type[Record]) -> None:
    assert {field.name for field in fields(Measurements)} <= outcome.model_fields.keys()


@pytest.mark.parametrize("finding", [Holds(**MEASURED), Broken("no", **MEASURED)])
def test_a_record_carries_what_was_measured(finding: Finding) -> None:
    record = recorded(finding)
    assert (graph_of(record), chosen_kernels_of(record), timing_of(record)) == (LEVELS, KERNELS, TIMING)


def test_what_was_not_examined_has_levels_and_no_times() -> None:
    assert graph_of(recorded(NotExamined(("no kernel",), graph=LEVELS))) == LEVELS
    with pytest.raises(ValidationError):
        recorded(NotExamined(("no kernel",), timing=TIMING))
