"""Caches whose rows have scales of their own: what right writers may differ in, and what is wrong or not examined."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.caches.row_codec import RowCodec, decode_rows, encode_rows, row_codec
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.cases.consistency import check_inputs, check_meaning
from attncheck.errors import BackendUnavailableError, SpecError
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.harness.driver.session import Session
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.problem.storage import key_storage, value_storage
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, CacheSpec

CPU = torch.device("cpu")
FORMATS = list(ROW_FORMATS)


def coded(make_case, kind, **cache):
    return make_case(cache={"kv_cache_dtype": kind, "layout": "HND"} | cache)


class VllmLikeImpl(ReferenceImpl):
    """Writes int8 rows as vLLM's Triton kernel does: product with the reciprocal, and ties away from 0."""

    last_bits = 1.0

    def _decoded_rows(self, call, *, writes):
        mapping = call.metadata.common.slot_mapping
        block_size = call.kv_cache.shape[2]
        for token, slot in enumerate(mapping.tolist()):
            for head in range(self.num_kv_heads):
                row = (
                    call.kv_cache.view(torch.uint8)[slot // block_size, head, slot % block_size] if slot >= 0 else None
                )
                for new, start in ((call.key, 0), (call.value, self.head_size + 4)):
                    if row is not None:
                        x = new[token, head].float()
                        scale = torch.clamp(x.abs().amax() / 127.0, min=1e-6) * self.last_bits
                        q = x * (1.0 / scale)
                        q = torch.where(q >= 0, q + 0.5, q - 0.5).clamp(-128, 127).to(torch.int8)
                        row[start : start + len(x)] = q.view(torch.uint8)
                        row[start + len(x) : start + len(x) + 4] = scale.reshape(1).view(torch.uint8)
        return super()._decoded_rows(call, writes=False)


@pytest.mark.parametrize("last_bits", [1.0, 1 + 2.0**-22, 1 - 2.0**-22])
def test_writers_may_differ_in_the_last_bits_of_a_scale_and_at_ties(judge, backend_of, make_case, last_bits):
    impl = type("Impl", (VllmLikeImpl,), {"last_bits": last_bits})
    case = coded(make_case, "int8_per_token_head")
    for check in ("numerics", "cache_write"):
        assert isinstance(judge(check, backend_of(impl), case), Holds)


def test_a_scale_of_another_step_is_wrong(judge, backend_of, make_case):
    impl = type("Impl", (VllmLikeImpl,), {"last_bits": 127 / 128})
    found = judge("cache_write", backend_of(impl), coded(make_case, "int8_per_token_head"))
    assert isinstance(found, Broken)
    assert found.figures["worst_half_steps"] > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["fp8_per_token_head", "int8_per_token_head"])
def test_a_codec_may_round_to_the_dtype_of_the_layer(judge, backend_of, make_case, kind, dtype):
    class Rounding(RowCodec):
        def read(self, kv_cache, slots):
            key, value = super().read(kv_cache, slots)
            return key.to(getattr(torch, dtype)), value.to(getattr(torch, dtype))

    def rounding(cls, layer, cache):
        exact = row_codec(cls, layer, cache)
        return Rounding(exact.row_format, exact.sizes, exact.units)

    case = make_case(cache={"kv_cache_dtype": kind, "layout": "HND"}, dtype=dtype)
    backend = backend_of(ReferenceImpl, kv_cache_codec=classmethod(rounding))
    assert isinstance(judge("cache_write", backend, case), Holds)


def test_a_byte_of_a_scale_outside_of_the_written_slots_is_seen(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        def _decoded_rows(self, call, *, writes):
            call.kv_cache.view(torch.uint8)[0, 0, 0, self.head_size] ^= 0x40
            return super()._decoded_rows(call, writes=writes)

    found = judge("cache_write", backend_of(Impl), coded(make_case, "int8_per_token_head"))
    assert isinstance(found, Broken)
    assert "slot_mapping does not contain it" in found.summary


@pytest.mark.parametrize("kind", FORMATS)
def test_foreign_slots_hold_nan(make_case, kind):
    session = Session(ReferenceBackend, build_problem(coded(make_case, kind), 0), CPU)
    foreign = torch.cat(list(session.pool.regions.values()))
    owned = session.problem.key_slots[session.problem.old_keys]
    session.pool.filled(float("nan"))
    image = session.pool.bytes().clone()
    for rows in session.pool.read_image(image, foreign):
        assert bool(torch.isnan(rows).all())
    for rows, given in zip(
        session.pool.read_image(image, owned), (session.problem.keys, session.problem.values), strict=True
    ):
        assert torch.equal(rows, given[session.problem.old_keys])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cache_without_a_fitting_codec_is_not_examined(judge, backend_of, make_case, kind):
    class Shifted(RowCodec):
        """Stores a row with a zero point, as an asymmetric format would."""

        def write(self, kv_cache, slots, key, value):
            super().write(kv_cache, slots, key + 0.3, value + 0.3)

    def shifted(cls, layer, cache):
        right = row_codec(cls, layer, cache)
        return Shifted(right.row_format, right.sizes, right.units)

    case = coded(make_case, kind)
    for codec, reason in ((lambda *_: None, "declare by kv_cache_codec"), (shifted, "unlike attncheck's definition")):
        with pytest.raises(BackendUnavailableError, match=reason):
            judge("numerics", backend_of(ReferenceImpl, kv_cache_codec=classmethod(codec)), case)


@pytest.mark.parametrize(
    ("kind", "largest", "group", "width"),
    [
        ("fp8_per_token_head", 448, 64, 68),
        ("int8_per_token_head", 127, 64, 68),
        ("int4_per_token_head", 7, 64, 36),
        ("nvfp4", 6, 16, 36),
    ],
)
def test_rows_are_stored_exactly_and_their_scales_differ(make_case, kind, largest, group, width):
    problem = build_problem(coded(make_case, kind), 0)
    scales = []
    for rows, storage in (
        (problem.keys, key_storage(problem.layer, problem.cache)),
        (problem.values, value_storage(problem.layer, problem.cache)),
    ):
        absmax = rows.double().unflatten(-1, (-1, group)).abs().amax(-1)
        mantissa, _ = torch.frexp(absmax / largest)
        assert torch.equal(mantissa, torch.full_like(mantissa, 0.5)), "a scale is no power of two"
        assert len(absmax.unique()) >= 3
        stored = encode_rows(rows, ROW_FORMATS[kind])
        assert stored.shape[-1] == width
        assert torch.equal(decode_rows(stored, ROW_FORMATS[kind], rows.shape[-1]), rows.double())
        assert torch.equal(storage.exact(rows), rows)
        scales.append(absmax)
    assert scales[0].max() / scales[0].min() == 8
    assert scales[1].max() / scales[1].min() >= 32


@pytest.mark.parametrize("kind", FORMATS)
def test_extreme_rows_have_zeros_outliers_and_numbers_near_the_middle_of_two_codes(kind):
    layer = LayerSpec(num_heads=2, num_kv_heads=2, head_size=64, dtype="float32")
    form = key_storage(layer, CacheSpec(kv_cache_dtype=kind)).coded_rows
    rows = form.extreme(torch.zeros(40, 2, 64)).double()
    assert bool((rows == 0).flatten(1).all(1).any()) or bool((rows == 0).all(-1).any())
    typical = rows.abs().median(-1).values
    assert float((rows.abs().amax(-1) / typical.clamp(min=1e-9))[typical > 0].max()) > 50
    error = (decode_rows(encode_rows(rows, ROW_FORMATS[kind]), ROW_FORMATS[kind], 64) - rows).abs()
    shares = error / form.allowed_error(rows)
    assert 0.75 < float(shares.max()) <= 1


def test_half_a_step_is_allowed():
    form = key_storage(
        LayerSpec(num_heads=1, num_kv_heads=1, head_size=4), CacheSpec(kv_cache_dtype="int8_per_token_head")
    ).coded_rows
    allowed = form.allowed_error(torch.tensor([[[25.4, 0.1, 0.0, -3.0]]]))  # the scale is 0.2
    assert torch.allclose(allowed, torch.full_like(allowed, 0.1), rtol=0.01)


@pytest.mark.parametrize(
    ("layer", "cache", "inputs", "reason"),
    [
        ({"head_size": 40}, {"kv_cache_dtype": "nvfp4"}, None, "multiple of 16"),
        ({"head_size": 33}, {"kv_cache_dtype": "int4_per_token_head"}, None, "multiple of 2"),
        ({}, {"kv_cache_dtype": "nvfp4", "k_scale": 0.3}, None, "power of two"),
        ({}, {"kv_cache_dtype": "nvfp4", "v_scale": (0.5, 0.5)}, None, "power of two"),
        ({}, {"kv_cache_dtype": "int8_per_token_head"}, ("negative_scores",), "leave negative_scores out"),
    ],
)
def test_what_a_format_cannot_store_exactly_is_refused(make_case, layer, cache, inputs, reason):
    case = make_case()
    given = replace(case.layer, **layer), replace(case.cache, **cache)
    if inputs is None:
        with pytest.raises(SpecError, match=reason):
            check_meaning(*given, case.batch)
    else:
        with pytest.raises(SpecError, match=reason):
            check_inputs(*given, inputs)


def test_a_name_that_is_not_declared_is_a_reason(make_case):
    case = coded(make_case, "nvfp4")

    class Declared(ReferenceBackend):
        supported_kv_cache_dtypes = ("auto", "fp8")

    assert any("nvfp4" in reason for reason in Declared.unsupported_reasons(case.layer, case.cache, case.batch))
    assert not ReferenceBackend.unsupported_reasons(case.layer, case.cache, case.batch)
