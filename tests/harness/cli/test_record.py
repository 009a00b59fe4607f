"""``attncheck record``: the command runs with the recording switched on, and its exit code is the command's."""

import json
import os
import sys
from pathlib import Path

import pytest

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


def test_the_command_is_told_by_its_environment(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", NOTES_ITS_ENVIRONMENT, "5"]
    assert cli.main(["record", "--output", "a.yaml", "--every", "3", "--cases", "7", "--", *command]) == 5
    assert json.loads((tmp_path / "a.yaml").read_text()) == {
        "ATTNCHECK_RECORD": str(tmp_path / "a.yaml"),
        "ATTNCHECK_RECORD_EVERY": "3",
        "ATTNCHECK_RECORD_CASES": "7",
    }
    assert "attncheck run --suite a.yaml" in capfd.readouterr().err
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
    assert "recorded.yaml was not written: no vLLM served a batch" in capfd.readouterr().err


def test_nothing_is_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recorded.yaml").write_text("mine")
    assert cli.main(["record", "--", sys.executable, "-c", NOTES_ITS_ENVIRONMENT, "0"]) == 2
    assert "there already" in capfd.readouterr().err
    assert (tmp_path / "recorded.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "gone/a.yaml", "--", "true"], "no such folder"),
        (["--every", "0", "--", "true"], "every is 0"),
        (["--", "no-such-command"], "no-such-command: cannot be run"),
    ],
)
def test_wrong_questions(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["record", *arguments]) == 2
    assert message in capfd.readouterr().err
