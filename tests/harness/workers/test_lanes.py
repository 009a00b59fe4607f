"""Several processes at work at once: who gets which case when, the order of records, and what an end costs."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.run.evaluate import RunPlan, environment_of
from attncheck.harness.run.outcomes import (
    BackendDescription,
    Circumstances,
    ProcessEnd,
    absent,
    identity_of,
    not_loaded,
)
from attncheck.harness.run.preparation import Gpu
from attncheck.harness.workers.executor import BackendQuestion, Supervisor
from attncheck.harness.workers.limits import Limit, TimeLimits
from attncheck.harness.workers.pool import WorkerError, WorkerPool
from attncheck.harness.workers.process import ProcessEndedError
from attncheck.harness.workers.protocol import HarnessFailure
from attncheck.harness.workers.worker import Examined, Stage
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import Crashed, Passed, Record

ENVIRONMENT = environment_of("cpu")


def known(ref: str) -> BackendDescription:
    return BackendDescription(info=BackendInfo(name=ref, ref=ref))


class FakeProcess:
    """Passes each case, each answer after ``pause`` looks in vain; dies of the cases in ``deadly``."""

    def __init__(self, pool: "FakePool", ref: str) -> None:
        self.has_ended = False
        self.pause = pool.pauses.get(ref, 0)
        self._pool, self._ref = pool, ref
        self._answers: list[Any | None] = []
        self.examined: list[BackendQuestion] = []

    def send(self, method: Any, key: str, checks: tuple[str, ...], *_: Any) -> None:
        assert not self._answers, "sent before it has answered"
        self._pool.log.append(f"{self._pool.name}{self._ref} begins {key.partition('/')[2]}")
        check = checks[0]
        if key in self._pool.deadly:
            self._answers = [Stage(name=f"check {check}"), ProcessEndedError(ProcessEnd("killed by SIGSEGV", ""))]
        else:
            self._answers = [*[None] * self.pause, self._passed(check), Examined()]

    def _passed(self, check: str) -> Passed:
        question, now = self.examined[-1], Circumstances(0, ENVIRONMENT.digest, attncheck.__version__)
        return Passed(**identity_of(now, question.case, question.backend, check))

    def answer(self, limit: Limit | None = None) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, Examined):
            self._pool.log.append(f"{self._pool.name}{self._ref} is done")
        return answer


class FakePool:
    """A fake of the pool. ``pauses``: how long the processes of a backend take for each case."""

    gpus: tuple[Gpu, ...] = ()

    def __init__(self, refs: str, name: str = "", **pauses: int) -> None:
        self.name, self.pauses = name, pauses
        self.log: list[str] = []
        self.deadly: set[str] = set()
        self.processes = {ref: FakeProcess(self, ref) for ref in refs}
        self.finished: list[str] = []
        self.twins: list[FakePool] = []
        self.failure: Exception | None = None
        self.limits = TimeLimits()

    def twin(self, gpu: Gpu | None = None) -> "FakePool":
        twin = FakePool("", f"{gpu.uuid}: " if gpu else f"twin {len(self.twins)} of ", **self.pauses)
        twin.log, twin.deadly, twin.failure = self.log, self.deadly, self.failure
        self.twins.append(twin)
        return twin

    def keep_only(self, refs: Iterator[str]) -> None:
        pass

    def process(self, ref: str) -> FakeProcess | None:
        return self.processes.get(ref)

    def discard(self, ref: str) -> None:
        self.processes.pop(ref, None)

    def prepare(self, ref: str) -> None:
        pass

    def restart(self, ref: str) -> FakeProcess:
        if self.name and self.failure is not None:
            raise self.failure
        self.log.append(f"{self.name}{ref} is started")
        self.processes[ref] = FakeProcess(self, ref)
        return self.processes[ref]

    def finish(self, ref: str) -> None:
        self.finished.append(ref)
        self.processes.pop(ref, None)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many processes were waited for, each time."""
    found: list[int] = []
    monkeypatch.setattr(
        "attncheck.harness.workers.executor.wait_for_answers", lambda processes: found.append(len(processes))
    )
    return found


@pytest.fixture
def help_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is worth its start, however little is left."""
    monkeypatch.setattr("attncheck.harness.workers.executor._START_S", 0)


@pytest.fixture
def cases(make_case: Callable[..., Case]) -> list[Case]:
    return [make_case(name=name) for name in ("first", "second", "third", "fourth")]


def examine(workers: FakePool, cases: Sequence[Case], *backends: BackendDescription, jobs: int = 2) -> Iterator[Record]:
    plan = RunPlan(cases=tuple(cases), checks=("numerics",))
    return Supervisor(plan, backends, cast(WorkerPool, workers), ENVIRONMENT, jobs=jobs).run()


def in_order(records: Iterable[Record]) -> list[tuple[str, str, str]]:
    return [(record.backend, record.case_id, record.outcome) for record in records]


def everything(refs: str, cases: Sequence[Case]) -> list[tuple[str, str, str]]:
    return [(ref, case.id, "passed") for ref in refs for case in cases]


def test_one_process_examines_one_backend_after_the_other(cases: list[Case]) -> None:
    workers = FakePool("ab")
    assert in_order(examine(workers, cases, *map(known, "ab"), jobs=1)) == everything("ab", cases)
    assert workers.log == [
        line for ref in "ab" for case in cases for line in (f"{ref} begins {case.id}", f"{ref} is done")
    ]
    assert workers.finished == ["a", "b"]


def test_two_processes_are_at_work_and_records_keep_their_order(cases: list[Case], waits: list[int]) -> None:
    """The first backend is slow: the others are done before, and their records wait for its."""
    workers = FakePool("abc", a=20)
    assert in_order(examine(workers, cases, *map(known, "abc"))) == everything("abc", cases)
    assert workers.log[:2] == ["a begins first", "b begins first"]
    assert workers.finished == ["b", "c", "a"]
    assert workers.log.index("c is done") < workers.log.index("a begins second")
    assert set(waits) == {1}  # only for the slow one, once nothing else is left
    assert workers.twins == []


def test_records_of_the_first_come_before_the_others_are_done(cases: list[Case]) -> None:
    workers = FakePool("ab", b=20)
    found = examine(workers, cases, *map(known, "ab"))
    assert in_order(next(found) for _ in cases) == everything("a", cases)
    assert "b is done" not in workers.log
    assert in_order(found) == everything("b", cases)


@pytest.mark.usefixtures("help_at_once")
def test_a_backend_alone_gets_several_processes(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attncheck.harness.workers.executor._SAMPLE", 1)
    workers = FakePool("a", a=3)
    assert in_order(examine(workers, cases, known("a"), jobs=3)) == everything("a", cases)
    assert len(workers.twins) == 2
    begun = [line.partition(" begins ")[2] for line in workers.log if " begins " in line]
    assert sorted(begun) == sorted(case.id for case in cases)
    assert {line.partition(" begins ")[0] for line in workers.log if " begins " in line} == {
        "a",
        "twin 0 of a",
        "twin 1 of a",
    }
    assert (workers.finished, [twin.finished for twin in workers.twins]) == (["a"], [["a"], ["a"]])


@pytest.mark.usefixtures("help_at_once")
def test_one_more_process_that_cannot_be_started_costs_nothing(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attncheck.harness.workers.executor._SAMPLE", 1)
    workers = FakePool("a", a=3)
    workers.failure = QuestionError("no more processes")
    assert in_order(examine(workers, cases, known("a"))) == everything("a", cases)
    assert len(workers.twins) == 1
    assert [line for line in workers.log if "twin" in line] == []


def test_each_lane_begins_and_helps_on_its_own_gpu(
    cases: list[Case], help_at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second lane begins ``b`` in a process of its own; the first one then helps with ``b`` on its own GPU."""
    monkeypatch.setattr("attncheck.harness.workers.executor._SAMPLE", 1)
    workers = FakePool("ab", a=1, b=9)
    workers.gpus = (Gpu("GPU-0"), Gpu("GPU-1"), Gpu("GPU-2"))
    assert in_order(examine(workers, cases, *map(known, "ab"))) == everything("ab", cases)
    assert [twin.name for twin in workers.twins] == ["GPU-1: "]
    assert workers.log[:3] == ["a begins first", "GPU-1: b is started", "GPU-1: b begins first"]
    begun = {line.partition(" begins ")[0] for line in workers.log if " begins " in line}
    assert begun == {"a", "b", "GPU-1: b"}
    assert (workers.finished, workers.twins[0].finished) == (["a", "b"], ["b"])


@pytest.mark.parametrize(("gpus", "twins"), [("0", []), ("01", ["GPU-1: ", "GPU-0: "])])
def test_more_processes_than_gpus_share_them(cases: list[Case], gpus: str, twins: list[str]) -> None:
    workers = FakePool("abc", a=20, b=20, c=20)
    workers.gpus = tuple(Gpu(f"GPU-{number}") for number in gpus)
    assert in_order(examine(workers, cases, *map(known, "abc"), jobs=3)) == everything("abc", cases)
    assert [twin.name for twin in workers.twins] == twins
    starts = [workers.log.index(line) for line in workers.log if line.endswith("begins first")]
    assert max(starts) < min(map(workers.log.index, (line for line in workers.log if line.endswith("is done"))))


def test_an_interrupt_yields_the_records_that_wait_for_an_earlier_backend(
    cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(processes: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attncheck.harness.workers.executor.wait_for_answers", interrupt)
    found = examine(FakePool("ab", a=20), cases, *map(known, "ab"))
    taken = []
    with pytest.raises(KeyboardInterrupt):
        taken.extend(found)  # an exception leaves what came before in the list
    assert in_order(taken) == everything("b", cases)


OURS = HarnessFailure(error="RuntimeError: No CUDA GPUs are available", traceback="")


@pytest.mark.parametrize("failure", [QuestionError("another GPU"), WorkerError("b", OURS), OSError("no memory")])
def test_a_backend_whose_process_does_not_start_on_a_gpu_is_left_to_the_others(
    failure: Exception, cases: list[Case]
) -> None:
    workers = FakePool("ab", a=1)
    workers.gpus = (Gpu("GPU-0"), Gpu("GPU-1"))
    workers.failure = failure
    assert in_order(examine(workers, cases, *map(known, "ab"))) == everything("ab", cases)
    assert [line for line in workers.log if "GPU-1" in line] == []


def test_what_needs_much_memory_is_examined_one_at_a_time(cases: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"second", "third"}
    monkeypatch.setattr(
        "attncheck.harness.workers.executor.needed_bytes", lambda case: 2**31 if case.id in large else 2**20
    )
    workers = FakePool("ab", a=3, b=3)
    assert in_order(examine(workers, cases, *map(known, "ab"))) == everything("ab", cases)
    at_work: dict[str, str] = {}
    most = 0
    for line in workers.log:
        ref, _, rest = line.partition(" ")
        at_work[ref] = rest.removeprefix("begins ")
        assert not {at_work.get("a"), at_work.get("b")} <= large
        most = max(most, sum(rest != "is done" for rest in at_work.values()))
    assert most == 2


def test_a_death_beside_another_process_costs_one_case(cases: list[Case]) -> None:
    workers = FakePool("ab", a=2, b=1)
    workers.deadly = {cases[1].key}
    records = list(examine(workers, cases, *map(known, "ab")))
    assert in_order(records) == [
        (ref, case.id, "crashed" if case is cases[1] else "passed") for ref in "ab" for case in cases
    ]
    (crash, _) = (record for record in records if isinstance(record, Crashed))
    assert (crash.cause, crash.stage) == (snapshot("killed by SIGSEGV"), "check numerics")
    assert sorted(line for line in workers.log if "started" in line) == [
        *["a is started"] * 2,  # one tries the case again
        *["b is started"] * 2,
    ]


def test_one_that_could_not_be_loaded_keeps_no_process_from_its_work(cases: list[Case]) -> None:
    workers = FakePool("ab")
    gone = not_loaded("gone", ("no library",))
    records = list(examine(workers, cases[:1], known("a"), gone, known("b")))
    expected = absent(Circumstances(0, ENVIRONMENT.digest, "0.1.0"), cases[0], gone, "numerics")
    assert [record.outcome for record in records] == ["passed", "unavailable", "passed"]
    assert records[1] == expected
    assert workers.log[:2] == ["a begins first", "b begins first"]


@pytest.mark.parametrize("ref", ["a", "b"])
def test_a_process_that_ended_before_its_first_question_is_replaced(cases: list[Case], ref: str) -> None:
    workers = FakePool("ab")
    workers.processes[ref].has_ended = True
    assert in_order(examine(workers, cases, *map(known, "ab"))) == everything("ab", cases)
    assert [line for line in workers.log if "started" in line] == [f"{ref} is started"]


def test_warmers_get_each_case_that_is_untimed_and_end_before_the_next_backend_and_the_times(
    make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr("attncheck.harness.workers.executor.WarmingAhead", lambda *_, is_on: Noting(log))
    cases = (make_case(name="first"), make_case(name="second"))
    plan = RunPlan(cases=cases, checks=("numerics",))
    list(Supervisor(plan, [known("a"), known("b")], cast(WorkerPool, FakePool("ab")), ENVIRONMENT, warms=True).run())
    assert log == ["a: first second", "a: second", "finish a", "b: first second", "b: second", "finish b", "close"]


def test_what_is_only_timed_is_warmed_before_the_first_round(make_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr("attncheck.harness.workers.executor.WarmingAhead", lambda *_, is_on: Noting(log))
    plan = RunPlan(cases=(make_case(name="first"),), checks=("timing",), rounds=0)
    gone = not_loaded("gone", ("no library",))
    list(Supervisor(plan, [known("a"), gone], cast(WorkerPool, FakePool("a")), ENVIRONMENT, warms=True).run())
    assert log == ["times of a", "close"]


class Noting:
    """A fake of what warms: keeps the calls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def before(self, ref: str, left: Sequence[tuple[Case, Any]], _workers: WorkerPool) -> None:
        self._log.append(f"{ref}: {' '.join(case.id for case, _ in left)}")

    def before_times(self, refs: Iterable[str]) -> None:
        self._log.append(f"times of {' '.join(refs)}")

    def finish(self, ref: str) -> None:
        self._log.append(f"finish {ref}")

    def close(self) -> None:
        self._log.append("close")
