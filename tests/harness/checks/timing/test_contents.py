"""New contents have a known truth, and every answer to them is judged."""

import gc
from itertools import count, pairwise

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.conventions import Conventions
from attncheck.errors import BlindCaseError
from attncheck.harness.checks.findings import FindingError
from attncheck.harness.checks.timing import contents as contents_module
from attncheck.harness.checks.timing.contents import (
    AnswerJudge,
    BaseProblem,
    FreshContents,
    SignedOrder,
    TimedAnswer,
    copy_answer,
)
from attncheck.harness.driver.outputs import GuardedBuffer
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.problem.storage import key_storage, value_storage
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import MLASpec, OutputQuantSpec
from attncheck.reference.step_spec import RequestSpec

CPU = torch.device("cpu")
SMALL = ((1, 21), (4, 19), (6, 6))

LATENT = {
    "num_kv_heads": 1,
    "num_heads": 4,
    "head_size": 48,
    "mla": MLASpec(kv_lora_rank=32, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=24),
}

LAYERS = {
    "plain": {},
    "window": {"sliding_window": 8},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "soft cap": {"logits_soft_cap": 5.0},
    "value heads": {"head_size_v": 32},
    "not causal": {"causal": False},
    "output codes": {"output_quant": OutputQuantSpec(dtype="fp8_e4m3", scale=0.1)},
    "query codes": {
        "query_quant": True,
        "cache": {"kv_cache_dtype": "fp8", "k_scale": 0.3, "v_scale": 0.07, "q_scale": (1.7, 0.6)},
    },
    "latent": LATENT,
}


def contents(problem):
    return FreshContents(problem, truth_of(problem, CPU, refuse_blindness=False), CPU)


@pytest.mark.parametrize("name", LAYERS)
def test_the_truth_is_that_of_the_new_contents(name, make_case):
    source = contents(build_problem(make_case(*SMALL, **LAYERS[name]), 3))
    for _ in range(4):
        new = source.next()
        truth = truth_of(new.problem(), CPU, refuse_blindness=False)
        rows = torch.arange(len(truth.out))
        right, budget = new.right(rows)
        assert torch.allclose(right, truth.out, atol=1e-12, rtol=1e-12)
        assert torch.equal(torch.isneginf(new.lse(rows)), torch.isneginf(truth.lse))
        assert torch.allclose(new.lse(rows), truth.lse, atol=1e-10)
        # What an honest run loses is luck; that it may lose it is a matter of sizes, which stay.
        assert float((budget.norm / truth.budget.norm).log2().abs().max()) < 1


def test_latent_rows_turn_their_sign_by_request_unless_requests_share_rows(make_case):
    apart = contents(build_problem(make_case(*SMALL, **LATENT), 0))
    turned = {tuple(apart.next().transform.request_sign.tolist()) for _ in range(100)}
    assert {len(set(signs)) for signs in turned} == {1, 2}
    requests = [RequestSpec(query_len=1, seq_len=n, shared_prefix=32) for n in (33, 40)]
    shared = contents(build_problem(make_case(*requests, **LATENT), 0))
    turned = {tuple(shared.next().transform.request_sign.tolist()) for _ in range(40)}
    assert turned == {(1, 1), (-1, -1)}


def test_nothing_is_repeated_and_the_answers_differ(make_case):
    source = contents(build_problem(make_case(*SMALL), 0))
    all_new = [source.next() for _ in range(20)]
    for one, other in pairwise(all_new):
        assert one.base is not other.base  # so that scores differ, too
    queries = {one.problem().query.view(torch.uint8).numpy().tobytes() for one in all_new}
    assert len(queries) == 20
    rows = torch.arange(len(all_new[0].base.truth.out))
    assert len({one.right(rows)[0].numpy().tobytes() for one in all_new}) == 20


@pytest.mark.parametrize("at_least", [1, 2])
def test_where_truths_take_long_there_are_few(at_least, make_case, monkeypatch):
    clock = count(step=10)
    monkeypatch.setattr(contents_module, "perf_counter", lambda: next(clock))
    problem = build_problem(make_case(*SMALL), 0)
    made = FreshContents(problem, None, CPU, at_least=at_least)
    assert len(made.bases) == at_least
    queries = [made.next().problem().query for _ in range(3)]
    assert not any(torch.equal(one, other) for one, other in pairwise(queries))


def test_problems_on_which_honest_kernels_overflow_are_left_out(make_case, monkeypatch):
    problem = build_problem(make_case(*SMALL), 0)
    truth = truth_of(problem, CPU, refuse_blindness=False)

    def refuse(*_, **__):
        raise BlindCaseError("made/case", "any error", "overflows")

    monkeypatch.setattr(contents_module, "truth_of", refuse)
    made = FreshContents(problem, truth, CPU)
    assert [made.next().base for _ in range(3)] == made.bases * 3
    with pytest.raises(BlindCaseError):
        FreshContents(problem, None, CPU)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_what_a_cache_of_codes_can_hold_it_can_hold_still(kv_cache_dtype, make_case):
    cache = {"kv_cache_dtype": kv_cache_dtype, "k_scale": 0.37, "v_scale": 1.9}
    case = make_case(*SMALL, cache=cache)
    problem = contents(build_problem(case, 0)).next().problem()
    for rows, storage in (
        (problem.keys, key_storage(case.layer, case.cache)),
        (problem.values, value_storage(case.layer, case.cache)),
    ):
        assert torch.equal(storage.rows_of(storage.codes(rows)), rows)


def test_zero_is_never_negative():
    order = SignedOrder(torch.tensor([[1, 0]]), torch.tensor([[-1, -1]]))
    moved = order.of(torch.tensor([[[0.0, 2.0]]]))
    assert moved.tolist() == [[[-2.0, 0.0]]]
    assert not torch.signbit(moved[0, 0, 1])


@pytest.mark.parametrize(
    ("layer", "moves"),
    [
        ({}, [range(20), range(21, 36)]),
        ({"sliding_window": 8}, []),
        ({"alibi": True}, []),
        ({"causal": False}, [range(20), range(21, 36)]),
    ],
)
def test_keys_change_places_where_no_modifier_counts_them(layer, moves, make_case):
    problem = build_problem(make_case(*SMALL, **layer), 0)
    assert list(BaseProblem(problem, truth_of(problem, CPU, refuse_blindness=False)).movable) == moves


def test_the_right_answer_is_nowhere_before_it_is_requested(make_case):
    source = contents(build_problem(make_case(*SMALL), 0))
    new = source.next()
    new.problem()
    rows = torch.arange(len(new.base.truth.out))
    alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.float64]
    right, _ = new.right(rows)
    assert any(torch.equal(new.base.truth.out, each) for each in alive)  # the untwisted one is
    assert not any(each.shape == right.shape and torch.equal(each, right) for each in alive)


def test_some_rows_are_chosen_anew_each_time(make_case):
    made = contents(build_problem(make_case(*SMALL), 0))
    chosen = [made.random_indices(1000, 10).tolist() for _ in range(5)]
    assert len({tuple(rows) for rows in chosen}) == 5
    assert all(rows == sorted(set(rows)) and len(rows) == 10 for rows in chosen)
    assert made.random_indices(7, 10).tolist() == list(range(7))


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
