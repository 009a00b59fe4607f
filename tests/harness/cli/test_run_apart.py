"""``attncheck run`` with each backend in a process of its own: what one does to it costs its case, and no other."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli
from attncheck.reports.run_file.records import Crashed, Errored, Record, TimedOut
from attncheck.reports.run_file.store import Run, read_run

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
import ctypes, os, pathlib, sys, threading, time
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

def leak():
    kept = []
    while True:
        kept.append(torch.ones(2**20))

def print_without_end():
    while True:
        os.write(1, b"the same line again\\n" * 1000)

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
Huge = backend(lambda: torch.empty(2**34))
Leaking = backend(leak)
Losing = backend(lose)
Pausing = backend(lambda: (ctypes.CDLL(None).printf(b"printed by C"), breakpoint()))
Printing = backend(lambda: threading.Thread(target=print_without_end, daemon=True).start())
Wrong = backend(lambda: 1 / 0)

class Needy(ReferenceBackend):
    @classmethod
    def required_environment(cls, device): return {"ATTNCHECK_TEST_NEED": "one two"}
    @classmethod
    def unavailable_reasons(cls, device):
        return [] if os.environ.get("ATTNCHECK_TEST_NEED") == "one two" else ["was not started with what it needs"]
"""

Attncheck = Callable[..., int]
WORDS = ("run", "--suite", "small.yaml", "--device", "cpu", "--output", "out.jsonl")


def write_files(folder: Path) -> None:
    (folder / "small.yaml").write_text(SUITE)
    (folder / "mine.py").write_text(MINE)


def outcomes(run: Run) -> dict[tuple[str, str, str], str]:
    return {(each.backend, each.case_id, each.check): each.outcome for each in run.records}


@pytest.fixture(scope="module")
def misdeeds(shell: Callable[..., tuple[int, str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """The run of all misdeeds, but of those that need options of their own; and what it printed."""
    folder = tmp_path_factory.mktemp("misdeeds")
    write_files(folder)
    names = " ".join(f"mine.py:{name}" for name in ("Aborting", "Losing", "Leaking", "Huge", "Printing"))
    words = f"attncheck {' '.join(WORDS)} {names} reference --check numerics,lse --memory-limit 1GiB"
    code, printed = shell(words, folder)
    assert code == 1, printed
    return read_run(folder / "out.jsonl"), printed


def test_a_misdeed_costs_its_own_case(misdeeds: tuple[Run, str]) -> None:
    run, _ = misdeeds
    short = {key: outcome for key, outcome in outcomes(run).items() if outcome != "passed"}
    assert short == {
        ("Aborting", "prefill", "numerics"): "crashed",
        ("Aborting", "prefill", "lse"): "crashed",
        ("Losing", "prefill", "numerics"): "crashed",  # a fresh process makes the other checks
        ("Leaking", "prefill", "numerics"): "crashed",
        ("Leaking", "prefill", "lse"): "crashed",
        ("Huge", "prefill", "numerics"): "errored",
        ("Huge", "prefill", "lse"): "errored",
    }
    assert len(run.records) == 6 * 2 * 2
    assert run.complete


def record_of(run: Run, backend: str) -> Record:
    return next(each for each in run.records if each.backend == backend and each.outcome != "passed")


def test_a_death_is_reported_with_its_place(misdeeds: tuple[Run, str]) -> None:
    run, printed = misdeeds
    story = printed.partition(", Aborting: killed by SIGABRT at mine.py:")[2]
    assert "killed by SIGABRT during check numerics" in story
    assert "no such kernel" in story
    assert "repeat: attncheck run --backend mine.py:Aborting" in story
    assert "Fatal Python error" not in printed.partition("attncheck ")[0]  # what it prints is its own
    death = record_of(run, "Aborting")
    assert isinstance(death, Crashed)
    assert "rows: 17\n" in death.output
    assert "rows: 2\n" not in death.output  # that was at the case before


def test_a_lost_device_is_reported_with_what_was_printed_last(misdeeds: tuple[Run, str]) -> None:
    run, printed = misdeeds
    record = record_of(run, "Losing")
    assert isinstance(record, Crashed)
    assert record.stage == "check numerics, in forward"
    assert record.cause == snapshot(
        "the device was lost: CUDA error: an illegal memory access was encountered; repeat with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer"
    )
    line = MINE[: MINE.index("raise torch.AcceleratorError")].count("\n") + 1
    assert f'mine.py", line {line} in illegal_access\n' in printed
    assert "      mine.cu:12: Assertion `slot < slots` failed\n" in printed.partition("printed last:\n")[2]


def test_memory_over_the_limit_is_named(misdeeds: tuple[Run, str]) -> None:
    run, _ = misdeeds
    leaking, huge = record_of(run, "Leaking"), record_of(run, "Huge")
    assert isinstance(leaking, Crashed)
    assert leaking.cause.startswith("out of memory (limit 1 GiB, it took ")
    assert isinstance(huge, Errored)
    assert "can't allocate memory: you tried to allocate 68719476736 bytes" in huge.message
    assert huge.message.endswith("(--memory-limit: 1 GiB)")


def test_a_blind_case_is_reported_once(misdeeds: tuple[Run, str]) -> None:
    run, printed = misdeeds
    assert run.errors == (
        "case small/blind: blind to sliding_window: no row of the batch has a key it could act on; lengthen a request",
    )
    assert printed.count(run.errors[0][:40]) == 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: None) -> Attncheck:
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *more: cli.main([*WORDS, "--case", "decode,prefill", "--check", "numerics", *more])


def test_a_blind_case_alone_is_a_wrong_question(run: Attncheck) -> None:
    assert run("reference", "--case", "blind", "--in-process") == 2
    assert [each.case_id for each in read_run("out.jsonl").records] == ["decode", "prefill"]


def test_what_a_backend_prints_is_shown_and_kept_with_its_failure(
    run: Attncheck, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("mine.py:Pausing", "mine.py:Needy", "-s") == 1
    found = read_run("out.jsonl")
    record = record_of(found, "Pausing")
    assert isinstance(record, Errored)
    assert record.message == "breakpoint() needs --in-process: the process of a backend has no terminal"
    assert "printed by C" in record.output
    assert record.output.count("rows: 17") == 1
    assert "rows: 2\n" not in record.output  # of the other case
    assert {"Pausing | rows: 2", "Pausing | rows: 17"} <= set(capfd.readouterr().err.splitlines())
    assert {each.outcome for each in found.records if each.backend == "Needy"} == {"passed"}
    needs = {each.name: each.required_environment for each in found.header.backends}
    assert needs["Needy"] == {"ATTNCHECK_TEST_NEED": "one two"}
    Path("out.jsonl").unlink()
    assert run("mine.py:Needy", "--in-process") == 2
    assert capfd.readouterr().err == snapshot(
        "error: backend 'Needy' is unavailable here: this process must have been started with ATTNCHECK_TEST_NEED='one two': type it before the command\n"
    )


def test_a_death_may_be_expected(run: Attncheck) -> None:
    entry = {"backend": "Aborting", "case": "prefill", "check": "numerics", "outcome": "crashed", "reason": "issue 9"}
    Path("known.yaml").write_text(json.dumps([entry]))
    assert run("mine.py:Aborting", "--expect", "known.yaml") == 0
    assert list(outcomes(read_run("out.jsonl")).values()) == ["passed", "xfailed"]


def test_our_own_fault_is_exit_code_3_and_what_was_found_is_kept(
    run: Attncheck, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("mine.py:Breaking", "reference") == 3
    assert capfd.readouterr().err == snapshot("""\
errored  Breaking  small/prefill  numerics: WorkerError in attncheck itself: TypeError: 'NoneType' object is not callable
attncheck itself failed at small/prefill: WorkerError: TypeError: 'NoneType' object is not callable
""")
    found = read_run("out.jsonl")
    assert found.complete
    assert list(outcomes(found).values()).count("passed") == 3


@pytest.fixture
def torch_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes at the end what a backend in this process does to torch."""
    for owner, name in ((torch.cuda, "is_initialized"), (torch.cuda, "synchronize"), (torch.Tensor, "clone")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.mark.usefixtures("torch_restored")
def test_a_run_in_one_process_goes_by_cases_and_ends_where_the_device_is_lost(
    run: Attncheck, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("mine.py:Wrong", "mine.py:Losing", "--in-process") == 1
    assert outcomes(read_run("out.jsonl")) == {
        ("Wrong", "decode", "numerics"): "passed",
        ("Losing", "decode", "numerics"): "passed",
        ("Wrong", "prefill", "numerics"): "errored",
        ("Losing", "prefill", "numerics"): "crashed",
    }
    assert "stopped when this process lost the device" in capfd.readouterr().out


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_at_the_limit_and_the_next_case_is_examined(run: Attncheck) -> None:
    assert run("mine.py:Hanging", "--case-timeout", "5") == 1
    passed, late = read_run("out.jsonl").records
    assert passed.outcome == "passed"
    assert isinstance(late, TimedOut)
    assert (late.stage, late.limit_s, late.recurrence) == ("check numerics", 5.0, "flaky")
    assert not Path("/proc", Path("hanging").read_text()).exists()


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ([], {"ATTNCHECK_OF_MINE", "DATABASE"}),
        (["--pass-env", "DEP*,VLLM_API_KEY"], {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN", "VLLM_API_KEY"}),
        (["--in-process"], {"ATTNCHECK_OF_MINE", "DATABASE"}),
    ],
)
def test_a_backend_sees_of_the_environment_what_it_may_need(
    run: Attncheck, monkeypatch: pytest.MonkeyPatch, words: list[str], seen: set[str]
) -> None:
    variables = {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN", "VLLM_API_KEY", "DATABASE"}
    for name in variables:
        monkeypatch.setenv(name, "x")
    Path("pyproject.toml").write_text("[tool.attncheck]\npass_env = 'DATA*'\n")
    assert run("mine.py:Printing", "--dry-run", *words) == 0
    assert variables & {*Path("seen").read_text().split()} == seen
