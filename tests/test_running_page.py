"""docs/running.md: its commands run, its table of pyproject.toml is read, and it names every key."""

import re
import shlex
import tomllib
from contextlib import nullcontext
from pathlib import Path

import pytest

from attncheck.harness.cli import app as cli
from attncheck.harness.cli import watch
from attncheck.harness.cli.config import KEEP, Config, read_config

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ attncheck (.*)$", TEXT, re.MULTILINE)
MINE = """\
import torch
from attncheck.backends.candidates.torch_sdpa import SDPABackend
class Mine(SDPABackend):
    pass
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(watch, "terminal_keys", lambda: nullcontext(lambda _seconds: "q"))
    words = shlex.split(command)
    if "--watch" in words:  # which has the process of the backend wait
        assert cli.main(words) == 0
        return
    here = ["--in-process", "--device", "cpu"] if words[0] == "run" else []
    assert cli.main([*words, *here]) == 0


def test_the_table_is_read_and_has_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (table,) = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(table, encoding="utf-8")
    assert read_config(tmp_path).backends == ("./mine.py", "torch_sdpa")
    assert list(tomllib.loads(table)["tool"]["attncheck"]) == list(Config.model_fields)
    assert f"newest {KEEP} stay" in " ".join(TEXT.split())
