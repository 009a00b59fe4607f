"""``attncheck run`` with a backend that loses the device, or never answers: the record, the exit code, what goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.harness.cli import app as cli
from attncheck.reports.run_file.records import Crashed, TimedOut
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.usefixtures("preloaded")

SUITE = """\
suite: small
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 16, dtype: float32}
cases:
  - {id: prefill, batch: q17}
  - {id: decode, batch: q1s20_q1s7}
"""
MINE = """\
import os, pathlib, sys, time
import torch
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl

def illegal_access(*arguments, **keywords):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\\nSearch for it")

def lose():
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = torch.Tensor.clone = illegal_access
    print("mine.cu:12: Assertion `slot < slots` failed")
    illegal_access()

def hang():
    pathlib.Path("hanging").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)

def backend(deed):
    class Impl(ReferenceImpl):
        def forward(self, attn_layer, query, *args, **keywords):
            if len(query) == 17 and not pathlib.Path("done").exists():
                pathlib.Path("done").touch()
                deed()
            return super().forward(attn_layer, query, *args, **keywords)
    class Mine(ReferenceBackend):
        get_impl_cls = classmethod(lambda cls: Impl)
    return Mine

Losing = backend(lose)
Hanging = backend(hang)
"""
LOST = (
    "the device was lost: CUDA error: an illegal memory access was encountered; "
    "repeat with CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer"
)
CHECKS = ("numerics", "lse", "containment")

Attncheck = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attncheck:
    (tmp_path / "small.yaml").write_text(SUITE)
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    words = ["run", "--suite", "small.yaml", "--device", "cpu", "--output", "out.jsonl"]
    words += [word for check in CHECKS for word in ("--check", check)]
    return lambda name, *more: cli.main([*words, "--backend", f"mine.py:{name}", *more])


def outcomes() -> list[tuple[str, str, str]]:
    return [(record.case_id, record.check, record.outcome) for record in read_run("out.jsonl").records]


def crashed() -> list[Crashed]:
    return [record for record in read_run("out.jsonl").records if isinstance(record, Crashed)]


def passed(*cases: str) -> list[tuple[str, str, str]]:
    return [(case, check, "passed") for case in cases for check in CHECKS]


def test_the_check_that_loses_the_device_crashes_and_a_fresh_process_makes_the_others(
    run: Attncheck, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("Losing") == 1
    assert outcomes() == [("prefill", "numerics", "crashed"), *passed("prefill", "decode")[1:]]
    (record,) = crashed()
    assert (record.stage, record.cause) == ("check numerics, in forward", LOST)
    printed = capfd.readouterr().out
    line = MINE[: MINE.index("raise torch.AcceleratorError")].count("\n") + 1
    assert f'mine.py", line {line} in illegal_access\n' in printed
    assert "printed last:\n      mine.cu:12: Assertion `slot < slots` failed\n" in printed


@pytest.fixture
def torch_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes at the end what a backend in this process does to torch."""
    for owner, name in ((torch.cuda, "is_initialized"), (torch.cuda, "synchronize"), (torch.Tensor, "clone")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.mark.usefixtures("torch_restored")
def test_a_run_in_one_process_ends_where_the_device_is_lost(run: Attncheck, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("Losing", "--in-process") == 1
    assert outcomes() == [("prefill", "numerics", "crashed")]
    assert "stopped when this process lost the device" in capfd.readouterr().out


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_at_the_limit_and_the_next_case_is_examined(run: Attncheck) -> None:
    assert run("Hanging", "--case-timeout", "5") == 1
    assert outcomes() == [("prefill", "numerics", "timed_out"), *passed("prefill", "decode")[1:]]
    late = [record for record in read_run("out.jsonl").records if isinstance(record, TimedOut)]
    assert {(record.stage, record.limit_s, record.recurrence) for record in late} == {("check numerics", 5.0, "flaky")}
    assert not Path("/proc", Path("hanging").read_text()).exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (
            ("--case-timeout", "-1"),
            snapshot("error: --case-timeout: must be at least 0 (found '-1'); see `attncheck run --help`\n"),
        ),
        (
            ("--case-timeout", "nan"),
            snapshot("error: --case-timeout: must be at least 0 (found 'nan'); see `attncheck run --help`\n"),
        ),
        (
            ("--case-timeout", "9", "--in-process"),
            snapshot(
                "error: --case-timeout 9 kills the process of a backend, and --in-process starts none; leave out one of them\n"
            ),
        ),
    ],
)
def test_a_limit_that_cannot_be_kept_is_refused(
    run: Attncheck, capfd: pytest.CaptureFixture[str], words: tuple[str, ...], reason: str
) -> None:
    assert run("Hanging", *words) == 2
    assert capfd.readouterr().err == reason
