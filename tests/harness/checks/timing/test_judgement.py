"""The judgement of answers under the clock, by answers written by hand."""

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.conventions import Conventions
from attncheck.harness.checks.findings import FindingError
from attncheck.harness.checks.timing import contents as contents_module
from attncheck.harness.checks.timing.contents import (
    AnswerJudge,
    FreshContents,
    TimedAnswer,
    copy_answer,
)
from attncheck.harness.driver.outputs import GuardedBuffer
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of

CPU = torch.device("cpu")


class Bench:
    """A judge of one batch, and right answers to its contents."""

    def __init__(self, case, conventions=Conventions()):  # noqa: B008 (frozen)
        problem = build_problem(case, 0)
        self.source = FreshContents(problem, truth_of(problem, CPU, refuse_blindness=False), CPU)
        self.judge = AnswerJudge("forward", self.source, conventions)
        self.rows = torch.arange(len(problem.query))
        self.dtype = problem.dtype

    def right(self, contents):
        return contents.right(self.rows)[0].to(self.dtype)

    def put(self, contents, output, lse=None, live=None):
        self.judge.judge(contents, self.rows, TimedAnswer(output.clone(), lse, output if live is None else live))

    def refusal(self, *arguments, **keywords):
        with pytest.raises(FindingError) as caught:
            self.put(*arguments, **keywords)
        return caught.value.finding


@pytest.fixture
def bench(make_case, monkeypatch):
    monkeypatch.setattr(contents_module, "sleep", lambda _seconds: None)
    return Bench(make_case((1, 21), (4, 19), dtype="float32"))


def test_right_answers_pass(bench):
    for _ in range(5):
        contents = bench.source.next()
        bench.put(contents, bench.right(contents))
        bench.judge.require_unchanged()
    bench.judge.finish()
    assert bench.judge.worst <= 1
    assert bench.judge.num_judged == 5


@pytest.mark.parametrize(("budgets", "is_wrong"), [(0.8, False), (1.2, True)])
def test_the_budget_is_that_of_numerics(budgets, is_wrong, make_case):
    bench = Bench(make_case((1, 21), (4, 19), dtype="float32"))
    contents = bench.source.next()
    right, budget = contents.right(bench.rows)
    off = right.clone()
    off[3, 2, 7] += budgets * min(float(budget.norm[3, 2]), float(budget.peak[3, 2]))
    if is_wrong:
        assert "row 3" in bench.refusal(contents, off.float()).summary
    else:
        bench.put(contents, off.float())
        assert bench.judge.worst == pytest.approx(budgets, rel=0.1)


def test_a_wrong_lse_is_an_answer_too(bench):
    contents = bench.source.next()
    lse = contents.lse(bench.rows)
    bench.put(contents, bench.right(contents), lse.float())
    found = bench.refusal(contents, bench.right(contents), (lse + 0.1).float())
    assert found.summary == snapshot("forward: call 2 left a wrong LSE: 5 rows")


def test_an_lse_is_taken_in_its_own_base(make_case):
    bench = Bench(make_case((1, 21), (4, 19), dtype="float32"), Conventions(lse_base="2"))
    contents = bench.source.next()
    bench.put(contents, bench.right(contents), (contents.lse(bench.rows) * 1.4426950408889634).float())


def test_of_many_rows_some_are_judged_and_at_last_all(plain, bench, monkeypatch):
    monkeypatch.setattr(contents_module, "JUDGED_ELEMENTS", 2 * 8 * 64)
    monkeypatch.setattr(bench.source, "random_indices", lambda count, limit: torch.arange(min(count, limit)))
    contents = bench.source.next()
    bench.put(contents, bench.right(contents))
    wrong = bench.right(contents)
    wrong[4] = 0
    bench.put(contents, wrong)  # one of the rows that are not looked at
    assert plain(bench.judge.notes[0]) == snapshot(
        "forward: 2 of 5 rows were judged after each call, chosen at random; all after the first and last"
    )
    with pytest.raises(FindingError) as refused:
        bench.judge.finish()
    assert plain(str(refused.value)) == snapshot(
        "forward: the output of call 2 is wrong: 1 of 5 rows is wrong, the first is row 4 (request 1, position 18), in all heads; the largest error is ..."
    )
    first = AnswerJudge("forward", bench.source, Conventions())
    with pytest.raises(FindingError):
        first.judge(contents, bench.rows, TimedAnswer(wrong.clone(), None, wrong))


@pytest.fixture
def out():
    buffer = GuardedBuffer((3, 2, 4), 2, torch.float32, CPU)
    buffer.rows.fill_(7.0)
    return buffer


def copied(returned, out):
    return copy_answer(returned, out, None, 2, {}, must_be_buffer=True)


def test_the_buffer_is_copied_as_it_is(out):
    answer = copied(torch.nn.Parameter(out.handed_out()), out)  # a subclass without code of its own
    out.rows.fill_(8.0)
    assert answer.fault is None
    assert answer.output.tolist() == torch.full((2, 2, 4), 7.0).tolist()
    assert answer.has_changed()


@pytest.mark.parametrize("returned", [None, "output", torch.zeros(3, 2, 4)])
def test_what_is_not_the_buffer_is_a_fault(out, returned):
    assert copied(returned, out).fault is not None
