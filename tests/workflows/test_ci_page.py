"""docs/ci.md is true: its commands work, on few cases, its expected fault is one, and it names what the workflows have.

`gh workflow run` starts a workflow on GitHub: of those two lines only the workflow and its input are looked at.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("workflows")

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
GPU = "attncheck-gpu.yml"
COMMANDS = re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE)
((NAME, KNOWN),) = re.findall(r"^```yaml\n# (\S+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
BRIEF = {"attncheck run": " --case 'long-*'", "pytest": " --attncheck-case 'long-*'"}
"""What is added to a command, so that it asks a few cases."""
FAULT = "    if metadata.max_query_len > 128:\n        return\n"


@pytest.fixture(scope="module")
def folder(gpu, machine, tmp_path_factory):
    """A checkout with a backend of one's own, and the run files of the workflow."""
    made = tmp_path_factory.mktemp("page")
    subprocess.run(["attncheck", "new", "backend", "my_backend"], cwd=made, env=environment(machine), check=True)
    (made / "test_my_backend.py").unlink()  # which pytest would collect
    for place in (made / "results", Path(machine["STUBS"]) / "artifact"):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(gpu.folder / "results", place, ignore=shutil.ignore_patterns("*.html"))
    shutil.copytree(made / "results", made / "base")
    (made / NAME).write_text(KNOWN, encoding="utf-8")
    return made


def environment(machine):
    return {**os.environ, **machine, "PYTEST_ADDOPTS": "-p no:cacheprovider"}


def run(command, folder, machine):
    command += next((words for beginning, words in BRIEF.items() if command.startswith(beginning)), "")
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment(machine), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--expect" not in command])
def test_a_command_works(folder, machine, command):
    if "--dir base" in command:
        shutil.rmtree(folder / "base")
    code, printed = run(command, folder, machine)
    assert code == 0, printed


def test_the_known_fault_is_expected_and_its_end_is_noticed(folder, machine):
    (expect,) = (command for command in COMMANDS if "--expect" in command)
    path = folder / "my_backend.py"
    right = path.read_text(encoding="utf-8")
    code, printed = run(expect, folder, machine)
    assert code == 1, printed
    assert "xpassed" in printed
    first = re.search(r"^def attend\(.*\n(    \"\"\".*\n)?", right, re.MULTILINE)[0]
    path.write_text(right.replace(first, first + FAULT), encoding="utf-8")
    code, printed = run(expect, folder, machine)
    assert code == 0, printed
    assert "xfailed" in printed


def test_what_is_named_of_the_workflows_is_there(workflow):
    read = workflow(GPU)
    for file, given in re.findall(r"^gh workflow run (\S+)(.*)$", TEXT, re.MULTILINE):
        assert file == GPU
        for name in re.findall(r"-f (\w+)=true", given):
            assert read["on"]["workflow_dispatch"]["inputs"][name]["type"] == "boolean"
    texts = [
        (ROOT / ".github" / "workflows" / file).read_text(encoding="utf-8")
        for file in re.findall(r"`(attncheck-\w+\.yml)`", TEXT)
    ]
    for name in re.findall(r"`((?:ATTNCHECK|TORCH|PIP)_?[A-Z_]*|EXAMINE|COMPARE)`", TEXT):
        assert any(name in text for text in texts), name
    assert re.search(r"from (\d+) % on it fails the job, of `build` from (\d+) %", TEXT).groups() == tuple(
        re.findall(r"(\d+)%", read["env"]["COMPARE"])
    )
    (rounds,) = re.findall(r"--rounds \d+", read["env"]["TIME"])
    assert f"`{rounds}`" in TEXT
