"""Short convolutions as layers with a state: their truth, their budget, and where their states are."""

import pytest
import torch
from torch.nn.functional import silu

from attncheck.backends.candidates.torch_state import TorchStateBackend, TorchStateImpl
from attncheck.cases.loader import load_suite
from attncheck.cases.outline import shape_of
from attncheck.harness.checks.findings import Broken, Holds
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
        rows.append(sums[0].t() if bias is None else silu(sums[0].t()))
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
            rows.append(silu(sums).to(problem.dtype).double())
        seen = Computed(torch.cat(rows)[:, :, None], truth.right.states)
        shares.append(float(truth.shares(seen).max()))
    assert 0.2 < max(shares) < 1


def products_at_once(windows, weight, bias):
    sums = (windows * weight).sum(-1)
    return silu(sums if bias is None else sums + bias)


def tap_by_tap(windows, weight, bias):
    sums = torch.zeros_like(windows[..., 0]) if bias is None else bias.expand(len(windows), -1)
    for tap in range(weight.shape[1]):
        sums = sums + windows[..., tap] * weight[:, tap]
    return silu(sums)


def activated_in_steps(windows, weight, bias):
    sums = (windows.float() * weight.float()).sum(-1)
    sums = (sums if bias is None else sums + bias.float()).to(windows.dtype)
    return sums / (1 + (-sums).exp())


@pytest.mark.parametrize("kernel", [products_at_once, tap_by_tap, activated_in_steps])
@pytest.mark.parametrize("case_id", ["short_conv-mixed.float16", "short_conv-mixed.bfloat16", "short_conv-blocks"])
def test_a_kernel_in_the_dtype_of_the_layer_is_within_the_budget(kernel, case_id):
    """torch rounds each result. Without errors that come together in the budget, these have up to 1.5 of it."""
    for seed in range(3):
        problem = build_recurrent(CASES[case_id], seed)
        truth = recurrent_truth(problem)
        weight, bias = (problem.weights[name] for name in ("weight", "bias"))
        rows = []
        for request in problem.requests:
            windows = history(request).to(problem.dtype).unfold(1, weight.shape[1], 1).transpose(0, 1)
            rows.append(kernel(windows, weight, bias))
        seen = Computed(torch.cat(rows).double()[:, :, None], truth.right.states)
        assert float(truth.shares(seen).max()) < 0.9


def found(forward, case_id, check):
    """Return the finding about a backend that runs ``forward`` after a right step."""

    def both(self, layer, inputs, states, attn_metadata, output):
        before = states.clone()
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        forward(before, states, attn_metadata)

    impl = type("Impl", (TorchStateImpl,), {"forward": both})
    backend = type("Mine", (TorchStateBackend,), {"get_impl_cls": staticmethod(lambda: impl)})
    return RecurrenceChecks(backend, CASES[case_id], 0, CPU, ()).find(check)()


def test_a_state_is_wrong_in_its_last_bit():
    def forward(before, states, metadata):
        states[metadata.state_indices_tensor[0, 0], 0, 0] *= 1.01

    finding = found(forward, "short_conv-mixed.bfloat16", "cache_write")
    assert isinstance(finding, Broken)
    assert finding.summary.startswith("1 of 10 stored states is not the last inputs, bit for bit; the first is in slot")
    assert "budget_share" not in finding.figures


def test_a_fault_that_the_outputs_contradict_is_no_cause_of_wrong_states():
    """The stored state of a chunk of one row is what it would be with no state, but its output is right."""

    def forward(before, states, metadata):
        lengths = metadata.query_start_loc.diff().tolist()
        for request in range(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills):
            slot = metadata.state_indices_tensor[request, 0]
            states[slot, : max(0, 3 - lengths[request])] = 0

    finding = found(forward, "short_conv-mixed.bfloat16", "cache_write")
    assert finding.summary.startswith("1 of 10 stored states is not the last inputs")
    assert finding.meaning is None


@pytest.mark.parametrize(
    ("first", "meaning"),
    [
        (lambda num_rows: 0, "the states after the drafts of decodes are not stored"),
        (lambda num_rows: num_rows - 1, "the last inputs of decodes are stored alone, as if all drafts were accepted"),
    ],
)
def test_decodes_that_store_one_state_are_named(first, meaning):
    def forward(before, states, metadata):
        lengths = metadata.query_start_loc.diff().tolist()
        for request in range(metadata.num_decodes):
            slot, at = metadata.state_indices_tensor[request, 0], first(lengths[request])
            one = states[slot, at : at + 3].clone()
            states[slot] = before[slot]
            states[slot, :3] = one

    finding = found(forward, "short_conv-drafts", "cache_write")
    assert finding.summary.startswith("4 of 7 stored states are not the last inputs")
    assert finding.meaning == meaning


def test_a_step_that_writes_other_inputs_of_a_slot_is_not_right_at_first():
    def forward(before, states, metadata):
        lengths = metadata.query_start_loc.diff().tolist()
        for request in range(metadata.num_decodes):
            states[metadata.state_indices_tensor[request, 0], 2 + lengths[request] :] = 0

    assert found(forward, "short_conv-drafts", "cache_write").summary.startswith("3 slots changed in inputs")
    assert isinstance(found(forward, "short_conv-drafts", "determinism"), Holds)
    finding = found(forward, "short_conv-drafts", "invariance")
    assert finding.summary.startswith("wrong in another order of requests: 3 slots changed in inputs")
    assert "the first step has wrong rows or states, too" in finding.meaning


def test_rows_of_channels_are_named_without_heads():
    case = CASES["short_conv-decode"]
    impl = type("Impl", (TorchStateImpl,), {"forward": lambda *arguments: None})
    backend = type("Mine", (TorchStateBackend,), {"get_impl_cls": staticmethod(lambda: impl)})
    finding = RecurrenceChecks(backend, case, 0, CPU, ()).find("numerics")()
    assert finding.summary.startswith("6 of 6 rows are wrong, the first is row 0 (request 0, position 49); the error")
    assert "head" not in finding.summary
    assert shape_of(case).startswith("48 channels, 4 taps, bfloat16")
