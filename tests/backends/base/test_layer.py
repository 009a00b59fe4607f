"""The layers and machines that our candidates refuse, and the FP8 codes that they write."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common_batches import common_metadata

from attncheck.backends.base import machine
from attncheck.backends.base.gathering import decode_fp8, encode_fp8
from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.candidates.triton_mla.backend import TritonMLABackend
from attncheck.backends.candidates.triton_unified.backend import UnifiedBackend
from attncheck.backends.contract import GroupShape, KVCacheSpec, MultipleOf, QuantKey, ScaleDesc
from attncheck.backends.kernel import kernel_backend
from attncheck.harness.driver.step import with_topk_indices
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

CANDIDATES = [ReferenceBackend, SDPABackend, FlexBackend]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
STEP = [(1, 5), (3, 20)]


def nothing(query, key_cache, value_cache, metadata, params, out):
    raise AssertionError("a refused step reached the kernel")


SIZES = {
    "supported_head_sizes": (16,),
    "supported_block_sizes": (MultipleOf(16),),
    "supported_dtypes": (torch.float32,),
}
BARE = kernel_backend(nothing, name="bare", **SIZES)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, "num_kv_heads 3 does not divide num_heads 4", {"num_kv_heads": 3}),
        (
            ValueError,
            "head_size 24: supported are 16; head_size_v 24: supported are 16; sliding_window 0: a window holds",
            {"head_size": 24, "sliding_window": 0},
        ),
        (ValueError, "scale nan is not finite", {"scale": float("nan")}),
        (ValueError, "logits_soft_cap -1.0 is negative", {"logits_soft_cap": -1.0}),
        (ValueError, "sinks has 3 values for 4 query heads", {"sinks": torch.zeros(3)}),
        (ValueError, "attn_type 'causal': must be one of decoder, encoder, encoder_only", {"attn_type": "causal"}),
        (ValueError, "kv_cache_dtype 'int8' is unknown", {"kv_cache_dtype": "int8"}),
        (
            NotImplementedError,
            "sliding_window is not supported; sinks is not supported",
            {"sliding_window": 4, "sinks": torch.zeros(4)},
        ),
        (NotImplementedError, "attn_type encoder_only is not supported", {"attn_type": "encoder_only"}),
        (NotImplementedError, "kv_cache_dtype fp8 is not supported", {"kv_cache_dtype": "fp8"}),
    ],
)
def test_a_constructor_refuses_values_and_features(error, message, changes):
    arguments = {"num_heads": 4, "head_size": 16, "scale": 0.25, "num_kv_heads": 2}
    with pytest.raises(error, match=f"^BARE: {message}"):
        BARE.get_impl_cls()(**arguments | changes)


def test_a_builder_and_a_cache_s_shape_refuse_sizes(refusals):
    spec = KVCacheSpec(block_size=24, num_kv_heads=2, head_size=16, dtype=torch.float32)

    def build(changes):
        BARE.get_builder_cls()(replace(spec, **changes), [], None, torch.device("cpu"))

    def shape(changes):
        BARE.get_kv_cache_shape(10, num_kv_heads=2, head_size=16, **changes)

    assert refusals(build, [{}]) == ["BARE: block_size 24: supported are multiples of 16"]
    chunked = [{"block_size": 16, "attention_chunk_size": 32}]
    assert refusals(build, chunked, NotImplementedError) == ["BARE: attention_chunk_size 32 is not supported"]
    assert refusals(shape, [{"block_size": 8}]) == ["BARE: block_size 8: supported are multiples of 16"]
    wide = [{"block_size": 16, "head_size_v": 8}]
    assert refusals(shape, wide, NotImplementedError) == ["BARE: head_size_v 8 beside head_size 16"]


def test_a_builder_refuses_masks_that_the_backend_does_not_declare(refusals):
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    cpu = torch.device("cpu")

    def construct(changes):
        BARE.get_builder_cls()(spec, [], SimpleNamespace(model_config=SimpleNamespace(**changes)), cpu)

    def build(changes):
        BARE.get_builder_cls()(spec, [], None, cpu).build(0, common_metadata([5, 3], [9, 3], **changes))

    assert refusals(construct, [{"rswa_window": 8}], NotImplementedError) == ["BARE: rswa_window 8 is not supported"]
    ranges = [{"mm_req_doc_ranges": {0: [], 1: [(1, 2)]}}]
    assert refusals(build, ranges, NotImplementedError) == [
        "BARE: mm_req_doc_ranges [(1, 2)] of request 1 are not supported"
    ]
    build({"mm_req_doc_ranges": {0: [], 1: []}})
    chosen = with_topk_indices(common_metadata([5, 3], [9, 3]), torch.zeros(8, 4, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="BARE: topk_indices are not supported"):
        BARE.get_builder_cls()(spec, [], None, cpu).build(0, chosen)


def assert_refused(step, error, message, **changes):
    """Refused, with output and cache as they were."""
    output, cache = step.output.clone(), step.kv_cache.clone()
    with pytest.raises(error) as caught:
        step.run(**changes)
    assert message in str(caught.value)
    assert torch.equal(step.output.isnan(), output.isnan())
    assert torch.equal(step.kv_cache.view(torch.uint8), cache.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"query": s.query[:2]}, "query has shape (2, 4, 16), not [4+, 4, 16]"),
        (
            lambda s: {"query": s.query.bfloat16(), "kv_cache": s.kv_cache.bfloat16()},
            "query has dtype torch.bfloat16: supported are torch.float32",
        ),
        (lambda s: {"output": s.output[:3]}, "output has shape (3, 4, 16), not [4+, 4, 16]"),
        (lambda s: {"key": s.key[:1]}, "key has shape (1, 2, 16), not [4+, 2, 16]"),
        (lambda s: {"value": None}, "value is None, but 4 rows are needed"),
        (lambda s: {"kv_cache": torch.empty(0)}, "kv_cache is empty"),
        (lambda s: {"kv_cache": s.kv_cache.half()}, "kv_cache has dtype torch.float16 for kv_cache_dtype auto"),
        (lambda s: {"output": None}, "output is None, but the caller must allocate it"),
    ],
)
def test_forward_refuses_tensors_that_do_not_fit(change, message, make_step):
    step = make_step(BARE, PLAIN, STEP)
    assert_refused(step, ValueError, f"BARE: {message}", **change(step))


def test_two_kernels_do_not_take_each_others_metadata(make_step):
    other = make_step(kernel_backend(nothing, name="twin"), PLAIN, STEP)
    theirs = other.builder().build(0, other.common)
    step = make_step(BARE, PLAIN, STEP)
    assert_refused(step, TypeError, "BARE: attn_metadata is a twin.Metadata", attn_metadata=theirs)


def test_a_kernel_refuses_undeclared_steps(make_step):
    unsupported = [
        (replace(PLAIN, causal=False), STEP, {}, "a decoder layer that is not causal"),
        (PLAIN, [(1, 5), (3, 2)], {}, "(query_len, seq_len) [(3, 2)]: more rows than keys"),
        (PLAIN, STEP, {"output_lse": torch.zeros(4, 4)}, "output_lse"),
        (PLAIN, STEP, {"output_scale": torch.ones(1)}, "output_scale"),
        (PLAIN, STEP, {"output_block_scale": torch.ones(1)}, "output_block_scale"),
    ]
    for layer, requests, changes, what in unsupported:
        step = make_step(BARE, layer, requests)
        assert_refused(step, NotImplementedError, f"BARE: {what} is not supported", **changes)
    alibi = kernel_backend(nothing, name="bare", features=("alibi", "non_causal"))
    step = make_step(alibi, replace(PLAIN, causal=False, alibi=True), STEP)
    assert_refused(step, NotImplementedError, "BARE: ALiBi without a causal mask is not supported")
    codes = kernel_backend(nothing, name="bare", features=("fp8_kv",), supported_kv_cache_dtypes=("auto", "fp8"))
    step = make_step(codes, PLAIN, STEP, cache=CacheSpec(kv_cache_dtype="fp8", k_scale=(1.0, 2.0)))
    assert_refused(step, NotImplementedError, "BARE: k_scale, v_scale or q_scale per head is not supported")
    encoder = make_step(SDPABackend, replace(PLAIN, attn_type="encoder_only"), [(3, 3)])
    encoder.common.causal = True
    assert_refused(encoder, ValueError, "TORCH_SDPA: attention of type encoder_only is not causal")


def test_padding_is_never_too_short_of_keys(make_step):
    """A padding request has neither rows nor keys; its lengths need no feature."""
    step = make_step(BARE, PLAIN, STEP, padding=(2, 3))
    with pytest.raises(AssertionError, match="a refused step reached the kernel"):
        step.run()


@pytest.mark.parametrize("backend", CANDIDATES)
def test_output_scales_go_with_an_output_of_codes_and_are_one_for_all(backend, make_step):
    step = make_step(backend, PLAIN, STEP)
    assert_refused(step, ValueError, "output has dtype torch.float32, and output_scale", output_scale=torch.ones(1))
    assert_refused(step, NotImplementedError, "output_block_scale is not supported", output_block_scale=torch.ones(1))
    codes = torch.zeros(step.output.shape).to(E4M3)
    assert_refused(step, ValueError, "output has dtype torch.float8_e4m3fn, and output_scale is None", output=codes)
    static = ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1))
    per_token = ScaleDesc(torch.float32, static=False, group_shape=GroupShape(1, -1))
    fuses = step.impl().fused_output_quant_supported
    assert fuses(QuantKey(E4M3, static))
    assert not fuses(QuantKey(E5M2, static))
    assert not fuses(QuantKey(E4M3, per_token))


@pytest.mark.parametrize("backend", CANDIDATES)
def test_a_step_without_keys_and_one_without_rows(backend, make_step):
    step = make_step(backend, PLAIN, [(2, 0), (1, 0)])
    step.run()
    assert (step.output == 0).all()
    idle = make_step(backend, PLAIN, [(1, 3)])
    idle.common.query_start_loc_cpu.zero_()
    idle.common.query_start_loc.zero_()
    idle.common.slot_mapping = torch.full((1,), -1)
    idle.run()
    assert idle.output.isnan().all()


def test_codes_are_rounded_saturated_and_scaled_by_head():
    x = torch.tensor([[[1.0625, 1e9, -1e9, float("nan")]], [[2.125, 0.3, 2.0**-8, 6.0]]]).transpose(0, 1)
    scales = torch.tensor([1.0, 2.0])
    codes = encode_fp8(x, scales, E4M3)
    assert str(codes.float()[0].tolist()) == str([[1.0, 448.0, -448.0, float("nan")], [1.0, 0.15625, 2.0**-9, 3.0]])
    assert decode_fp8(codes, scales, torch.float32)[0, 1].tolist() == [2.0, 0.3125, 2.0**-8, 6.0]
    assert encode_fp8(torch.full((1, 1), 1e9), torch.ones(1), E5M2).float().item() == 57344.0


def test_a_kernel_quantises_its_output_itself(make_step):
    seen = []

    def attend(query, key_cache, value_cache, metadata, params, out, *, output_scale=None):
        seen.append((out.dtype, output_scale))

    step = make_step(kernel_backend(attend, name="own", features=["output_quant"]), PLAIN, STEP)
    scale = torch.tensor([0.5])
    step.run(output=torch.zeros(step.output.shape).to(E4M3), output_scale=scale)
    step.run()
    assert seen == [(E4M3, scale), (torch.float32, None)]
    with pytest.raises(ValueError, match="the feature 'output_quant' needs a parameter output_scale"):
        kernel_backend(attend, name="own")


def test_a_gpu_is_held_against_the_capability_that_kernels_need(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.gpu_reasons("cuda", (8, 0)) == ["device cuda: torch finds no GPU"]
    assert machine.gpu_reasons("cpu", (8, 0)) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert machine.gpu_reasons("cuda:1", (8, 6)) == []
    assert machine.gpu_reasons("cuda:1", (9, 0)) == ["device cuda:1: compute capability 8.6, and the kernels need 9.0"]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    (reason,) = machine.gpu_reasons("cuda", (8, 0))
    assert "AMD" in reason


def test_what_is_installed_and_what_does_not_import():
    assert machine.installed_version("pytest") == pytest.__version__
    assert machine.installed_version("no-such-distribution") is None
    assert (machine.public("2.8.3+cu128"), machine.public("2.8.3")) == ("2.8.3", "2.8.3")
    assert machine.import_reasons("pytest") == []
    assert machine.import_reasons("no_such_module") == [
        "no_such_module cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    ]


@pytest.mark.parametrize("backend", [UnifiedBackend, TritonMLABackend])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_kernels_of_bfloat16_are_compiled_for_no_gpu_before_ampere(backend, capability, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    too_old = ["bfloat16 on compute capability 7.5: Triton needs 8.0"]
    for dtype, stored in (("bfloat16", "auto"), ("float16", "bfloat16"), ("float16", "auto")):
        layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype=dtype)
        found = backend.unavailable_case_reasons("cuda:0", layer, CacheSpec(kv_cache_dtype=stored), batch)
        assert found == (too_old if capability == (7, 5) and "bfloat16" in (dtype, stored) else [])
