"""scripts/gpu-kernels: can be tried without a GPU; asks everything once; times honestly; its page tells all of it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from attncheck.cases.loader import load_suite, suite_names
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.environment import collect_environment
from attncheck.reports.run_file.header import BackendInfo, RunHeader, SuiteInfo
from attncheck.reports.run_file.records import Passed
from attncheck.reports.run_file.store import RunWriter, read_run

ROOT = Path(__file__).resolve().parent.parent.parent


def call(*words):
    """The script as a person starts it, on a machine without a GPU; its exit code and output."""
    env = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu-kernels"), *map(str, words)], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_it_can_be_tried_without_a_gpu(tmp_path):
    words = ("--rounds", 1, "--backend", "triton_unified", "--suite", "interpreted", "--case", "scale")
    code, printed = call("--emulated-only", tmp_path / "out", *words)
    assert code == 0, printed
    names = {"README.md", "environment.txt", "log.txt", "speed.jsonl", "suites-cpu.jsonl.xz"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    records = read_run(tmp_path / "out" / "suites-cpu.jsonl.xz").records
    assert {(record.case_id, record.outcome) for record in records} == {("scale", "passed")}
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "No time below means anything" in page
    assert re.search(r"\| triton_unified \| 256 \| [\d.]+ \| [\d.]+ - [\d.]+ \| 1 \|", page)
    assert "No memory checker: there is no GPU." in page
    assert "Cases without a record" not in page


def test_without_a_gpu_it_refuses_in_words(tmp_path):
    code, printed = call(tmp_path / "out")
    assert code == 2
    assert "gpu-kernels needs a GPU: device 'cuda': torch" in printed
    assert not (tmp_path / "out").exists()


def test_what_contributors_are_told_to_type_is_understood(script):
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    commands = re.findall(r"`scripts/gpu-kernels([^`]*)`", text)
    asked = [script("gpu_kernels")._arguments(command.split()) for command in commands]
    assert {found.emulated_only for found in asked} == {False, True}


@pytest.fixture
def planned(script, monkeypatch, tmp_path):
    """``planned(lacking, *words)``: the parts on a GPU where all candidates but those of ``lacking`` can run."""
    gpu_kernels = script("gpu_kernels")

    def planned(lacking, *words):
        def introduced(refs, device):
            return {
                ref: BackendDescription(
                    info=BackendInfo(name=ref, ref=ref),
                    is_mla=ref == "triton_mla",
                    unavailable_reasons=("not installed",) if ref in lacking else (),
                )
                for ref in refs
            }

        monkeypatch.setattr(gpu_kernels, "introduced", introduced)
        asked = gpu_kernels._arguments(["--workers", "14", *words])
        suites = [load_suite(name) for name in suite_names()]
        return gpu_kernels._plan(asked, suites, "cuda", "/bin/compute-sanitizer", tmp_path)

    return planned


def values(job, option):
    return [value for word, value in zip(job.words, job.words[1:], strict=False) if word == option]


def test_every_suite_is_asked_once_of_every_candidate_that_serves_its_layers(planned):
    _, suites, pages = planned({"flashinfer"})
    assert suites.left_out == {"flashinfer": "not installed"}
    assert {job.ref for job in pages.jobs} == {"flash_attn"}
    assert all(values(job, "--set") == ["cache.block_size=256"] for job in pages.jobs)
    asked = {}
    for job in (*suites.jobs, *pages.jobs):
        asked.setdefault(job.ref, []).extend(values(job, "--suite"))
    usual = sorted(set(suite_names()) - {"mla"})
    assert {ref: sorted(names) for ref, names in asked.items()} == {
        **dict.fromkeys(("triton_unified", "xformers", "torch_varlen", "flash_attn"), usual),
        "triton_mla": ["interpreted", "mla", "smoke"],
    }
    files = [job.file for part in (suites, pages) for job in part.jobs]
    assert len(set(files)) == len(files) <= 14


def test_the_checker_is_put_around_small_cases_that_exist(planned):
    checker, *_ = planned(set())
    known = {case.id for case in load_suite("interpreted")}
    assert [job.ref for job in checker.jobs] == ["triton_unified", "triton_mla", "xformers"]
    for job in checker.jobs:
        assert job.words[:3] == ("/bin/compute-sanitizer", "--tool", "memcheck")
        assert "--in-process" in job.words
        assert 0 < len(values(job, "--case")) == len(known & set(values(job, "--case")))
    assert {job.ref for part in planned(set(), "--part", "memcheck") for job in part.jobs} == {
        job.ref for job in checker.jobs
    }


def test_runs_that_asked_different_suites_become_one_file(script, tmp_path):
    jobs = script("evidence_jobs")
    made = []
    for number, name in enumerate(("decode", "prefill")):
        header = RunHeader(
            started="2026-01-01T00:00:00+00:00",
            environment=collect_environment("cpu"),
            suites=(SuiteInfo(name=name, ref=name, cases=1),),
            checks=("numerics",),
            device="cpu",
            seed=0,
            backends=(BackendInfo(name="mine", ref="mine"),),
        )
        record = Passed(
            backend="mine",
            backend_ref="mine",
            backend_version="",
            suite=name,
            case_id="edge",
            case_hash="0",
            check="numerics",
            seed=0,
            environment=header.environment.digest,
            attncheck_version=header.environment.attncheck,
        )
        made.append(jobs.Job("mine", (), tmp_path / f"{number}.jsonl"))
        with RunWriter(made[-1].file, header) as writer:
            writer.add(record)
    (tmp_path / "out").mkdir()
    part = jobs.joined(jobs.Part("suites", "cpu", tuple(made)), tmp_path / "out", "x")
    small = jobs.packed(part, tmp_path / "out")
    assert not part.problems
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["suites-cpu.jsonl.xz"]
    run = read_run(tmp_path / "out" / small.file)
    assert [suite.name for suite in run.header.suites] == ["decode", "prefill"]
    assert [record.case for record in run.records] == ["decode/edge", "prefill/edge"]


TIMER = """
import json, os, sys
results, device, seed, limit, *units = sys.argv[1:]
with open(results, "a") as lines:
    for unit in units:
        print(json.dumps({"unit": unit, "begun": True}), file=lines, flush=True)
        name = unit.split("/")[1]
        if name == "dies":
            os._exit(9)
        found = {"refused": "no"} if name == "refuses" else {"seconds": 1 + int(seed), "bytes": 8.0, "error": 0.0}
        print(json.dumps({"unit": unit, "seed": int(seed), **found}), file=lines, flush=True)
"""


def test_rounds_go_on_without_what_ends_its_process_or_refuses(script, monkeypatch, tmp_path):
    rounds = script("speed_rounds")
    (tmp_path / "timer.py").write_text(TIMER)
    monkeypatch.setattr(rounds, "TIMER", str(tmp_path / "timer.py"))
    far = time.monotonic() + 60
    contenders = ["works/16", "dies/16", "refuses/16", "too/16"]
    jobs, lines = rounds.measure(contenders, "cpu", tmp_path, rounds=3, deadline=far)
    found = {timing.unit: timing for timing in rounds.timings(lines)}
    assert found["decode/works/16"].medians == (1.0, 2.0, 3.0)
    assert found["decode/works/16"].rate == 8.0 / 2.0
    assert found["prefill/works/16"].medians == (1.0, 2.0, 3.0)
    assert found["decode/dies/16"].trouble == "ended: exit code 9"
    assert found["decode/refuses/16"].trouble == "refused: no"
    assert [job.status for job in jobs] == ["exit code 9", "exit code 9", *["exit code 0"] * 3]
    orders = [[word.split("/")[1] for word in job.words if word.startswith("decode/")] for job in (jobs[0], jobs[3])]
    assert orders == [["copy", "works", "dies", "refuses", "too"], ["copy", "too", "works"]]


def test_a_deadline_that_has_passed_leaves_everything_untimed_and_says_so(script, tmp_path):
    rounds = script("speed_rounds")
    jobs, lines = rounds.measure(["torch_sdpa/16"], "cpu", tmp_path, rounds=2, deadline=time.monotonic() - 1)
    assert [job.status for job in jobs] == ["not begun: out of time"]
    assert {(timing.unit, timing.trouble) for timing in rounds.timings(lines)} >= {
        ("decode/torch_sdpa/16", "ended: not begun")
    }


def dense(question):
    """Attention of the whole step in float64, head by head, by the textbook."""
    group = question.query.shape[2] // question.keys.shape[2]
    query = question.query.double()
    keys, values = (rows.double().repeat_interleave(group, dim=2) for rows in (question.keys, question.values))
    scores = torch.einsum("nqhd,nkhd->nhqk", query, keys) * query.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
    return torch.einsum("nhqk,nkhd->nqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).flatten(0, 1)


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_outputs_are_held_against_the_right_answer(script, name):
    speed = script("kernel_speed")
    question = speed.Question(name, speed.TINY, torch.device("cpu"), 7)
    right = dense(question)
    assert question.error_of(right) < 1e-12
    wrong = right.clone()
    wrong[-1] = wrong[0]
    assert question.error_of(wrong) > 0.1
    assert torch.isnan(torch.tensor(question.error_of(torch.full_like(right, torch.nan))))


def test_the_least_work_is_counted(script):
    speed = script("kernel_speed")
    layer = speed.LayerSpec(num_heads=4, num_kv_heads=2, head_size=8, dtype="float16")
    size = speed.Size(layer=layer, requests={"decode": (3, 5), "prefill": (2, 3)}, copied=64, matmul=2)
    decode, prefill = (speed.Question(name, size, torch.device("cpu"), 0) for name in ("decode", "prefill"))
    keys_and_values = 2 * 2 * 8 * 2  # both, KV heads, numbers, bytes
    assert decode.work == {"bytes": 15 * keys_and_values + 2 * 3 * 4 * 8 * 2, "operations": 15 * 4 * 4 * 8}
    assert prefill.work["operations"] == 2 * (1 + 2 + 3) * 4 * 4 * 8


def test_the_page_gives_shares_of_what_the_device_can_do_and_tells_what_is_missing(script, tmp_path):
    jobs, rounds, page = script("evidence_jobs"), script("speed_rounds"), script("kernels_page")
    timings = [
        rounds.Timing("decode/copy/0", (0.5, 0.25, 0.125), 1e9),
        rounds.Timing("decode/quick/16", (0.5, 0.4), 0.9e9, 0.001),
        rounds.Timing("decode/wrong/16", (1.0,), 1e9, 0.3),
        rounds.Timing("decode/gone/16", (), trouble="refused: not | installed"),
    ]
    words = ("attncheck", "run", "--suite", "decode", "--suite", "prefill")
    suites = jobs.Part(
        "suites", "cuda", (jobs.Job("triton_unified", words, tmp_path / "a", status="stopped after 9 s"),)
    )
    printed = "========= ERROR SUMMARY: 2 errors\n"
    checked = jobs.Job("triton_mla", (), tmp_path / "b", status="exit code 77", output=printed)
    text = page.page(
        [jobs.Part("memcheck", "cuda", (checked,)), suites],
        timings,
        "",
        on_gpu=True,
        environment=collect_environment("cpu"),
        command="scripts/gpu-kernels",
        seconds=9.0,
        asked={"decode": 3, "prefill": 4},
    )
    assert "| copy | - | 250.000 | 125.000 - 500.000 | 3 | 4 | - | - |" in text
    assert "| quick | 16 | 450.000 | 400.000 - 500.000 | 2 | 2 | 50% | 1.0e-03 |" in text
    assert "| wrong | 16 | 1000.000 | 1000.000 - 1000.000 | 1 | 1 | 25% | **3.0e-01** |" in text
    assert "- decode/gone/16: refused: not \\| installed" in text
    assert "- suites, triton_unified: 0 of 7 cases have records; of these suites none: decode, prefill" in text
    assert "- suites, cuda: triton_unified: stopped after 9 s: it printed nothing" in text
    assert "| triton_mla | 2 errors | 0 | exit code 77 |" in text
    assert "No GPU was used" not in text
