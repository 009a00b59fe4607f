"""Layers with a state: their problems, truths and budgets, and the findings about backends."""

import math
from copy import copy
from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference_state import ReferenceStateBackend, ReferenceStateImpl
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.candidates.torch_state import TorchStateBackend, TorchStateBuilder, TorchStateImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.backends.state import NULL_BLOCK_ID, StateMetadataBuilder, as_matrices
from attncheck.backends.verification import contract_problems
from attncheck.cases.consistency import check_meaning
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Tolerance
from attncheck.errors import SpecError
from attncheck.harness.driver.recurrent import StatePool, StateSession
from attncheck.harness.problem.recurrent import ABSENT, FOREIGN, UNREAD, build_recurrent
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.truth.recurrent import (
    Computed,
    mistakes,
    recurrent_truth,
    rounded_chunks,
    rows_of,
    wrong_orders,
)
from attncheck.reference.attention.recurrence import recurrence, recurrent_rows
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reference.step_spec import RecurrenceOptions, RequestSpec

CPU = torch.device("cpu")
NOT_EXAMINED = dict.fromkeys(("lse", "features", "builder"), "unsupported")
WITHOUT_GRAPHS = NOT_EXAMINED | {"cudagraph": "unsupported"}
MIXED = ((1, 20), (1, 9), (12, 30), (2, 2), (21, 21), (1, 1))
DRAFTS = ((3, 20), (2, 9), (1, 9), (12, 30), (9, 9))
BLOCKS = (
    RequestSpec(query_len=1, seq_len=9, shared_prefix=8),
    RequestSpec(query_len=6, seq_len=14, shared_prefix=8),
    RequestSpec(query_len=1, seq_len=16),
    RequestSpec(query_len=1, seq_len=7),
    RequestSpec(query_len=12, seq_len=30),
    RequestSpec(query_len=21),
)
"""Requests in blocks of 4 tokens; the first two read one state."""
LAYERS = {
    "mamba1": {"num_heads": 12, "num_kv_heads": 1, "head_size": 8, "head_size_v": 1},
    "linear": {"num_heads": 4, "num_kv_heads": 4, "head_size": 16, "head_size_v": 8},
    "short_conv": {"num_heads": 12, "num_kv_heads": 1, "head_size": 4, "head_size_v": 1},
}
DEFAULT = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "head_size_v": 8}
RULES = ("gdn", "kda", "mamba2", "mamba1", "linear", "short_conv")


@pytest.fixture
def state_case(make_case):
    """Return a function to a case of a rule; ``options`` are the path's."""

    def make(rule, *requests, options=None, padding=(2, 3), **fields):
        sizes = LAYERS.get(rule, DEFAULT)
        given = RecurrenceOptions(rule=rule, **(options or {}))
        return make_case(*requests, path="recurrence", options=given, padding=padding, **(sizes | fields))

    return make


def loaded(backend):
    return LoadedBackend(name="mine", ref="./x.py:Mine", backend=backend, version="", origin="test")


def examine(backend, case, **plan):
    examiner = Examiner(RunPlan(cases=(case,), backends=(loaded(backend),), **plan))
    records = {record.check: record for record in examiner.run()}
    assert examiner.blind == []
    return records


def outcomes(records):
    return {check: record.outcome for check, record in records.items()}


def changed(base=TorchStateImpl, builder=StateMetadataBuilder, **members):
    """Return a backend whose impl has other members. Its builder declares no graphs."""
    impl = type("Impl", (base,), members)
    classes = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type("Mine", (TorchStateBackend,), classes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafts", [0, 2])
def test_right_backends_pass_every_check(state_case, rule, drafts):
    case = state_case(rule, *(DRAFTS if drafts else MIXED), options={"num_speculative_tokens": drafts})
    for backend in (ReferenceStateBackend, TorchStateBackend):
        records = examine(backend, case)
        has_graphs = backend is TorchStateBackend and not drafts  # two decodes of a length are needed
        left_out = NOT_EXAMINED if has_graphs else WITHOUT_GRAPHS
        assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "passed") | left_out
        assert records["numerics"].figures["budget_share"] < 0.8
        assert ("after a roll-back of drafts" in records["invariance"].notes) == bool(drafts)
        assert "with prompts in two pieces" in records["invariance"].notes


@pytest.mark.parametrize("rule", ["gdn", "kda", "mamba2", "linear"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_kernel_that_rounds_each_product_is_within_the_budget(state_case, rule, state_dtype):
    """Chunks of other sizes than those of the budget's own runs."""
    shares = []
    for seed in range(3):
        case = state_case(rule, (70, 70), (40, 60), options={"state_dtype": state_dtype})
        problem = build_recurrent(case, seed)
        truth = recurrent_truth(problem)
        for size in (8, 32, 128):
            parts = []
            for request in problem.requests:
                rows = rows_of(problem, request).to(torch.float32)
                out, after = rounded_chunks(rows, request.initial, size, torch.bfloat16, torch.float32)
                parts.append((out.bfloat16(), after[len(out) - 1].to(problem.stale.dtype)))
            seen = Computed(
                torch.cat([out for out, _ in parts]).double(), torch.stack([state for _, state in parts]).double()
            )
            shares += [float(truth.shares(seen).max()), float(truth.state_shares(seen).max())]
    assert 0.2 < max(shares) < 1


def out_of_stored(self, layer, inputs, states, attn_metadata, output):
    """Compute decodes, and all requests of mamba1, from the state rounded to its dtype after each row."""
    m, pool = attn_metadata, as_matrices(self.rule, states)
    before = pool.clone()
    TorchStateImpl.forward(self, layer, inputs, states, m, output)
    weights = {name: getattr(layer, name) for name in ("A", "dt_bias", "slopes") if hasattr(layer, name)}
    starts, slots = m.query_start_loc.tolist(), m.state_indices_tensor.tolist()
    for request in range(m.num_decodes + m.num_prefills):
        is_decode = request < m.num_decodes
        if not is_decode and self.rule != "mamba1":
            continue
        state = None
        if m.has_initial_states[request]:
            state = before[slots[request][int(m.num_accepted_tokens[request]) - 1]]
        for column, t in enumerate(range(starts[request], starts[request + 1])):
            row = {name: tensor[t : t + 1].float() for name, tensor in inputs.items()}
            rows = recurrent_rows(self.rule, row, weights, scale=self.scale, qk_l2norm=self.qk_l2norm)
            state = recurrence(rows, state, keep=[0])[1][0].to(pool.dtype)
            out = torch.einsum("hvk,hk->hv", state.float(), rows.query[0])
            output[t] = out.to(output.dtype).view_as(output[t])
            pool[slots[request][column if is_decode else 0]] = state


@pytest.mark.parametrize("rule", ["gdn", "mamba2", "linear", "mamba1"])
def test_an_output_of_the_stored_state_is_right(state_case, rule):
    """In a batch, and alone: a request alone has at least the budget of its rows in the batch."""
    case = state_case(rule, *MIXED, options={"state_dtype": "bfloat16"}, dtype="float32")
    records = examine(changed(forward=out_of_stored), case)
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "passed") | WITHOUT_GRAPHS


def test_a_beta_with_three_roundings_is_far_within_the_budget():
    """As vLLM's gates for CPUs compute it. Without a run of such a beta, a state has 0.9 of its budget here."""

    def stepwise(self, query, key, value, g, beta, a, b):
        beta = 1 / (1 + (-b.bfloat16()).exp())
        return TorchStateImpl._rows_of_delta(self, query, key, value, g, beta.float())

    (case,) = (case for case in load_suite("state").cases if case.id == "gdn-heads.4")
    problem = build_recurrent(case, 2)
    seen = StateSession(changed(_rows_of_delta=stepwise), problem, CPU).run(problem)
    shares = recurrent_truth(problem).state_shares(Computed(seen.out, seen.states))
    assert float(shares.max()) < 0.5


def test_a_norm_in_the_dtype_of_the_layer_is_within_the_budget():
    """As in layers of torch. Without a run of such a norm, a state has up to 1.5 of its budget here."""

    def normalised(rows):
        rows = rows.bfloat16()
        return (rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + 1e-6)).float()

    def low(self, query, key, value, g, beta, a, b):
        other = copy(self)
        other.qk_l2norm = False
        return TorchStateImpl._rows_of_delta(other, normalised(query), normalised(key), value, g, beta)

    (case,) = (case for case in load_suite("state").cases if case.id == "gdn-decode")
    problem = build_recurrent(case, 49)
    seen = StateSession(changed(_rows_of_delta=low), problem, CPU).run(problem)
    truth, computed = recurrent_truth(problem), Computed(seen.out, seen.states)
    assert max(float(truth.shares(computed).max()), float(truth.state_shares(computed).max())) < 0.9


@pytest.mark.parametrize("rule", RULES)
def test_a_request_alone_has_at_least_the_budget_of_its_rows(state_case, rule):
    problem = build_recurrent(state_case(rule, *MIXED), 0)
    first = recurrent_truth(problem)
    for row, request in enumerate(problem.requests[:2]):
        alone = recurrent_truth(problem.ordered([request]), first)
        assert bool((alone.budget.norm[0] >= first.budget.norm[row] * (1 - 1e-6)).all())


def test_an_error_of_a_few_roundings_is_seen(state_case):
    """An output that is off by one percent, and a state that is off by as much."""

    def forward(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        output[5, 1] *= 1.1
        states[attn_metadata.state_indices_tensor[0, 0], 2] *= 1.02

    records = examine(changed(forward=forward), state_case("gdn", *MIXED))
    assert records["numerics"].figures["rows_wrong"] == records["numerics"].figures["heads_wrong"] == 1
    assert records["numerics"].summary.startswith("1 of 38 rows is wrong, the first is row 5 (request 2, position 21)")
    assert records["cache_write"].outcome == "failed"
    assert "1 of 6 stored states is wrong" in records["cache_write"].summary


def test_problems_are_the_same_bits_on_every_machine(state_case):
    problem = build_recurrent(state_case("gdn", *MIXED, dtype="float32"), 0)
    assert [request.slots for request in problem.requests] == [(8,), (9,), (11,), (4,), (7,), (10,)]
    first = problem.requests[0].inputs["value"][0, 0, :2].tolist()
    assert [math.floor(value * 2**10) for value in first] == [-450, -551]


def test_slots_are_distinct_and_decodes_come_first(state_case):
    case = state_case("mamba2", (9, 9), (3, 20), (5, 30), (2, 9), options={"num_speculative_tokens": 3})
    problem = build_recurrent(case, 0)
    assert [request.number for request in problem.requests] == [1, 3, 0, 2]
    assert [request.is_decode for request in problem.requests] == [True, True, False, False]
    slots = [slot for request in problem.requests for slot in request.slots]
    assert len(set(slots)) == 16
    assert not {NULL_BLOCK_ID, len(problem.stale) - 1} & set(slots)
    assert list(problem.requests[0].written.values()) == [0, 1, 2]
    assert problem.requests[3].written == {problem.requests[3].slots[0]: 4}
    regions = problem.regions()
    assert set(regions[ABSENT].tolist()) == set(problem.requests[2].slots)
    assert not set(regions[FOREIGN].tolist()) & set(slots)
    read = {request.slots[request.accepted - 1] for request in problem.requests if request.initial is not None}
    assert set(regions[UNREAD].tolist()) == set(slots) - read - set(problem.requests[2].slots)


def test_metadata_is_that_of_the_batch(state_case):
    built = {}

    def forward(self, layer, inputs, states, attn_metadata, output):
        built.update(vars(attn_metadata), rows=len(output), stride=states.stride(0), size=states[0].numel())
        ReferenceStateImpl.forward(self, layer, inputs, states, attn_metadata, output)

    case = state_case("kda", *DRAFTS, options={"num_speculative_tokens": 2})
    problem = build_recurrent(case, 0)
    backend = changed(ReferenceStateImpl, forward=forward)
    StateSession(backend, problem, CPU).run(problem)
    counts = (built["num_decodes"], built["num_decode_tokens"], built["num_prefills"], built["num_prefill_tokens"])
    assert counts == (3, 6, 2, 21)
    assert built["query_start_loc"].tolist() == [0, 3, 5, 6, 18, 27, 27, 27]
    assert built["has_initial_states"].tolist() == [True] * 4 + [False] * 3
    assert built["state_indices_tensor"].tolist() == [list(each.slots) for each in problem.requests] + [[0] * 3] * 2
    assert built["num_accepted_tokens"].tolist() == [each.accepted for each in problem.requests] + [1, 1]
    assert built["rows"] == 30
    assert built["stride"] > built["size"]


def test_a_pool_keeps_states_in_the_shape_of_vllm(state_case):
    shapes = {rule: StatePool(build_recurrent(state_case(rule, (3, 9)), 0), CPU).states.shape[1:] for rule in RULES}
    delta = (4, 8, 16)
    others = {"mamba1": (12, 8), "linear": (4, 16, 8), "short_conv": (3, 12)}
    assert shapes == {"gdn": delta, "kda": delta, "mamba2": delta, **others}


@pytest.mark.parametrize(
    ("rule", "members", "check", "summary", "meaning"),
    [
        (
            "gdn",
            {"forward": lambda self, layer, inputs, states, attn_metadata, output: None},
            "numerics",
            "38 of 38 rows are wrong, the first is row 0 (request 0, position 19), in all heads; the error is NaN",
            None,
        ),
        (
            "gdn",
            {"forward": lambda self, layer, inputs, states, attn_metadata, output: states[0].fill_(1.0)},
            "cache_write",
            "1 slot that the step must leave alone changed, the first is slot 0 of 13 (the null block)",
            "the null block was written",
        ),
        (
            "mamba2",
            {"forward": lambda self, layer, inputs, states, attn_metadata, output: None},
            "cache_write",
            "6 of 6 stored states are wrong, the first is in slot",
            "the new state is not stored",
        ),
    ],
)
def test_findings_name_place_and_cause(state_case, rule, members, check, summary, meaning):
    record = examine(changed(**members), state_case(rule, *MIXED), checks=(check,))[check]
    assert record.outcome == "failed"
    assert record.summary.startswith(summary)
    assert meaning is None or meaning in record.meaning


def off_by(factor, when):
    """Return a method whose outputs are multiplied by ``factor`` in the steps for which ``when`` is true."""

    def forward(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        if when(attn_metadata):
            output *= factor

    return forward


def test_a_change_of_the_whole_cache_is_named(state_case):
    def forward(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        states.copy_(states.bfloat16())

    record = examine(changed(forward=forward), state_case("gdn", *MIXED), checks=("cache_write",))["cache_write"]
    assert record.meaning == "all slots of no request were written, as by an operation on the whole cache"


def test_a_prompt_of_one_row_that_counts_as_a_decode_is_named(state_case):
    """As in vLLM's linear attention: the other prompts begin with zeros."""

    def forward(self, layer, inputs, states, attn_metadata, output):
        has_one = attn_metadata.query_start_loc.diff() == 1
        metadata = replace(attn_metadata, has_initial_states=attn_metadata.has_initial_states | has_one)
        TorchStateImpl.forward(self, layer, inputs, states, metadata, output)

    records = examine(changed(forward=forward), state_case("linear", *MIXED), checks=("numerics", "cache_write"))
    assert records["numerics"].figures["rows_wrong"] == 1
    words = "states are used where has_initial_states is False"
    assert [record.meaning for record in records.values()] == [words, words]


def test_a_result_that_is_right_explains_no_fault(state_case):
    """In a step of decodes, the stored state is the initial one: to read it is right."""
    backend = changed(forward=off_by(1.02, lambda m: True))
    case = state_case("mamba2", (1, 20), (1, 9))
    record = examine(backend, case, checks=("numerics",))["numerics"]
    assert (record.outcome, record.meaning) == ("failed", None)


def test_a_later_step_has_a_cause_only_if_it_is_shown(state_case):
    def found(when):
        return examine(changed(forward=off_by(1.1, when)), state_case("gdn", *MIXED), checks=("invariance",))

    alone = found(lambda m: len(m.query_start_loc) == 2)["invariance"]
    assert alone.meaning == "the result of a request depends on what is beside it in the batch"
    pieces = found(lambda m: (m.num_decodes, m.num_prefills) == (0, 3))["invariance"]
    assert pieces.summary.startswith("right at first, wrong with prompts in two pieces")
    assert pieces.meaning is None


def test_what_is_kept_from_an_earlier_call_is_one_cause(state_case):
    """A state that is cached by its slot from the first call on."""

    def forward(self, layer, inputs, states, attn_metadata, output):
        slot = int(attn_metadata.state_indices_tensor[0, 0])
        kept = vars(self).setdefault("kept", {})
        states[slot] = kept.get(slot, states[slot])
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        kept[slot] = states[slot].clone()

    checks = ("containment", "determinism", "invariance")
    records = examine(changed(forward=forward), state_case("gdn", *MIXED), checks=checks)
    kept = "something is kept from an earlier call, or the backend is not deterministic"
    assert {check: record.meaning for check, record in records.items()} == dict.fromkeys(checks, kept)


def test_other_bits_of_a_wrong_step_have_no_cause_of_their_own(state_case):
    """An output that grows with each call."""

    def forward(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        self.calls = vars(self).get("calls", 0) + 1
        output[0] += self.calls

    record = examine(changed(forward=forward), state_case("gdn", *MIXED), checks=("determinism",))["determinism"]
    assert record.summary == snapshot(
        "other bits when the step is repeated on the same impl: 1 of 38 rows, the first is row 0 (request 0, position 19)"
    )
    assert record.meaning == snapshot("not known; the first step has wrong rows or states, too")


def test_equal_bits_do_not_depend_on_the_batch(state_case, monkeypatch):
    """The truth of a request alone allows less here, so that the bits of the batch are wrong alone."""

    def narrow(problem, first=None):
        truth = recurrent_truth(problem, first)
        return truth if first is None or len(problem.requests) > 1 else replace(truth, budget=truth.budget.scaled(1e-3))

    monkeypatch.setattr("attncheck.harness.checks.recurrence.recurrent_truth", narrow)
    case = state_case("gdn", *MIXED, dtype="float32")
    record = examine(ReferenceStateBackend, case, checks=("invariance",))["invariance"]
    assert "alone" in record.summary
    assert record.meaning is None


@pytest.mark.parametrize("rule", RULES)
def test_zeros_are_wrong_in_every_row_of_every_rule(state_case, rule):
    def forward(self, layer, inputs, states, attn_metadata, output):
        output.zero_()

    record = examine(changed(forward=forward), state_case(rule, *MIXED), checks=("numerics",))["numerics"]
    assert record.figures["rows_wrong"] == 38


def test_what_is_beside_states_and_output_must_stay(state_case):
    def gaps(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        states.as_strided((1,), (1,), states.stride(0) - 1).zero_()

    def beside(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        output.as_strided((1,), (1,), 0).zero_()

    case = state_case("mamba2", *MIXED)
    assert examine(changed(forward=gaps), case)["cache_write"].summary == "memory between the slots changed"
    found = examine(changed(forward=beside), case)
    assert found["containment"].summary == "memory beside the output was written"
    assert found["numerics"].outcome == "passed"

    def weights(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        inputs["dt"][-1] = 0
        layer.A.mul_(2)

    assert examine(changed(forward=weights), case)["numerics"].summary == "arguments were changed: dt, A"


def test_poison_is_traced_to_its_region(state_case):
    def forward(self, layer, inputs, states, attn_metadata, output):
        read = 0 * states[attn_metadata.state_indices_tensor[3, 0]].sum()  # request 3 has no state
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        output[0] += read
        output[1] += 0 * inputs["query"][-1].sum()

    record = examine(changed(forward=forward), state_case("linear", *MIXED), checks=("containment",))["containment"]
    assert record.summary == snapshot(
        "NaN in slots of requests without a state, padding rows reaches 2 of 38 rows, the first is row 0 (request 0, position 19)"
    )


def test_a_backend_that_declares_less_is_examined_less(state_case, make_case):
    narrow = type(
        "Narrow",
        (TorchStateBackend,),
        {"supported_rules": ("gdn",), "supported_state_dtypes": ("float32",), "max_speculative_tokens": 1},
    )
    for case, reason in (
        (state_case("kda", (3, 9)), "rule kda: supported are gdn"),
        (state_case("gdn", (3, 9), options={"state_dtype": "bfloat16"}), "state_dtype bfloat16: supported are float32"),
        (
            state_case("gdn", (3, 9), options={"num_speculative_tokens": 2}),
            "num_speculative_tokens 2: at most 1 are supported",
        ),
        (make_case((3, 9)), "the layer has a KV cache, not a state"),
    ):
        for record in examine(narrow, case).values():
            assert (record.outcome, record.reasons, record.by) == ("unsupported", (reason,), "backend")
    of_size = type("OfSize", (TorchStateBackend,), {"get_supported_head_sizes": classmethod(lambda cls: [16])})
    record = examine(of_size, state_case("gdn", (3, 9)))["numerics"]
    assert (record.outcome, record.reasons) == ("unsupported", ("head_size_v 8: supported are 16",))
    assert examine(of_size, state_case("mamba1", (3, 9), head_size=16))["numerics"].outcome == "passed"
    record = examine(SDPABackend, state_case("gdn", (3, 9)))["numerics"]
    assert (record.outcome, record.reasons) == ("unsupported", ("the layer has a state, not a KV cache",))


def test_a_declared_case_that_raises_is_a_broken_declaration(state_case):
    def forward(self, layer, inputs, states, attn_metadata, output):
        return layer.D

    records = examine(changed(forward=forward), state_case("gdn", (3, 9)))
    assert records["numerics"].outcome == "errored"
    assert records["refusals"].summary == snapshot(
        "declared, but raised at forward: AttributeError: layer has no 'D': the contract provides A_log, dt_bias"
    )


def test_a_case_that_cannot_show_a_fault_is_refused(state_case):
    examiner = Examiner(RunPlan(cases=(state_case("gdn", (9, 9), scale=1.001),), backends=(loaded(TorchStateBackend),)))
    assert list(examiner.run()) == []
    (fault,) = examiner.blind
    assert "blind to the scale is missing: no row moves by 10 times the allowed error" in str(fault)


@pytest.mark.parametrize("rule", ["gdn", "kda"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_step_of_decodes_shows_the_delta_rule(state_case, rule, drafts):
    """Random queries of this size are nearly orthogonal to the keys of few rows."""
    sizes = {"head_size": 128, "head_size_v": 128}
    decodes = ((1 + drafts, 20), (1, 9), (1, 9), (1, 30))
    for seed in range(4):
        case = state_case(rule, *decodes, options={"num_speculative_tokens": drafts}, **sizes)
        recurrent_truth(build_recurrent(case, seed))  # it refuses a case that cannot show a fault


@pytest.mark.parametrize("rule", RULES)
def test_each_mistake_of_a_rule_is_another_output(state_case, rule):
    options = {"num_speculative_tokens": 2}
    problem = build_recurrent(state_case(rule, *DRAFTS, options=options), 0)
    meanings = [mistake.meaning for mistake in (*mistakes(problem), *wrong_orders(problem))]
    assert len(set(meanings)) == len(meanings) >= 7


@pytest.mark.parametrize(
    ("rule", "fields", "words"),
    [
        ("mamba1", {"num_kv_heads": 2}, "a layer of the rule mamba1 has num_kv_heads 1"),
        ("mamba1", {"head_size_v": 2}, "a layer of the rule mamba1 has head_size_v 1"),
        ("linear", {"num_kv_heads": 2}, "a layer of the rule linear has num_kv_heads 4"),
        ("mamba2", {"scale": 0.5}, "a layer of the rule mamba2 has no scale"),
        ("gdn", {"sliding_window": 4}, "a layer of the rule gdn has no sliding_window"),
        ("gdn", {"options": {"bias": False}}, "the rule gdn has no bias"),
        ("short_conv", {"options": {"state_dtype": "bfloat16"}}, "the rule short_conv has no state_dtype"),
        ("short_conv", {"head_size": 1}, "a convolution with one tap has no state"),
    ],
)
def test_a_layer_has_the_sizes_of_its_rule(state_case, rule, fields, words):
    case = state_case(rule, (3, 9), **fields)
    with pytest.raises(SpecError, match=words):
        check_meaning(case.layer, case.cache, case.batch)


def test_more_new_tokens_than_tokens_are_refused(state_case):
    case = state_case("gdn", (9, 3))
    with pytest.raises(SpecError, match="the 9 new tokens count as tokens of the request"):
        check_meaning(case.layer, case.cache, case.batch)


def test_the_form_of_a_class_is_checked():
    assert contract_problems(TorchStateBackend) == []
    wrong = changed(forward=lambda self, query, key, value: None)
    (problem,) = contract_problems(wrong)
    assert "cannot be called with (layer, inputs, states, attn_metadata, output)" in problem


def test_right_backends_pass_with_prefix_caching(state_case):
    for rule, state_dtype in (
        ("gdn", "float32"),
        ("mamba1", "bfloat16"),
        ("linear", "float32"),
        ("short_conv", "float32"),
    ):
        options = {"mamba_cache_mode": "all", "state_dtype": state_dtype}
        case = state_case(rule, *BLOCKS, options=options, cache={"block_size": 4})
        for backend in (ReferenceStateBackend, TorchStateBackend):
            records = examine(backend, case)
            assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "passed") | WITHOUT_GRAPHS
            assert "in slots that other requests have left" in records["invariance"].notes


def test_metadata_name_the_blocks_to_read_and_to_write(state_case):
    """Decodes are requests 0, 2 and 3; the columns are counted by hand."""
    built = {}

    def forward(self, layer, inputs, states, attn_metadata, output):
        built.update(vars(attn_metadata))
        built["read"] = [attn_metadata.source(request) for request in range(6)]
        built["written"] = [attn_metadata.destinations(request) for request in range(6)]
        ReferenceStateImpl.forward(self, layer, inputs, states, attn_metadata, output)

    case = state_case("gdn", *BLOCKS, options={"mamba_cache_mode": "all"}, cache={"block_size": 4})
    problem = build_recurrent(case, 0)
    StateSession(changed(ReferenceStateImpl, forward=forward), problem, CPU).run(problem)
    assert (built["num_decodes"], built["num_prefills"], built["mamba_block_size"]) == (3, 3, 4)
    assert built["num_computed_tokens"].tolist() == [8, 15, 6, 8, 18, 0, 0, 0]
    assert built["block_idx_last_computed_token"].tolist() == [1, 3, 1, 1, 4, 0, 0, 0]
    assert built["block_idx_first_scheduled_token"].tolist() == [2, 3, 1, 2, 4, 0, 0, 0]
    assert built["block_idx_last_scheduled_token"].tolist() == [2, 3, 1, 3, 7, 5, 0, 0]
    slots = [each.slots for each in problem.requests]
    assert slots[0][:2] == slots[3][:2]
    assert built["read"] == [slots[0][1], slots[1][3], slots[2][1], slots[0][1], slots[4][4], slots[5][0]]
    of_prompts = [{3: 2, 5: 3}, {1: 4, 5: 5, 9: 6, 11: 7}, {3: 0, 7: 1, 11: 2, 15: 3, 19: 4, 20: 5}]
    rows = [{0: 2}, {0: 3}, {0: 1}, *of_prompts]
    assert built["written"] == [
        {row: own[column] for row, column in each.items()} for own, each in zip(slots, rows, strict=True)
    ]
    wanted = [{slot: row for row, slot in each.items()} for each in built["written"]]
    assert wanted == [each.written for each in problem.requests]


def test_a_source_that_is_no_destination_must_stay(state_case):
    def forward(self, layer, inputs, states, attn_metadata, output):
        TorchStateImpl.forward(self, layer, inputs, states, attn_metadata, output)
        states[attn_metadata.source(0)] = states[attn_metadata.destinations(0)[0]]

    case = state_case("gdn", *BLOCKS, options={"mamba_cache_mode": "all"}, cache={"block_size": 4})
    record = examine(changed(forward=forward), case, checks=("cache_write",))["cache_write"]
    assert record.summary.startswith("1 slot that the step must leave alone changed")
    assert "the slot from which a state was read was written" in record.meaning


def test_a_backend_without_prefix_caching_is_not_examined_with_it(state_case):
    narrow = type("Narrow", (TorchStateBackend,), {"supported_mamba_cache_modes": ("none",)})
    case = state_case("gdn", *BLOCKS, options={"mamba_cache_mode": "all"}, cache={"block_size": 4})
    assert examine(narrow, case)["numerics"].reasons == ("mamba_cache_mode all: supported are none",)


def test_what_prefix_caching_does_not_have_is_refused(state_case):
    drafted = state_case("gdn", (1, 9), options={"mamba_cache_mode": "all", "num_speculative_tokens": 2})
    shared = state_case("gdn", *BLOCKS, cache={"block_size": 4})
    for case, words in ((drafted, "have no drafts"), (shared, "share states with mamba_cache_mode all alone")):
        with pytest.raises(SpecError, match=words):
            check_meaning(case.layer, case.cache, case.batch)


def in_order(order):
    """Return a method that does the parts of each row of a delta rule in another order."""

    def forward(self, layer, inputs, states, attn_metadata, output):
        m = attn_metadata
        pool = as_matrices(self.rule, states)
        for request in range(m.num_decodes + m.num_prefills):
            first, end = m.query_start_loc[request : request + 2].tolist()
            own = {name: tensor[first:end].double() for name, tensor in inputs.items()}
            rows = recurrent_rows(self.rule, own, {}, scale=self.scale, qk_l2norm=self.qk_l2norm)
            state = pool[m.source(request)].double() * m.has_initial_states[request]
            for t in range(end - first):
                key, query = rows.key[t, :, :, None], rows.query[t, :, :, None]
                value, beta = rows.value[t, :, :, None], rows.beta[t, :, None, None]
                decay = rows.log_decay[t, :, None].exp()
                before = state
                if order == "decay last":
                    state = (state + beta * (value - state @ key) * key.mT) * decay
                elif order == "undecayed":
                    state = state * decay + beta * (value - state @ key) * key.mT
                elif order == "correction first":
                    state = (state - beta * (state @ key) * key.mT) * decay + beta * value * key.mT
                else:
                    state = state * decay
                    state = state + beta * (value - state @ key) * key.mT
                output[first + t] = ((before if order == "output first" else state) @ query)[..., 0]
                if t in m.destinations(request):
                    pool[m.destinations(request)[t]] = state.to(pool.dtype)

    return forward


@pytest.mark.parametrize(
    ("rule", "order", "words"),
    [
        ("gdn", "output first", "the output comes from the state before the row"),
        ("gdn", "decay last", "the decay follows the row's key and value"),
        ("gdn", "undecayed", "takes from the new state what the undecayed one returns"),
        ("kda", "correction first", "the state is corrected before its decay"),
    ],
)
def test_a_wrong_order_within_a_row_is_named(state_case, rule, order, words):
    case = state_case(rule, *MIXED)
    assert examine(changed(forward=in_order("")), case, checks=("numerics",))["numerics"].outcome == "passed"
    record = examine(changed(forward=in_order(order)), case, checks=("numerics",))["numerics"]
    assert record.outcome == "failed"
    assert words in record.meaning


def test_accepted_tokens_are_all_numbers_in_turn(state_case):
    case = state_case("gdn", *[(4, 20)] * 4, (1, 9), options={"num_speculative_tokens": 3})
    assert [request.accepted for request in build_recurrent(case, 0).requests] == [4, 1, 3, 2, 4]


def test_some_gates_are_zero_in_decodes_and_prompts(state_case):
    for rule in ("gdn", "kda"):
        requests = build_recurrent(state_case(rule, *MIXED), 0).requests
        without = [bool((request.inputs["g"] == 0).flatten(1).all(dim=1).any()) for request in requests]
        assert without == [False, True, True, False, True, True]


def graphs(forward):
    """Return a function from a case to the record of ``cudagraph`` of a backend with another ``_decode``."""
    backend = changed(builder=TorchStateBuilder, _decode=forward)
    return lambda case: examine(backend, case, checks=("cudagraph",))["cudagraph"]


def test_a_replay_serves_other_slots_and_fewer_requests(state_case):
    case = state_case("gdn", (3, 20), (3, 9), (3, 12), (8, 8), options={"num_speculative_tokens": 2})
    right = graphs(TorchStateImpl._decode)(case)
    assert (right.outcome, right.figures["replays"], right.figures["requests"]) == ("passed", 3, 3)

    class Copies(TorchStateBuilder):
        def build(self, *args, **kwargs):
            metadata = super().build(*args, **kwargs)
            kept = vars(self).setdefault("kept", [])
            kept.append(metadata.state_indices_tensor.clone())
            return replace(metadata, state_indices_tensor=kept[-1])

    def reads(self, layer, inputs, pool, metadata, output):
        metadata.query_start_loc.tolist()
        TorchStateImpl._decode(self, layer, inputs, pool, metadata, output)

    def without_padding(self, layer, inputs, pool, metadata, output):
        TorchStateImpl._decode(self, layer, inputs, pool, metadata, output)
        pool[metadata.state_indices_tensor[-1, 0]] += 1

    copies = type("Mine", (TorchStateBackend,), {"get_builder_cls": staticmethod(lambda: Copies)})
    summary = examine(copies, case, checks=("cudagraph",))["cudagraph"].summary
    assert summary.startswith("right without a graph, wrong in a replay of decodes: 9 of 9 rows are wrong")
    assert "forward cannot be captured: host read" in graphs(reads)(case).summary
    assert "without a graph" in graphs(without_padding)(case).summary


def test_what_does_not_fit_is_unavailable_before_anything_is_made(state_case):
    records = examine(TorchStateBackend, state_case("gdn", (10**6, 10**6), num_heads=1024))
    assert set(outcomes(records).values()) == {"unavailable"}
    assert needed_bytes(state_case("gdn", (1, 10**6))) < 2**26


def test_a_builder_counts_a_prompt_of_one_token_as_a_prompt(state_case):
    problem = build_recurrent(state_case("gdn", (1, 9), (1, 1)), 0)
    seen = []

    class Builder(StateMetadataBuilder):
        def build(self, *args, **kwargs):
            seen.append(super().build(*args, **kwargs))
            return seen[-1]

    backend = type("Mine", (TorchStateBackend,), {"get_builder_cls": staticmethod(lambda: Builder)})
    StateSession(backend, problem, CPU).run(problem)
    assert (seen[0].num_decodes, seen[0].num_prefills) == (1, 1)


def test_the_suite_has_every_rule_and_dtype():
    found = {(case.batch.path.options.rule, case.batch.path.options.state_dtype) for case in load_suite("state")}
    assert found == {(rule, dtype) for rule in RULES for dtype in ("float32", "bfloat16")} - {
        ("short_conv", "bfloat16")
    }
    ids = {case.id for case in load_suite("state")}
    assert {f"{rule}-{kind}" for rule in RULES for kind in ("mixed", "drafts", "blocks", "long", "sizes")} <= {
        each.partition(".")[0] for each in ids
    }


def test_a_tolerance_widens_both_budgets(state_case):
    case = state_case("mamba1", *MIXED)
    wider = replace(case, tolerance=Tolerance(factor=4.0, reason="a test"))
    one, four = (recurrent_truth(replace(build_recurrent(case, 0), case=each)) for each in (case, wider))
    assert torch.equal(one.budget.norm * 4, four.budget.norm)
    assert torch.equal(one.state_budget.peak * 4, four.state_budget.peak)
