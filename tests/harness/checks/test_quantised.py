"""FP8 caches and outputs: codes that right arithmetic reaches, the errors of codes, scales in explanations."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.caches.codecs import PackedCodec
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.errors import BlindCaseError
from attncheck.harness.checks import cache_write
from attncheck.harness.checks.cudagraph.capture import allocate_inputs
from attncheck.harness.checks.findings import Holds
from attncheck.harness.driver.pool import CodecError, prove_codec
from attncheck.harness.driver.session import Fill, Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.problem.storage import (
    OutputCodes,
    key_storage,
    nearest_code,
    output_codes,
    truncated_code,
)
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.harness.truth.truth import truth_of
from attncheck.reference import Precision, paged_attention
from attncheck.reference.spec import LayerSpec, OutputQuantSpec
from attncheck.reference.step_spec import CacheSpec, StridesSpec

CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALES = {"k_scale": 0.3, "v_scale": (0.07, 0.7), "q_scale": 1.7}


def storage(kind="fp8", scale=0.3):
    return key_storage(
        LayerSpec(num_heads=2, num_kv_heads=2, head_size=64), CacheSpec(kv_cache_dtype=kind, k_scale=scale)
    )


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_dividing_and_multiplying_by_the_reciprocal_are_both_right(judge, backend_of, make_case, kind):
    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            limit = torch.finfo(key_cache.dtype).max
            slots = slot_mapping[slot_mapping >= 0]
            for new, cache, scale in ((key, key_cache, layer._k_scale), (value, value_cache, layer._v_scale)):
                scaled = new[slot_mapping >= 0].float() * (1 / scale).reshape(-1, 1)
                codes = scaled.clamp(-limit, limit).to(cache.dtype).view(torch.uint8)
                cache.view(torch.uint8)[slots // cache.shape[1], slots % cache.shape[1]] = codes

    case = make_case(cache={"kv_cache_dtype": kind} | SCALES)
    for impl in (ReferenceImpl, Impl):
        for check in ("numerics", "cache_write"):
            assert isinstance(judge(check, backend_of(impl), case), Holds)


@pytest.mark.parametrize(
    ("kind", "is_cut", "meaning"),
    [
        ("fp8_e5m2", True, "codes are truncated, not rounded to the nearest; NaN is stored as a number"),
        ("fp8_e4m3", False, "NaN is stored as a number"),
    ],
)
def test_a_writer_that_makes_numbers_of_nan_is_named(judge, backend_of, make_case, kind, is_cut, meaning):
    class Impl(ReferenceImpl):
        def write(self, layer, key, value, key_cache, value_cache, slot_mapping):
            limit = torch.finfo(key_cache.dtype).max
            for new, cache in ((key, key_cache), (value, value_cache)):
                scaled = (new.double() / 0.25).nan_to_num(nan=limit).clamp(-limit, limit)
                codes = truncated_code(scaled, cache.dtype) if is_cut else nearest_code(scaled, cache.dtype)
                cache.view(torch.uint8)[slot_mapping // cache.shape[1], slot_mapping % cache.shape[1]] = codes

    case = make_case(cache={"kv_cache_dtype": kind, "k_scale": 0.25, "v_scale": 0.25})
    assert judge("cache_write", backend_of(Impl), case).meaning == meaning


def test_the_rows_reach_codes_that_only_one_of_the_two_makes():
    held = storage(scale=(0.3, 0.71))
    rows = cache_write.extreme_rows(torch.zeros(40, 2, 64, dtype=torch.bfloat16), held)
    first, *others = cache_write.honest_codes(rows, held)
    assert sum(int((first != other).sum()) for other in others) > 0
    exact = storage(scale=(0.5, 2.0))
    codes = cache_write.honest_codes(cache_write.extreme_rows(rows, exact), exact)
    assert all(torch.equal(codes[0], other) for other in codes[1:])


def test_a_codec_is_trusted_with_its_own_scales_and_cache_alone(make_case):
    problem = build_problem(make_case(cache={"kv_cache_dtype": "fp8"} | SCALES), 0)
    right = ReferenceBackend.kv_cache_codec(problem.layer, problem.cache)
    assert isinstance(right, PackedCodec)
    prove_codec(right, ReferenceBackend, problem)
    wrong = replace(right, coding=replace(right.coding, k_scale=0.3, v_scale=0.3))

    class Mixed:
        write, read = right.write, wrong.read

    with pytest.raises(CodecError, match="the codec cannot be trusted with values: what was written to all slots"):
        prove_codec(Mixed(), ReferenceBackend, problem)

    class Flat(ReferenceBackend):
        """Keys and values share the memory of one page."""

        @classmethod
        def get_kv_cache_shape(cls, *sizes, **_):
            return (2, 1, *ReferenceBackend.get_kv_cache_shape(*sizes)[2:])

    with pytest.raises(IndexError):  # a right codec vouches for no other cache
        prove_codec(right, Flat, problem)


def test_foreign_slots_hold_an_infinity_where_the_format_has_one(make_case):
    for kind, infinite in (("fp8_e5m2", True), ("fp8_e4m3", False)):
        session = Session(ReferenceBackend, build_problem(make_case(cache={"kv_cache_dtype": kind}), 0), CPU)
        foreign = torch.cat(list(session.pool.regions.values()))
        owned = session.problem.key_slots[session.problem.old_keys]
        session.pool.filled(float("-inf"))
        image = session.pool.bytes().clone()
        for rows in session.pool.read_image(image, foreign):
            assert bool((rows == float("-inf")).all()) == infinite
        for rows in session.pool.read_image(image, owned):
            assert bool(torch.isfinite(rows).all())


def test_a_case_that_cannot_notice_a_scale_is_blind(make_case):
    with pytest.raises(BlindCaseError, match="v_scale"):
        truth_of(build_problem(make_case(cache={"kv_cache_dtype": "fp8", "v_scale": 1.001}), 0), CPU)
    with pytest.raises(BlindCaseError, match="k_scale"):
        truth_of(build_problem(make_case((1, 1), cache={"kv_cache_dtype": "fp8", "k_scale": 3.0}), 0), CPU)


def test_the_error_of_a_code_is_the_distance_to_its_value():
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, output_quant=OutputQuantSpec(scale=0.1))
    assert output_codes(layer) == OutputCodes(E4M3, float(torch.tensor(0.1, dtype=torch.float32)))
    codes = OutputCodes(E4M3, 0.5)
    out = torch.tensor([0.5, 0.53, 0.56, 1e9, 0.0004, -0.0004], dtype=torch.float64)
    seen = torch.tensor([1.0, 1.0, 1.0, 448.0, 0.0, 0.0]).to(E4M3)
    errors = codes.error(seen, out)
    assert errors[[0, 1, 3, 4, 5]].tolist() == [0.0] * 5
    assert float(errors[2]) == pytest.approx(0.53125 - 0.56, rel=1e-4)
    assert bool(torch.isnan(codes.error(torch.tensor([float("nan")]).to(E4M3), out[:1])).all())
    assert torch.equal(codes.of(out).float(), torch.tensor([1.0, 1.0, 1.125, 448.0, 0.0, -0.0]))


class NeverFuses(ReferenceImpl):
    """Would quantise its output, but returns False."""

    def fused_output_quant_supported(self, quant_key):
        return False


@pytest.mark.parametrize(
    ("features", "outcome"),
    [(ReferenceBackend.features - {"output_quant"}, "passed"), (ReferenceBackend.features, "failed")],
)
def test_an_impl_that_returns_false_refuses(make_case, features, outcome):
    members = {"get_impl_cls": staticmethod(lambda: NeverFuses), "features": features}
    candidate = LoadedBackend("no", "no", type("No", (ReferenceBackend,), members), "", "test")
    case = make_case(output_quant=OutputQuantSpec(scale=0.1))
    records = {record.check: record for record in Examiner(RunPlan(cases=(case,), backends=(candidate,))).run()}
    assert records["refusals"].outcome == outcome
    assert "construct" in str(records["refusals"])


def test_padding_rows_of_codes_stay_and_a_profiling_call_is_finite(make_case):
    problem = build_problem(make_case((1, 9), (3, 20), padding=(1, 3), output_quant=OutputQuantSpec(scale=0.01)), 0)
    session = Session(ReferenceBackend, problem, CPU)
    seen = session.run(Fill())
    assert seen.output.dtype == E4M3
    assert seen.output[4:].double().unique().tolist() == [1.5]
    idle = session.run_without_metadata()
    assert bool(torch.isfinite(idle.double()).all())


@pytest.mark.parametrize(
    ("change", "meaning"),
    [
        (lambda layer: {"_k_scale": torch.ones(1)}, "k_scale is left out"),
        (lambda layer: {"_v_scale": layer._v_scale[:1]}, "the v_scale of KV head 0 is used for all heads"),
        (lambda layer: {"_v_scale": layer._v_scale**2}, "v_scale is applied twice"),
    ],
)
def test_faults_of_scales_are_named(judge, backend_of, make_case, change, meaning):
    class Impl(ReferenceImpl):
        def attend(self, layer, *rest):
            own = {name: getattr(layer, name) for name in ("_q_scale", "_k_scale", "_v_scale")}
            super().attend(type("Layer", (), own | change(layer)), *rest)

    case = make_case((1, 40), (5, 30), cache={"kv_cache_dtype": "fp8"} | SCALES)
    finding = judge("numerics", backend_of(Impl), case)
    assert finding.meaning.startswith(f"{meaning}: a reference with this fault gives the same output in all rows")


QUERY_CODES = {"query_quant": True, "cache": {"kv_cache_dtype": "fp8"} | SCALES}


def test_a_backend_gets_codes_whose_values_are_those_of_the_truth(make_case):
    """Query heads 0 and 1 share the first scale, heads 2 and 3 the second."""
    cache = QUERY_CODES["cache"] | {"q_scale": (1.7, 0.4)}
    case = make_case((1, 9), (3, 20), num_heads=4, num_kv_heads=2, padding=(1, 3), query_quant=True, cache=cache)
    problem = build_problem(case, 0)
    (call,) = Session(ReferenceBackend, problem, CPU).prepared().calls
    assert call.query.dtype == E4M3
    assert (call.key.dtype, call.value.dtype) == (torch.bfloat16, torch.bfloat16)
    scales = torch.tensor([1.7, 1.7, 0.4, 0.4], dtype=torch.float32).double()[:, None]
    assert torch.equal(call.query[:4].double() * scales, truth_of(problem, CPU).rows.query)
    assert bool(torch.isnan(call.query[4:].double()).all())


class NeverTakesCodes(ReferenceImpl):
    """Would decode FP8 queries, but states that it does not take them."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.supports_quant_query_input = False


@pytest.mark.parametrize(
    ("features", "outcome"),
    [(ReferenceBackend.features - {"fp8_query"}, "passed"), (ReferenceBackend.features, "failed")],
)
def test_an_impl_that_takes_no_fp8_query_refuses(make_case, features, outcome):
    members = {"get_impl_cls": staticmethod(lambda: NeverTakesCodes), "features": features}
    candidate = LoadedBackend("no", "no", type("No", (ReferenceBackend,), members), "", "test")
    records = {each.check: each for each in Examiner(RunPlan((make_case(**QUERY_CODES),), (candidate,))).run()}
    assert records["refusals"].outcome == outcome
    assert "supports_quant_query_input is False" in str(records["refusals"])


@pytest.mark.parametrize(("factor", "holds"), [(256, True), (0.1, False)])
def test_a_kernel_may_multiply_codes_of_values_by_weights_in_the_same_format(
    judge, backend_of, make_case, factor, holds
):
    """Tensor cores take both operands in FP8. Weights are at most 1: without a factor, most become 0."""

    class Rounded(Precision):
        def round_prob(self, p):
            return (factor * p).to(E4M3).to(p.dtype) / factor

    class Impl(ReferenceImpl):
        def attend(self, layer, query, key, value, caches, metadata, output, output_lse):
            common, rows = metadata.common, metadata.num_rows
            scales = {"q_scale": self.query_scale(layer), "k_scale": layer._k_scale, "v_scale": layer._v_scale}
            places = common.block_table_tensor, common.seq_lens, common.query_start_loc
            out, lse = paged_attention(
                query[:rows], *caches, *places, self.params(metadata), precision=Rounded(torch.float32), **scales
            )
            output[:rows], output_lse[:rows] = out.to(output.dtype), lse.float()

    case = make_case((1, 200), (5, 90), head_size=64, **QUERY_CODES)
    assert isinstance(judge("numerics", backend_of(Impl), case), Holds) == holds


@pytest.mark.parametrize(
    ("change", "meaning"),
    [
        (lambda q: torch.ones(1), "q_scale is left out"),
        (lambda q: q**2, "q_scale is applied twice"),
        (lambda q: 1 / q, "q_scale divides the codes"),
    ],
)
def test_faults_of_the_query_scale_are_named(judge, backend_of, make_case, change, meaning):
    class Impl(ReferenceImpl):
        def query_scale(self, layer):
            return change(super().query_scale(layer))

    finding = judge("numerics", backend_of(Impl), make_case((1, 40), (5, 30), **QUERY_CODES))
    assert finding.meaning.startswith(f"{meaning}: a reference with this fault gives the same output in all rows")


def test_a_case_that_cannot_notice_the_query_scale_is_blind(make_case):
    cache = QUERY_CODES["cache"] | {"q_scale": 1.001}
    with pytest.raises(BlindCaseError, match="q_scale"):
        truth_of(build_problem(make_case((1, 40), query_quant=True, cache=cache), 0), CPU)


class WritesIntoTheQuery(ReferenceImpl):
    """Overwrites the first row of codes after it has read them."""

    def attend(self, layer, query, *operands):
        super().attend(layer, query, *operands)
        query.view(torch.uint8)[0] = 0


def test_codes_of_the_query_are_compared_and_persist_as_other_inputs_do(judge, backend_of, make_case):
    case = make_case((1, 40), (5, 30), **QUERY_CODES)
    finding = judge("cache_write", backend_of(WritesIntoTheQuery), case)
    assert "query" in finding.summary
    for form in ("fused", "padded", "transposed", "odd"):
        strides = StridesSpec(query=form, key="contiguous", value="contiguous")
        assert isinstance(judge("numerics", ReferenceBackend, replace(case, strides=strides)), Holds)
    inputs = allocate_inputs(build_problem(case, 0), 2, 6, 64, CPU).largest
    assert (inputs.query.dtype, inputs.key.dtype) == (E4M3, torch.bfloat16)
