"""docs/first-gpu-run.md: its commands are understood, and what it quotes is what attncheck prints."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

from attncheck.backends.registry import builtin_names
from attncheck.cases.loader import load_suite, suite_names
from attncheck.harness.cli.app import app
from attncheck.harness.problem.memory_estimate import needed_bytes
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers import warming

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "first-gpu-run.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ (.*)$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_parsed_and_names_existing_files_and_cases(command, monkeypatch):
    program, *words = shlex.split(command)
    if program == "scripts/gpu-evidence":
        monkeypatch.syspath_prepend(str(ROOT / "scripts"))
        assert import_module("gpu_evidence").options().parse_args(words).within == 3600  # an hour, as the page states
        return
    assert program == "attncheck"
    name, *options = words
    given = typer.main.get_command(app).commands[name].make_context(name, options).params
    assert set(given.get("backend") or ()) <= set(builtin_names())
    assert given.get("suite") is None or select_cases(given["suite"], given["case"] or (), given["check"] or ()).cases


def test_what_it_quotes_is_in_the_product():
    source = " ".join(path.read_text(encoding="utf-8") for path in (ROOT / "src" / "attncheck").glob("*/**/*.py"))
    quoted = (
        "is built without CUDA",
        "finds no GPU",
        "the case needs about",
        "there is neither nvcc",
        "ATTNCHECK_TRACEBACK",
    )
    assert [words for words in quoted if words not in TEXT or words not in source] == []


def test_every_candidate_has_its_share_of_the_minutes():
    table = TEXT.partition("## What it costs")[2].partition("\n## ")[0]
    assert set(builtin_names()) <= set(re.findall(r"`(\w+)`", table))


def test_the_figures_are_those_of_the_code():
    (most,) = re.findall(r"No case of the suites needs more than ([\d.]+) GiB", TEXT)
    (pool,) = re.findall(r"those of `limits` up to ([\d.]+) GiB", TEXT)
    cases = [case for name in suite_names() for case in load_suite(name)]
    for figure, reserves in ((float(most), True), (float(pool), False)):
        largest = max(needed_bytes(case, reserves=reserves) for case in cases) / 2**30
        assert figure - 0.1 < largest <= figure
    far = {case.id: needed_bytes(case) / 2**30 for case in load_suite("smoke")}
    assert round(far.pop("far-elements")) == 8
    assert max(far.values()) < 1
    assert "up to seven more processes" in " ".join(TEXT.split())
    assert warming._MOST == 8
