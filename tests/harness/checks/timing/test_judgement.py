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


def test_the_answer_of_an_earlier_call_is_known_again(plain, bench):
    earlier = [bench.source.next() for _ in range(3)]
    for contents in earlier:
        bench.put(contents, bench.right(contents))
    found = bench.refusal(bench.source.next(), bench.right(earlier[1]))
    assert plain(found.meaning) == snapshot(
        "it is the right answer to the contents of 2 calls before: results are kept, and found again by address or by a fingerprint of the inputs"
    )
    assert plain(found.summary) == snapshot(
        "forward: the output of call 4 is wrong: 5 of 5 rows are wrong, the first is row 0 (request 0, position 20), in all heads; the largest error is ..."
    )
    found = bench.refusal(bench.source.next(), bench.right(earlier[2]))


def test_an_unwritten_output_is_distinguished_from_a_wrong_one(bench):
    out = GuardedBuffer((5, 8, 64), 5, torch.float32, CPU)
    assert "nothing was written" in bench.refusal(bench.source.next(), out.rows).meaning
    contents = bench.source.next()
    found = bench.refusal(contents, torch.zeros_like(bench.right(contents)))
    assert found.meaning is None
    assert found.figures["rows_wrong"] == 5


def test_an_output_that_comes_later_is_found(bench, monkeypatch):
    contents = bench.source.next()
    live = torch.zeros_like(bench.right(contents))
    monkeypatch.setattr(contents_module, "sleep", lambda _seconds: live.copy_(bench.right(contents)))
    assert bench.refusal(contents, torch.zeros_like(live), live=live).meaning == snapshot(
        "the output was written after the clock had stopped: work is left to a thread, or another stream"
    )


def test_a_lower_precision_is_named(bench):
    contents = bench.source.next()
    found = bench.refusal(contents, bench.right(contents).bfloat16().float())
    assert found.meaning == snapshot(
        "it is near the right answer: under the clock a lower precision than the layer's, or a shortcut"
    )
    assert found.figures["budget_share"] > 1


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


class Own(torch.Tensor):
    """A subclass that runs code of its own."""

    @classmethod
    def __torch_function__(cls, *arguments, **keywords):
        return super().__torch_function__(*arguments, **keywords)


class TestForm:
    """``copy_answer``."""

    def answer(self, returned, out, *, spans=None, must_be_buffer=True):
        return copy_answer(returned, out, None, 2, spans or {}, must_be_buffer=must_be_buffer)

    @pytest.fixture
    def out(self):
        buffer = GuardedBuffer((3, 2, 4), 2, torch.float32, CPU)
        buffer.rows.fill_(7.0)
        return buffer

    def test_the_buffer_is_copied_as_it_is(self, out):
        answer = self.answer(out.handed_out(), out)
        out.rows.fill_(8.0)
        assert answer.fault is None
        assert answer.output.tolist() == torch.full((2, 2, 4), 7.0).tolist()
        assert answer.has_changed()

    @pytest.mark.parametrize("returned", [None, "output", torch.zeros(3, 2, 4)])
    def test_what_is_not_the_buffer_is_a_fault(self, out, returned):
        assert self.answer(returned, out).fault is not None

    def test_a_subclass_without_own_code_is_a_tensor(self, out):
        assert self.answer(torch.nn.Parameter(out.handed_out()), out).fault is None

    def test_a_subclass_is_a_fault(self, out):
        answer = self.answer(out.handed_out().as_subclass(Own), out)
        assert answer.fault == snapshot("forward returned a Own; the contract requires a torch.Tensor")
        assert answer.meaning == snapshot(
            "a subclass may be computed when it is looked at, after the clock has stopped"
        )

    def test_own_memory_is_fine_but_not_that_of_an_input(self, out):
        query = torch.zeros(3, 2, 4)
        start = query.untyped_storage().data_ptr()
        spans = {"query": (start, start + query.untyped_storage().nbytes())}
        assert self.answer(torch.ones(3, 2, 4), out, spans=spans, must_be_buffer=False).fault is None
        answer = self.answer(query, out, spans=spans, must_be_buffer=False)
        assert answer.fault == snapshot("forward returned memory of query, which it was lent to read")
        assert answer.meaning == snapshot("an input is handed back as output")
