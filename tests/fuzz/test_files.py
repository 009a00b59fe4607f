"""Case files, expectation files and statements from strangers: loaded or refused, in little time and memory."""

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from mutations import answered, changed, obeyed, try_inputs

from attncheck.cases.loader import load_file, suite_file, suite_names
from attncheck.cases.outline import keys_of, shape_of
from attncheck.cases.profile import load_profile
from attncheck.harness.cli.statements import RENDERERS
from attncheck.harness.run.expectations import load_expectations
from attncheck.harness.run.statement import make_statement, read_statement, verify
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Failed, Record
from attncheck.reports.run_file.store import Run
from attncheck.reports.terminal.columns import Style

ROOT = Path(__file__).parent.parent.parent
OPTIONAL = {"needs": ["sinks", "head_size=64"], "says": "*", "until": "2026-12-31", "issue": "https://example.org/17"}


def apart(tree: Any) -> list[Any]:
    """Return each case of a suite, or each expectation, as a file of its own."""
    if isinstance(tree, list):
        return [[entry | OPTIONAL] for entry in tree]
    return [{**tree, "cases": [case]} for case in tree["cases"]] if "cases" in tree else [tree]


def inputs_from(paths: list[Path]) -> Callable[[Random], bytes]:
    """Return a function that draws a changed copy of one of the files, or of a part of one."""
    files = [path.read_bytes() for path in paths]
    trees = [tree for content in files for tree in apart(yaml.load(content, yaml.CSafeLoader))]
    small = [yaml.dump(tree, Dumper=yaml.CSafeDumper, sort_keys=False).encode() for tree in trees]
    return lambda chance: changed(chance, trees, files, small)


COUNTS = pytest.mark.parametrize("count", [150, pytest.param(4_000, marks=pytest.mark.slow)])


@COUNTS
def test_whatever_a_case_file_holds(tmp_path: Path, count: int) -> None:
    draw = inputs_from([*map(suite_file, suite_names()), *sorted((ROOT / "tests/cases/vllm").glob("*.yaml"))])

    def check(chance: Random) -> None:
        suite = answered(load_file, tmp_path / "any.yaml", draw(chance))
        for case in suite.cases if suite is not None else ():
            assert len(case.hash) == 12
            assert not obeyed(case.description + shape_of(case))
            assert keys_of(case)

    try_inputs(check, count)


@COUNTS
def test_whatever_an_expectation_file_holds(tmp_path: Path, make_record: Callable[..., Record], count: int) -> None:
    draw = inputs_from(sorted((ROOT / "docs/expected").glob("*.yaml")))
    record = make_record("failed", meaning="the window is one key too long")
    assert isinstance(record, Failed)

    def check(chance: Random) -> None:
        for entry in answered(load_expectations, tmp_path / "any.yaml", draw(chance)) or ():
            assert not obeyed(str(entry))
            wanted = entry.expectation
            answers = [wanted.foresees(record), wanted.is_about(record), wanted.fits_case("smoke", "decode")]
            assert {*answers} <= {True, False}

    try_inputs(check, count)


@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=pytest.mark.slow)])
def test_whatever_a_statement_holds(
    tmp_path: Path, header: RunHeader, make_record: Callable[..., Record], count: int
) -> None:
    alone = header.model_copy(update={"backends": header.backends[:1]})
    records = tuple(
        make_record(outcome, suite="encoder", case_id="encoder-only-many") for outcome in ("passed", "failed")
    )
    statement = make_statement(Run("run", alone, records), load_profile("vllm-0.32-encoder"), [], date(2026, 1, 1))
    cut = statement.judgement.model_copy(update={"missing": statement.judgement.missing[:2]})
    tree = statement.model_copy(update={"judgement": cut}).model_dump(mode="json")
    content = json.dumps(tree).encode()

    def check(chance: Random) -> None:
        found = answered(read_statement, tmp_path / "any.json", changed(chance, [tree], [content], [content]))
        if found is not None:
            known = verify(found, date(2026, 1, 2))
            assert known.faults or found == statement
            for render in RENDERERS.values():
                assert not obeyed(render(found, known, Style()))

    try_inputs(check, count)
