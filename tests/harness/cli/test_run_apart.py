"""``attncheck run`` with each backend in a process of its own: what one does to it costs its case, and no other."""

import json
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.reports.run_file.store import read_run

SUITE = """\
suite: small
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: decode, batch: q1s20_q1s7}
  - {id: prefill, batch: q17}
  - {id: blind, batch: q1s9, layer: {sliding_window: 64}}
"""
MINE = """\
import ctypes, os, pathlib, sys, time
import torch
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

pathlib.Path("seen").write_text(" ".join(os.environ))

def illegal_access(*arguments, **keywords):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\nSearch for it")

def lose():
    if pathlib.Path("lost").exists():
        return
    pathlib.Path("lost").touch()
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = torch.Tensor.clone = illegal_access
    print("mine.cu:12: Assertion `slot < slots` failed")
    illegal_access()

def hang():
    if not pathlib.Path("hanging").exists():
        pathlib.Path("hanging").write_text(str(os.getpid()))
        while True:
            time.sleep(0.01)

def break_attncheck():
    from attncheck.harness.run import evaluate
    evaluate.record_of = None

def backend(deed):
    class Impl(ReferenceImpl):
        def forward(self, attn_layer, query, *args, **keywords):
            print("rows:", len(query), file=sys.stderr)
            if len(query) == 17:
                deed()
            return super().forward(attn_layer, query, *args, **keywords)
    class Mine(ReferenceBackend):
        get_impl_cls = classmethod(lambda cls: Impl)
    return Mine

Aborting = backend(lambda: (print("no such kernel", file=sys.stderr), os.abort()))
Breaking = backend(break_attncheck)
Hanging = backend(hang)
Losing = backend(lose)
Pausing = backend(lambda: (ctypes.CDLL(None).printf(b"printed by C"), breakpoint()))
Wrong = backend(lambda: 1 / 0)

class Needy(ReferenceBackend):
    @classmethod
    def required_environment(cls, device): return {"ATTNCHECK_TEST_NEED": "one two"}
    @classmethod
    def unavailable_reasons(cls, device):
        return [] if os.environ.get("ATTNCHECK_TEST_NEED") == "one two" else ["was not started with what it needs"]
"""
RUN = "run --suite small.yaml --device cpu --output out.jsonl"
pytestmark = pytest.mark.xdist_group("apart")  # whose run of misdeeds is made once


def write_files(folder):
    (folder / "small.yaml").write_text(SUITE)
    (folder / "mine.py").write_text(MINE)


def outcomes(run):
    return {(each.backend, each.case_id, each.check): each.outcome for each in run.records}


def record_of(run, backend):
    return next(each for each in run.records if each.backend == backend and each.outcome != "passed")


@pytest.fixture(scope="module")
def misdeeds(shell, tmp_path_factory):
    """The run of all misdeeds, but of those that need options of their own; and what it printed."""
    folder = tmp_path_factory.mktemp("misdeeds")
    write_files(folder)
    code, printed = shell(f"attncheck {RUN} mine.py:Aborting mine.py:Losing reference --check numerics,lse", folder)
    assert code == 1, printed
    return read_run(folder / "out.jsonl"), printed


def test_a_misdeed_costs_its_own_case(misdeeds):
    run, _ = misdeeds
    short = {key: outcome for key, outcome in outcomes(run).items() if outcome != "passed"}
    assert short == {
        ("Aborting", "prefill", "numerics"): "crashed",
        ("Aborting", "prefill", "lse"): "crashed",
        ("Losing", "prefill", "numerics"): "crashed",  # a fresh process makes the other checks
    }
    assert len(run.records) == 3 * 2 * 2
    assert run.complete


def test_a_death_is_reported_with_its_place(misdeeds):
    run, printed = misdeeds
    story = printed.partition(", Aborting: killed by SIGABRT at mine.py:")[2]
    assert "killed by SIGABRT during check numerics" in story
    assert "no such kernel" in story
    assert "repeat: attncheck run --backend mine.py:Aborting" in story
    assert "Fatal Python error" not in printed.partition("attncheck ")[0]  # what it prints is its own
    output = record_of(run, "Aborting").output
    assert "rows: 17\n" in output
    assert "rows: 2\n" not in output  # that was at the case before


def test_a_lost_device_is_reported_with_what_was_printed_last(misdeeds):
    run, printed = misdeeds
    record = record_of(run, "Losing")
    assert (record.stage, record.cause) == snapshot(
        (
            "check numerics, in forward",
            "the device was lost: CUDA error: an illegal memory access was encountered; repeat with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer",
        )
    )
    line = MINE[: MINE.index("raise torch.AcceleratorError")].count("\n") + 1
    assert f'mine.py", line {line} in illegal_access\n' in printed
    assert "      mine.cu:12: Assertion `slot < slots` failed\n" in printed.partition("printed last:\n")[2]


def test_a_blind_case_is_reported_once(misdeeds):
    run, printed = misdeeds
    assert run.errors == snapshot(
        (
            "case small/blind: blind to sliding_window: no row of the batch has a key it could act on; lengthen a request",
        )
    )
    assert printed.count(run.errors[0][:40]) == 1


@pytest.fixture
def run(typed, folder, preloaded):
    write_files(folder)
    return lambda words: typed(f"{RUN} --check numerics {words}")


TWO = "--case decode,prefill"


def test_a_blind_case_alone_is_a_wrong_question(run):
    assert run("reference --in-process").code == 2
    assert [each.case_id for each in read_run("out.jsonl").records] == ["decode", "prefill"]


def test_what_a_backend_prints_is_shown_and_kept_with_its_failure(run):
    done = run(f"mine.py:Pausing mine.py:Needy {TWO} -s")
    assert done.code == 1
    found = read_run("out.jsonl")
    record = record_of(found, "Pausing")
    assert record.message == "breakpoint() needs --in-process: the process of a backend has no terminal"
    assert "printed by C" in record.output
    assert record.output.count("rows: 17") == 1
    assert "rows: 2\n" not in record.output  # of the other case
    assert {"Pausing | rows: 2", "Pausing | rows: 17"} <= set(done.err.splitlines())
    assert {each.outcome for each in found.records if each.backend == "Needy"} == {"passed"}
    needs = {each.name: each.required_environment for each in found.header.backends}
    assert needs["Needy"] == {"ATTNCHECK_TEST_NEED": "one two"}
    done = run("mine.py:Needy --in-process --output again.jsonl")
    assert done.code == 2
    assert done.err == snapshot(
        "error: backend 'Needy' is unavailable here: this process must have been started with ATTNCHECK_TEST_NEED='one two': type it before the command\n"
    )


def test_a_death_may_be_expected_and_our_own_fault_is_exit_code_3(run):
    entry = {"backend": "Aborting", "case": "prefill", "check": "numerics", "outcome": "crashed", "reason": "issue 9"}
    Path("known.yaml").write_text(json.dumps([entry]))
    assert run(f"mine.py:Aborting {TWO} --expect known.yaml").code == 0
    assert list(outcomes(read_run("out.jsonl")).values()) == ["passed", "xfailed"]
    Path("out.jsonl").unlink()
    done = run(f"mine.py:Breaking reference {TWO}")
    assert (done.code, done.err) == (
        3,
        snapshot("""\
errored  Breaking  small/prefill  numerics: WorkerError in attncheck itself: TypeError: 'NoneType' object is not callable
attncheck itself failed at small/prefill: WorkerError: TypeError: 'NoneType' object is not callable
"""),
    )
    found = read_run("out.jsonl")
    assert found.complete
    assert list(outcomes(found).values()).count("passed") == 3


def test_a_run_in_one_process_goes_by_cases_and_ends_where_the_device_is_lost(run, monkeypatch):
    for owner, name in ((torch.cuda, "is_initialized"), (torch.cuda, "synchronize"), (torch.Tensor, "clone")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undoes at the end what the backend does to torch
    done = run(f"mine.py:Wrong mine.py:Losing {TWO} --in-process")
    assert done.code == 1
    assert outcomes(read_run("out.jsonl")) == {
        ("Wrong", "decode", "numerics"): "passed",
        ("Losing", "decode", "numerics"): "passed",
        ("Wrong", "prefill", "numerics"): "errored",
        ("Losing", "prefill", "numerics"): "crashed",
    }
    assert "stopped when this process lost the device" in done.out


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_at_the_limit_and_the_next_case_is_examined(run):
    assert run(f"mine.py:Hanging {TWO} --case-timeout 5").code == 1
    passed, late = read_run("out.jsonl").records
    assert (passed.outcome, late.outcome) == ("passed", "timed_out")
    assert (late.stage, late.limit_s, late.recurrence) == ("check numerics", 5.0, "flaky")
    assert not Path("/proc", Path("hanging").read_text()).exists()


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("--pass-env DEP*,VLLM_API_KEY", {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN", "VLLM_API_KEY"}),
        ("--in-process", {"ATTNCHECK_OF_MINE", "DATABASE"}),
    ],
)
def test_a_backend_sees_of_the_environment_what_it_may_need(run, monkeypatch, words, seen):
    variables = {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN", "VLLM_API_KEY", "DATABASE"}
    for name in variables:
        monkeypatch.setenv(name, "x")
    Path("pyproject.toml").write_text("[tool.attncheck]\npass_env = 'DATA*'\n")
    assert run(f"mine.py:Wrong --dry-run {words}").code == 0
    assert variables & {*Path("seen").read_text().split()} == seen
