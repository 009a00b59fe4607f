"""README.md is true: its files work, its commands run, and they print what it shows.

Excepted are the scripts, which take minutes, and the installation. Figures with a decimal point and the machine's own
words are not compared; counts are.
"""

import json
import os
import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
(KERNEL,) = (body for kind, body in BLOCKS if kind == "python")
((REMOVED, ADDED),) = (re.findall(r"^[-+](.*)$", body, re.MULTILINE) for kind, body in BLOCKS if kind == "diff")
(CONSOLE,) = (body for kind, body in BLOCKS if kind == "console")
WRONG, RIGHT = (body for kind, body in BLOCKS if kind == "text")


@pytest.fixture
def run(tmp_path, shell):
    """``run(block, kernel)``: run the command of a block beside ``mine.py``; its exit code, output, and what is shown."""

    def command(block, kernel=KERNEL):
        (tmp_path / "mine.py").write_text(kernel, encoding="utf-8")
        line, _, shown = block.removeprefix("$ ").partition("\n")
        return (*shell(line, tmp_path), shown)

    return command


def test_the_first_command_prints_what_is_shown(run, assert_printed):
    code, printed, shown = run(CONSOLE)
    assert code == 0, printed
    assert_printed(shown, printed)


def test_the_wrong_kernel_is_caught_as_shown(run, assert_printed):
    code, printed, shown = run(WRONG)
    assert code == 1, printed
    assert_printed(shown, printed)


def test_the_repeat_line_works_when_pasted(run):
    code, printed, _ = run(re.search(r"repeat: (.*)", WRONG)[1])
    assert code == 1, printed


def test_the_corrected_kernel_passes(run, assert_printed):
    assert KERNEL.count(REMOVED) == 1
    code, printed, shown = run(RIGHT, KERNEL.replace(REMOVED, ADDED))
    assert code == 0, printed
    assert_printed(shown, printed)


def test_the_table_of_checks_has_every_check(run):
    code, printed, _ = run("attncheck list checks")
    assert code == 0, printed
    assert re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) == re.findall(r"^(\w+)", printed, re.MULTILINE)


def test_the_detection_figures_are_those_of_the_kept_result(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    detection = import_module("detection")
    measured = json.loads((ROOT / "docs" / "detection.json").read_text(encoding="utf-8"))
    assert detection.table(measured) in TEXT
    assert measured["mutants"] == [mutant.name for mutant in detection.comparable_mutants()]


@pytest.mark.parametrize("script", re.findall(r"^    (scripts/\w+)", TEXT, re.MULTILINE))
def test_a_script_is_there_to_be_run(script):
    assert os.access(ROOT / script, os.X_OK)


def test_the_installation_names_extras_that_are_there():
    (extras,) = re.findall(r"^pip install '\.\[(.*)\]'$", TEXT, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_it_is_short():
    assert 110 <= len(TEXT.splitlines()) <= 130


def test_every_link_leads_somewhere():
    links = re.findall(r"\[[^]]*\]\(([^)]+)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_local_path_it_names_is_there():
    named = set(
        re.findall(r"`((?:backends|benchmarks|cases|harness|reference|reports|tests|scripts|docs)/[\w./-]*)`", TEXT)
    )
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]
