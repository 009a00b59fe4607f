"""Short convolutions as layers with a state: their truth, their budget, and where their states are."""

import pytest
import torch

from attncheck.backends.candidates.torch_state import TorchStateBackend, TorchStateImpl
from attncheck.cases.loader import load_suite
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.recurrence import RecurrenceChecks
from attncheck.harness.driver.recurrent import StateSession
from attncheck.harness.problem.recurrent import build_recurrent
from attncheck.harness.truth.recurrent import Computed, recurrent_truth

CPU = torch.device("cpu")
CASES = {case.id: case for case in load_suite("state") if case.id.startswith("short_conv")}


def history(request):
    """The inputs before the first row and the new ones, ``[C, K - 1 + T]``, each at its place in the slot."""
    first = request.accepted - 1
    before = torch.zeros(request.inputs["x"].shape[1], request.past)
    if request.initial is not None:
        before = request.initial[:, 0, first : first + request.past]
    return torch.cat([before.double(), request.inputs["x"].double().t()], dim=1)


@pytest.mark.parametrize("case_id", sorted(CASES))
def test_outputs_are_those_of_the_convolution_of_torch(case_id):
    problem = build_recurrent(CASES[case_id], 0)
    truth, weight, bias = recurrent_truth(problem), problem.weights["weight"], problem.weights.get("bias")
    assert (bias is None) == case_id.startswith("short_conv-plain")
    rows = []
    for request in problem.requests:
        given = None if bias is None else bias.double()
        sums = torch.nn.functional.conv1d(history(request)[None], weight.double()[:, None], given, groups=len(weight))
        rows.append(sums[0].t() if bias is None else torch.nn.functional.silu(sums[0].t()))
    assert torch.allclose(truth.right.out[:, :, 0], torch.cat(rows), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("case_id", ["short_conv-mixed.bfloat16", "short_conv-drafts", "short_conv-blocks"])
def test_the_state_after_a_row_is_the_last_inputs_up_to_it(case_id):
    """With drafts, the state after row t is columns t to t + K - 2 of the slot; otherwise columns 0 to K - 2."""
    problem = build_recurrent(CASES[case_id], 0)
    states = recurrent_truth(problem).right.states
    for (request, slot), state in zip(problem.places, states, strict=True):
        inputs, past = history(request), request.past
        rows = range(request.num_rows) if request.is_decode else [request.written[slot]]
        for column, row in enumerate(rows):
            assert torch.equal(state[:, 0, column : column + past], inputs[:, row + 1 : row + 1 + past])
        assert not state[:, 0, past + len(rows) - 1 :].any()


def test_drafts_change_one_slot_and_leave_its_other_rows():
    problem = build_recurrent(CASES["short_conv-drafts"], 0)
    seen = StateSession(TorchStateBackend, problem, CPU).run(problem)
    assert seen.strays == ()
    before = problem.pool()
    changed = {slot for slot in range(len(before)) if not torch.equal(before[slot], seen.pool[slot])}
    assert changed == {request.slots[0] for request in problem.requests}
    two_rows = next(request for request in problem.requests if request.is_decode and request.num_rows == 2)
    kept = before[two_rows.slots[0]][:, 0, 4:]
    assert kept.shape[1] == 2
    assert torch.equal(seen.pool[two_rows.slots[0]][:, 0, 4:], kept)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_kernel_that_rounds_each_product_is_within_the_budget(dtype):
    shares = []
    for seed in range(5):
        problem = build_recurrent(CASES[f"short_conv-mixed.{dtype}"], seed)
        truth = recurrent_truth(problem)
        weight, bias = (problem.weights[name].double() for name in ("weight", "bias"))
        rows = []
        for request in problem.requests:
            windows = history(request).unfold(1, weight.shape[1], 1)
            products = (windows * weight[:, None]).to(problem.dtype).double()
            sums = products.sum(-1).t() + bias
            rows.append(torch.nn.functional.silu(sums).to(problem.dtype).double())
        seen = Computed(torch.cat(rows)[:, :, None], truth.right.states)
        shares.append(float(truth.shares(seen).max()))
    assert 0.2 < max(shares) < 1


def test_a_state_is_wrong_in_its_last_bit():
    def forward(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        states[attn_metadata.state_indices_tensor[0, 0], 0, 0] *= 1.01

    impl = type("Impl", (TorchStateImpl,), {"forward": forward})
    backend = type("Mine", (TorchStateBackend,), {"get_impl_cls": staticmethod(lambda: impl)})
    finding = RecurrenceChecks(backend, CASES["short_conv-mixed.bfloat16"], 0, CPU, ()).find("cache_write")()
    assert isinstance(finding, Broken)
    assert finding.summary.startswith(
        "1 of 10 stored states are not the last inputs, bit for bit; the first is in slot"
    )
    assert "budget_share" not in finding.figures
