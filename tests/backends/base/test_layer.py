"""What our candidates do not declare they refuse, with nothing changed; and the FP8 codes that they write."""

from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.base.gathering import decode_fp8, encode_fp8
from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.contract import GroupShape, KVCacheSpec, MultipleOf, QuantKey, ScaleDesc
from attncheck.backends.kernel import kernel_backend
from attncheck.reference.spec import CacheSpec, LayerSpec

CANDIDATES = [ReferenceBackend, SDPABackend, FlexBackend]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STATIC = ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1))
PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")


def nothing(query, key_cache, value_cache, metadata, params, out):
    raise AssertionError("a refused step reached the kernel")


BARE = kernel_backend(
    nothing,
    name="bare",
    supported_head_sizes=(16,),
    supported_block_sizes=(MultipleOf(16),),
    supported_dtypes=(torch.float32,),
)


def construct(backend, **changes):
    arguments = {
        "num_heads": 4,
        "head_size": 16,
        "scale": 0.25,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    positional = [changes.pop(name, default) for name, default in arguments.items()]
    return backend.get_impl_cls()(*positional, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, snapshot("BARE: num_kv_heads 3 does not divide num_heads 4")),
        (
            {"head_size": 24, "sliding_window": 0},
            snapshot(
                "BARE: head_size 24: supported are 16; head_size_v 24: supported are 16; sliding_window 0: a window holds at least the query's own key"
            ),
        ),
        ({"head_size_v": 8}, snapshot("BARE: head_size_v 8: supported are 16")),
        ({"scale": float("nan")}, snapshot("BARE: scale nan is not finite")),
        ({"logits_soft_cap": -1.0}, snapshot("BARE: logits_soft_cap -1.0 is negative")),
        ({"alibi_slopes": [0.5]}, snapshot("BARE: alibi_slopes has 1 values for 4 query heads")),
        ({"sinks": torch.zeros(3)}, snapshot("BARE: sinks has 3 values for 4 query heads")),
        (
            {"attn_type": "causal"},
            snapshot("BARE: attn_type 'causal': must be one of decoder, encoder, encoder_only, encoder_decoder"),
        ),
        ({"kv_cache_dtype": "int8"}, snapshot("BARE: kv_cache_dtype 'int8' is unknown")),
    ],
)
def test_a_constructor_refuses_values(changes, message):
    with pytest.raises(ValueError, match="BARE: ") as caught:
        construct(BARE, **changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alibi_slopes": [0.5] * 4}, "alibi is not supported"),
        ({"sliding_window": 4, "sinks": torch.zeros(4)}, "sliding_window is not supported; sinks is not supported"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap is not supported"),
        ({"kv_sharing_target_layer_name": "layer.0"}, "kv_sharing is not supported"),
        ({"attn_type": "encoder_only"}, "attn_type encoder_only is not supported"),
        ({"attn_type": "encoder_decoder"}, "attn_type encoder_decoder is not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 is not supported"),
    ],
)
def test_a_constructor_refuses_features(changes, message):
    with pytest.raises(NotImplementedError, match=f"BARE: {message}"):
        construct(BARE, **changes)


def test_a_builder_and_a_cache_s_shape_refuse_sizes(refusals):
    spec = KVCacheSpec(block_size=24, num_kv_heads=2, head_size=16, dtype=torch.float32)

    def build(changes):
        BARE.get_builder_cls()(replace(spec, **changes), [], None, torch.device("cpu"))

    def shape(changes):
        BARE.get_kv_cache_shape(10, num_kv_heads=2, head_size=16, **changes)

    chunked = [{"block_size": 16, "attention_chunk_size": 32}]
    assert refusals(build, [{}]) == snapshot(["BARE: block_size 24: supported are multiples of 16"])
    assert refusals(build, chunked, NotImplementedError) == snapshot(["BARE: attention_chunk_size 32 is not supported"])
    assert refusals(shape, [{"block_size": 8}]) == snapshot(["BARE: block_size 8: supported are multiples of 16"])
    wide = [{"block_size": 16, "head_size_v": 8}]
    assert refusals(shape, wide, NotImplementedError) == snapshot(["BARE: head_size_v 8 beside head_size 16"])


STEP = [(1, 5), (3, 20)]


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
        (lambda s: {"query": s.query[:, :, :8]}, "query has shape (4, 4, 8), not [4+, 4, 16]"),
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
    twin = kernel_backend(nothing, name="twin")
    step, other = make_step(BARE, PLAIN, STEP), make_step(twin, PLAIN, STEP)
    assert_refused(
        step, TypeError, "BARE: attn_metadata is a twin.Metadata", attn_metadata=other.builder().build(0, other.common)
    )


@pytest.mark.parametrize("keyword", ["output_scale", "output_block_scale"])
def test_a_kernel_that_does_not_quantise_its_output_refuses_scales(keyword, make_step):
    step = make_step(BARE, PLAIN, STEP)
    assert_refused(step, NotImplementedError, f"{keyword} is not supported", **{keyword: torch.ones(1)})


@pytest.mark.parametrize("backend", CANDIDATES)
def test_output_scales_go_with_an_output_of_codes_and_are_one_for_all(backend, make_step):
    step = make_step(backend, PLAIN, STEP)
    assert_refused(step, ValueError, "output has dtype torch.float32, and output_scale", output_scale=torch.ones(1))
    assert_refused(step, NotImplementedError, "output_block_scale is not supported", output_block_scale=torch.ones(1))
    codes = torch.zeros(step.output.shape).to(torch.float8_e4m3fn)
    assert_refused(step, ValueError, "output has dtype torch.float8_e4m3fn, and output_scale is None", output=codes)


def test_a_kernel_refuses_undeclared_steps(make_step):
    step = make_step(BARE, replace(PLAIN, causal=False), STEP)
    assert_refused(step, NotImplementedError, "BARE: a decoder layer that is not causal is not supported")
    step = make_step(BARE, PLAIN, [(1, 5), (3, 2)])
    assert_refused(
        step, NotImplementedError, "BARE: (query_len, seq_len) [(3, 2)]: more rows than keys is not supported"
    )
    step = make_step(BARE, PLAIN, STEP)
    assert_refused(step, NotImplementedError, "BARE: output_lse is not supported", output_lse=torch.zeros(4, 4))
    alibi = kernel_backend(nothing, name="bare", features=("alibi", "non_causal"))
    step = make_step(alibi, replace(PLAIN, causal=False, alibi=True), STEP)
    assert_refused(step, NotImplementedError, "BARE: ALiBi without a causal mask is not supported")


def test_scales_per_head_are_a_feature_of_their_own(make_step):
    plain_fp8 = kernel_backend(nothing, name="bare", features=("fp8_kv",), supported_kv_cache_dtypes=("auto", "fp8"))
    cache = CacheSpec(kv_cache_dtype="fp8", k_scale=(1.0, 2.0))
    step = make_step(plain_fp8, PLAIN, STEP, cache=cache)
    assert_refused(step, NotImplementedError, "BARE: k_scale or v_scale per head is not supported")


def test_an_encoder_layer_is_never_causal(make_step):
    step = make_step(SDPABackend, replace(PLAIN, attn_type="encoder_only"), [(3, 3)])
    step.common.causal = True
    assert_refused(step, ValueError, "TORCH_SDPA: attention of type encoder_only is not causal")


def test_padding_is_never_too_short_of_keys(make_step):
    """A padding request has neither rows nor keys; its lengths need no feature."""
    step = make_step(BARE, PLAIN, STEP, padding=(2, 3))
    with pytest.raises(AssertionError) as refused:
        step.run()
    assert str(refused.value) == snapshot("a refused step reached the kernel")


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
    codes = encode_fp8(x, torch.tensor([1.0, 2.0]), E4M3).float()
    assert codes[0, 0, :3].tolist() == [1.0, 448.0, -448.0]
    assert bool(codes[0, 0, 3].isnan())
    assert codes[0, 1].tolist() == [1.0, 0.15625, 2.0**-9, 3.0]
    assert encode_fp8(torch.full((1, 1), 1e9), torch.ones(1), E5M2).float().item() == 57344.0
    assert decode_fp8(codes.to(E4M3), torch.tensor([1.0, 2.0]), torch.float32)[0, 1].tolist() == [
        2.0,
        0.3125,
        2.0**-8,
        6.0,
    ]


@pytest.mark.parametrize("backend", CANDIDATES)
def test_what_is_declared_to_the_graph_compiler(backend, make_step):
    impl = make_step(backend, PLAIN, STEP).impl()
    assert impl.fused_output_quant_supported(QuantKey(E4M3, STATIC))
    assert not impl.fused_output_quant_supported(QuantKey(E5M2, STATIC))
    per_token = ScaleDesc(torch.float32, static=False, group_shape=GroupShape(1, -1))
    assert not impl.fused_output_quant_supported(QuantKey(E4M3, per_token))


def test_a_kernel_quantises_its_output_itself(make_step):
    seen = []

    def attend(query, key_cache, value_cache, metadata, params, out, *, output_scale=None):
        seen.append((out.dtype, output_scale))

    step = make_step(kernel_backend(attend, name="own", features=["output_quant"]), PLAIN, STEP)
    scale = torch.tensor([0.5])
    step.run(output=torch.zeros(step.output.shape).to(E4M3), output_scale=scale)
    step.run()
    assert seen == [(E4M3, scale), (torch.float32, None)]
    with pytest.raises(ValueError) as refused:
        kernel_backend(attend, name="own")
    assert str(refused.value) == snapshot(
        "kernel_backend 'own': the feature 'output_quant' needs a parameter output_scale, and the parameter needs the feature"
    )
