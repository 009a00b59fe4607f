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
from attncheck.harness.workers.worker import DeviceChosen
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
    """``supervised(device, gpus, jobs=2)``: the number of processes that examine a run of these options."""
    given = []

    def supervise(*_, jobs, costs):
        given.append(jobs)

    monkeypatch.setattr("attncheck.harness.workers.executor.Supervisor", supervise)

    def supervised(device, gpus, on_each, **options):
        selection = select_cases(["smoke"])
        backend = BackendDescription(info=BackendInfo(name="reference", ref="reference"))
        plan = RunPlan(cases=selection.cases, device=device)
        pool = WorkerPool()
        environment, alike = environment_of("cpu"), tuple(Gpu(str(index)) for index in range(gpus))
        pool.chosen = DeviceChosen(device=device, notes=(), environment=environment, gpus=alike, processes=on_each)
        pool.examiner(Run(RunOptions(**options), selection, plan, environment, (backend,)))
        assert "deadline" not in options or 890 < pool.limits.backend_s <= 900
        return given.pop()

    return supervised


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "on_each", "jobs", "expected"),
    [
        ("cpu", 0, 2, 1, None, 2),
        ("cpu", 0, 1, 1, None, 1),
        ("cpu", 0, 64, 1, None, 8),
        ("cpu", 0, 2, 1, 3, 3),
        ("cuda:0", 0, 2, 10, None, 2),
        ("cuda", 1, 64, 10, None, 8),
        ("cuda", 1, 64, 3, None, 3),
        ("cuda", 3, 64, 5, None, 15),
        ("cuda", 3, 2, 5, None, 2),
        ("cuda", 3, 2, 1, 4, 4),
    ],
)
def test_processes_share_the_cores_and_the_memory_of_each_gpu(
    supervised, device, gpus, cores, on_each, jobs, expected, monkeypatch
):
    """``on_each``: how many processes each GPU has memory for."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr("attncheck.harness.workers.pool.free_host_bytes", lambda: 500 * 2**30)
    assert supervised(device, gpus, on_each, jobs=jobs) == expected
    assert supervised(device, gpus, on_each, jobs=jobs, deadline=time.monotonic() + 1000.0) == expected
