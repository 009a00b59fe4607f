"""FP8 caches and outputs in our own candidates: against the formulas of the codes."""

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.base.gathering import decode_fp8, encode_fp8
from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.contract import GroupShape, QuantKey, ScaleDesc
from attncheck.backends.kernel import kernel_backend
from attncheck.reference.spec import LayerSpec

CANDIDATES = [ReferenceBackend, SDPABackend, FlexBackend]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
MIXED = [(1, 37), (5, 20), (9, 9)]
STATIC = ScaleDesc(torch.float32, static=True, group_shape=GroupShape(-1, -1))


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
    impl = make_step(backend, PLAIN, MIXED).impl()
    assert impl.fused_output_quant_supported(QuantKey(E4M3, STATIC))
    assert not impl.fused_output_quant_supported(QuantKey(E5M2, STATIC))
    per_token = ScaleDesc(torch.float32, static=False, group_shape=GroupShape(1, -1))
    assert not impl.fused_output_quant_supported(QuantKey(E4M3, per_token))


def test_a_kernel_quantises_its_output_itself(make_step):
    seen = []

    def attend(query, key_cache, value_cache, metadata, params, out, *, output_scale=None):
        seen.append((out.dtype, output_scale))

    step = make_step(kernel_backend(attend, name="own", features=["output_quant"]), PLAIN, MIXED)
    scale = torch.tensor([0.5])
    step.run(output=torch.zeros(step.output.shape).to(E4M3), output_scale=scale)
    step.run()
    assert seen == [(E4M3, scale), (torch.float32, None)]
    with pytest.raises(ValueError) as refused:
        kernel_backend(attend, name="own")
    assert str(refused.value) == snapshot(
        "kernel_backend 'own': the feature 'output_quant' needs a parameter output_scale, and the parameter needs the feature"
    )
