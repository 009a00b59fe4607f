"""docs/run-files.md is true: its commands work in order, and it names every outcome and identifying field."""

import json
import re
from pathlib import Path

from attncheck.reports.run_file.header import FORMAT
from attncheck.reports.run_file.record_base import RecordKey
from attncheck.reports.run_file.records import OUTCOMES

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "run-files.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE)


def test_its_commands_work(shell, tmp_path):
    code, printed = shell(" && ".join(COMMANDS), tmp_path)
    assert code == 0, printed
    assert (tmp_path / "records.csv").read_text(encoding="utf-8").startswith("run,backend,")
    assert json.loads((tmp_path / "tables.json").read_text(encoding="utf-8"))["runs"][0]["verdict"] == "passed"


def test_it_names_what_a_record_is_known_by_and_every_outcome():
    identity = TEXT.partition("## Identity")[2].partition("A run holds")[0]
    assert re.findall(r"`(\w+)`", identity) == list(RecordKey._fields)
    assert re.findall(r"^\| `(\w+)` \|", TEXT.partition("## Outcomes")[2].partition("## ")[0], re.MULTILINE) == [
        *OUTCOMES
    ]
    assert f"`format` is {FORMAT}." in TEXT
