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
from attncheck.reports.run_file.store import read_run

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


EVIDENCE = ROOT / "docs" / "evidence" / "nvidia-h200-2026-11-26"
MEASURED = TEXT.partition("## What an H200 showed")[2].partition("\n## ")[0]


def runs(folder):
    """The kept runs of a folder by name."""
    return {path.name.removesuffix(".jsonl.xz"): read_run(path) for path in sorted((EVIDENCE / folder).glob("*.xz"))}


def levels(run):
    graphs = {(record.backend, getattr(record, "graph", None)) for record in run.records}
    return {(backend, str(graph.measured)) for backend, graph in graphs if graph is not None}


def test_the_results_are_those_of_the_kept_runs():
    table = {}
    for names, cases, passed, found in re.findall(r"^\| (`.*`) \| (.*) \| (\d+).* \| (.*) \|$", MEASURED, re.MULTILINE):
        each = re.findall(r"`(\w+)`", names)
        for name, level in zip(each, (found.split(", ") * len(each))[: len(each)], strict=True):
            table[name] = (int(re.match(r"\d+", cases)[0]), not cases.endswith("stopped"), int(passed), level)
    kept = {name: run for name, run in runs("smoke").items() if not name.endswith("-emulated")}
    assert table == {
        name: (
            len({record.case_id for record in run.records}),
            run.complete,
            sum(record.outcome == "passed" for record in run.records),
            "".join(level for _, level in levels(run)),
        )
        for name, run in kept.items()
    }
    assert {record.outcome for run in kept.values() for record in run.records} == {"passed", "unsupported"}
    (most,) = re.findall(r"largest error is (0\.\d+) of the allowed", MEASURED)
    shares = [
        record.figures.get("budget_share", 0)
        for run in kept.values()
        for record in run.records
        if record.outcome == "passed"
    ]
    assert round(max(shares), 2) == float(most)


def test_real_and_emulated_graphs_have_the_same_levels():
    kept = runs("miniatures")
    pairs = {name: (run, kept[f"{name}-emulated"]) for name, run in kept.items() if not name.endswith("-emulated")}
    real = {level for run, _ in pairs.values() for level in levels(run)}
    assert real == {level for _, run in pairs.values() for level in levels(run)}
    assert f"{len(real)} small backends of the tests" in TEXT


def test_a_harmed_gpu_costs_the_checks_of_its_case():
    for name, run in runs("faults").items():
        harmed = {record.outcome for record in run.records if record.backend != "torch_sdpa"}
        assert harmed - {"passed"}
        others = {record.outcome for record in run.records if record.backend == "torch_sdpa"}
        assert others == {"passed"} or name == "full_memory"  # see the README of the folder


def test_the_times_are_those_of_the_kept_runs():
    found = {}
    for run in runs("timing").values():
        for record in run.records:
            timing = record.timing
            (forward,) = (each for each in timing.latencies if each.part == "forward")
            found.setdefault((record.backend, record.case_id), []).append(forward.median_ns)
            assert round(timing.overhead.empty_ns / 1000, 1) in (1.2, 1.3)
            assert timing.overhead.replay_ns < 50
            assert round(timing.ceilings.matmul_flops_per_s / 1e12) in (798, 799, 800)
    decodes, prompts = found["triton_unified", "large_decode"], found["triton_unified", "large_prefill"]
    assert [round(min(times) / 1000) for times in (decodes, prompts)] == [117, 120]
    assert round(max(max(each) / min(each) for each in (decodes, prompts)) - 1, 3) == 0.004
