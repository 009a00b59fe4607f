"""A run as a call: options in, a finished run out, and what examines its cases."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from attncheck.harness.cli import app as cli
from attncheck.harness.cli.run import execute_run
from attncheck.harness.run.evaluate import Examiner, RunPlan, environment_of
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers.pool import WorkerPool
from attncheck.reports.run_file.header import BackendInfo, RunHeader
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.mark.parametrize(("in_process", "cache", "truths"), [(True, True, 0), (False, True, 1), (False, False, 0)])
def test_a_run_is_a_call(
    in_process: bool,
    cache: bool,
    truths: int,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATTNCHECK_NO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun: list[RunHeader] = []
    options = RunOptions(
        backends=("reference",),
        suites=("smoke",),
        cases=("decode.float32",),
        checks=("numerics",),
        device="cpu",
        output=tmp_path / "run.jsonl",
        in_process=in_process,
        cache=cache,
    )
    finished = execute_run(options, begun.append)
    assert [(record.case, record.outcome) for record in finished.records] == [("smoke/decode.float32", "passed")]
    assert (finished.blind, finished.unmet, finished.unseen, finished.stopped) == ((), (), (), "")
    assert begun == [finished.header]
    stored = read_run(finished.path)
    assert (stored.header, tuple(stored.records)) == (finished.header, finished.records)
    assert capfd.readouterr().out == ""
    assert len(list(tmp_path.glob("attncheck/truths/*"))) == truths


def test_a_run_that_lacks_a_record_has_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Examiner, "run", lambda _self: (_ for _ in ()))
    path = str(tmp_path / "run.jsonl")
    words = ["reference", "--suite", "smoke", "--case", "decode.float32", "--check", "numerics", "--in-process"]
    assert cli.main(["run", *words, "--output", path]) == 2
    printed = capsys.readouterr()
    assert "the run is incomplete: 1 of 1 cases lack records, such as smoke/decode.float32" in printed.err
    assert not read_run(path).complete


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "wanted", "expected"),
    [
        ("cpu", 0, 2, None, (2, False)),
        ("cpu", 0, 1, None, (1, False)),
        ("cpu", 0, 2, 3, (3, False)),
        ("cuda:0", 0, 2, None, (1, True)),
        ("cuda:0", 0, 2, 1, (1, True)),
        ("cuda", 3, 4, None, (3, True)),
        ("cuda", 3, 2, None, (2, True)),
        ("cuda", 3, 2, 3, (3, True)),
        ("cuda", 3, 2, 4, (4, False)),
        ("cuda:0", 0, 2, 2, (2, False)),
    ],
)
def test_processes_share_the_cores_of_a_cpu_and_a_gpu_is_for_one_and_its_warmers(
    device: str, gpus: int, cores: int, wanted: int | None, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, bool]] = []

    def supervise(*_: Any, jobs: int, warms: bool, costs: object) -> None:
        given.append((jobs, warms))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr("attncheck.harness.workers.executor.Supervisor", supervise)
    pool = WorkerPool()
    pool.gpus = tuple(Gpu(str(index)) for index in range(gpus))
    pool.examiner(run_on(device, RunOptions(jobs=wanted)))
    pool.examiner(run_on(device, RunOptions(jobs=wanted, warm=False)))
    assert given == [expected, (expected[0], False)]


def test_backends_that_share_a_time_limit_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmers use the cores that other backends need, so they exist only beside a single process."""
    given: list[tuple[int, bool]] = []

    def supervise(*_: Any, jobs: int, warms: bool, costs: object) -> None:
        given.append((jobs, warms))

    monkeypatch.setattr("attncheck.harness.workers.pool.most_processes", lambda device, gpus=1: 6 // gpus)
    monkeypatch.setattr("attncheck.harness.workers.executor.Supervisor", supervise)
    for gpus, jobs in ((1, None), (2, None), (1, 4), (1, 1)):
        pool = WorkerPool()
        pool.gpus = tuple(Gpu(str(index)) for index in range(gpus))
        pool.examiner(run_on("cuda", RunOptions(jobs=jobs, deadline=time.monotonic() + 1000.0)))
        assert 890 < pool.limits.backend_s <= 900
    assert given == [(6, False), (6, False), (4, False), (1, True)]


def run_on(device: str, options: RunOptions) -> Run:
    selection = select_cases(["smoke"])
    backend = BackendDescription(info=BackendInfo(name="reference", ref="reference"))
    plan = RunPlan(cases=selection.cases, device=device)
    return Run(options, selection, plan, environment_of("cpu"), (backend,))
