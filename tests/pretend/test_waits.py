"""What the host waits for in a step on an accelerator, beside what the backend itself waits for."""

import pytest
import torch
from made_cases import make_case

from attncheck.backends.registry import load
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem

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
