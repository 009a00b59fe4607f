"""``attncheck run`` with each backend in a process of its own: exit codes, what is printed, what the run file holds."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli
from attncheck.reports.run_file.records import Crashed, Errored
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
import ctypes, os, sys
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

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

def break_attncheck():
    from attncheck.harness.run import evaluate
    evaluate.record_of = None

Aborting = backend(lambda: (print("no such kernel", file=sys.stderr), os.abort()))
Wrong = backend(lambda: 1 / 0)
Breaking = backend(break_attncheck)
Pausing = backend(lambda: (ctypes.CDLL(None).printf(b"printed by C"), breakpoint()))

class Needy(ReferenceBackend):
    @classmethod
    def required_environment(cls, device): return {"ATTNCHECK_TEST_NEED": "one two"}
    @classmethod
    def unavailable_reasons(cls, device):
        return [] if os.environ.get("ATTNCHECK_TEST_NEED") == "one two" else ["was not started with what it needs"]
"""

Attncheck = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: None) -> Attncheck:
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    words = ("run", "--suite", "small.yaml", "--device", "cpu", "--check", "numerics", "--output", "out.jsonl")
    return lambda *more: cli.main([*words, *more])


def outcomes() -> list[tuple[str, str, str]]:
    return [(record.backend, record.case_id, record.outcome) for record in read_run("out.jsonl").records]


def test_what_a_backend_prints_is_shown_and_kept_with_its_failure(
    run: Attncheck, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("--backend", "mine.py:Pausing", "--case", "decode", "--case", "prefill", "-s") == 1
    assert outcomes() == [("Pausing", "decode", "passed"), ("Pausing", "prefill", "errored")]
    record = read_run("out.jsonl").records[1]
    assert isinstance(record, Errored)
    assert record.message == "breakpoint() needs --in-process: the process of a backend has no terminal"
    assert "printed by C" in record.output
    assert record.output.count("rows: 17") == 1
    assert "rows: 2\n" not in record.output  # of the other case
    printed = capfd.readouterr().err.splitlines()
    assert {"Pausing | rows: 2", "Pausing | rows: 17"} <= set(printed)


def test_a_death_is_reported_with_its_place_and_the_others_are_examined(
    run: Attncheck, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--backend", "mine.py:Aborting", "--backend", "reference", "--case", "decode", "--case", "prefill")
    assert run(*words) == 1
    assert outcomes() == [
        ("Aborting", "decode", "passed"),
        ("Aborting", "prefill", "crashed"),
        ("reference", "decode", "passed"),
        ("reference", "prefill", "passed"),
    ]
    printed = capfd.readouterr()
    story = printed.out.partition(", Aborting: killed by SIGABRT at mine.py:")[2]
    assert "killed by SIGABRT during check numerics" in story
    assert "mine.py" in story
    assert "no such kernel" in story
    assert "repeat: attncheck run --backend mine.py:Aborting" in story
    assert "Fatal Python error" not in printed.err  # what it prints is its own
    (death,) = (record for record in read_run("out.jsonl").records if isinstance(record, Crashed))
    assert "rows: 17\n" in death.output
    assert "rows: 2\n" not in death.output  # that was at the case before
    entry = {"backend": "Aborting", "case": "prefill", "check": "numerics", "outcome": "crashed", "reason": "issue 9"}
    Path("known.yaml").write_text(json.dumps([entry]))
    Path("out.jsonl").unlink()
    assert run(*words[:2], "--case", "prefill", "--expect", "known.yaml") == 0
    assert outcomes() == [("Aborting", "prefill", "xfailed")]


def test_a_backend_gets_the_environment_it_requires(run: Attncheck, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--backend", "mine.py:Needy", "--case", "decode")
    assert run(*words) == 0
    assert outcomes() == [("Needy", "decode", "passed")]
    (info,) = read_run("out.jsonl").header.backends
    assert info.required_environment == {"ATTNCHECK_TEST_NEED": "one two"}
    Path("out.jsonl").unlink()
    assert run(*words, "--in-process") == 2
    printed = capfd.readouterr().err
    assert "ATTNCHECK_TEST_NEED" in printed
    assert "'one two'" in printed
    assert printed == snapshot(
        "error: backend 'Needy' is unavailable here: this process must have been started with ATTNCHECK_TEST_NEED='one two': type it before the command\n"
    )


def test_in_process_takes_any_selection_and_finds_the_same(run: Attncheck) -> None:
    words = ("--backend", "mine.py:Wrong", "--backend", "reference")
    assert run(*words, "--case", "decode", "--case", "prefill") == 1
    apart = outcomes()
    assert ("Wrong", "prefill", "errored") in apart
    Path("out.jsonl").unlink()
    assert run(*words, "--case", "decode", "--case", "prefill", "--in-process") == 1
    here = outcomes()
    assert sorted(here) == sorted(apart)
    assert [case for _, case, _ in here] == ["decode", "decode", "prefill", "prefill"]


def test_a_blind_case_is_reported_once(run: Attncheck, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "reference", "--backend", "torch_sdpa", "--case", "blind", "--case", "decode") == 2
    assert [case for _, case, _ in outcomes()] == ["decode", "decode"]
    (error,) = read_run("out.jsonl").errors
    assert error == snapshot(
        "case small/blind: blind to sliding_window: no row of the batch has a key it could act on; lengthen a request"
    )
    assert "small/blind" in error
    assert capfd.readouterr().out.count(error[:40]) == 1


def test_our_own_fault_is_exit_code_3_and_what_was_found_is_kept(
    run: Attncheck, capfd: pytest.CaptureFixture[str]
) -> None:
    others = ("--backend", "reference", "--case", "decode", "--case", "prefill")
    assert run("--backend", "mine.py:Breaking", *others) == 3
    printed = capfd.readouterr().err
    assert "small/prefill" in printed
    assert printed == snapshot("""\
errored  Breaking  small/prefill  numerics: WorkerError in attncheck itself: TypeError: 'NoneType' object is not callable
attncheck itself failed at small/prefill: WorkerError: TypeError: 'NoneType' object is not callable
""")
    found = read_run("out.jsonl")
    assert found.complete
    outcome_of = {(record.backend, record.case_id): record.outcome for record in found.records}
    assert outcome_of.pop(("Breaking", "prefill")) == "errored"
    assert set(outcome_of.values()) == {"passed"}
    assert len(outcome_of) == 3


def test_a_crash_when_stopping_at_the_first(run: Attncheck) -> None:
    assert run("--backend", "mine.py:Aborting", "--backend", "reference", "--case", "pre*", "-x") == 1
    (record,) = read_run("out.jsonl").records
    assert isinstance(record, Crashed)


SHOWS = """\
import os, pathlib
from attncheck.backends.candidates.reference import ReferenceBackend
pathlib.Path("seen").write_text(" ".join(os.environ))
class Mine(ReferenceBackend): pass
"""


@pytest.mark.parametrize(
    ("table", "words", "seen"),
    [
        ("", [], {"ATTNCHECK_OF_MINE"}),
        ("", ["--pass-env", "DEPLOY_*,VLLM_API_KEY"], {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN", "VLLM_API_KEY"}),
        ("", ["--pass-env", "*"], {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN", "VLLM_API_KEY", "DATABASE"}),
        ("[tool.attncheck]\npass_env = 'DATA*'\n", [], {"ATTNCHECK_OF_MINE", "DATABASE"}),
        ("[tool.attncheck]\npass_env = 'DATA*'\n", ["--pass-env", "DEP*"], {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN"}),
        ("", ["--in-process"], {"ATTNCHECK_OF_MINE"}),
    ],
)
def test_a_backend_sees_of_the_environment_what_it_may_need(
    run: Attncheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, words: list[str], seen: set[str]
) -> None:
    variables = {"ATTNCHECK_OF_MINE", "DEPLOY_TOKEN", "VLLM_API_KEY", "DATABASE"}
    for name in variables:
        monkeypatch.setenv(name, "x")
    (tmp_path / "shows.py").write_text(SHOWS)
    (tmp_path / "pyproject.toml").write_text(table)
    assert run("./shows.py:Mine", "--case", "decode", *words) == 0
    assert variables & {*(tmp_path / "seen").read_text().split()} == seen
