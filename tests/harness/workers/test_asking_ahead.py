"""The process of the next backend at work while one is heard: when, how far ahead, and what its end then costs."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from attncheck.cases.model import Case
from attncheck.harness.run.backend_description import BackendDescription, unloadable
from attncheck.harness.run.evaluation import RunPlan, environment_of
from attncheck.harness.workers.protocol import Answer, Begun, Done, Examine, format_message
from attncheck.harness.workers.supervisor import Supervisor
from attncheck.harness.workers.worker_pool import WorkerPool
from attncheck.reports.run_file.header import BackendInfo
from attncheck.reports.run_file.records import Passed, Record

ENVIRONMENT = environment_of("cpu")
LEAST_PIPE = 2**16
"""Bytes that a pipe of Linux holds, and so what can be sent to a process that reads nothing."""


def passed() -> Passed:
    who = {"suite": "made", "case_id": "case", "case_hash": "0" * 12, "seed": 0, "backend": "a", "backend_ref": "a"}
    return Passed.model_validate(
        who | {"check": "numerics", "backend_version": "", "environment": "e" * 12, "attncheck_version": "0.1.0"}
    )


class Attentive:
    """Is asked many cases before it is listened to, passes each, and says when it is asked and when it is heard."""

    def __init__(self, ref: str, log: list[str]) -> None:
        self.has_ended, self.sent = False, 0
        self._ref, self._log = ref, log
        self._answers: Iterator[Answer] = itertools.cycle([Begun(stage="check numerics"), passed(), Done()])

    def send(self, request: Examine) -> None:
        self.sent += len(format_message(request))
        self._log.append(f"{self._ref} is asked {request.case.partition('/')[2]}")

    def receive(self, limit_s: float | None = None) -> Answer:
        answer = next(self._answers)
        if isinstance(answer, Done):
            self._log.append(f"{self._ref} is heard")
        return answer


class FakePool:
    """Stands for the pool, with a process for every letter of ``refs``."""

    def __init__(self, refs: str) -> None:
        self.log: list[str] = []
        self.processes = {ref: Attentive(ref, self.log) for ref in refs}

    def keep_only(self, refs: Iterator[str]) -> None:
        pass

    def process(self, ref: str) -> Attentive | None:
        return self.processes.get(ref)

    def discard(self, ref: str) -> None:
        del self.processes[ref]

    def prepare(self, ref: str) -> None:
        pass

    def restart(self, ref: str) -> Attentive:
        self.log.append(f"{ref} is restarted")
        self.processes[ref] = Attentive(ref, self.log)
        return self.processes[ref]

    def finish(self, ref: str) -> None:
        pass


def known(ref: str) -> BackendDescription:
    return BackendDescription(info=BackendInfo(name=ref, ref=ref))


def examine(workers: FakePool, cases: Sequence[Case], *backends: BackendDescription) -> Iterator[Record]:
    plan = RunPlan(cases=tuple(cases), checks=("numerics",))
    return Supervisor(plan, backends, cast(WorkerPool, workers), ENVIRONMENT, asks_ahead=True).run()


def before(log: list[str], line: str) -> list[str]:
    return log[: log.index(line)]


def test_the_next_one_works_while_one_is_heard_and_records_keep_their_order(make_case: Any) -> None:
    workers, cases = FakePool("abc"), (make_case(name="first"), make_case(name="second"))
    records = list(examine(workers, cases, *map(known, "abc")))
    assert [record.outcome for record in records] == ["passed"] * 6
    asked = [f"{{}} is asked {case.id}" for case in cases]
    assert workers.log == [
        *(line.format("b") for line in asked),
        *(line for case in asked for line in (case.format("a"), "a is heard")),
        *(line.format("c") for line in asked),
        *["b is heard"] * 2,
        *["c is heard"] * 2,
    ]


def test_a_case_that_takes_much_memory_is_not_asked_ahead(make_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, cases = FakePool("ab"), (make_case(name="first"), make_case(name="second"))
    monkeypatch.setattr(
        "attncheck.harness.workers.supervisor.needed_bytes", lambda case: 2**31 if case.id == cases[1].id else 2**20
    )
    list(examine(workers, cases, *map(known, "ab")))
    ahead = before(workers.log, "a is heard")
    assert ahead.count(f"b is asked {cases[0].id}") == 1
    assert f"b is asked {cases[1].id}" not in ahead
    assert workers.log.count(f"b is asked {cases[1].id}") == 1


def test_no_more_is_sent_ahead_than_a_pipe_holds_that_nobody_reads(make_case: Any) -> None:
    workers, case = FakePool("ab"), make_case()
    cases = [replace(case, id=f"{'long' * 50}{number}") for number in range(400)]
    records = examine(workers, cases, *map(known, "ab"))
    next(records)  # the first of a's: the requests to b have been sent
    assert 0 < workers.processes["b"].sent < LEAST_PIPE
    assert len(list(records)) == 2 * len(cases) - 1
    assert workers.processes["b"].sent > LEAST_PIPE
    assert [line for line in workers.log if line.startswith("b is asked")] == [
        f"b is asked {each.id}" for each in cases
    ]


def test_one_that_could_not_be_loaded_keeps_nobody_from_working_ahead(make_case: Any) -> None:
    workers, case = FakePool("ab"), make_case()
    records = list(examine(workers, [case], known("a"), unloadable("gone", "gone", ("no library",)), known("b")))
    assert [record.outcome for record in records] == ["passed", "unavailable", "passed"]
    assert f"b is asked {case.id}" in before(workers.log, "a is heard")


@pytest.mark.parametrize("ref", ["a", "b"])
def test_what_was_answered_ahead_counts_although_the_process_has_ended_since(make_case: Any, ref: str) -> None:
    """The first backend is asked nothing ahead: a process of its that has ended is replaced before it costs a case."""
    workers = FakePool("ab")
    workers.processes[ref].has_ended = True
    assert [record.outcome for record in examine(workers, [make_case()], *map(known, "ab"))] == ["passed"] * 2
    assert [line for line in workers.log if "restarted" in line] == (["a is restarted"] if ref == "a" else [])


def test_warmers_are_told_of_each_case_that_is_untimed_and_end_before_the_next_backend_and_the_times(
    make_case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setattr("attncheck.harness.workers.supervisor.WarmingAhead", lambda *_, is_on: Noting(log))
    cases = (make_case(name="first"), make_case(name="second"))
    plan = RunPlan(cases=cases, checks=("numerics",))
    list(Supervisor(plan, [known("a"), known("b")], cast(WorkerPool, FakePool("ab")), ENVIRONMENT, warms=True).run())
    assert log == ["a: first second", "a: second", "finish", "b: first second", "b: second", "finish", "close"]


def test_what_is_only_timed_is_warmed_before_the_first_round(make_case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr("attncheck.harness.workers.supervisor.WarmingAhead", lambda *_, is_on: Noting(log))
    plan = RunPlan(cases=(make_case(name="first"),), checks=("timing",), rounds=0)
    gone = unloadable("gone", "gone", ("no library",))
    list(Supervisor(plan, [known("a"), gone], cast(WorkerPool, FakePool("a")), ENVIRONMENT, warms=True).run())
    assert log == ["times of a", "close"]


class Noting:
    """Stands for what warms: keeps the calls."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def before(self, ref: str, left: Sequence[tuple[Case, Any]]) -> None:
        self._log.append(f"{ref}: {' '.join(case.id for case, _ in left)}")

    def before_times(self, refs: Iterable[str]) -> None:
        self._log.append(f"times of {' '.join(refs)}")

    def finish(self) -> None:
        self._log.append("finish")

    def close(self) -> None:
        self._log.append("close")
