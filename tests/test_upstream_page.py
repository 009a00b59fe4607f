"""docs/upstream/README.md lists each folder under the kind that its report has."""

import re
from pathlib import Path

UPSTREAM = Path(__file__).resolve().parent.parent / "docs" / "upstream"
KINDS = {
    "Wrong answers": "wrong answer",
    "Hazards": "hazard",
    "Differences of documentation": "difference of documentation",
}


def test_the_index_lists_each_report_under_its_kind():
    _, *sections = re.split(r"^## ", (UPSTREAM / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    listed = {
        folder: KINDS[section.splitlines()[0]]
        for section in sections
        for folder in re.findall(r"^\| \[[\w-]+\]\(([\w-]+)/report\.md\)", section, re.MULTILINE)
    }
    reports = {path.parent.name: path.read_text(encoding="utf-8") for path in UPSTREAM.glob("*/report.md")}
    assert listed == {name: re.search(r"^- Kind: (.*)$", text, re.MULTILINE)[1] for name, text in reports.items()}
    assert {path.parent.name for path in UPSTREAM.glob("*/show.py")} == set(listed)
