"""Which question goes to which lane, in which order, and when one more process is worth its start."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from attncheck.cases.model import Case
from attncheck.harness.run.outcomes import BackendDescription, not_loaded
from attncheck.harness.workers.executor import BackendQuestion, Schedule
from attncheck.reports.run_file.header import BackendInfo

MakeCase = Callable[..., Case]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def questions_to(ref: str, *cases: Case, check: str = "numerics") -> list[BackendQuestion]:
    backend = BackendDescription(info=BackendInfo(name=ref, ref=ref))
    return [BackendQuestion(backend, case, (check,)) for case in cases]


def drained(schedule: Schedule, ref: str, lane: int) -> list[int]:
    found = []
    while (index := schedule.take(ref, lane)) is not None:
        found.append(index)
    return found


def test_questions_come_in_their_order_and_backends_too(make_case: MakeCase) -> None:
    cases = [make_case(name=name) for name in "xyz"]
    gone = BackendQuestion(not_loaded("gone", ("no library",)), cases[0], ("numerics",))
    schedule = Schedule([gone, *questions_to("a", *cases), *questions_to("b", *cases)])
    assert schedule.to_begin(0) == "a"
    schedule.begin("a")
    assert schedule.to_begin(0) == "b"
    assert drained(schedule, "a", 0) == [1, 2, 3]
    assert not schedule.has_left("a", 0)
    assert [each.case.id for each in schedule.left("b")] == ["x", "y", "z"]


def test_cases_that_share_a_graph_level_stay_in_one_lane(make_case: MakeCase) -> None:
    """The level belongs to layer and cache; where no level is measured, any lane takes any case."""
    first = make_case(name="first")
    wide = replace(first, id="wide", layer=replace(first.layer, num_heads=first.layer.num_heads * 2))
    same = replace(first, id="same", cache=replace(first.cache, first_block=3))
    cases = (first, wide, same)
    schedule = Schedule(questions_to("a", *cases, check="cudagraph"))
    schedule.begin("a")
    assert schedule.take("a", 0) == 0
    assert drained(schedule, "a", 1) == [1]
    assert not schedule.has_left("a", 1)
    assert schedule.take("a", 0) == 2
    assert drained(Schedule(questions_to("a", *cases)), "a", 1) == [0, 1, 2]


@pytest.mark.parametrize(("each_s", "expected"), [(0.1, None), (0.5, None), (2.0, "a")])
def test_one_more_process_starts_where_much_is_left(make_case: MakeCase, each_s: float, expected: str | None) -> None:
    """Of 20 cases 5 are over: 15 left take 1.5, 7.5 and 30 s, of which another process would take half, after 5 s."""
    clock = Clock()
    questions = questions_to("a", *(make_case(name=f"case{number}") for number in range(20)))
    schedule = Schedule(questions, clock)
    schedule.begin("a")
    for number in range(5):
        assert schedule.to_help(1) is None
        assert schedule.take("a", 0) == number
        clock.now += each_s
        schedule.finish(questions[number])
    assert schedule.to_help(1) == expected
    schedule.begin("a")
    schedule.refuse("a", 1)
    assert (schedule.to_help(1), schedule.to_help(2)) == (None, expected)


def test_where_earlier_runs_have_the_times_a_process_starts_at_once(make_case: MakeCase) -> None:
    """Of 8 cases 5 are known to take 3 s each, so that all take 24 s."""
    questions = questions_to("a", *(make_case((1, number), name=f"case{number}") for number in range(1, 9)))
    seconds = {("a", each.case.hash, "numerics"): 3.0 for each in questions[:5]}
    others = {("b", each.case.hash, "numerics"): 3.0 for each in questions}
    for costs, expected in ((seconds, "a"), (dict.fromkeys(seconds, 0.01), None), (others, None)):
        schedule = Schedule(questions, Clock(), costs)
        schedule.begin("a")
        assert schedule.to_help(1) == expected


def test_a_backend_that_a_lane_cannot_start_is_begun_by_another(make_case: MakeCase) -> None:
    schedule = Schedule(questions_to("a", make_case()))
    schedule.begin("a")
    schedule.refuse("a", 1)
    assert (schedule.to_begin(1), schedule.to_begin(0)) == (None, "a")


def test_no_process_helps_with_what_another_lane_has_to_take(make_case: MakeCase) -> None:
    clock = Clock()
    schedule = Schedule(questions_to("a", *(make_case(name=name) for name in "xyz"), check="cudagraph"), clock)
    schedule.begin("a")
    schedule.take("a", 0)
    clock.now = 1000.0
    assert schedule.to_help(1) is None
    schedule.leave("a")
    assert schedule.to_help(0) is None


def test_a_large_case_waits_for_another_and_small_ones_do_not(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "attncheck.harness.workers.executor.needed_bytes", lambda case: 2**31 if "big" in case.id else 0
    )
    cases = [make_case(name=name) for name in ("big1", "big2", "small")]
    questions = [*questions_to("a", *cases), *questions_to("b", *cases)]
    schedule = Schedule(questions)
    assert schedule.take("a", 0) == 0
    assert schedule.take("b", 1) == 5
    assert schedule.take("b", 1) is None
    assert schedule.has_left("b", 1)
    schedule.finish(questions[0])
    assert schedule.take("b", 1) == 3
