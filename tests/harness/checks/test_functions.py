"""Functions of a backend, ``merge_attn_states`` and ``causal_conv1d``: their problems, truths and budgets, and findings."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Tolerance
from attncheck.harness.checks.convolution import PAD_ID, build_conv, conv_truth
from attncheck.harness.checks.functions import build_merge, merge_truth
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reference import causal_conv1d, merge_attn_states
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reference.step_spec import CausalConv1dOptions

CPU = torch.device("cpu")
# The checks that do not apply to a function without an LSE.
NOT_APPLICABLE = dict.fromkeys(("lse", "features", "determinism", "invariance", "builder", "cudagraph"), "unsupported")


@pytest.fixture
def merge_case(make_case):
    return partial(make_case, path="merge")


@pytest.fixture
def conv_case(make_case):
    """Return a function to a case of a convolution; ``options`` are the path's."""

    def make(*requests, options=None, **given):
        return make_case(*requests, path="causal_conv1d", options=CausalConv1dOptions(**(options or {})), **given)

    return make


def test_states_are_the_same_bits_on_every_machine(merge_case):
    problem = build_merge(merge_case((2, 9), (1, 1), dtype="float32"), 0)
    rows = problem.lse_a[0].tolist()
    assert rows != build_merge(problem.case, 1).lse_a[0].tolist()
    assert rows[2] == -math.inf
    # Another generator gives other problems under the same hash.
    assert [math.floor(value * 2**10) for value in (rows[0], rows[1])] == [2254, -380]


def test_rows_and_heads_are_about_everything_that_goes_wrong(merge_case):
    problem = build_merge(merge_case((33, 70)), 0)
    a, b = problem.lse_a, problem.lse_b
    both = torch.isfinite(a) & torch.isfinite(b)
    kinds = {
        "empty": a.isneginf() & b.isneginf(),
        "no a": a.isneginf() & b.isfinite(),
        "no b": a.isfinite() & b.isneginf(),
        "equal": (a == b) & both,
        "far below a": (a - b > 90) & both,
        "far below b": (b - a > 90) & both,
        "over": (a > 88) & (b > 88),
        "under": (a < -88) & (b < -88) & both,
        "opposite": ((a - 80).abs() <= 2) & ((b + 80).abs() <= 2),
    }
    assert [kind for kind, where in kinds.items() if not bool(where.any())] == []
    assert bool(a.isneginf().any(dim=0).all())  # in every head


def test_where_the_cut_decides_the_states_follow_the_lengths(merge_case):
    problem = build_merge(merge_case((4, 1004), (3, 3), inputs=()), 0)
    assert problem.positions == ((0, 1000), (0, 1001), (0, 1002), (0, 1003), (1, 0), (1, 1), (1, 2))
    # No context, no first state, but where the second has to be the empty one.
    assert torch.equal(problem.lse_a[4:].isfinite(), problem.lse_b[4:].isneginf() & problem.lse_a[4:].isfinite())
    assert int(problem.lse_a[4:].isneginf().sum()) > 20
    rows = problem.lse_a[:4]
    assert bool(((rows - math.log(1000)).abs() <= 2.01)[rows.isfinite() & (rows > 3)].all())
    assert not bool((problem.lse_a[torch.isfinite(problem.lse_a)].abs() > 9.1).any())  # ``inputs`` has no large states


def test_rubbish_is_only_in_empty_states_and_states_are_views_that_swap(merge_case):
    problem = build_merge(merge_case((33, 70), dtype="float32"), 0)
    given, other, swapped = (problem.arguments(CPU, **how) for how in ({}, {"rubbish": 7.0}, {"swapped": True}))
    for one, two in ("ab", "ba"):
        changed = (given[f"out_{one}"] != other[f"out_{one}"]).all(dim=-1)
        assert torch.equal(changed, given[f"lse_{one}"].isinf())
        assert torch.equal(given[f"out_{one}"], swapped[f"out_{two}"])
        assert torch.equal(given[f"lse_{one}"], swapped[f"lse_{two}"])
    assert not given["out_b"].is_contiguous()
    assert not given["lse_b"].is_contiguous()
    plain = build_merge(merge_case((5, 40), inputs=("needles",)), 0).arguments(CPU)
    assert all(tensor.is_contiguous() for tensor in plain.values())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_merge_that_counts_in_powers_of_two_is_within_the_budget(merge_case, dtype):
    problem = build_merge(merge_case((33, 70), (20, 20), dtype=dtype), 0)
    truth = merge_truth(problem, CPU)
    out_a, lse_a, out_b, lse_b = (tensor.float() for tensor in problem.arguments(CPU).values())
    a, b = lse_a * math.log2(math.e), lse_b * math.log2(math.e)
    highest = torch.maximum(a, b)
    pivot = torch.where(highest.isinf(), 0.0, highest)
    w_a, w_b = torch.exp2(a - pivot), torch.exp2(b - pivot)
    share = (w_a / (w_a + w_b)).nan_to_num()[..., None]
    other = (w_b / (w_a + w_b)).nan_to_num()[..., None]
    out = (out_a * share + out_b * other).to(problem.dtype)
    assert float(share_of_budget(out.double() - truth.out, truth.budget).max()) < 0.7
    lse = (highest + torch.log2(w_a + w_b)) * math.log(2)
    error = torch.where(truth.lse.isinf(), 0.0, (lse.double() - truth.lse).abs())
    assert float((error / truth.budget.lse).max()) < 0.7
    wider = replace(problem.case, tolerance=Tolerance(factor=4.0, reason="a test"))
    four = merge_truth(build_merge(wider, 0), CPU).budget
    assert all(torch.equal(getattr(truth.budget, name) * 4, getattr(four, name)) for name in ("norm", "peak", "lse"))


def test_lines_are_distinct_and_padding_has_none(conv_case):
    problem = build_conv(conv_case(*[(1, 5)] * 30), 0)
    assert len(set(problem.lines)) == 30
    assert not {0, len(problem.states) - 1} & set(problem.lines)
    assert problem.lines != sorted(problem.lines)
    padded = build_conv(conv_case((3, 9), (1, 1), padding=(3, 5)), 0)
    assert padded.query_start_loc.tolist() == [0, 3, 4, 5, 6, 7]
    assert len(padded.x) == 9
    assert padded.cache_indices.tolist()[2:] == [PAD_ID] * 3
    assert padded.has_initial_state.tolist() == [True, False, False, True, False]
    few = build_conv(conv_case((3, 9), padding=(3, 1)), 0)
    assert few.query_start_loc.tolist() == [0, 3, 4, 4, 4]
    assert not torch.equal(problem.x, build_conv(problem.case, 1).x)


def test_regions_are_all_that_no_answer_looks_at(conv_case):
    problem = build_conv(conv_case((3, 9), (2, 2), options={"channels": 5}), 0)
    first, second = problem.lines
    poisoned = problem.arguments(CPU, math.nan)["conv_states"]
    assert poisoned is not None
    clean = ~torch.isnan(poisoned).any(dim=1)
    assert clean.nonzero().tolist() == [[first, 0], [first, 1], [first, 2]]
    without_state = problem.arguments(CPU, math.nan, ("lines of sequences without a state",))["conv_states"]
    assert without_state.isnan().any(dim=(1, 2)).nonzero().flatten().tolist() == [second]
    everywhere = sum(mask.expand(-1, 5, -1).long() for mask in problem.regions().values())
    assert int(everywhere.max()) == 1  # disjoint


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rounds", ["products", "sums"])
def test_a_convolution_that_rounds_on_its_way_is_within_the_budget(conv_case, dtype, rounds):
    problem = build_conv(conv_case((60, 60), (7, 30), (1, 9), dtype=dtype, options={"width": 4}), 0)
    truth = conv_truth(problem, CPU)
    starts = problem.query_start_loc.tolist()
    y = torch.empty(68, 1, 64, dtype=torch.float64)
    for request, line in enumerate(problem.lines):
        first, last = starts[request], starts[request + 1]
        past = problem.states[line, :, :3].T * problem.has_initial_state[request]
        tape = torch.cat([past, problem.x[first:last]])
        carried = problem.dtype if rounds == "products" else torch.float32
        terms = [tape[k : k + last - first].to(carried) * problem.weight[:, k].to(carried) for k in range(4)]
        z = problem.bias.float() + sum(term.float() for term in terms)
        z = z.to(problem.dtype).float() if rounds == "sums" else z
        y[first:last, 0] = torch.nn.functional.silu(z).to(problem.dtype).double()
    assert float(share_of_budget(y - truth.y, truth.budget).max()) < 0.8


def offering(**functions):
    return type("Mine", (ReferenceBackend,), {"functions": staticmethod(lambda: functions)})


def examine(backend, case, **plan):
    loaded = LoadedBackend(name="mine", ref="./x.py:Mine", backend=backend, version="", origin="test")
    examiner = Examiner(RunPlan(cases=(case,), backends=(loaded,), **plan))
    records = {record.check: record for record in examiner.run()}
    assert examiner.blind == []
    return records


def emptied(tensor):
    tensor.untyped_storage().resize_(0)
    return tensor


def outcomes(records):
    return {check: record.outcome for check, record in records.items()}


def test_what_is_not_offered_or_not_declared_is_not_examined_and_the_reason_is_stated(merge_case, conv_case):
    narrow = offering(merge_attn_states=merge_attn_states)
    narrow.get_supported_dtypes = staticmethod(lambda: [torch.float16])
    for backend, case, reason in (
        (offering(), merge_case(), "functions() offers no merge_attn_states"),
        (offering(), conv_case(), "functions() offers no causal_conv1d"),
        (narrow, merge_case(dtype="float32"), "dtype float32: supported are float16"),
    ):
        for record in examine(backend, case).values():
            assert (record.outcome, record.reasons, record.by) == ("unsupported", (reason,), "backend")


def test_an_exception_is_the_functions_and_breaks_the_claim(merge_case, conv_case):
    unlisted = type("Mine", (ReferenceBackend,), {"functions": staticmethod(lambda: 1 / 0)})
    records = examine(unlisted, merge_case())
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "errored")
    assert records["numerics"].stage == "functions"

    def broken(*_, **__):
        raise KeyError("line")

    records = examine(offering(causal_conv1d=broken), conv_case())
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "errored") | NOT_APPLICABLE | {"refusals": "failed"}
    assert records["refusals"].summary == snapshot("declared, but raised at causal_conv1d: KeyError: 'line'")
    assert records["numerics"].traceback.count("File ") == 1  # that of the function, and none of the harness


@pytest.mark.parametrize(
    ("merge", "complaint"),
    [
        (lambda a, x, b, y: a, "merge_attn_states returned a Tensor; the contract requires a pair (out, lse)"),
        (lambda a, x, b, y: (None, x), "the output is None, not a torch.Tensor"),
        (
            lambda a, x, b, y: (emptied(a.clone()), x),
            "the output is a tensor whose storage was resized: it holds too few bytes",
        ),
        (lambda a, x, b, y: (a, (x + y).t()), "the LSE has shape (8, 5), expected (5, 8)"),
        (lambda a, x, b, y: (a, x.half()), "the LSE has dtype float16, expected float32 or float64"),
        (lambda a, x, b, y: (a.half(), x), "the output has dtype float16, expected bfloat16, float32 or float64"),
    ],
)
def test_an_answer_of_another_form_is_wrong(merge_case, merge, complaint):
    records = examine(offering(merge_attn_states=merge), merge_case((5, 40)), checks=("numerics", "lse", "refusals"))
    assert outcomes(records) == {"numerics": "failed", "lse": "failed", "refusals": "passed"}
    assert records["numerics"].summary == records["lse"].summary == complaint


def test_changed_arguments_are_named_though_the_answer_is_right(merge_case, conv_case):
    def merge(out_a, lse_a, out_b, lse_b):
        answer = merge_attn_states(out_a, lse_a, out_b, lse_b)
        lse_a[0] += 1
        out_b.untyped_storage().fill_(0)
        return answer

    def convolve(x, *rest, **options):
        y = causal_conv1d(x, *rest, **options)
        rest[-1].logical_not_()
        x.as_strided((1,), (1,), x.shape[1]).zero_()  # in memory behind the first row of the view
        return y

    numerics = {"checks": ("numerics",)}
    merged = examine(offering(merge_attn_states=merge), merge_case(), **numerics)["numerics"]
    assert merged.summary == "arguments were changed: lse_a, out_b"
    convolved = examine(offering(causal_conv1d=convolve), conv_case(), **numerics)["numerics"]
    assert convolved.summary == "arguments were changed: x, has_initial_state"


@pytest.mark.parametrize("is_declared_safe", [False, True])
def test_rubbish_is_only_nan_where_nan_is_declared_to_be_safe(merge_case, is_declared_safe):
    def multiply(out_a, lse_a, out_b, lse_b):
        a, b = (out.masked_fill(out.isinf(), torch.nan) for out in (out_a, out_b))
        out, lse = merge_attn_states(a, lse_a, b, lse_b)
        return out + (a + b).isnan().any() * torch.nan if bool((a + b).isnan().any()) else out, lse

    backend = offering(merge_attn_states=multiply)
    if not is_declared_safe:
        backend.features = ReferenceBackend.features - {"merge_nan"}
    record = examine(backend, merge_case(), checks=("containment",))["containment"]
    assert record.outcome == ("failed" if is_declared_safe else "passed")
    if is_declared_safe:
        assert record.summary.startswith("NaN instead of 3072 behind an LSE of -inf reaches 40 of 40 rows")


def test_a_merge_that_does_not_repeat_itself_is_held_to_the_budget(merge_case):
    calls = []

    def merge(out_a, lse_a, out_b, lse_b):
        calls.append(1)
        out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
        return out * (1 + 1e-6 * len(calls)), lse

    record = examine(offering(merge_attn_states=merge), merge_case(), checks=("containment",))["containment"]
    assert record.outcome == "passed"
    assert record.notes == ("compared within the allowed error: equal input gives different bits",)


def test_what_does_not_fit_is_unavailable_before_anything_is_made(conv_case, merge_case):
    for case, function in (
        (conv_case((10**6, 10**6), options={"channels": 10**6}), causal_conv1d),
        (merge_case((10**6, 10**6), num_heads=1024), merge_attn_states),
    ):
        records = examine(offering(**{function.__name__: function}), case)
        assert set(outcomes(records).values()) == {"unavailable"}
    assert needed_bytes(merge_case((1, 10**6))) < 2**20  # context is only a number


def test_a_wrong_convolution_is_reported_in_rows(plain, conv_case):
    def convolve(x, *rest, **options):
        y = causal_conv1d(x, *rest, **options)
        y[7] *= 1.05
        y[9] = torch.nan
        return y

    checks = ("numerics", "cache_write")
    records = examine(offering(causal_conv1d=convolve), conv_case((6, 9), (6, 20)), checks=checks)
    assert plain(records["numerics"].summary) == snapshot(
        "wrong in 2 of 12 rows, the first is row 7 (request 1, position 15); the largest error is ..."
    )
    assert records["cache_write"].outcome == "passed"


def test_rows_of_padding_are_the_functions_own(conv_case):
    def convolve(x, weight, bias, states, starts, *rest, **options):
        y = causal_conv1d(x, weight, bias, states, starts, *rest, **options)
        y[10:] = torch.nan
        return y

    records = examine(offering(causal_conv1d=convolve), conv_case((10, 12), padding=(1, 3)))
    assert outcomes(records) == dict.fromkeys(DEFAULT_CHECKS, "passed") | NOT_APPLICABLE


def test_a_failure_is_dumped_with_the_tensors_of_its_question(merge_case, tmp_path):
    examine(offering(merge_attn_states=lambda a, x, b, y: (a, x)), merge_case((5, 40)), dump=tmp_path)
    (file,) = tmp_path.iterdir()
    content = torch.load(file, weights_only=True)
    assert content["case"] == "made/case"
    assert content["truth"].dtype == torch.float64
    assert {"truth_lse", "budget_norm", "budget_lse"} <= set(content)
    again, _ = merge_attn_states(*(content[name] for name in ("out_a", "lse_a", "out_b", "lse_b")))
    assert torch.equal(again, content["truth"])
