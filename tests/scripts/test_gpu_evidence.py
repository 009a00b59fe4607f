"""scripts/gpu-evidence: refuses where there is no GPU, and can be tried without one; its page tells what happened."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncheck.reports.run_file.graph_levels import GraphLevels, GraphProbe
from attncheck.reports.run_file.header import BackendInfo, Environment, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Failed, Passed
from attncheck.reports.run_file.store import RunWriter, read_run

ROOT = Path(__file__).resolve().parent.parent.parent
ENVIRONMENT = Environment(
    attncheck="0.1.0",
    python="3.12.3",
    torch="2.11.0+cu130",
    numpy="2.3.0",
    platform="Linux x86_64",
    cpu="a cpu",
    cores=16,
    device="cuda",
    device_name="a GPU",
    capability="9.0",
    driver="580.1",
)
SINGLE = "UNIFORM_SINGLE_TOKEN_DECODE"


def call(*words):
    """The script as a person starts it, on a machine without a GPU; its exit code and output."""
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu-evidence"), *map(str, words)], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_without_a_gpu_it_refuses_in_words(tmp_path):
    code, printed = call(tmp_path / "out")
    assert code == 2
    assert "gpu-evidence needs a GPU: device 'cuda': torch" in printed
    assert "--emulated-only" in printed
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_refused(tmp_path):
    (tmp_path / "mine").write_text("kept")
    code, printed = call("--emulated-only", tmp_path)
    assert code == 2
    assert "is no empty folder" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_it_compares_emulated_with_emulated_and_leaves_run_files_and_a_page(tmp_path):
    folder = tmp_path / "evidence" / "here"
    code, printed = call("--emulated-only", folder, "--part", "miniatures", "--backend", "*:ClaimsSingleDecode")
    assert code == 0, printed
    assert str(folder / "README.md") in printed
    names = {"README.md", "environment.txt", "log.txt", "miniatures-again.jsonl", "miniatures-emulated.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    (record,) = read_run(folder / "miniatures-again.jsonl").records
    assert (record.outcome, record.graph.measured) == ("failed", "NEVER")
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "No GPU was used" in page
    assert "1 case of all backends: 1 agree, 0 differ, 0 cannot be compared." in page
    assert "| ClaimsSingleDecode | graphs/plain |" in page
    assert "attncheck doctor" in (folder / "environment.txt").read_text(encoding="utf-8")
    assert "$ attncheck run --backend tests/miniatures/graphs.py:ClaimsSingleDecode" in (folder / "log.txt").read_text()


def test_what_contributors_are_told_to_type_is_understood(script):
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    commands = re.findall(r"`scripts/gpu-evidence([^`]*)`", text)
    asked = [script("gpu_evidence")._arguments(command.split()) for command in commands]
    assert [found.emulated_only for found in asked] == [False, True]


def test_all_parts_leave_at_most_eight_files_and_every_check_is_asked(script, tmp_path):
    gpu_evidence = script("gpu_evidence")
    parts = gpu_evidence._plan(gpu_evidence._arguments([]), "cuda", tmp_path)
    assert [part.file for part in parts] == [
        "candidates-cuda.jsonl",
        "miniatures-cuda.jsonl",
        "candidates-emulated.jsonl",
        "miniatures-emulated.jsonl",
        "first-look-cuda.jsonl",
    ]
    candidates, miniatures, *_, rest = parts
    words = ("run", "--backend", "reference", "--suite", "smoke", "--check", "cudagraph", "--device", "cuda")
    assert candidates.jobs[0].words[4:-2] == words
    assert miniatures.jobs[0].words[8] == "tests/miniatures/graphs.yaml"
    assert {"reference", "torch_sdpa"} <= {job.ref for job in rest.jobs}
    assert {"numerics", "claims"} <= set(rest.jobs[0].words)
    assert "cudagraph" not in rest.jobs[0].words
    refs = {job.ref for job in miniatures.jobs}
    assert "tests/miniatures/graphs.py:RowByRow" in refs
    assert not [ref for ref in refs if ref.endswith(":Miniature")]
    assert len({job.file for part in parts for job in part.jobs}) == sum(len(part.jobs) for part in parts)


def test_a_file_of_miniatures_that_cannot_be_imported_is_asked_for_all_the_same(script, monkeypatch, tmp_path):
    gpu_evidence = script("gpu_evidence")
    monkeypatch.setattr(gpu_evidence, "ROOT", tmp_path)
    path = tmp_path / "tests" / "miniatures" / "graphs_broken.py"
    path.parent.mkdir(parents=True)
    path.write_text("import no_such_library")
    assert gpu_evidence._miniatures() == ["tests/miniatures/graphs_broken.py"]


def test_what_a_cpu_would_interpret_or_cannot_run_is_left_out_there_and_asked_on_the_gpu(script, tmp_path):
    gpu_evidence = script("gpu_evidence")
    parts = gpu_evidence._plan(gpu_evidence._arguments([]), "cuda", tmp_path)
    real, emulated, look = (
        next(part for part in parts if (part.kind, part.side) == which)
        for which in (("candidates", "cuda"), ("candidates", "emulated"), ("first-look", "cuda"))
    )
    gone = {"triton_unified", "triton_mla", "xformers", "torch_varlen", "flash_attn", "flashinfer"}
    assert set(emulated.left_out) == gone
    assert not gone & {job.ref for job in emulated.jobs}
    assert {"reference", "torch_sdpa", "flex_attention", "torch_mla"} <= {job.ref for job in emulated.jobs}
    assert "interpreted" in emulated.left_out["triton_unified"]
    assert "the backend runs on cuda" in emulated.left_out["flash_attn"]
    for part in (real, look):
        assert gone <= {job.ref for job in part.jobs}
        assert not part.left_out
    text = script("evidence_page").page(parts, command="x", seconds=1.0)
    assert "- candidates, emulated: triton_unified, xformers, triton_mla: kernels are interpreted there" in text


def test_a_process_is_stopped_when_its_time_is_up_and_none_begins_after_the_deadline(script, tmp_path):
    jobs = script("evidence_jobs")
    job = jobs.Job("sleeper", ("python", "-c", "import time; time.sleep(60)"), tmp_path / "a.jsonl")
    began = time.monotonic()
    ended = jobs.run_job(job, began + 60, 0.2)
    assert ended.status == "stopped after 0 s"
    assert 0.2 <= ended.seconds < 10
    assert jobs.run_job(job, began, 60).status == "not begun: out of time"
    missing = jobs.Job("x", ("no-such-program",), tmp_path / "b.jsonl")
    assert jobs.run_job(missing, began + 60, 60).status.startswith("not begun: ")


@pytest.fixture
def part(script, tmp_path):
    """``part("candidates", "cuda", record, ...)``: a part whose one process left these records."""
    made = script("evidence_jobs")

    def part(kind, side, *records, status="exit code 0", output="", problems=()):
        header = RunHeader(
            started="2026-01-01T00:00:00+00:00",
            environment=ENVIRONMENT,
            suites=(SuiteInfo(name="smoke", ref="smoke", cases=1),),
            checks=("numerics", "cudagraph"),
            device="cuda",
            seed=0,
            backends=(BackendInfo(name="mine", ref="mine"),),
        )
        path = tmp_path / f"{kind}-{side}.jsonl"
        with RunWriter(path, header) as writer:
            for record in records:
                writer.add(record)
        jobs = (made.Job("mine", (), path, status=status, output=output),)
        return made.Part(kind, side, jobs, read_run(path) if records else None, problems)

    return part


def who(check):
    own = dict.fromkeys(("backend", "backend_ref", "backend_version"), "mine")
    asked = {"suite": "smoke", "case_id": "edge", "case_hash": "0", "check": check, "seed": 0}
    return own | asked | {"environment": ENVIRONMENT.digest, "attncheck_version": "0.1.0"}


def levels(measured, outcome, recorder):
    probe = GraphProbe(name="decode", level=SINGLE, outcome=outcome, reason="a.py:3 in forward")
    return GraphLevels(declared=SINGLE, measured=measured, recorder=recorder, probes=(probe,))


def test_the_page_says_what_differs_what_went_wrong_and_what_fell_short(script, part):
    real = Failed(**who("cudagraph"), summary="broke", graph=levels("NEVER", "failed", "cuda"))
    emulated = Passed(**who("cudagraph"), graph=levels(SINGLE, "passed", "emulated"))
    text = script("evidence_page").page(
        [
            part("candidates", "cuda", real, status="exit code 1"),
            part("candidates", "emulated", emulated),
            part(
                "miniatures", "cuda", status="stopped after 150 s", output="one\nlast words\n", problems=("x: empty",)
            ),
            part("first-look", "cuda", Failed(**who("numerics"), summary="3 of 4 rows")),
        ],
        command="scripts/gpu-evidence",
        seconds=12.3,
    )
    assert text.startswith("# CUDA graphs on a GPU\n")
    assert "No GPU was used" not in text
    assert "- cuda: a GPU, compute capability 9.0, driver 580.1" in text
    assert "torch 2.11.0+cu130, Python 3.12.3" in text
    assert "1 case of all backends: 0 agree, 1 differ" in text
    assert f"| mine | smoke/edge | {SINGLE} | NEVER<br>decode | {SINGLE} | **no** |" in text
    assert "| candidates, cuda | 1 | 1 x exit code 1 | failed: 1 backend, 1 case: 1 failed |" in text
    assert "- miniatures, cuda: mine: stopped after 150 s: last words" in text
    assert "- miniatures, cuda: x: empty" in text
    assert "## Miniatures\n\nOnly one side ran" in text
    assert "## The other checks on cuda" in text
    assert "| mine | 0/1 | - |" in text
    assert "- mine, smoke/edge, numerics, failed: 3 of 4 rows" in text


def test_what_ended_as_runs_do_is_no_problem(script, part):
    passed = Passed(**who("cudagraph"), graph=levels(SINGLE, "passed", "cuda"))
    parts = [part("candidates", side, passed, status=f"exit code {n}") for n, side in enumerate(("cuda", "emulated"))]
    text = script("evidence_page").page(parts, command="x", seconds=1.0)
    assert "What did not end" not in text
    assert "Miniatures" not in text
    assert "1 agree" in text
