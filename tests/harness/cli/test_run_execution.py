"""A run as a call: options in, a finished run out, and what examines its cases."""

import os
import time

import pytest

from attncheck.harness.cli.run import execute_run
from attncheck.harness.run.evaluate import Examiner, RunPlan, environment_of
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers.pool import WorkerPool
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.store import read_run

pytestmark = pytest.mark.usefixtures("preloaded")


@pytest.mark.parametrize(("in_process", "cache", "truths"), [(True, True, 0), (False, True, 1), (False, False, 0)])
def test_a_run_is_a_call(in_process, cache, truths, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("ATTNCHECK_NO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begun = []
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


def test_a_run_that_lacks_a_record_has_exit_code_2(here, the_run, monkeypatch):
    monkeypatch.setattr(Examiner, "run", lambda _self: (_ for _ in ()))
    done = here("reference --case decode --check numerics")
    assert done.code == 2
    assert "the run is incomplete: 1 of 1 cases lack records, such as small/decode" in done.err
    assert not the_run().complete


@pytest.fixture
def supervised(monkeypatch):
    """``supervised(device, gpus, jobs=2)``: the processes that examine a run of these options, and whether some warm."""
    given = []

    def supervise(*_, jobs, warms, costs):
        given.append((jobs, warms))

    monkeypatch.setattr("attncheck.harness.workers.executor.Supervisor", supervise)

    def supervised(device, gpus, **options):
        selection = select_cases(["smoke"])
        backend = BackendDescription(info=BackendInfo(name="reference", ref="reference"))
        plan = RunPlan(cases=selection.cases, device=device)
        pool = WorkerPool()
        pool.gpus = tuple(Gpu(str(index)) for index in range(gpus))
        pool.examiner(Run(RunOptions(**options), selection, plan, environment_of("cpu"), (backend,)))
        assert "deadline" not in options or 890 < pool.limits.backend_s <= 900
        return given.pop()

    return supervised


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "jobs", "expected"),
    [
        ("cpu", 0, 2, None, (2, False)),
        ("cpu", 0, 1, None, (1, False)),
        ("cpu", 0, 2, 3, (3, False)),
        ("cuda:0", 0, 2, None, (1, True)),
        ("cuda", 3, 4, None, (3, True)),
        ("cuda", 3, 2, None, (2, True)),
        ("cuda", 3, 2, 4, (4, False)),
        ("cuda:0", 0, 2, 2, (2, False)),
    ],
)
def test_processes_share_the_cores_of_a_cpu_and_a_gpu_is_for_one_and_its_warmers(
    supervised, device, gpus, cores, jobs, expected, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert supervised(device, gpus, jobs=jobs) == expected
    assert supervised(device, gpus, jobs=jobs, warm=False) == (expected[0], False)


@pytest.mark.parametrize(
    ("gpus", "jobs", "expected"), [(1, None, (6, False)), (2, None, (6, False)), (1, 4, (4, False)), (1, 1, (1, True))]
)
def test_backends_that_share_a_time_limit_share_a_gpu(supervised, gpus, jobs, expected, monkeypatch):
    """Warmers use the cores that other backends need, so they exist only beside a single process."""
    monkeypatch.setattr("attncheck.harness.workers.pool.most_processes", lambda device, gpus=1: 6 // gpus)
    assert supervised("cuda", gpus, jobs=jobs, deadline=time.monotonic() + 1000.0) == expected
