"""A run as a call: options in, a finished run out, and what examines its cases."""

import os
from pathlib import Path
from typing import Any

import pytest

from attncheck.errors import SelectionError
from attncheck.harness.cli.executors import case_examiner
from attncheck.harness.cli.run_execution import execute_run
from attncheck.harness.cli.run_options import RunOptions
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.evaluation import RunPlan, environment_of
from attncheck.harness.run.preparation import PreparedRun
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers.worker_pool import WorkerPool
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


def test_options_that_contradict_each_other_are_no_options() -> None:
    with pytest.raises(SelectionError, match="give --provider"):
        RunOptions(functions=("*",))


@pytest.mark.parametrize(
    ("device", "cores", "wanted", "expected"),
    [
        ("cpu", 2, None, (2, False)),
        ("cpu", 1, None, (1, False)),
        ("cpu", 2, 3, (3, False)),
        ("cuda:0", 2, None, (1, True)),
        ("cuda:0", 2, 1, (1, True)),
    ],
)
def test_processes_share_the_cores_of_a_cpu_and_a_gpu_is_for_one_and_its_warmers(
    device: str, cores: int, wanted: int | None, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, bool]] = []

    def supervise(*_: Any, jobs: int, warms: bool) -> None:
        given.append((jobs, warms))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr("attncheck.harness.workers.supervisor.Supervisor", supervise)
    prepared = prepared_for(device)
    case_examiner(prepared, WorkerPool(), jobs=wanted)
    case_examiner(prepared, WorkerPool(), jobs=wanted, warms=False)
    assert given == [expected, (expected[0], False)]


def test_several_processes_on_a_gpu_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"--jobs 2 on cuda:0: .* give --jobs 1 or auto"):
        case_examiner(prepared_for("cuda:0"), WorkerPool(), jobs=2)


def prepared_for(device: str) -> PreparedRun:
    selection = select_cases(["smoke"])
    backend = BackendDescription(info=BackendInfo(name="reference", ref="reference"))
    plan = RunPlan(cases=selection.cases, device=device)
    return PreparedRun(selection, plan, environment_of("cpu"), (backend,))
