"""scripts/gpu-evidence: its commands are understood, and a trial without a GPU leaves what each of them wrote."""

import re
import shlex
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest
import typer.main

from attncheck.backends.registry import builtin_names
from attncheck.cases.loader import load_suite, suite_names
from attncheck.harness.cli.app import app
from attncheck.reports.run_file.store import read_run

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def script(monkeypatch):
    """The module of the folder scripts/, which is no package."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return import_module("gpu_evidence")


@pytest.fixture
def call(shell):
    """``call(*words)``: the script as a person starts it, on a machine without a GPU; its exit code and output."""
    return lambda *words: shell(
        shlex.join([str(ROOT / "scripts" / "gpu-evidence"), *map(str, words)]), ROOT, PYTHON="python"
    )


def test_without_a_gpu_and_in_a_folder_that_holds_something_it_refuses_in_words(call, script, tmp_path):
    code, printed = call(tmp_path / "out")
    assert code == 2
    assert "finds no GPU. --device cpu tries" in printed
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").write_text("kept")
    code, printed = call("--device", "cpu", tmp_path)
    assert code == 2
    assert "is no empty folder" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    documented = [
        script.options().parse_args(words.split()) for words in re.findall(r"`scripts/gpu-evidence([^`]*)`", text)
    ]
    assert {each.device for each in documented} == {"cuda", "cpu"}


@pytest.mark.slow
def test_a_trial_compares_emulated_with_emulated_and_leaves_run_files_and_reports(call, tmp_path):
    folder = tmp_path / "evidence" / "here"
    code, printed = call("--device", "cpu", "--part", "machine", "--part", "miniatures", folder)
    assert code == 0, printed
    assert str(folder / "README.md") in printed
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    endings = (".txt", ".jsonl.xz", ".md", ".html", "-emulated.jsonl.xz", "-emulated.md")
    assert left == {"README.md", "machine.txt", *(f"miniatures/graphs{end}" for end in endings)}
    for run in ("graphs", "graphs-emulated"):
        (record,) = read_run(folder / "miniatures" / f"{run}.jsonl.xz").records
        assert (record.outcome, record.graph.measured) == ("failed", "NEVER")
    assert "no regression" in (folder / "miniatures" / "graphs-emulated.md").read_text(encoding="utf-8")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "A trial without a GPU" in page
    ended = re.findall(r"^\| \[\S+\]\((\S+)\) \| (.*), \d+ s \| `(.*)` \|$", page, re.MULTILINE)
    codes = [how for file, how, _ in ended if file == "miniatures/graphs.txt"]
    assert codes == ["exit code 1", "exit code 1", *["exit code 0"] * 3]
    assert ("machine.txt", "exit code 0", "attncheck doctor") in ended
    log = (folder / "miniatures" / "graphs.txt").read_text(encoding="utf-8")
    assert log.startswith("$ attncheck run --backend=backends/mutants/graphs.py:ClaimsSingleDecode --suite=")
    assert "failed: 1 backend, 1 case: 1 failed" in log


def options_of(tmp_path, **options):
    """The defaults of the command line, on a machine with a GPU."""
    given = {"device": "cuda", "backend": "*", "rounds": 5, "limit": 60.0, "deadline": float("inf")}
    return Namespace(folder=tmp_path, **{**given, **options})


def test_a_command_that_takes_too_long_or_does_not_exist_stops_no_other(script, tmp_path):
    sleeps = [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(60)"]
    works = [sys.executable, "-c", "print('done')"]
    script._run(("x", [sleeps, ["no-such-program"], works]), options_of(tmp_path, limit=2.0))
    script._run(("y", [works]), options_of(tmp_path, deadline=0.0))
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert [line.split(" | ")[1].rpartition(",")[0] for line in page.splitlines()] == [
        "stopped after 2 s",
        "not begun: No such file or directory",
        "exit code 0",
        "not begun: out of time",
    ]
    assert "asleep" in (tmp_path / "x.txt").read_text(encoding="utf-8")


@pytest.fixture
def runs(script, tmp_path):
    """By step, the parameters of its ``attncheck run`` on a GPU, as the command line reads them."""
    commands = typer.main.get_command(app).commands
    found = {}
    for name, chain in (step for part in script.PARTS for step in script._chains(part, options_of(tmp_path))):
        for words in (words for words in chain if "attncheck" in words):
            command, *rest = words[words.index("attncheck") + 1 :]
            if command in ("report", "compare"):  # the files they read are not there yet
                rest = [word if word.startswith("--") else __file__ for word in rest]
            params = commands[command].make_context(command, rest).params
            if command in ("run", "time"):
                found.setdefault(name, params)
    return found


def test_all_candidates_suites_and_graph_miniatures_run_on_the_gpu(script, runs):
    assert {name for name in runs if name.startswith("smoke/")} == {f"smoke/{ref}" for ref in builtin_names()}
    for ref in script.KERNELS:
        params = runs[f"suites/{ref}"]
        assert set(params["suites"]) == set(suite_names())
        assert list(params["settings"] or ()) == (["cache.block_size=256"] if ref == "flash_attn" else [])
    assert {params["device"] for params in runs.values()} == {"cuda"}
    assert all(list(runs[f"timing/pages-of-{page}"]["backends"]) == list(refs) for page, refs in script.TIMED.items())
    known = {case.id for case in load_suite("interpreted")}
    checked = [set(params["cases"]) - known for name, params in runs.items() if name.startswith("memcheck/")]
    assert checked == [set()] * 3
    for _, chain in script._chains("memcheck", options_of(Path("x"))):
        assert any(word.endswith("compute-sanitizer") for word in chain[0])
    refs = {ref for name, params in runs.items() if name.startswith("miniatures/") for ref in params["backends"]}
    assert "backends/mutants/graphs.py:RowByRow" in refs
    assert not [ref for ref in refs if ref.endswith((":Base", ":Miniature", "Backend"))]
    folders = ROOT / "backends" / "mutants", ROOT / "tests" / "miniatures"
    files = {path.stem for folder in folders for path in folder.glob("graphs*.py")}
    assert {f"miniatures/{file}" for file in files} <= runs.keys()


def test_classes_of_vllm_and_the_audit_end_within_the_limit_of_a_command(script, runs):
    """The classes run at once, and what their limit leaves is for their start and their reports."""
    classes = {name: params for name, params in runs.items() if name.startswith("vllm/")}
    assert len(classes) == 8
    assert {params["backend_timeout"] for params in classes.values()} == {24.0}
    assert runs["audit"]["deadline"] == "30"
    assert runs["audit"]["reports"] == [f"audit={runs['audit']['output'].with_suffix('.md')}"]
    assert {name for params in classes.values() for name in params["suites"][0].split(",")} <= set(suite_names())
