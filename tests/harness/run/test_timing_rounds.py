"""The process of each question: timing in rounds and apart from all else; valid numbers of rounds."""

from dataclasses import replace

import pytest

from attncheck.errors import SelectionError
from attncheck.harness.checks.findings import TimingSettings
from attncheck.harness.run.backend_loading import ThisProcess
from attncheck.harness.run.evaluate import environment_of
from attncheck.harness.run.options import RunOptions
from attncheck.harness.run.outcomes import BackendDescription
from attncheck.harness.run.run import Run
from attncheck.harness.run.selection import (
    DEFAULT_ROUNDS,
    RoundQuestions,
    RunPlan,
    check_timed,
    count_questions,
    rotated,
    select_cases,
    timed_questions,
    untimed_questions,
)
from attncheck.harness.workers.pool import WorkerPool
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.run_file.header import BackendInfo


def test_times_are_taken_apart_from_all_other_checks(make_case):
    plain, named = make_case(name="plain"), replace(make_case(name="named"), checks=("lse", "timing"))
    by_case = RunPlan(cases=(plain, named))
    assert untimed_questions(by_case, "a") == RoundQuestions(((plain, DEFAULT_CHECKS), (named, ("lse",))))
    assert timed_questions(by_case, "a", 4) == RoundQuestions(((named, ("timing",)),), round=4)
    by_run = RunPlan(cases=(plain, named), checks=("timing",))
    assert untimed_questions(by_run, "a") == RoundQuestions(())
    assert timed_questions(by_run, "a") == RoundQuestions(((plain, ("timing",)), (named, ("timing",))))
    assert timed_questions(by_run, "a", 1, {plain.key}) == RoundQuestions(((named, ("timing",)),), round=1)


def test_a_backend_is_examined_on_its_own_suite_only(make_case):
    mine, other = make_case(), replace(make_case(), suite="other")
    plan = RunPlan(cases=(mine, other), checks=("numerics", "timing"), chosen={"a": frozenset({other.key})}, rounds=3)
    assert [case for case, _ in untimed_questions(plan, "a").questions] == [other]
    assert [case for case, _ in timed_questions(plan, "a").questions] == [other]
    assert count_questions(plan, ["a"]) == 1 + 3
    assert count_questions(plan, ["a", "b"]) == (1 + 3) + (2 + 6)


def test_every_backend_is_the_first_as_often_as_any_other():
    orders = [rotated("abc", number) for number in range(6)]
    assert all(sorted(order) == list("abc") for order in orders)
    for place in range(3):
        assert sorted(order[place] for order in orders) == list("aabbcc")
    assert rotated([], 3) == ()


class FakePool(WorkerPool):
    """Keeps what it is assigned, and starts no process."""

    def assign(self, assignment):
        self.assignment = assignment

    def choose_device(self, wishes, wanted):
        return "cpu", (), environment_of("cpu")

    def describe(self, refs):
        return [BackendDescription(info=BackendInfo(name=ref, ref=ref)) for ref in refs]


@pytest.mark.parametrize(
    ("wanted", "check", "in_process", "rounds"),
    [
        (None, "timing", False, DEFAULT_ROUNDS),
        (3, "timing", False, 3),
        (None, "numerics", False, 1),
        (None, "timing", True, 1),
    ],
)
def test_ten_rounds_by_default(wanted, check, in_process, rounds):
    options = RunOptions(backends=("reference",), rounds=wanted, in_process=in_process)
    assert Run.open(select_cases(["decode"], (), [check]), options, FakePool()).plan.rounds == rounds


def test_settings_of_times_reach_the_plan_the_processes_and_the_header():
    pool, settings = FakePool(), TimingSettings(limit_s=2.0, warm=True)
    selection = select_cases(["decode"], (), ["timing"])
    options = RunOptions(backends=("reference",), device="cpu", rounds=4, time_limit=2.0, warm_cache=True)
    apart = Run.open(selection, options, pool)
    assert (apart.plan.rounds, apart.plan.timing, pool.assignment.timing) == (4, settings, settings)
    assert (apart.header().rounds, apart.notes) == (4, ())
    own = TimingSettings(max_samples=20)
    here = Run.open(selection, replace(options, rounds=1), ThisProcess(), timing=own)
    assert (here.plan.rounds, here.plan.timing) == (1, own)


def test_options_of_times_need_times():
    assert not select_cases(["decode"]).is_timed
    selection = select_cases(["decode"], (), ["timing"])
    assert selection.is_timed
    check_timed(selection, "--kernels")
    with pytest.raises(SelectionError, match=r"^--kernels configures the check timing: add --check timing$"):
        check_timed(select_cases(["decode"], (), ["lse"]), "--kernels")
    with pytest.raises(SelectionError, match=r"^--rounds 2 in one process: a round is a process; leave out --in-"):
        RunOptions(rounds=2, in_process=True)
