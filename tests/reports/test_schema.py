"""The schema of run files is up to date, and declares all fields of every line of a kept run."""

import json
from pathlib import Path
from typing import Any

from attncheck.reports.run_file.records import OUTCOMES, format_line
from attncheck.reports.run_file.schema import run_file_schema
from attncheck.reports.run_file.store import read_lines

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
KEPT = sorted((DOCS / "evidence").rglob("*.jsonl.xz"))
SCHEMA = run_file_schema()


def definition_of(line: dict[str, Any]) -> dict[str, Any]:
    """The part of the schema about a line, found by its ``kind`` and ``outcome``."""
    reference = SCHEMA["discriminator"]["mapping"][line["kind"]]
    if isinstance(reference, dict):
        reference = reference["discriminator"]["mapping"][line["outcome"]]
    found: dict[str, Any] = SCHEMA["$defs"][reference.rpartition("/")[2]]
    return found


def test_the_copy_in_the_docs_is_up_to_date():
    kept = json.loads((DOCS / "run-file.schema.json").read_text(encoding="utf-8"))
    assert kept == SCHEMA, "write it again: attncheck list schema --of run > docs/run-file.schema.json"


def test_it_holds_for_lines_of_kept_runs():
    for path in KEPT:
        lines = list(read_lines(str(path)))
        for text in {*lines[::50], lines[-1]}:  # the header is the first line, the footer the last
            line = json.loads(text)
            definition = definition_of(line)
            assert set(definition.get("required", ())) <= set(line) <= set(definition["properties"]), path.name


def test_it_names_every_outcome_and_figures_that_are_no_finite_numbers(make):
    for outcome in OUTCOMES:
        definition = definition_of(json.loads(format_line(make(outcome))))
        assert definition["properties"]["outcome"]["const"] == outcome
        assert definition["additionalProperties"] is False
    line = json.loads(format_line(make("failed", figures={"worst": "NaN", "rows": 3})))
    figures = definition_of(line)["properties"]["figures"]["additionalProperties"]["anyOf"]
    assert line["figures"]["worst"] in next(each["enum"] for each in figures if "enum" in each)
