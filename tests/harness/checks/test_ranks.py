"""The path ``ranks``: a process for each rank of context parallelism, and the findings on wrong ranks."""

import math
from unittest.mock import Mock

import pytest
import torch

from attncheck.backends.contract import get_dcp_group, get_dcp_world_size_and_rank
from attncheck.backends.registry import load
from attncheck.cases.loader import load_suite
from attncheck.errors import BackendUnavailableError
from attncheck.harness.checks.findings import FindingError, NotExamined
from attncheck.harness.checks.ranks import check, process
from attncheck.harness.checks.ranks.check import RankChecks
from attncheck.harness.checks.ranks.faults import likely_fault
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.step import make_step
from attncheck.harness.problem.problem import build_problem, rank_problem
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.step_spec import DCPOptions

CPU = torch.device("cpu")
PAGE = 16

WRONG = """
import time
from attncheck.backends.mutants.ranks import RanksBackend, RanksImpl


class Wrong(RanksBackend):
    class Impl(RanksImpl):
        def of_context(self, layer, query, caches, metadata):
            if self.dcp_rank == 1:
                {}
            return super().of_context(layer, query, caches, metadata)
"""


def on_ranks(make_case, *requests, size=2, interleave=1, **fields):
    options = DCPOptions(size=size, interleave=interleave)
    return make_case(*requests, path="ranks", options=options, **({"num_kv_heads": 1} | fields))


def checks_of(ref, case):
    problem = build_problem(case, 0)
    return RankChecks(load(str(ref)), problem, truth_of(problem, CPU), CPU, ())


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 16), (4, 2)])
def test_each_rank_has_its_heads_and_the_slots_of_its_keys(make_case, size, interleave):
    """Dealing positions to ranks one by one, each rank filling the pages of the same table in order."""
    requests = ((1, 1), (1, 31), (5, 65), (20, 20))
    problem = build_problem(on_ranks(make_case, *requests, size=size, interleave=interleave), 0)
    ranks = [rank_problem(problem, rank) for rank in range(size)]
    assert torch.equal(torch.cat([each.query for each in ranks], dim=1), problem.query)
    table = ranks[0].block_table
    expected = [[] for _ in range(size)]
    held = [[0] * len(requests) for _ in range(size)]
    for request, (_, length) in enumerate(requests):
        for position in range(length):
            owner = position // interleave % size
            local = held[owner][request]
            held[owner][request] += 1
            for rank in range(size):
                slot = int(table[request, local // PAGE]) * PAGE + local % PAGE
                expected[rank].append(slot if rank == owner else -1)
    for rank, each in enumerate(ranks):
        assert torch.equal(each.block_table, table)
        assert each.key_slots.tolist() == expected[rank]
        common = make_step(each, CPU).common_metadata()
        assert common.dcp_local_seq_lens.tolist() == held[rank]
        assert common.seq_lens.tolist() == [length for _, length in requests]
        new = torch.cat([torch.tensor(expected[rank])[r.base + r.cached : r.base + r.num_keys] for r in each.requests])
        assert common.slot_mapping.tolist() == new.tolist()


def test_padding_requests_hold_no_key(make_case):
    problem = rank_problem(build_problem(on_ranks(make_case, (1, 3), (1, 4), padding=(2, 2)), 0), 1)
    assert make_step(problem, CPU).common_metadata().dcp_local_seq_lens.tolist() == [1, 2, 0, 0]


@pytest.mark.parametrize(
    "ref", ["reference", pytest.param("attncheck.backends.mutants.ranks:RanksBackend", marks=pytest.mark.slow)]
)
def test_a_right_backend_passes_on_two_processes(ref):
    """The reference spreads new keys, too; the base of the mutants attends to them on each rank, as vLLM does."""
    (case,) = [case for case in load_suite("ranks") if case.id == "mixed.4"]
    records = list(Examiner(RunPlan((case,))).records(case, load(ref)))
    assert [(record.check, record.outcome) for record in records] == [("numerics", "passed"), ("cache_write", "passed")]


def test_backends_that_do_not_declare_it_are_not_run(make_case):
    case = on_ranks(make_case, (1, 9))
    (record,) = Examiner(RunPlan((case,))).records(case, load("torch_sdpa"), checks=("numerics",))
    assert (record.outcome, record.reasons) == ("unsupported", ("path ranks: feature 'dcp' is not declared",))


def test_other_checks_examine_nothing(make_case):
    found = checks_of("reference", on_ranks(make_case, (1, 9))).find("containment")
    assert isinstance(found, NotExamined)


@pytest.mark.parametrize(
    ("words", "stage", "message"),
    [
        ("raise ValueError('no context')", "forward of rank 1", "no context"),
        (
            "return super().of_context(layer, query[:1], caches, metadata)",
            "forward of rank",
            "rank 0: all_gather of bfloat16 [2, 4, 64] along 1; rank 1: all_gather of bfloat16 [1, 4, 64] along 1",
        ),
    ],
)
def test_the_first_rank_that_raises_is_named(make_case, tmp_path, words, stage, message):
    (tmp_path / "wrong.py").write_text(WRONG.format(words))
    checks = checks_of(tmp_path / "wrong.py:Wrong", on_ranks(make_case, (1, 40), (1, 33)))
    with pytest.raises(StageError) as failure:
        checks.find("numerics")()
    raised = failure.value.raised
    assert raised.stage.startswith(stage)
    assert message in raised.message
    with pytest.raises(StageError):  # the ranks do not run again
        checks.find("cache_write")()


@pytest.mark.parametrize(
    ("error", "outcome", "words"),
    [
        (None, "errored", ("attncheck itself", "TypeError")),
        (MemoryError("1 GiB"), "unsupported", ("out of memory in rank 0: 1 GiB",)),
        (BackendUnavailableError("x", ["no kernel"]), "unsupported", ("backend 'x' is unavailable here: no kernel",)),
    ],
)
def test_what_attncheck_raises_in_a_rank_is_no_failure_of_the_backend(make_case, monkeypatch, error, outcome, words):
    def answers(question, folder):
        return tuple(process.answer_of(question, rank, folder) for rank in range(question.size))

    monkeypatch.setattr(check, "run_ranks", answers)
    monkeypatch.setattr(process, "rank_problem", error and Mock(side_effect=error))
    case = on_ranks(make_case, (1, 9))
    (record,) = Examiner(RunPlan((case,))).records(case, load("reference"), checks=("numerics",))
    assert record.outcome == outcome
    assert words == ((record.stage, record.error_type) if outcome == "errored" else record.reasons)


@pytest.mark.slow
def test_ranks_that_do_not_end_are_a_failure_of_the_backend(make_case, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "LIMIT_S", 25.0)
    (tmp_path / "wrong.py").write_text(WRONG.format("time.sleep(1000)"))
    with pytest.raises(FindingError) as failure:
        checks_of(tmp_path / "wrong.py:Wrong", on_ranks(make_case, (1, 40))).find("numerics")()
    waits = "rank 0 waits in all_gather of bfloat16 [1, 4, 64] along 1; rank 1 does not wait for others"
    assert failure.value.finding.summary == f"the ranks did not end within 25 s: {waits}"


def merged(problem, weights_of, base=math.e):
    """Attention over the context of each rank, merged by ``weights_of``, then over the row's own key; float64."""
    options, layer = problem.case.batch.path.options, problem.layer
    out = torch.empty(len(problem.query), layer.num_heads, layer.head_size, dtype=torch.float64)
    for row, request in enumerate(problem.requests):
        keys, values = (
            x[request.base : request.base + request.num_keys, 0].double() for x in (problem.keys, problem.values)
        )
        scores = problem.query[row].double() @ keys.T * layer.softmax_scale
        owner = torch.arange(request.num_keys - 1) // options.interleave % options.size
        parts = [scores[:, :-1].masked_fill(owner != rank, -torch.inf) for rank in range(options.size)]
        lses = torch.stack([part.logsumexp(-1) for part in parts])
        outs = torch.stack([part.softmax(-1) @ values[:-1] for part in parts])
        context = (weights_of(lses)[..., None] * outs).sum(0)
        total = torch.log(base ** lses[0] + base ** lses[1]) / math.log(base)
        share = torch.sigmoid(total - scores[:, -1])[:, None]
        out[row] = share * context + (1 - share) * values[-1]
    return out


@pytest.mark.parametrize(
    ("weights_of", "base", "expected"),
    [
        (torch.ones_like, math.e, "the outputs of the ranks are added without the weights of their LSEs"),
        (lambda lses: (lses * math.log(2)).softmax(0), 2.0, "natural LSEs of the ranks are merged with powers of 2"),
        (lambda lses: lses.softmax(0).flip(0), math.e, None),
        (lambda lses: lses.softmax(0), math.e, None),
    ],
)
def test_a_fault_of_the_merge_is_named_and_nothing_else(make_case, weights_of, base, expected):
    problem = build_problem(on_ranks(make_case, (1, 40), (1, 33), interleave=16, dtype="float32"), 0)
    truth = truth_of(problem, CPU)
    assert torch.allclose(merged(problem, lambda lses: lses.softmax(0)), truth.out)
    assert likely_fault(problem, truth, merged(problem, weights_of, base)) == expected


def test_a_process_that_is_no_rank_has_no_group():
    assert get_dcp_world_size_and_rank() == (1, 0)
    with pytest.raises(RuntimeError, match="only the path ranks"):
        get_dcp_group()
