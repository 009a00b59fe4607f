"""docs/html-page.md and docs/many-runs.md are true: commands print what is shown, and every sign is explained."""

import re
from pathlib import Path

import pytest

from attncheck.harness.cli import app as cli
from attncheck.reports.analysis.recommendation import STANDINGS
from attncheck.reports.document.support import SIGNS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "html-page.md").read_text(encoding="utf-8")
MANY = (ROOT / "docs" / "many-runs.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```console\n\$ attncheck (.*?)\n(.*?)^```$", MANY, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("command", "output"), COMMANDS, ids=["site", "recommend"])
def test_a_command_prints_what_is_shown(
    command: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == output


def test_every_sign_and_every_answer_is_explained() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", TEXT, re.MULTILINE)
    assert [row for row in rows if len(row[0]) == 1] == [(sign.sign, sign.meaning) for sign in SIGNS.values()]
    answers = re.findall(r"^\| (.+?) \| .+? \|$", MANY, re.MULTILINE)
    assert answers[-len(STANDINGS) :] == list(STANDINGS.values())
