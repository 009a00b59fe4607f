"""What a finding measured is in its record, in the field of the same name."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from attncheck.harness.checks.findings import Broken, Finding, Holds, Measurements, NotExamined
from attncheck.harness.run.outcomes import Circumstances, record_of
from attncheck.reports.run_file import records
from attncheck.reports.run_file.graph_levels import GraphLevels
from attncheck.reports.run_file.records import Record
from attncheck.reports.run_file.timings import Timing

LEVELS = GraphLevels(declared="ALWAYS", measured=None, recorder="cuda")
TIMING = Timing(latencies=())
MEASURED: dict[str, Any] = {"graph": LEVELS, "chosen_kernels": ("flash", "math"), "timing": TIMING}


def recorded(finding: Finding) -> Record:
    circumstances = Circumstances(seed=0, environment="abcdefabcdef", attncheck_version="0.1.0")
    question = SimpleNamespace(suite="smoke", id="one", hash="0123456789ab")
    backend: Any = SimpleNamespace(name="a", ref="a", version="", features=frozenset())
    return record_of(circumstances, question, backend, "cudagraph", finding, 0.5)


def test_every_measurement_has_a_field_in_records_of_what_was_examined() -> None:
    measured = {field.name for field in fields(Measurements)}
    for outcome in (records.Passed, records.Failed, records.XFailed, records.XPassed):
        assert measured <= outcome.model_fields.keys()
    for finding in (Holds(**MEASURED), Broken("no", **MEASURED)):
        record = recorded(finding)
        assert (records.graph_of(record), records.timing_of(record)) == (LEVELS, TIMING)
        assert records.chosen_kernels_of(record) == ("flash", "math")


def test_what_was_not_examined_has_levels_and_no_times() -> None:
    assert records.graph_of(recorded(NotExamined(("no kernel",), graph=LEVELS))) == LEVELS
    with pytest.raises(ValidationError):
        recorded(NotExamined(("no kernel",), timing=TIMING))
