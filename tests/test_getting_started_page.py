"""docs/getting-started.md and docs/reading-a-report.md are true: commands work and print what is shown."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
TEXT = (DOCS / "getting-started.md").read_text(encoding="utf-8")
CONSOLE = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
BUILT_IN, NEW, OWN, WRONG, WATCHED = CONSOLE
((CHANGED,),) = [re.findall(r"^```python\n(.*?)\n```$", TEXT, re.MULTILINE)]
RIGHT = CHANGED.replace("seq_len // page_size", "-(-seq_len // page_size)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("started")


def test_the_built_in_backend_passes_as_is_shown(shell, assert_printed, folder):
    code, printed = shell(BUILT_IN[0], folder)
    assert code == 0, printed
    assert_printed(BUILT_IN[1], printed)


def test_the_kernel_that_is_written_passes_and_its_fault_is_found(shell, assert_printed, folder):
    for command, shown in (NEW, OWN):
        code, printed = shell(command, folder)
        assert code == 0, printed
        assert_printed(shown, printed)
    written = (folder / "mine.py").read_text(encoding="utf-8")
    assert written.count(RIGHT) == 1
    (folder / "mine.py").write_text(written.replace(RIGHT, CHANGED), encoding="utf-8")
    code, printed = shell(WRONG[0], folder)
    assert code == 1, printed
    assert_printed(WRONG[1], printed)


def test_the_watched_run_is_the_one_before_it():
    assert WATCHED[0].endswith(" --check numerics --watch")


def test_the_run_file_is_read_as_is_shown(shell, tmp_path):
    text = (DOCS / "reading-a-report.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    code, printed = shell(" && ".join(commands), tmp_path)
    assert code == 0, printed
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "report.html", "records.csv"}
