"""What the host waits for in a step on an accelerator, beside what the backend itself waits for."""

from dataclasses import replace

import pytest
import torch
from made_cases import make_case

from attncheck.backends.registry import load
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.checks.numerics import check_lse, check_numerics
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("backend", "results"), [("torch_sdpa", 1), ("reference", 2)])
def test_a_step_waits_for_its_call_its_results_and_one_comparison_of_its_inputs(device, backend, results):
    session = Session(load(backend).backend, build_problem(make_case((1, 33), (5, 17)), 0), CUDA)
    device.acts.clear()
    seen = session.run()
    ours = [act for act in device.acts if "/backends/" not in act.place and "/reference/" not in act.place]
    waits = [act.what for act in ours if "not waited for" not in act.what]
    assert waits == ["torch.cuda.synchronize", *["copy"] * results, "aten::equal"]
    assert seen.changed == ()
    assert (seen.output.device.type, seen.pool_after.device.type) == ("cpu", "cuda")


def test_results_that_a_larger_session_left_on_the_device_are_judged_where_the_truth_is(device):
    backend = load("reference").backend
    problem = build_problem(make_case((1, 33), (5, 17)), 0)
    seen = Session(backend, problem, CUDA).run()
    left = replace(
        seen,
        output=seen.output.to(CUDA),
        lse=seen.lse.to(CUDA),
        unwritten=seen.unwritten.to(CUDA),
        lse_unwritten=seen.lse_unwritten.to(CUDA),
    )
    truth = truth_of(problem, CUDA)
    assert truth.out.device.type == "cpu"
    assert isinstance(check_numerics(problem, truth, left), Holds)
    assert isinstance(check_lse(problem, truth, left, backend.conventions), Holds)
    wrong = replace(left, output=left.output * 2, lse=left.lse + 1)
    assert isinstance(check_numerics(problem, truth, wrong), Broken)
    assert isinstance(check_lse(problem, truth, wrong, backend.conventions), Broken)
