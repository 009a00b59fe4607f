"""README.md is true: every file in it works, every command runs, and what it prints is what it is said to print.

Excepted, since a test cannot run them: the scripts (they run the tests, or take minutes) and the installations. Figures
with a decimal point and the machine's own words are not compared; counts are.
"""

import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from attncheck.harness.run.selection import DEFAULT_INTERPRETED
from attncheck.reports.run_file.store import read_run
from attncheck.reports.terminal import run as terminal

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
FILES = {
    match[1]: body for kind, body in BLOCKS if kind in ("python", "yaml") and (match := re.match(r"# (\S+)\n", body))
}
PROGRAMS = [body for kind, body in BLOCKS if kind == "python" and body not in FILES.values()]
CONSOLE = [
    (command, output)
    for kind, body in BLOCKS
    if kind == "console"
    for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE)
]
TIMED = [command for command, _ in CONSOLE if "times.jsonl" in command]
WRONG, DEMO = (body for kind, body in BLOCKS if kind == "text")


@pytest.fixture
def run(tmp_path, shell):
    """Run a shell command in a folder that holds the README's files; its exit code and output."""
    for name, body in FILES.items():
        (tmp_path / name).write_text(body, encoding="utf-8")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    return lambda command: shell(command, tmp_path)


APART = [(command, output) for command, output in CONSOLE if command not in TIMED]


@pytest.mark.parametrize(("command", "output"), APART, ids=[command for command, _ in APART])
def test_a_command_works_and_prints_what_is_said(run, assert_printed, command, output):
    code, printed = run(command)
    assert code == 0, printed
    assert_printed(output, printed)


def test_times_are_taken_compared_and_shown(run, tmp_path):
    """In one round in place of ten, of which nothing can be told."""
    take, *others = TIMED
    assert "--check timing" in take
    for command in (f"{take} --rounds 1 --time-limit 0.01", *others):
        code, printed = run(command)
        assert code == 0, printed
    assert {record.backend for record in read_run(tmp_path / "times.jsonl").records} == {"torch_sdpa", "Mine"}
    assert (tmp_path / "times.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_works(run, program, tmp_path):
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    code, printed = run("python program.py")
    assert code == 0, printed


def test_the_demo_prints_what_is_said(assert_printed):
    """As the kept run of all cases shows it: to make the run takes a minute, and CI runs all cases."""
    found = read_run(ROOT / "docs" / "evidence" / "cpu-2026-11-23" / "candidates.jsonl.xz")
    assert found.header.command[:2] == ("attncheck", "run")
    records = tuple(
        each
        for each in found.records
        if (each.suite == "smoke" or each.case_id in DEFAULT_INTERPRETED)
        and (not each.backend.endswith("_mla") or each.case_id.startswith("latent"))
    )
    counts = {"smoke": 78, "interpreted": len(DEFAULT_INTERPRETED)}
    suites = tuple(suite.model_copy(update={"cases": counts[suite.name]}) for suite in found.header.suites)
    header = found.header.model_copy(update={"suites": suites})
    assert_printed(DEMO, terminal.render_run(replace(found, header=header, records=records)))


def test_the_wrong_example_is_caught_as_is_said(run, assert_printed, tmp_path):
    right = FILES["mine.py"]
    assert ".tril(context)" in right
    (tmp_path / "mine.py").write_text(right.replace(".tril(context)", ".tril()"), encoding="utf-8")
    command, _, output = WRONG.removeprefix("$ ").partition("\n")
    code, printed = run(command)
    assert code == 1, printed
    assert_printed(output, printed)


def test_the_repeat_line_of_the_example_works_when_pasted(run, tmp_path):
    (tmp_path / "mine.py").write_text(FILES["mine.py"].replace(".tril(context)", ".tril()"), encoding="utf-8")
    command = re.search(r"repeat: (.*)", WRONG)[1]
    code, printed = run(command)
    assert code == 1, printed


@pytest.mark.parametrize("script", re.findall(r"^    (scripts/\w+)", TEXT, re.MULTILINE))
def test_a_script_is_there_to_be_run(script):
    assert os.access(ROOT / script, os.X_OK)


def test_the_light_dependencies_are_all_but_torch_and_numpy():
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    light = {re.match(r"[\w-]+", requirement)[0] for requirement in stated} - {"torch", "numpy"}
    assert set(re.search(r"^pip install (pydantic.*)$", TEXT, re.MULTILINE)[1].split()) == light


def test_the_installation_names_extras_that_are_there():
    (extras,) = re.findall(r"^pip install '\.\[(.*)\]'$", TEXT, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_the_step_for_ci_gives_the_action_inputs_that_it_has():
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    ((step,),) = (yaml.safe_load(body) for kind, body in BLOCKS if kind == "yaml" and "uses:" in body)
    assert step["with"].keys() <= inputs.keys()
    assert step["with"]["run"].split()[1] in TEXT.partition("## In CI")[0]


def test_every_link_leads_somewhere():
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    links = re.findall(r"\[[^]]*\]\(([^)]+)\)", TEXT)
    assert links
    assert [link for link in links if not link.startswith("#") and not (ROOT / link).exists()] == []
    assert {link[1:] for link in links if link.startswith("#")} <= anchors


def test_every_local_path_it_names_is_there():
    named = set(re.findall(r"`((?:backends|cases|harness|reference|reports|tests|scripts|docs)/[\w./-]*)`", TEXT))
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]
