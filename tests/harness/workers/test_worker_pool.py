"""The processes of a run: what they are started with, and the report of one that does not come up."""

import os
from types import SimpleNamespace

import pytest
from inline_snapshot import snapshot

from attncheck.errors import BackendLoadError, QuestionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.evaluate import RunPlan, environment_of
from attncheck.harness.run.outcomes import OURSELVES, BackendDescription, ProcessEnd, not_loaded
from attncheck.harness.run.selection import select_cases
from attncheck.harness.workers import limits as limits_module
from attncheck.harness.workers import pool as workers
from attncheck.harness.workers.limits import (
    MemoryLimits,
    MemoryWatch,
    TimeLimits,
    WorkerSettings,
    passed_environment,
)
from attncheck.harness.workers.pool import WorkerPool
from attncheck.harness.workers.process import ProcessEndedError, RefusedError, StoppedError, WorkerError, WorkerProcess
from attncheck.harness.workers.protocol import HarnessFailure
from attncheck.harness.workers.starting import ForkServer
from attncheck.harness.workers.worker import Assignment, CaseServer, DeviceChosen, Imports
from attncheck.reports.run_file.header import BackendInfo

HERE = environment_of("cpu")
ASSIGNMENT = Assignment(
    suites=("smoke",), digests=(), device="cpu", seed=0, dump=None, environment=HERE, timing=TimingSettings()
)
CHOSEN = DeviceChosen(device="cpu", notes=("as wished",), environment=HERE)
FAULT = WorkerError("a", HarnessFailure(error="ValueError: ours", traceback="Traceback, and where"))


def described(ref, **required):
    return BackendDescription(info=BackendInfo(name=ref, ref=ref, required_environment=required))


class Fake:
    """A process that returns the answers of ``script`` by reference and number of the start, by default a description.

    ``alive``: the references of the processes alive at each ``receive`` of a description.
    """

    script: dict[str, list[BackendDescription | Exception]]
    started: list["Fake"]
    alive: list[str]
    device: DeviceChosen | Exception
    silent: tuple[str, ...]
    spoilt: dict[str, Exception]

    def __init__(self, environment=None, show=None, pass_env=(), start=None):
        self.ref, self.environment, self.state = "", dict(environment or {}), "alive"
        self.printed = SimpleNamespace(label="")
        self.calls = []
        self._turn = 0
        self.identity, self.has_ended = 0, True
        self.started.append(self)

    @property
    def received(self):
        return [given[0] for method, *given in self.calls if method is CaseServer.assign]

    def send(self, *call):
        self.calls.append(call)
        if call[0] is CaseServer.load:
            self._turn = sum(other.ref == self.ref for other in self.started) - 1

    def call(self, limit, *call):
        self.send(*call)
        self.limit = limit
        assert call[0] is CaseServer.choose_device
        if self.ref in self.silent:
            raise ProcessEndedError(ProcessEnd("killed by SIGABRT", ""))
        answer = self.spoilt.pop(self.ref, self.device)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def receive(self, _limit):
        assert self.calls[-1][0] is CaseServer.describe
        self.alive.append("".join(each.ref for each in self.started if each.state == "alive"))
        answer = self.script[self.ref][self._turn] if self.ref in self.script else described(self.ref)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def finish(self):
        self.state = "finished"

    def kill(self):
        self.close()

    def close(self, *, at_once=False):
        self.state = "ended at once" if at_once or self.state == "alive" else "ended"


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(workers, "WorkerProcess", Fake)
    Fake.started, Fake.script, Fake.alive = [], {}, []
    Fake.device, Fake.silent, Fake.spoilt = CHOSEN, (), {}
    yield Fake.started
    assert all(fake.state.startswith("ended") for fake in Fake.started)


def assigned(*given, **more):
    processes = WorkerPool(*given, **more)
    processes.assign(ASSIGNMENT)
    return processes


def test_all_are_started_before_the_first_is_listened_to(started):
    Fake.script = {"b": [RefusedError("unknown backend")]}
    with assigned() as processes:
        processes.start(["a"])
        assert len(started) == 1
        found = processes.describe(["a", "b"])
        assert [found[0], str(found[1])] == [described("a"), "unknown backend"]
        assert len(started) == 2


def test_each_process_imports_what_the_run_needs_before_its_backend(started):
    request = Imports(checks=("lse",), functions=False)
    with assigned(imports=request) as processes:
        processes.start(["a", "b"])
        assert [fake.ref for fake in started] == ["a", "b"]
        assert [fake.calls[0] for fake in started] == [(CaseServer.prepare, request)] * 2


def test_a_server_with_other_variables_than_the_processes_need_is_replaced(monkeypatch):
    monkeypatch.setenv("OF_MINE", "1")
    early = ForkServer(passed_environment(os.environ))
    with WorkerPool(server=early) as pool:
        assert pool._server is early
    with WorkerPool(server=early, settings=WorkerSettings(pass_env=("OF_MINE",))) as pool:
        assert pool._server.environment["OF_MINE"] == "1"


def test_the_first_process_that_lives_chooses_the_device(started):
    Fake.silent = ("a",)
    with WorkerPool() as processes:
        processes.start(["a", "b", "c"])
        assert processes.choose_device(("cuda",), None) == ("cpu", ("as wished",), HERE)
    assert [len(fake.calls) for fake in started] == [3, 3, 2]
    assert started[1].calls[-1] == (CaseServer.choose_device, None, ("cuda",))


def test_where_no_process_lives_one_without_a_backend_chooses(started):
    Fake.silent = ("a",)
    with WorkerPool(settings=WorkerSettings(TimeLimits(backend_s=12.0))) as processes:
        processes.start(["a"])
        assert processes.choose_device((), "cpu")[0] == "cpu"
        assert [(fake.ref, fake.state) for fake in started] == [("a", "alive"), ("", "ended at once")]
    assert [fake.limit.seconds for fake in started] == [12.0, 300.0]  # the first one imports its backend before
    assert started[0].limit.words.endswith("by --backend-timeout 12")
    Fake.silent = ("a", "")
    with WorkerPool() as processes, pytest.raises(QuestionError) as refused:
        processes.choose_device((), "cpu")
    assert str(refused.value) == snapshot(
        "a process without a backend ended before it named the device: killed by SIGABRT"
    )


def test_every_process_is_watched_and_gets_its_limits(started, monkeypatch):
    watched = []
    watches = []
    monkeypatch.setattr(MemoryWatch, "__init__", lambda _watch, limit: watches.append(limit))
    monkeypatch.setattr(MemoryWatch, "add", lambda _watch, process: watched.append(process))
    limits = MemoryLimits(host=4 * 2**30, device=2**30)
    with assigned(settings=WorkerSettings(memory=limits)) as processes:
        processes.describe(["a"])
        processes.twin().restart("a")
    assert watched == started
    assert set(watches) == {limits.host}
    assert [[message.memory for message in fake.received] for fake in started] == [[limits]] * 2


def test_a_device_that_is_not_there_is_refused(started):
    Fake.device = RefusedError("device 'cuda': torch finds no GPU")
    with WorkerPool() as processes, pytest.raises(QuestionError, match="torch finds no GPU"):
        processes.choose_device((), "cuda")


def test_a_host_with_little_memory_holds_few_processes(started, monkeypatch):
    monkeypatch.setattr(limits_module, "free_host_bytes", lambda: 6 * 2**30)
    refs = list("abcde")
    with assigned() as processes:
        processes.start(refs)
        assert [fake.ref for fake in started] == ["a", "b", "c"]
        assert processes.describe(refs) == [described(ref) for ref in refs]
        assert Fake.alive == ["abc", "abc", "acd", "ade", "ade"]
        assert processes.process("b") is None
        again = processes.restart("b")
        assert [fake.ref for fake in started] == ["a", "b", "c", "d", "e", "b"]
        assert again is started[-1] is processes.process("b")


def test_one_that_requires_an_environment_is_started_again_with_it(started, monkeypatch):
    monkeypatch.setenv("ATTNCHECK_SET", "yes")
    needy = described("needy", ATTNCHECK_NEED="1", ATTNCHECK_SET="yes")
    content = described("content", ATTNCHECK_SET="yes")
    Fake.script = {"needy": [needy, needy, needy], "content": [content]}
    with assigned() as processes:
        assert processes.describe(["needy", "content"]) == [needy, content]
        assert [(fake.ref, fake.environment) for fake in started] == [
            ("needy", {}),
            ("content", {}),
            ("needy", {"ATTNCHECK_NEED": "1"}),
        ]
        processes.restart("needy")
        assert started[-1].environment == {"ATTNCHECK_NEED": "1"}


def test_one_that_is_never_content_is_refused(started):
    Fake.script = {"moody": [described("moody", A="1"), described("moody", A="2")]}
    with assigned() as processes:
        (found,) = processes.describe(["moody"])
    assert isinstance(found, BackendLoadError)
    assert str(found) == snapshot("backend 'moody': started with {'A': '1'}, it now requires {'A': '2'}")


def test_one_that_requires_more_than_a_process_can_be_given_is_refused_alone(started):
    greedy = described("greedy", A="x" * 200_000)
    Fake.script = {"greedy": [greedy]}
    with assigned() as processes:
        processes.start(["greedy", "content"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers, "WorkerProcess", WorkerProcess)
            refused, content = processes.describe(["greedy", "content"])
    assert isinstance(refused, BackendLoadError)
    assert str(refused) == snapshot(
        "backend 'greedy': its process cannot be started with the environment it requires: Argument list too long"
    )
    assert content == described("content")


def test_a_death_while_a_backend_is_loaded_is_part_of_its_description(started):
    end = ProcessEnd("killed by SIGABRT", "loading\nno driver\n")
    Fake.script = {"dead": [ProcessEndedError(end)]}
    with assigned() as processes:
        (found,) = processes.describe(["dead"])
    assert isinstance(found, BackendDescription)
    assert (found.is_loaded, found.failure) == (False, end)


def test_a_process_that_its_backend_has_spoilt_names_no_device_and_is_replaced(started):
    Fake.script, Fake.spoilt = {"a": [described("a"), FAULT]}, {"a": FAULT}
    with assigned() as processes:
        processes.start(["a", "b"])
        assert processes.choose_device((), "cpu")[0] == "cpu"
        found, other = processes.describe(["a", "b"])
    assert isinstance(found, BackendDescription)
    assert found.failure == Raised(OURSELVES, "WorkerError", FAULT.fault.error, FAULT.fault.traceback)
    assert other == described("b")
    assert [fake.ref for fake in started] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (RefusedError("the suite has changed"), "the suite has changed"),
        (not_loaded("a", ("no library", "no GPU")), "no library; no GPU"),
        (
            BackendDescription(info=BackendInfo(name="a", ref="a", features=("lse",))),
            "a has changed since the run began",
        ),
        (FAULT, "ValueError: ours (in the process of a)"),
    ],
)
def test_one_that_does_not_come_up_again_as_it_was(started, second, message):
    Fake.script = {"a": [described("a"), described("a"), second]}
    with assigned() as processes:
        processes.describe(["a"])
        processes.restart("a")
        with pytest.raises(WorkerError if second is FAULT else QuestionError) as refused:
            processes.restart("a")
    assert str(refused.value) == message


def test_a_pool_that_is_stopped_starts_no_process_until_it_is_isolated(started):
    """At the end of the untimed checks, a slot may be stopped while it starts a process; timings follow."""
    with assigned() as processes:
        processes.describe(["a"])
        processes.stop()
        assert started[0].state == "ended at once"
        with pytest.raises(StoppedError):
            processes.restart("a")
        assert len(started) == 1
        processes.isolate("a")
        processes.restart("a")
        assert started[1].state == "alive"


def test_those_that_are_done_may_take_a_moment_and_others_end_at_once(started):
    with assigned() as processes:
        processes.describe(list("abcd"))
        processes.keep_only("abc")
        assert [fake.state for fake in started] == ["alive", "alive", "alive", "ended at once"]
        processes.finish("a")
        assert processes.process("a") is None
        assert [fake.state for fake in started[:2]] == ["finished", "alive"]
        processes.isolate("b")  # from now on it is alone
        assert [fake.state for fake in started[:3]] == ["ended", "alive", "ended at once"]
        assert processes.process("c") is None
    assert started[1].state == "ended at once"


def test_one_that_used_a_gpu_has_ended_before_the_next_one_uses_it(started):
    with WorkerPool() as processes:
        processes.assign(ASSIGNMENT.model_copy(update={"device": "cuda:0"}))
        processes.describe(list("ab"))
        processes.finish("a")
        assert [fake.state for fake in started] == ["ended", "alive"]


def test_an_interrupted_run_waits_for_no_process(started):
    processes = assigned()
    processes.describe(["a"])
    processes.finish("a")
    processes.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert started[0].state == "ended at once"


def test_a_backend_that_shares_no_probes_any_more_is_started_again_without(started):
    with assigned() as processes:
        processes.describe(list("ab"))
        processes.stop_sharing_probes("a")
        for ref in "ab":
            processes.discard(ref)
            processes.restart(ref)
    shares = [(fake.ref, assignment.shares_probes) for fake in started for assignment in fake.received]
    assert shares == [("a", True), ("b", True), ("a", False), ("b", True)]


@pytest.mark.parametrize(("patterns", "cases"), [((), None), (("decode.float16",), ("smoke/decode.float16",))])
def test_processes_are_assigned_the_cases_that_are_selected(started, patterns, cases):
    selection = select_cases(["smoke"], patterns)
    with WorkerPool() as processes:
        processes.begin(selection, RunPlan(cases=selection.cases), HERE)
        processes.describe(["a"])
    (assignment,) = started[0].received
    assert (assignment.cases, assignment.by_default) == (cases, False)
