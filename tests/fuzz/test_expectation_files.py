"""Expectation files from strangers: read or refused, and what was read can be held against records."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import yaml
from mutations import answered, changed, obeyed, try_inputs

from attncheck.harness.run.expectations import load_expectations
from attncheck.reports.run_file.records import Failed, Record

EXPECTED = Path(__file__).parent.parent.parent / "docs" / "expected"
FILES = [path.read_bytes() for path in sorted(EXPECTED.glob("*.yaml"))]
ENTRIES = [entry for content in FILES for entry in yaml.load(content, yaml.CSafeLoader)]
OPTIONAL = {"needs": ["sinks", "head_size=64"], "says": "*", "until": "2026-12-31", "issue": "https://example.org/17"}
TREES = [[entry | OPTIONAL] for entry in ENTRIES]
SMALL = [yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False).encode() for tree in TREES]


@pytest.mark.parametrize("count", [150, pytest.param(4_000, marks=pytest.mark.slow)])
def test_whatever_an_expectation_file_holds(tmp_path: Path, make_record: Callable[..., Record], count: int) -> None:
    record = make_record("failed", meaning="the window is one key too long")
    assert isinstance(record, Failed)

    def check(chance: Random) -> None:
        data = changed(chance, TREES, FILES, SMALL)
        for entry in answered(load_expectations, tmp_path / "any.yaml", data) or ():
            assert not obeyed(str(entry))
            wanted = entry.expectation
            answers = [wanted.foresees(record), wanted.is_about(record), wanted.fits_case("smoke", "decode")]
            assert {*answers} <= {True, False}

    try_inputs(check, count)
