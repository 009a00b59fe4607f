"""Steps that are computed as one batch: the same answers as of each step alone, in pages of its own."""

from dataclasses import replace

import pytest
import torch

from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.replay import ProbeProblems
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.spec import BatchSpec, RequestSpec

CPU = torch.device("cpu")
IDS = {"smoke": ["mixed.HND", "alibi", "window-extend", "fp8-cache-per-head", "shared-cache"], "mla": []}
NUM_STEPS = 6


def layers():
    cases = [case for name, ids in IDS.items() for case in load_suite(name).cases if case.id in ids or not ids]
    mla = [case for case in cases if case.layer.mla is not None][:1]
    one_token = BatchSpec(requests=(RequestSpec(query_len=1),))
    plain = [case for case in cases if case.suite == "smoke"]
    return [*(replace(case, batch=one_token) for case in plain), *mla]


@pytest.fixture(params=layers(), ids=lambda case: case.id, scope="module")
def steps(request):
    """The problems of a layer, and the cases of the first steps of its probes."""
    questions = ProbeProblems(replace(request.param, cache=replace(request.param.cache, num_blocks=None)), 3, CPU)
    questions.compute_together(questions.probes[:4])
    cases = [questions.case(probe, step) for probe in questions.probes[:4] for step in probe.steps]
    return questions, list(dict.fromkeys(cases))[:NUM_STEPS]


def test_a_step_has_the_truth_of_its_own_rows_and_keys_in_pages_of_its_own(steps):
    questions, cases = steps
    for case in cases:
        problem = questions.problem(case)
        shared, alone = questions.truth(case), truth_of(problem, CPU, refuse_blindness=False)
        assert torch.allclose(shared.out, alone.out, rtol=1e-12, atol=1e-12)
        assert torch.allclose(shared.lse, alone.lse, rtol=1e-12, atol=1e-12)
        for name in ("norm", "peak", "lse"):
            assert torch.allclose(getattr(shared.budget, name), getattr(alone.budget, name), rtol=1e-6)
        assert shared.rows.num_keys.tolist() == [request.num_keys for request in problem.requests]
        owned = [page for request in problem.requests for page in request.pages]
        assert len(set(owned)) == len(owned) == sum(-(-r.num_keys // case.cache.block_size) for r in problem.requests)
        assert problem.num_blocks == case.cache.num_blocks
        assert len(problem.query) == case.batch.num_tokens
        assert problem.block_table.shape[0] == case.batch.num_requests
    first, second = (questions.problem(case) for case in cases[:2])
    assert not torch.equal(first.query[:1], second.query[:1])


def test_one_step_alone_is_computed_as_it_is():
    questions, alone = (ProbeProblems(layers()[0], 0, CPU) for _ in range(2))
    probe = next(probe for probe in questions.probes if len(probe.steps) == 1)
    questions.compute_together([probe])
    case = questions.case(probe, probe.steps[0])
    assert torch.equal(questions.problem(case).query, alone.problem(case).query)
