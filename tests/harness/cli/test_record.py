"""``attncheck record``: the command runs with the recording switched on, and its exit code is the command's."""

import json
import os
import sys
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli

NOTES_ITS_ENVIRONMENT = (
    "import json, os, pathlib, sys;"
    "given = {k: v for k, v in os.environ.items() if k.startswith('ATTNCHECK_RECORD') or k == 'VLLM_PLUGINS'};"
    "pathlib.Path(os.environ['ATTNCHECK_RECORD']).write_text(json.dumps(given)); sys.exit(int(sys.argv[1]))"
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_the_command_gets_the_settings_in_its_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", NOTES_ITS_ENVIRONMENT, "5"]
    assert cli.main(["record", "--output", "a.yaml", "--every", "3", "--cases", "7", "--", *command]) == 5
    assert json.loads((tmp_path / "a.yaml").read_text()) == {
        "ATTNCHECK_RECORD": str(tmp_path / "a.yaml"),
        "ATTNCHECK_RECORD_EVERY": "3",
        "ATTNCHECK_RECORD_CASES": "7",
    }
    printed = capfd.readouterr().err
    assert "--suite" in printed
    assert printed == snapshot("written: a.yaml; examine it: attncheck run --suite a.yaml\n")
    assert "ATTNCHECK_RECORD" not in os.environ


def test_where_vllm_loads_named_plugins_alone_ours_is_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "theirs")
    assert cli.main(["record", "--", sys.executable, "-c", NOTES_ITS_ENVIRONMENT, "0"]) == 0
    assert json.loads((tmp_path / "recorded.yaml").read_text())["VLLM_PLUGINS"] == "theirs,attncheck_record"


@pytest.mark.parametrize(("leaves_with", "expected"), [(0, 1), (4, 4)])
def test_a_command_that_serves_nothing(leaves_with: int, expected: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", "--", sys.executable, "-c", f"raise SystemExit({leaves_with})"]) == expected
    assert "recorded.yaml was not written: vLLM ran no batch in" in capfd.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recorded.yaml").write_text("mine")
    assert cli.main(["record", "--", sys.executable, "-c", NOTES_ITS_ENVIRONMENT, "0"]) == 2
    assert "there already" in capfd.readouterr().err
    assert (tmp_path / "recorded.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "gone/a.yaml", "--", "true"], snapshot("error: --output gone/a.yaml: no such folder\n")),
        (["--every", "0", "--", "true"], snapshot("error: recording: every is 0; give a whole number above 0\n")),
        (["--", "no-such-command"], snapshot("error: no-such-command: cannot be run: No such file or directory\n")),
    ],
)
def test_wrong_questions(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", *arguments]) == 2
    assert capfd.readouterr().err == message
