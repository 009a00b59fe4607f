"""Cache dtypes that a backend registers: codecs that are learned or declared, right backends, and wrong ones."""

import pytest
import torch

from attncheck.backends.base.coded_rows import Int8Cache
from attncheck.backends.caches.packings import coded_rows_shape
from attncheck.backends.caches.row_codec import RowCodec
from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.declarations import undeclared
from attncheck.cases.consistency import check_meaning
from attncheck.errors import BackendUnavailableError, SpecError
from attncheck.harness.checks.findings import Broken, Holds
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import ROW_FORMATS, BatchSpec, CacheSpec, RequestSpec

SCALES = {"k_scale": 0.5, "v_scale": 0.25}


def registered(make_case, dtype="float16", **cache):
    return make_case(cache={"kv_cache_dtype": "registered"} | cache, dtype=dtype)


class Codes:
    """An impl whose cache is codes of ``code``, with scales that its writer and its reader use or ignore."""

    code, writes_scales, reads_scales, key_scale = torch.int8, True, True, "_k_scale"

    def _decoded_rows(self, call, *, writes):
        stored = [view.view(self.code) for view in self._cache_views(call.kv_cache)]
        slots = call.metadata.common.slot_mapping
        scales = getattr(call.layer, self.key_scale), call.layer._v_scale
        for view, new, scale in zip(stored, (call.key, call.value), scales, strict=True):
            for row, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    codes = new[row].float() / (scale if self.writes_scales else 1.0)
                    codes = codes.round().clamp(-127, 127) if self.code == torch.int8 else codes
                    view[slot // view.shape[1], slot % view.shape[1]] = codes.to(self.code)
        key_scale, value_scale = (call.layer._k_scale, call.layer._v_scale) if self.reads_scales else (1.0, 1.0)
        return stored[0].float() * key_scale, stored[1].float() * value_scale


def impl_of(**members):
    own = type("Registering", (ReferenceBackend,), {"registered_kv_cache_dtype": ("int8", torch.uint8)})
    return type("Impl", (Codes, ReferenceImpl), {"backend": own} | members)


def registering(impl):
    return type("Tried", (impl.backend,), {"get_impl_cls": staticmethod(lambda: impl)})


@pytest.mark.parametrize("code", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("cache", "dtype"), [(SCALES, "float16"), ({}, "bfloat16"), ({"layout": "HND"}, "float32")])
def test_codes_of_the_backends_own_writer_are_learned(judge, make_case, code, cache, dtype):
    backend = registering(impl_of(code=code))
    case = registered(make_case, dtype, **cache)
    for check in ("numerics", "cache_write", "containment"):
        found = judge(check, backend, case)
        assert isinstance(found, Holds), found
    assert "learned from the backend's own writer" in " ".join(judge("cache_write", backend, case).notes)


@pytest.mark.parametrize(
    ("members", "check", "meaning"),
    [
        ({"reads_scales": False}, "numerics", "k_scale and v_scale are left out"),
        ({"code": torch.float8_e4m3fn, "reads_scales": False}, "numerics", "k_scale and v_scale are left out"),
        ({"code": torch.float8_e4m3fn, "writes_scales": False}, "numerics", None),
    ],
)
def test_scales_that_writer_and_reader_use_differently_are_wrong(judge, make_case, members, check, meaning):
    backend = registering(impl_of(**members))
    found = judge(check, backend, registered(make_case, **SCALES))
    assert isinstance(found, Broken)
    assert meaning is None or meaning in found.meaning


def test_a_scale_of_the_other_operand_is_no_codec(judge, make_case):
    with pytest.raises(BackendUnavailableError, match="neither multiply its codes nor are ignored"):
        judge("numerics", registering(impl_of(key_scale="_v_scale")), registered(make_case, **SCALES))


def test_codes_without_scales_are_right_if_they_hold_the_rows(judge, make_case):
    backend = registering(impl_of(writes_scales=False, reads_scales=False))
    for check in ("numerics", "cache_write"):
        assert isinstance(judge(check, backend, registered(make_case)), Holds)
    with pytest.raises(BackendUnavailableError, match="kv_cache_dtype int8: the codec stores rows unlike"):
        judge("numerics", backend, registered(make_case, **SCALES))


def test_rows_in_a_wrong_slot_are_found(judge, backend_of, make_case):
    class Impl(ReferenceImpl):
        def _decoded_rows(self, call, *, writes):
            if len(call.metadata.common.seq_lens) > 1:  # the codec is learned from steps of one request
                call.metadata.common.slot_mapping[-1] -= 1
            return super()._decoded_rows(call, writes=writes)

    found = judge("cache_write", backend_of(Impl), registered(make_case, **SCALES))
    assert isinstance(found, Broken)


class PackedImpl(ReferenceImpl):
    """Rows of int4 with scales of their own, under a name of the backend's own."""

    shift = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.kv_cache_dtype == "packed"
        self.kv_cache_dtype = "int4_per_token_head"

    def _decoded_rows(self, call, *, writes):
        key, value = super()._decoded_rows(call, writes=writes)
        return key, value * value.abs().amax(-1, keepdim=True).roll(self.shift, 1) / value.abs().amax(-1, keepdim=True)


def packed(impl, **members):
    def shape(cls, num_blocks, block_size, num_kv_heads, head_size, *, cache_dtype_str):
        assert cache_dtype_str == "packed"
        return coded_rows_shape("int4_per_token_head", num_blocks, block_size, num_kv_heads, head_size, head_size)

    def codec(cls, layer, cache):
        return RowCodec(ROW_FORMATS["int4_per_token_head"], (layer.head_size, layer.head_size), (1.0, 1.0))

    own = {"get_kv_cache_shape": classmethod(shape), "kv_cache_codec": classmethod(codec)}
    own |= {"registered_kv_cache_dtype": ("packed", torch.uint8)}
    backend = type("Packed", (ReferenceBackend,), own | members)
    return registering(type("Impl", (impl,), {"backend": backend}))


def test_a_declared_codec_decides_what_is_right(judge, make_case):
    case = registered(make_case, layout="HND")
    for check in ("numerics", "cache_write", "containment"):
        found = judge(check, packed(PackedImpl), case)
        assert isinstance(found, Holds), found
    wrong = judge("numerics", packed(type("Wrong", (PackedImpl,), {"shift": 1})), case)
    assert isinstance(wrong, Broken)


def test_a_writer_with_another_rounding_than_the_declared_codec_is_found(judge, make_case, monkeypatch):
    # The codec calls the method of a tensor. Exact rows are right, though their quotients are a little too small.
    monkeypatch.setattr(torch, "round", lambda x: torch.trunc(x * (1 + 2.0**-12)))
    found = judge("cache_write", packed(PackedImpl), registered(make_case, layout="HND"))
    assert isinstance(found, Broken)
    assert "between codes" in found.summary


def test_codes_that_share_a_byte_are_not_learned(judge, make_case):
    backend = packed(PackedImpl, kv_cache_codec=classmethod(lambda *_: None))
    with pytest.raises(BackendUnavailableError, match=r"kv_cache_dtype packed: .*kv_cache_codec can declare one"):
        judge("numerics", backend, registered(make_case, layout="HND"))


def test_a_backend_that_registers_none_does_not_support_the_case(make_case):
    case = registered(make_case)
    backend = type("None", (ReferenceBackend,), {"registered_kv_cache_dtype": None})
    (reason,) = undeclared(backend, case.layer, case.cache, case.batch)
    assert reason == "kv_cache_dtype registered: registered_kv_cache_dtype is None"


@pytest.mark.parametrize("scale", [0.3, 4.0, (0.5, 0.5)])
def test_scales_whose_multiples_are_not_exact_are_refused(scale):
    layer = LayerSpec(num_heads=2, num_kv_heads=2, head_size=8)
    with pytest.raises(SpecError, match="cannot be stored exactly"):
        check_meaning(
            layer,
            CacheSpec(kv_cache_dtype="registered", k_scale=scale),
            BatchSpec(requests=(RequestSpec(query_len=1, seq_len=4),)),
        )


def test_int8_codes_are_rounded_to_the_nearest():
    views = torch.zeros(1, 4, 1, 2, dtype=torch.int8), torch.zeros(1, 4, 1, 2, dtype=torch.int8)
    cache = Int8Cache(views, (torch.tensor(0.5), torch.tensor(0.25)))
    cache.write(torch.tensor([[[0.7, -200.0]]]), torch.tensor([[[0.7, 0.1]]]), torch.tensor([3]))
    assert views[0][0, 3, 0].tolist() == [1, -127]
    assert cache.read()[1][0, 3, 0].tolist() == [0.75, 0.0]
