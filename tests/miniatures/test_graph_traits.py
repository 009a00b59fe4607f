"""Faults of graphs that only one trait of a layer or cache shows are found although layers share the probes."""

from pathlib import Path

import pytest

from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.harness.run.evaluation import Examiner, RunPlan

HERE = Path(__file__).resolve().parent

CAUGHT = {
    "WindowReadsALength": ("'decode'", "NEVER", ("window", "window-cap")),
    "SplitsUnderACap": ("'long decode'", "NEVER", ("window-cap", "cap-alibi")),
    "ReadsALengthOfHND": ("'decode'", "NEVER", ("half-hnd",)),
    "RowsOfHalf": ("'mixed'", "UNIFORM_BATCH", ("half", "half-hnd")),
    "DraftsUnderALiBi": ("'drafting'", "NEVER", ("alibi", "cap-alibi")),
}
"""Miniature: the probe that breaks, the level measured, and the cases with the trait; one of them at least fails."""


def examined(name, *ids):
    suite = load_suite(str(HERE / "graphs_traits.yaml"))
    backend = load(f"{HERE / 'graphs_traits.py'}:{name}")
    examiner = Examiner(RunPlan(cases=suite.cases, backends=(backend,), checks=("cudagraph",)))
    records = [examiner.examine(case, backend) for case in suite.cases if not ids or case.id in ids]
    assert not examiner.blind
    return {record.case_id: record for (record,) in records}


def test_a_right_backend_has_its_level_on_every_layer():
    records = examined("Modified")
    assert {record.outcome for record in records.values()} == {"passed"}
    assert {record.graph.measured for record in records.values()} == {"ALWAYS"}
    played = {case: len(record.graph.probes) for case, record in records.items()}
    assert played["plain"] == 25
    assert sum(played.values()) < 24 * len(played) * 2 / 3


@pytest.mark.parametrize("name", CAUGHT)
def test_a_fault_of_one_trait_is_found_on_a_layer_that_has_it(name):
    probe, level, ids = CAUGHT[name]
    failed = [record for record in examined(name, *ids).values() if record.outcome == "failed"]
    assert failed
    for record in failed:
        assert record.graph.measured == level
        assert probe in record.summary
