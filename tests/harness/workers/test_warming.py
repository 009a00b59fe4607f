"""Processes that examine cases ahead of a run: their cases, when they begin, and how they end."""

import threading
from types import SimpleNamespace

import pytest

from attncheck.harness.device import Cuda, Facts, GpuModes
from attncheck.harness.run.evaluate import RunPlan
from attncheck.harness.run.outcomes import ProcessEnd, not_loaded
from attncheck.harness.workers import pool
from attncheck.harness.workers.limits import TimeLimits
from attncheck.harness.workers.pool import Warmers, WarmingAhead, most_processes, questions_to_warm
from attncheck.harness.workers.process import ProcessEndedError, RefusedError
from attncheck.harness.workers.worker import CaseServer, Examined, Stage
from attncheck.reports.run_file.records import Crashed

LOADED = not_loaded("a", ())


class FakeProcess:
    """Answers each case at once; a ``hanging`` case waits until it is killed, a ``deadly`` one ends the process.

    A ``losing`` case loses the device.
    """

    def __init__(self, sent, *, deadly="", hanging="", losing="", first=LOADED):
        self._sent, self._deadly, self._hanging, self._answers = sent, deadly, hanging, [first]
        self._losing = losing
        self._killed = threading.Event()
        self.is_closed = False

    def call(self, limit, method):
        assert method == CaseServer.describe
        return self.receive()

    def send(self, method, case, *_):
        self._sent.append(case.partition("/")[2])
        lost = Crashed.model_construct() if self._sent[-1] == self._losing else None
        self._answers = [Stage(name="check numerics"), Examined.model_construct(lost=lost)]

    def receive(self, _limit=None):
        if self._sent and self._sent[-1] == self._deadly:
            raise ProcessEndedError(ProcessEnd("killed by SIGABRT", ""))
        if self._sent and self._sent[-1] == self._hanging:
            assert self._killed.wait(30), "not killed"
            raise ProcessEndedError(ProcessEnd("killed by SIGKILL", ""))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        self._killed.set()

    def close(self):
        self.is_closed = True


@pytest.fixture
def questions(make_case):
    """Four small cases: a, b, c, d."""
    return [(make_case((1, 5), name=name), ("numerics",)) for name in "abcd"]


class Starter:
    """Starts fake processes and keeps the cases sent to them. ``first`` describes the first process."""

    def __init__(self, **first):
        self.sent = []
        self.made = []
        self._first = first

    def __call__(self):
        self.made.append(FakeProcess(self.sent, **({} if self.made else self._first)))
        return self.made[-1]


def test_small_cases_are_examined_from_the_last_by_one_process(questions, make_case):
    start = Starter()
    large = make_case((8192, 2**17), name="large")
    warmers = Warmers(start, [*questions, (large, ("numerics",))], 1)
    warmers.wait()
    assert start.sent == ["d", "c", "b", "a"]
    assert warmers.examined == [f"made/{name}" for name in "dcba"]
    assert [process.is_closed for process in start.made] == [True]


@pytest.mark.parametrize("how", ["deadly", "losing"])
def test_a_case_that_ends_its_process_is_lost_and_a_fresh_process_takes_the_others(questions, how):
    start = Starter(**{how: "c"})
    warmers = Warmers(start, questions, 1)
    warmers.wait()
    assert (start.sent, len(start.made)) == (["d", "c", "b", "a"], 2)
    assert (warmers.lost, warmers.examined) == (["made/c"], ["made/d", "made/b", "made/a"])
    assert all(process.is_closed for process in start.made)


def test_a_case_without_an_end_is_ended(questions):
    start = Starter(hanging="d")
    warmers = Warmers(start, questions, 1, limit_s=0.05)
    warmers.wait()
    assert (warmers.lost, start.sent) == (["made/d"], ["d", "c", "b", "a"])


def test_a_case_that_the_run_has_come_to_is_left_out(questions):
    start = Starter(hanging="d")
    warmers = Warmers(start, questions, 1)
    warmers.skip(questions[1][0])
    while not start.made:
        pass
    start.made[0].kill()
    warmers.wait()
    assert start.sent == ["d", "c", "a"]


def test_closing_ends_a_process_in_the_midst_of_a_case_and_sends_no_more(questions):
    start = Starter(hanging="c")
    warmers = Warmers(start, questions, 1)
    while "c" not in start.sent:
        pass
    warmers.close()
    assert start.sent == ["d", "c"]
    assert [process.is_closed for process in start.made] == [True]
    warmers.close()


def test_a_backend_that_cannot_be_loaded_again_gets_no_case(questions):
    start = Starter(first=RefusedError("the suite has changed"))
    warmers = Warmers(start, questions, 1)
    warmers.wait()
    assert (start.sent, warmers.examined) == ([], [])
    assert [process.is_closed for process in start.made] == [True]


def test_what_is_only_timed_is_warmed_by_its_numerics(make_case):
    case = make_case((1, 5))
    assert questions_to_warm(RunPlan((case,), checks=("lse", "timing")), "a") == ((case, ("lse",)),)
    assert questions_to_warm(RunPlan((case,), checks=("timing",)), "a") == ((case, ("numerics",)),)


class Begins:
    """A fake of ``Warmers``: keeps what each was given, and what happened to it."""

    def __init__(self, log):
        self._log = log

    def __call__(self, start, questions, count, *, loading):
        self._log.append(f"{count} for {''.join(case.id for case, _ in questions)}")
        return self

    def skip(self, case):
        self._log.append(f"skips {case.id}")

    def wait(self):
        self._log.append("waits")

    def close(self):
        self._log.append("ends")


class Machine:
    """A clock, and caches that hold ``kernels``."""

    def __init__(self):
        self.kernels, self.now = 100, 0.0

    def kernel_count(self):
        return self.kernels

    def monotonic(self):
        return self.now


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(pool, "kernel_count", machine.kernel_count)
    monkeypatch.setattr(pool, "time", machine)
    monkeypatch.setattr(pool, "most_processes", lambda device, gpus: 5 if gpus == 1 else 3)
    return machine


@pytest.fixture
def log(monkeypatch):
    """What happens to the warmers."""
    log = []
    monkeypatch.setattr(pool, "Warmers", Begins(log))
    return log


def a_pool():
    return SimpleNamespace(limits=TimeLimits())


@pytest.fixture
def plan(questions):
    return RunPlan(tuple(case for case, _ in questions), checks=("timing",))


@pytest.mark.parametrize(
    ("added", "seconds", "is_on", "expected"),
    [
        pytest.param(2, 3.0, True, ["4 for cd", "skips c", "skips d", "ends"], id="compiles"),
        pytest.param(0, 3.0, True, [], id="kernels are there"),
        pytest.param(1, 0.1, True, [], id="kernels cost nothing"),
        pytest.param(2, 3.0, False, [], id="off"),
    ],
)
def test_warmers_begin_when_the_first_case_has_compiled_and_end_with_the_backend(
    machine, questions, plan, log, added, seconds, is_on, expected
):
    workers = a_pool()
    ahead = WarmingAhead(plan, workers, is_on=is_on)
    for index in range(len(questions)):
        ahead.before("a", questions[index:], workers)
        machine.now += seconds
        machine.kernels += added
    ahead.finish("a")
    assert log == expected


def test_gpus_at_work_share_the_warmers_of_a_backend(machine, questions, plan, log):
    """Those of ``a`` start on the GPU that compiles first, those of ``b`` on its own; each end with their backend."""
    first, second = a_pool(), a_pool()
    ahead = WarmingAhead(plan, first, 2, is_on=True)
    for ref, index, workers in (("a", 0, first), ("b", 0, second), ("a", 1, first), ("a", 2, second), ("b", 1, second)):
        ahead.before(ref, questions[index:], workers)
        machine.now, machine.kernels = machine.now + 3, machine.kernels + 1
    ahead.finish("a")
    ahead.close()
    assert log == ["2 for cd", "skips c", "2 for cd", "ends", "ends"]


def test_what_is_only_timed_is_examined_before_and_nothing_beside_the_times(machine, questions, plan, log):
    workers = a_pool()
    ahead = WarmingAhead(plan, workers, is_on=True)
    ahead.before_times(["a", "b"])
    ahead.close()
    assert log == ["4 for abcd", "waits", "ends"] * 2
    for index in range(len(questions)):
        ahead.before("a", questions[index:], workers)
        machine.now, machine.kernels = machine.now + 3, machine.kernels + 1
    assert len(log) == 6


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 8),
        ({"cores": 3}, 3),
        ({"host": 7 * 2**30}, 4),
        ({"memory": 24 * 2**30}, 3),
        ({"memory": 4 * 2**30}, 1),
        ({"modes": GpuModes("Exclusive_Process", "Disabled")}, 1),
        ({"modes": None, "memory": None, "host": None}, 8),
        ({"gpus": 16}, 4),
        ({"gpus": 8, "host": 40 * 2**30}, 3),
    ],
)
def test_as_many_processes_as_the_machine_has_room_for(changed, expected, monkeypatch):
    """An H100 with 80 GiB in a host of 64 cores and 500 GiB, but for what is ``changed``."""
    found = {
        "cores": 64,
        "host": 500 * 2**30,
        "memory": 80 * 2**30,
        "modes": GpuModes("Default", "Disabled"),
        "gpus": 1,
        **changed,
    }
    monkeypatch.setattr(pool, "usable_cores", lambda: found["cores"])
    monkeypatch.setattr(pool, "free_host_bytes", lambda: found["host"])
    facts = Facts("H100", "9.0", found["memory"], cache=50 * 2**20)
    monkeypatch.setattr(Cuda, "facts", lambda _gpu: facts)
    monkeypatch.setattr(Cuda, "modes", lambda _gpu: found["modes"])
    device = "cpu" if found["memory"] is None else "cuda"
    assert most_processes(device, found["gpus"]) == expected
