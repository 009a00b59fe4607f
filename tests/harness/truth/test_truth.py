"""The truth of a case: its values, the device that computes them, and the tolerances around them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_cases import make_case

from attncheck.cases.model import Tolerance
from attncheck.errors import BlindCaseError
from attncheck.harness.device import float64_rate
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth import truth as module
from attncheck.harness.truth.faults import keys_seen, toggles
from attncheck.harness.truth.truth import (
    device_seconds,
    host_seconds,
    params_of,
    rows_of,
    truth_device,
    truth_notes,
    truth_of,
)
from attncheck.harness.truth.unpaged import UnpagedAttention, budget_of, score_bound, share_of_budget
from attncheck.reference import AttentionParams, visible
from attncheck.reference.spec import MODIFIERS


def truth(case, seed=0):
    return truth_of(build_problem(case, seed), torch.device("cpu"))


@pytest.mark.parametrize(
    "layer",
    [
        {"sliding_window": 16},
        {"sliding_window": 1},
        {"logits_soft_cap": 50.0},
        {"logits_soft_cap": 2.0},
        {"alibi": True},
        {"sinks": True},
        {"sliding_window": 9, "logits_soft_cap": 20.0, "sinks": True},
        {"causal": False, "sliding_window": 4},
    ],
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_ordinary_cases_bite_whatever_the_seed(layer, dtype):
    for seed in range(3):
        truth(make_case(dtype=dtype, **layer), seed)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ({"sliding_window": 1000}, r"made/case: blind to sliding_window: no row .* could act on"),
        ({"sinks": (-30.0,) * 8}, r"blind to sinks: only 0 of 40 rows move by 10 times the allowed error"),
        ({"alibi": (1e-6,) * 8}, "blind to alibi"),
    ],
)
def test_a_modifier_without_effect_is_blind(layer, message):
    with pytest.raises(BlindCaseError, match=message):
        truth(make_case(**layer))


def test_single_rows_are_blind_to_causality():
    with pytest.raises(BlindCaseError, match="blind to causal: no row of the batch has a key it could act on"):
        truth(make_case((1, 40), causal=False))
    truth(make_case((1, 40), (2, 33), causal=False))


def test_plain_inputs_take_what_they_get():
    truth(make_case(logits_soft_cap=5000.0, inputs=("views",)))


def test_a_case_of_its_own_tolerance_gets_it():
    case = make_case()
    wider = replace(case, tolerance=Tolerance(factor=3.0, reason="to be seen here"))
    assert wider.hash == case.hash
    assert torch.equal(truth(wider).budget.norm, 3 * truth(case).budget.norm)


CPU = torch.device("cpu")


def params_and_rows(case):
    problem = build_problem(case, 0)
    return params_of(problem), rows_of(problem, CPU)


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_case_must_notice_each_of_its_modifiers(name):
    params, rows = params_and_rows(make_case((3, 20), **{name: MODIFIERS[name].ordinary}))
    found = list(toggles(params, rows))
    assert found[0].subject in (name, MODIFIERS[name].feature)
    out, _ = rows.attend(params)
    assert all(bool((toggle.hypothesis.compute()[0] != out).any()) for toggle in found)


def test_a_plain_layer_has_nothing_to_notice():
    assert list(toggles(*params_and_rows(make_case((3, 20))))) == []


@pytest.mark.parametrize("modifiers", [{}, {"sliding_window": 5}, {"attn_chunk_size": 7}, {"causal": False}])
@pytest.mark.parametrize("tree", [False, True])
def test_seen_keys_are_counted(modifiers, tree):
    params, rows = params_and_rows(make_case((3, 20), (3, 3), (3, 2), **modifiers))
    branches = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    if tree:
        rows = replace(rows, tree=branches)
    expected = []
    for num_keys in (20, 3, 2):
        for row in range(3):
            sees = visible(params, torch.tensor([num_keys - 3 + row]), torch.arange(num_keys)).tolist()
            hidden = [node for node in range(3) if tree and not branches[row, node]]
            expected.append(sum(sees) - sum(sees[num_keys - 3 + n] for n in hidden if num_keys - 3 + n >= 0))
    assert keys_seen(rows, params).tolist() == expected


GPU = torch.device("cuda", 0)


def gpu(major, minor, num_sms, **others):
    sizes = {"total_memory": 2**34, "L2_cache_size": 2**25, "multi_processor_count": num_sms}
    return SimpleNamespace(name="GPU", major=major, minor=minor, **sizes, **others)


H100, RTX_4090, RTX_3050 = gpu(9, 0, 132), gpu(8, 9, 128, clock_rate=2_520_000), gpu(8, 6, 20)


@pytest.fixture
def prefill():
    return make_case((4096, 4096), num_heads=8, num_kv_heads=2, head_size=64)


@pytest.mark.parametrize(
    ("properties", "cores", "place"),
    [
        (H100, 16, GPU),
        (H100, 64, GPU),
        (RTX_4090, 16, GPU),
        (RTX_4090, 96, CPU),
        (RTX_3050, 2, GPU),
        (RTX_3050, 16, CPU),
    ],
)
def test_the_faster_of_both_computes_a_long_prefill(monkeypatch, prefill, properties, cores, place):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(module, "_num_cores", lambda: cores)
    assert truth_device(prefill, GPU) == place
    assert bool(truth_notes(prefill, GPU)) == (place == CPU)


def test_a_short_decode_is_not_worth_the_copies(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: RTX_3050)
    monkeypatch.setattr(module, "_num_cores", lambda: 16)
    assert truth_device(make_case((1, 33), (1, 17)), GPU) == GPU


def test_on_the_cpu_nothing_is_estimated(monkeypatch, prefill):
    monkeypatch.delattr(torch.cuda, "get_device_properties")
    assert truth_device(prefill, CPU) == CPU
    assert truth_notes(prefill, CPU) == ()


def test_the_seconds_are_operations_over_rates(prefill):
    pairs = sum(range(1, 4097))  # of a causal prefill
    products, values = 2 * 8 * 64 * pairs, 2 * 8 * 64 * pairs
    # An SM of H100 has 64 float64 units; half of their rate is counted on.
    assert device_seconds(prefill, float64_rate(H100)) == pytest.approx((products + 2 * values) / (132 * 64 * 1.5e9))
    copied = 8 * 4096 * 8 * (64 + 4) / 10e9 + 0.0002
    operations = products + 2 * values + (products + values) / 2
    assert host_seconds(prefill, 4) == pytest.approx(operations / (4 * 16e9) + copied)
    assert device_seconds(prefill, float64_rate(gpu(12, 0, 132))) == pytest.approx(
        32 * device_seconds(prefill, float64_rate(H100))
    )


def float32_kernel(problem, *, round_p, peak=1.0):
    """Plain float32 attention, written without the reference; optionally with the softmax rounded to the dtype.

    ``peak``: what the largest weight of a row is before it is divided by their sum.
    """
    layer, outputs = problem.layer, []
    for r in problem.requests:
        group = layer.num_heads // layer.num_kv_heads
        query = problem.query[r.first_row : r.first_row + r.rows].float()
        keys = problem.keys[r.base : r.base + r.num_keys].float().repeat_interleave(group, 1)
        values = problem.values[r.base : r.base + r.num_keys].float().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * layer.softmax_scale
        distance = (torch.arange(r.rows) + r.first_position)[:, None] - torch.arange(r.num_keys)
        hidden = distance < 0
        if layer.sliding_window:
            hidden |= distance >= layer.sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = peak * torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        total = weights.sum(dim=-1)
        if round_p:
            weights = weights.to(problem.dtype).float()
        outputs.append((torch.einsum("hqk,khd->qhd", weights, values) / total.T[..., None]).to(problem.dtype))
    return torch.cat(outputs)


def shares(problem, truth, output):
    return share_of_budget(output.double() - truth.out, truth.budget)


@settings(max_examples=40)
@given(
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    keys=st.integers(1, 700),
    rows=st.integers(1, 40),
    head_size=st.sampled_from([16, 64, 128]),
    scale=st.sampled_from([None, 0.03, 0.5]),
    round_p=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_right_kernels_are_never_accused(dtype, keys, rows, head_size, scale, round_p, seed):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": head_size}
    case = make_case((rows, rows + keys - 1), dtype=dtype, scale=scale, **sizes)
    problem = build_problem(case, seed)
    truth = truth_of(problem, CPU)
    assert float(shares(problem, truth, float32_kernel(problem, round_p=round_p)).max()) <= 1.0


@pytest.mark.parametrize("head_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_luck_of_few_numbers_fails_no_kernel(dtype, head_size):
    for seed in range(20):
        problem = build_problem(make_case((4, 60), (1, 130), head_size=head_size, dtype=dtype), seed)
        output = float32_kernel(problem, round_p=True, peak=0.7)
        assert float(shares(problem, truth_of(problem, CPU), output).max()) <= 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("keys", [2, 17, 500, 4096])
def test_zeros_a_constant_and_the_mean_of_v_are_far_outside(dtype, keys):
    problem = build_problem(make_case((1, keys), (1, keys), dtype=dtype), 0)
    truth = truth_of(problem, CPU)
    mean = torch.cat([problem.values[r.base : r.base + r.num_keys].double().mean(0)[None] for r in problem.requests])
    for blind in (
        torch.zeros_like(truth.out),
        torch.full_like(truth.out, 0.1),
        mean.repeat_interleave(4, dim=1),
    ):
        worst_row = shares(problem, truth, blind).amax(dim=1)
        assert bool((worst_row > 10).all())


@pytest.mark.parametrize(("second_key", "ruled_by"), [(3.0, "two roundings"), (1.3, "the loss")])
def test_the_budget_is_the_formula(second_key, ruled_by):
    """One row, one head, two keys, equal columns: by hand; values that cancel make the loss the larger part."""
    query, keys = torch.tensor([[[2.0]]]), torch.tensor([[[1.0]], [[second_key]]])
    values = torch.tensor([[[1.0]], [[-1.0]]]).expand(2, 1, 8)
    rows = UnpagedAttention(query, keys, values, torch.tensor([0, 1]), torch.tensor([0, 2]))
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, head_size_v=8, scale=0.5)
    out, lse, weighted = rows.attend_weighted(params)
    budget = budget_of(rows, params, torch.bfloat16, out, lse, weighted)
    lead = float(torch.tensor(second_key)) - 1.0
    truth = (math.exp(-lead) - 1) / (math.exp(-lead) + 1)
    # In bfloat16 the softmax numerators are exp(-lead) rounded and 1, the output is rounded once more.
    e = float(torch.tensor(math.exp(-lead)).bfloat16())
    low = float(torch.tensor((e - 1) / (math.exp(-lead) + 1), dtype=torch.float64).bfloat16())
    loss, roundings = 3 * abs(low - truth), 2**-7 * abs(truth)
    assert (loss > roundings) == (ruled_by == "the loss")
    floor = 8 * 2**-24 * (1 + 0.5 * 2 * second_key) * 1.0
    assert float(out[0, 0, 0]) == pytest.approx(truth, abs=1e-12)
    assert float(budget.peak) == pytest.approx(max(loss, roundings) + floor, rel=1e-4)
    assert float(budget.norm) == pytest.approx(8**0.5 * float(budget.peak))


def test_score_bound_counts_only_keys_the_row_sees():
    keys = torch.tensor([1.0, 100.0, 2.0]).reshape(3, 1, 1)
    rows = UnpagedAttention(torch.ones(2, 1, 1), keys, keys, torch.tensor([0, 2]), torch.tensor([0, 3]))
    windowed = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, window=(0, 0))
    assert score_bound(rows, windowed).flatten().tolist() == [100.0, 2.0]
    capped = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, logits_soft_cap=5.0)
    assert score_bound(rows, capped).flatten().tolist() == [5.0, 5.0]
    biased = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, window=(0, 0), alibi_slopes=(0.5,))
    assert score_bound(rows, biased).flatten().tolist() == [101.5, 3.5]


def test_a_cap_hides_the_rounding_of_large_scores_and_not_that_of_large_terms():
    query = torch.tensor([[[30.0, -40.0]], [[30.0, -40.0]]])
    keys = torch.tensor([[[40.0, 30.0]], [[80.0, -60.0]]])  # scores of 0 and 4800
    rows = UnpagedAttention(query, keys, keys, torch.tensor([0, 2]), torch.tensor([0, 2]))
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=2, scale=1.0, logits_soft_cap=5.0)
    assert score_bound(rows, params).flatten().tolist() == pytest.approx([2500.0, 2500.0])
    second = replace(params, window=(0, 0))
    assert score_bound(rows, second).flatten().tolist() == pytest.approx([2500.0, 5.0])


def test_nan_is_infinitely_wrong_and_no_error_is_right():
    problem = build_problem(make_case((1, 1)), 0)
    truth = truth_of(problem, CPU)
    error = torch.zeros_like(truth.out)
    assert float(share_of_budget(error, truth.budget).max()) == 0.0
    error[0, 0, 0] = float("nan")
    assert float(share_of_budget(error, truth.budget)[0, 0]) == math.inf


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_sum_of_the_rounded_softmax_is_an_honest_lse(dtype):
    for seed in range(5):
        problem = build_problem(make_case((3, 700), (1, 33), dtype=dtype), seed)
        truth = truth_of(problem, CPU)
        for r in problem.requests:
            rows = slice(r.first_row, r.first_row + r.rows)
            keys = problem.keys[r.base : r.base + r.num_keys].float().repeat_interleave(4, 1)
            scores = torch.einsum("qhd,khd->qhk", problem.query[rows].float(), keys) * problem.layer.softmax_scale
            distance = (torch.arange(r.rows) + r.first_position)[:, None, None] - torch.arange(r.num_keys)
            scores = scores.masked_fill(distance < 0, float("-inf"))
            top = scores.amax(dim=-1, keepdim=True)
            lse = (top + torch.exp(scores - top).to(problem.dtype).float().sum(-1, keepdim=True).log())[..., 0]
            assert bool(((lse - truth.lse[rows]).abs() <= truth.budget.lse[rows]).all())
            assert bool(((lse + 0.02 - truth.lse[rows]).abs() > truth.budget.lse[rows]).any())


@pytest.mark.parametrize("scale", [0.01, 0.4])
def test_a_tanh_of_exponentials_is_within_the_budget(scale):
    """Small scores lose most: 2 sigmoid(2x) - 1 is off by some roundings of 1, times the cap."""
    cap = 30.0
    changes = {"dtype": "float32", "scale": scale, "logits_soft_cap": cap, "sliding_window": 3}
    for seed in range(5):
        problem = build_problem(make_case((15, 15), (31, 31), **changes), seed)
        truth = truth_of(problem, CPU)
        for r in problem.requests:
            rows = slice(r.first_row, r.first_row + r.rows)
            keys = problem.keys[r.base : r.base + r.num_keys].repeat_interleave(4, 1)
            scores = torch.einsum("qhd,khd->qhk", problem.query[rows], keys) * scale
            scores = cap * (2 / (1 + torch.exp(-2 * scores / cap)) - 1)
            distance = (torch.arange(r.rows) + r.first_position)[:, None, None] - torch.arange(r.num_keys)
            lse = scores.masked_fill((distance < 0) | (distance > 2), float("-inf")).logsumexp(-1)
            assert bool(((lse - truth.lse[rows]).abs() <= truth.budget.lse[rows]).all())
            assert bool(((lse + 1e-4 - truth.lse[rows]).abs() > truth.budget.lse[rows]).any())


def test_what_underflows_in_float32_may_vanish():
    """A sink far above every score: the keys' weights lie below the smallest float32."""
    keys = torch.full((3, 1, 1), -300.0)
    rows = UnpagedAttention(torch.ones(1, 1, 1), keys, torch.ones(3, 1, 1), torch.tensor([0, 1]), torch.tensor([0, 3]))
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=1, scale=1.0, sinks=(5.0,))
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        out, lse, weighted = rows.attend_weighted(params)
        assert 0 < float(out) < 1e-100
        budget = budget_of(rows, params, dtype, out, lse, weighted)
        assert float(share_of_budget(-out, budget).max()) <= 1.0
        assert float(share_of_budget(torch.full_like(out, 1e-3), budget).max()) > 1.0


def decode_kernel(truth, rounded, *, max_from_sinks=False):
    """One row over all its keys, written without the reference. ``rounded``: what becomes of its weights ``[H, 1, k]``.

    ``max_from_sinks``: whether weights are relative to the sink, if it is above all scores.
    """
    rows, params = truth.rows, truth.params
    scores = torch.einsum("qhd,khd->hqk", rows.query.float(), rows.keys.float()) * params.softmax_scale
    top = scores.amax(dim=-1, keepdim=True)
    sinks = torch.tensor(params.sinks or [-torch.inf] * params.num_heads)[:, None, None]
    if max_from_sinks:
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sinks - top)
    return torch.einsum("hqk,khd->qhd", rounded(weights) / total, rows.values.float())


def to_fp8(factor):
    return lambda weights: (factor * weights).to(torch.float8_e4m3fn).float() / factor


HEADS = {"num_heads": 16, "num_kv_heads": 16, "head_size": 64, "dtype": "float16"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("keys", "factor", "sinks", "is_right"),
    [(2, 256, False, True), (2, 448, False, True), (500, 256, 16 * (10.0,), True), (500, 1, False, False)],
)
def test_fp8_weights_have_the_factor_of_a_kernel_and_may_be_relative_to_the_sink(keys, factor, sinks, is_right, seed):
    case = make_case((1, keys), query_quant=True, sinks=sinks, cache={"kv_cache_dtype": "fp8"}, **HEADS)
    problem = build_problem(case, seed)
    right = truth_of(problem, CPU, refuse_blindness=False)
    out = decode_kernel(right, to_fp8(factor), max_from_sinks=bool(sinks)).to(problem.dtype)
    assert (float(shares(problem, right, out).max()) <= 1.0) == is_right


def test_weights_times_the_scales_of_values_may_be_rounded():
    case = make_case((1, 500), cache={"kv_cache_dtype": "fp8_per_token_head"}, **HEADS)
    for seed in range(3):
        problem = build_problem(case, seed)
        right = truth_of(problem, CPU)
        scales = right.rows.values.float().abs().amax(dim=-1).T[:, None] / 448
        out = decode_kernel(right, lambda weights, by=scales: (weights * by).half().float() / by).half()
        assert float(shares(problem, right, out).max()) <= 1.0
