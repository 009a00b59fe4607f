"""Times taken in rounds through processes: a fresh one each turn, alone, whatever became of the others."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from inline_snapshot import snapshot

import attncheck
from attncheck.cases.model import Case
from attncheck.errors import QuestionError
from attncheck.harness.checks.findings import Finding, Holds, NotExamined
from attncheck.harness.run.evaluate import RunPlan, environment_of
from attncheck.harness.run.outcomes import BackendDescription, Circumstances, ProcessEnd, not_loaded, record_of
from attncheck.harness.workers.executor import BackendQuestion, Supervisor
from attncheck.harness.workers.limits import Limit, TimeLimits
from attncheck.harness.workers.pool import WorkerPool
from attncheck.harness.workers.process import ProcessEndedError
from attncheck.harness.workers.worker import Examined, Stage
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import Crashed, Record

ENVIRONMENT = environment_of("cpu")
DEATH = ProcessEndedError(ProcessEnd("killed by SIGSEGV", "the end of it"))
Deed = Finding | Exception | str
"""What a process does with a case: a finding, its end, or why the case cannot be put."""


class FakePool:
    """A fake of the workers: keeps account of who is alive, and of who else is alive while one takes times.

    ``deeds``: by backend, case and round, what is not ``Holds``.
    """

    gpus = ()

    def __init__(self, cases: Iterable[Case], refs: str) -> None:
        self.cases = {case.key: case for case in cases}
        self.log: list[str] = []
        self.deeds: dict[tuple[str, str, int], Deed] = {}
        self.unstartable: dict[str, list[int]] = {}
        self.alive = {ref: Process(self, ref, 0) for ref in refs}
        self.ending: list[str] = []
        self.starts = dict.fromkeys(refs, 1)
        self.limits = TimeLimits()

    def keep_only(self, refs: Iterator[str]) -> None:
        kept = set(refs)
        self.alive = {ref: process for ref, process in self.alive.items() if ref in kept}

    def isolate(self, ref: str) -> None:
        self.keep_only(iter([ref]))
        self.ending.clear()

    def process(self, ref: str) -> "Process | None":
        return self.alive.get(ref)

    def discard(self, ref: str) -> None:
        self.alive.pop(ref, None)

    def prepare(self, ref: str) -> None:
        pass

    def restart(self, ref: str) -> "Process":
        self.starts[ref] += 1
        if self.starts[ref] in self.unstartable.get(ref, []):
            raise QuestionError("no more memory")
        self.alive[ref] = Process(self, ref, self.starts[ref] - 1)
        return self.alive[ref]

    def finish(self, ref: str) -> None:
        if self.alive.pop(ref, None) is not None:
            self.ending.append(ref)


class Process:
    def __init__(self, pool: FakePool, ref: str, number: int) -> None:
        self.ref, self.number, self.has_ended = ref, number, False
        self._pool = pool
        self._answers: list[Any] = []
        self.examined: list[BackendQuestion] = []

    def send(self, method: Any, key: str, checks: tuple[str, ...], number: int, _drawn: None) -> None:
        pool, case = self._pool, self._pool.cases[key]
        pool.log.append(f"{self.ref}{self.number} {case.id} {'+'.join(checks)} {number}")
        if "timing" in checks:
            assert list(pool.alive) == [self.ref], "another process of the run is alive"
            assert pool.ending == [], "another process of the run is about to end"
        deed = pool.deeds.get((self.ref, case.id, number), Holds())
        self._answers.append(Stage(name="declarations"))
        for check in checks:
            if isinstance(deed, str):
                break
            self._answers.append(Stage(name=f"check {check}"))
            if isinstance(deed, Exception):
                self._answers.append(deed)
                return
            who = Circumstances(0, ENVIRONMENT.digest, attncheck.__version__, number)
            self._answers.append(record_of(who, case, known(self.ref), check, deed, 0.0))
        self._answers.append(Examined(blind=deed if isinstance(deed, str) else None))

    def answer(self, limit: Limit | None = None) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def known(ref: str) -> BackendDescription:
    return BackendDescription(info=BackendInfo(name=ref, ref=ref))


def supervisor(pool: FakePool, *backends: BackendDescription, checks: tuple[str, ...], rounds: int) -> Supervisor:
    plan = RunPlan(cases=tuple(pool.cases.values()), checks=checks, rounds=rounds)
    return Supervisor(plan, backends, cast(WorkerPool, pool), ENVIRONMENT, jobs=2)


def examine(
    pool: FakePool, *backends: BackendDescription, checks: tuple[str, ...] = ("timing",), rounds: int = 2
) -> list[Record]:
    return list(supervisor(pool, *backends, checks=checks, rounds=rounds).run())


def outcomes(records: Iterable[Record]) -> list[tuple[str, str, int, str]]:
    return [(record.backend, record.case_id, record.round, record.outcome) for record in records]


@pytest.fixture
def two(make_case: Any) -> tuple[Case, Case]:
    return make_case(name="x"), make_case(name="y")


def test_each_round_has_fresh_processes_one_alone_at_a_time_and_another_one_first(two: tuple[Case, ...]) -> None:
    pool = FakePool(two, "abc")
    records = examine(pool, *map(known, "abc"), rounds=3)
    assert [line.split()[0] for line in pool.log[::2]] == ["a0", "b1", "c1", "b2", "c2", "a1", "c3", "a2", "b3"]
    assert pool.log[:2] == ["a0 x timing 0", "a0 y timing 0"]
    order = ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert outcomes(records) == [(ref, case.id, turn // 3, "passed") for turn, ref in enumerate(order) for case in two]
    assert len({record.key for record in records}) == 18


def test_other_checks_come_before_in_processes_of_their_own(two: tuple[Case, ...]) -> None:
    named = (two[0], replace(two[1], checks=("lse",)))
    pool = FakePool(named, "ab")
    examine(pool, *map(known, "ab"), checks=("numerics", "lse", "timing"), rounds=1)
    others = ["a0 x numerics+lse 0", "a0 y lse 0", "b0 x numerics+lse 0", "b0 y lse 0"]
    assert sorted(pool.log[:4]) == others  # side by side
    assert pool.log[4:] == ["a1 x timing 0", "a1 y timing 0", "b1 x timing 0", "b1 y timing 0"]


def test_without_times_there_is_one_process_and_one_round(two: tuple[Case, ...]) -> None:
    pool = FakePool(two, "a")
    assert outcomes(examine(pool, known("a"), checks=("numerics",), rounds=1)) == [
        ("a", "x", 0, "passed"),
        ("a", "y", 0, "passed"),
    ]
    assert pool.starts == {"a": 1}


def test_a_crash_in_one_round_is_of_that_round_and_the_others_go_on(two: tuple[Case, ...]) -> None:
    pool = FakePool(two, "ab")
    pool.deeds["a", "x", 1] = DEATH
    records = examine(pool, *map(known, "ab"), rounds=3)
    of_a = [entry for entry in outcomes(records) if entry[0] == "a"]
    assert [(case, number, outcome) for _, case, number, outcome in of_a] == [
        *(("x", 0, "passed"), ("y", 0, "passed")),
        *(("x", 1, "crashed"), ("y", 1, "passed")),
        *(("x", 2, "passed"), ("y", 2, "passed")),
    ]
    (crash,) = (record for record in records if isinstance(record, Crashed))
    assert (crash.stage, crash.cause, crash.round) == ("check timing", snapshot("killed by SIGSEGV"), 1)
    assert {outcome for ref, _, _, outcome in outcomes(records) if ref == "b"} == {"passed"}


def test_one_that_does_not_come_up_in_a_round_loses_that_round(two: tuple[Case, ...]) -> None:
    pool = FakePool(two, "ab")
    pool.unstartable["b"] = [3]  # its process of the second round
    records = examine(pool, *map(known, "ab"), rounds=3)
    lost = [record for record in records if isinstance(record, Crashed)]
    assert outcomes(lost) == [("b", "x", 1, "crashed"), ("b", "y", 1, "crashed")]
    assert {(record.stage, record.cause.rpartition(": ")[2]) for record in lost} == {("the start", "no more memory")}
    assert len(records) == 12


def test_what_the_first_round_did_not_examine_is_recorded_once(two: tuple[Case, ...]) -> None:
    pool = FakePool(two, "ab")
    pool.deeds["a", "x", 0] = NotExamined(("no windows",))
    pool.deeds["b", "x", 0] = pool.deeds["b", "y", 0] = NotExamined(("nothing",))
    records = examine(pool, known("a"), known("b"), not_loaded("gone", ("no library",)), rounds=3)
    assert outcomes(records) == [
        *(("a", "x", 0, "unsupported"), ("a", "y", 0, "passed")),
        *(("b", "x", 0, "unsupported"), ("b", "y", 0, "unsupported")),
        *(("gone", "x", 0, "unavailable"), ("gone", "y", 0, "unavailable")),
        *(("a", "y", 1, "passed"), ("a", "y", 2, "passed")),
    ]
    assert pool.starts == {"a": 3, "b": 2}


def test_what_a_later_round_does_not_examine_is_of_that_round(two: tuple[Case, ...]) -> None:
    pool = FakePool(two[:1], "a")
    pool.deeds["a", "x", 1] = NotExamined(("memory is short",))
    outcomes = [record.outcome for record in examine(pool, known("a"), rounds=3)]
    assert outcomes == ["passed", "unsupported", "passed"]


@pytest.mark.parametrize("checks", [("timing",), ("numerics", "timing")])
def test_a_case_that_cannot_be_put_is_reported_once_and_left_out_of_later_rounds(
    two: tuple[Case, ...], checks: tuple[str, ...]
) -> None:
    pool = FakePool(two, "ab")
    for ref in "ab":
        pool.deeds[ref, "x", 0] = "case made/x: blind"
    both = supervisor(pool, known("a"), known("b"), checks=checks, rounds=2)
    assert {record.case_id for record in both.run()} == {"y"}
    assert list(map(str, both.blind)) == ["case made/x: blind"]
    assert not [line for line in pool.log if " x " in line and line.endswith("1")]
