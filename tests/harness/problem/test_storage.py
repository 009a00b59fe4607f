"""What caches can hold: rows come out as they went in, and keep their signatures."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncheck.cases.loader import load_suite, suite_names
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.problem.queries import decode
from attncheck.harness.problem.storage import key_storage, truncated_code, value_storage
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reference.step_spec import CacheSpec

FP8 = st.sampled_from(["fp8", "fp8_e4m3", "fp8_e5m2"])
DTYPES = st.sampled_from(["float16", "bfloat16", "float32"])


@settings(max_examples=60, deadline=None)
@given(kind=FP8, dtype=DTYPES, scale=st.floats(2.0**-9, 60.0), seed=st.integers(0, 2**31))
def test_quantising_stored_rows_again_changes_nothing(kind, dtype, scale, seed):
    layer = LayerSpec(num_heads=2, num_kv_heads=2, head_size=64, dtype=dtype)
    storage = key_storage(layer, CacheSpec(kv_cache_dtype=kind, k_scale=(scale, 3 * scale)))
    numbers = torch.rand(20, 2, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4 - 2
    rows = storage.storable(numbers)
    codes = storage.codes(rows)
    assert rows.dtype == storage.dtype
    assert torch.equal(storage.codes(storage.rows_of(codes)), codes)
    assert torch.equal(storage.rows_of(codes), rows)
    # and the code is near to what was drawn: 3.5 steps of 2**-3 or 2**-2, or of the smallest number
    step = 3.5 * (2.0**-3 if storage.held == torch.float8_e4m3fn else 2.0**-2)
    scales = storage.scale.double()
    most = torch.finfo(storage.held).max * scales
    wanted = torch.minimum(torch.maximum(numbers, -most), most)
    near = (storage.exact(rows) - wanted).abs() <= 1.01 * (step * wanted.abs()).clamp(
        min=torch.finfo(storage.held).smallest_normal * scales
    )
    assert bool(near.all())


def test_a_writer_that_cuts_the_mantissa_off_stores_the_same_codes_where_heads_share_a_scale():
    cases = [case for name in suite_names() for case in load_suite(name) if case.layer.has_cache]
    storages = [how(case.layer, case.cache) for case in cases for how in (key_storage, value_storage)]
    distinct = {
        (s.dtype, s.held, tuple(s.scale.flatten().tolist())): s for s in storages if s.is_fp8 and len(s.scale) == 1
    }
    assert len(distinct) > 20
    numbers = torch.rand(64, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 - 2
    for storage in distinct.values():
        rows = storage.storable(numbers)
        for quotient in (rows.float() / storage.scale, rows.float() * (1 / storage.scale)):
            assert torch.equal(truncated_code(quotient.double(), storage.held), storage.codes(rows)), storage


def test_exact_numbers_are_codes_times_the_scale_as_the_backend_gets_it(make_case):
    cache = {"kv_cache_dtype": "fp8", "k_scale": 0.3, "v_scale": (0.7, 0.07)}
    problem = build_problem(make_case(cache=cache), 0)
    keys, values = key_storage(problem.layer, problem.cache), value_storage(problem.layer, problem.cache)
    codes = problem.keys.float().div(torch.tensor(0.3)).to(torch.float8_e4m3fn)
    assert torch.equal(keys.exact(problem.keys), codes.double() * float(torch.tensor(0.3)))
    codes = problem.values.float().div(torch.tensor([0.7, 0.07])[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(values.exact(problem.values), codes.double() * torch.tensor([0.7, 0.07]).double()[:, None])


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [0.02, 1.0, 20.0])
def test_signatures_survive(make_case, kind, scale):
    cache = {"kv_cache_dtype": kind, "k_scale": scale, "v_scale": scale}
    problem = build_problem(make_case((3, 9), (1, 40), cache=cache), 0)
    for rows, name, letter in ((problem.keys, "key", "K"), (problem.values, "value", "V")):
        for index in (0, 8, 9, 30):
            request, position = (0, index) if index < 9 else (1, index - 9)
            for head in range(2):
                found = [str(c) for c in decode(rows[index, head]) if c.kind == name]
                assert found == [f"{letter} of request {request}, position {position}, KV head {head}"]


def test_a_float_cache_of_another_dtype_holds_what_it_is_given(make_case):
    problem = build_problem(make_case(dtype="float32", cache={"kv_cache_dtype": "bfloat16"}), 0)
    assert problem.keys.dtype == torch.float32
    assert torch.equal(problem.keys.to(torch.bfloat16).float(), problem.keys)
    assert not torch.equal(build_problem(make_case(dtype="float32"), 0).keys, problem.keys)


def test_an_encoder_has_no_cache_to_round_for():
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, attn_type=AttentionType.ENCODER_ONLY)
    assert not key_storage(layer, CacheSpec(kv_cache_dtype="fp8")).is_fp8


def test_codes_that_the_dtype_cannot_represent_are_not_used():
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=1, dtype="float16")
    storage = key_storage(layer, CacheSpec(kv_cache_dtype="fp8_e5m2", k_scale=2.0))
    codes = torch.tensor([0x7B, 0x78, 0x01, 0x7C, 0x7F, 0x00], dtype=torch.uint8).view(-1, 1, 1)  # 57344 * 2 > 65504
    assert storage.holds(codes).flatten().tolist() == [False, False, True, False, True, True]
    assert storage.usable_rows(codes).flatten().tolist() == [0.0, 0.0, 2.0**-15, 0.0, 0.0, 0.0]
    tiny = key_storage(layer, CacheSpec(kv_cache_dtype="fp8_e5m2", k_scale=2.0**-9))  # 2**-25 is none in float16
    assert tiny.holds(codes).flatten().tolist() == [True, True, False, False, True, True]
