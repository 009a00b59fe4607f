"""docs/fuzzing.md: its commands do what the page shows."""

import re
import shlex
from pathlib import Path

import pytest

from attncheck.harness.cli import app as cli

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "fuzzing.md").read_text(encoding="utf-8")
((MINE),) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FUZZ, RUN, SHRINK = re.findall(r"^\$ attncheck (.*)$", TEXT, re.MULTILINE)
(SHOWN,) = re.findall(r"^\$ attncheck fuzz .*\n((?:.+\n)+?)```$", TEXT, re.MULTILINE)


@pytest.mark.slow
def test_the_fault_is_found_made_small_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    assert cli.main([*shlex.split(FUZZ), "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert re.match(re.escape(SHOWN).replace(re.escape("..."), "(?s:.*?)"), printed), printed
    (case,) = (tmp_path / "small").glob("*.yaml")
    assert case.with_suffix(".py").is_file()
    words = shlex.split(RUN.replace("small/*.yaml", str(case.relative_to(tmp_path))))
    assert cli.main([*words, "--device", "cpu", "--in-process"]) == 1
    capsys.readouterr()
    assert cli.main(shlex.split(SHRINK.replace("numerics-...", case.stem))) == 1
    assert "small: 1 requests, " in capsys.readouterr().out
