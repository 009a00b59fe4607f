"""docs/adding-a-backend.md and its two neighbours are true: files are the templates, commands print what the pages show.

The file for vLLM is tried out in tests/vllm, the others once more, in a clean installation, by scripts/check_wheel.py.
"""

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from attncheck.harness.cli.app import app
from attncheck.harness.cli.new import TEMPLATES, BackendKind, template_files

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("adding-a-backend.md", "backend-classes.md", "vllm-classes.md")
TEXT = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
FUNCTION, TEST, CLASSES, VLLM = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILES = {BackendKind.FUNCTION: FUNCTION, BackendKind.CLASSES: CLASSES, BackendKind.VLLM: VLLM}
CONSOLE = [
    (command, output)
    for body in re.findall(r"^```console\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE)
]
NEW, FUNCTION_RUN, FAILING_RUN, FIRST_ONLY, CLASSES_RUN, VLLM_RUN = CONSOLE
((WRONG, RIGHT),) = re.findall(r"`(: seq_len.*?)` for `(.*?)`", TEXT)


@pytest.mark.parametrize("kind", list(BackendKind))
def test_a_file_of_the_page_is_the_one_that_is_written(kind):
    written = template_files(kind, "mine")
    assert FILES[kind] == written["mine.py"]
    assert FILES[kind] == (ROOT / "harness" / "cli" / "templates" / TEMPLATES[kind]).read_text(encoding="utf-8")
    assert written["test_mine.py"].replace("vllm:", "") == TEST


def test_every_written_file_is_documented(shell, tmp_path):
    assert shell(NEW[0], tmp_path)[0] == 0
    (written,) = re.findall(r"^writes `(.*?)`.*`(.*?)`", TEXT, re.MULTILINE)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)


@pytest.mark.parametrize(
    ("file", "run"),
    [(FUNCTION, FUNCTION_RUN), pytest.param(CLASSES, CLASSES_RUN, marks=pytest.mark.slow)],
    ids=["function", "classes"],
)
def test_a_file_is_right_and_prints_what_the_page_shows(shell, assert_printed, tmp_path, file, run):
    (tmp_path / "mine.py").write_text(file, encoding="utf-8")
    command, output = run
    code, printed = shell(command, tmp_path)
    assert code == 0, printed
    assert_printed(output, printed)


def test_the_test_collects_each_check_of_each_case(shell, tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION, encoding="utf-8")
    (tmp_path / "test_mine.py").write_text(TEST, encoding="utf-8")
    code, printed = shell("python -m pytest -v test_mine.py -k decode.float32", tmp_path)
    assert code == 0, printed
    assert "test_mine.py::test_mine[decode.float32-numerics] PASSED" in printed
    assert "8 passed, 2 skipped" in printed


@pytest.mark.slow
def test_the_failure_is_reported_as_the_page_shows_and_can_be_repeated(shell, assert_printed, tmp_path):
    assert FUNCTION.count(RIGHT) == 1
    (tmp_path / "mine.py").write_text(FUNCTION.replace(RIGHT, WRONG), encoding="utf-8")
    command, output = FAILING_RUN
    code, printed = shell(command, tmp_path)
    assert code == 1, printed
    assert_printed(output, printed)
    code, printed = shell(re.search(r"repeat: (.*)", output)[1], tmp_path)
    assert code == 1, printed
    assert "the last, partly filled page is missing" in printed
    code, printed = shell(f"{FIRST_ONLY[0]} --dump wrong", tmp_path)
    assert code == 1, printed
    assert printed.count("repeat: ") == 1
    assert [path.suffix for path in (tmp_path / "wrong").iterdir()] == [".pt"]


def test_every_option_that_is_named_is_there():
    command = typer.main.get_command(app)
    options = {option for name in ("run", "list") for each in command.commands[name].params for option in each.opts} | {
        option for each in command.commands["new"].commands["backend"].params for option in each.opts
    }
    named = {word for code in re.findall(r"`(--[^`]*)`", TEXT) for word in shlex.split(code) if word.startswith("--")}
    assert named
    assert named <= options


@pytest.mark.parametrize(("file", "section"), re.findall(r"\]\(([\w.-]+)#?([\w-]*)\)", TEXT))
def test_a_link_leads_somewhere(file, section):
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    headings = [re.sub(r"[^\w -]", "", line).lower() for line in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    assert not section or section in [heading.replace(" ", "-") for heading in headings]
