"""Parameters: what they default to, what they refuse, and what a layer spec makes of them."""

from dataclasses import replace

import pytest
import torch

from attncheck.errors import AttncheckError, ReferenceArgumentError
from attncheck.reference import AttentionParams, AttentionType, LayerSpec, Precision, layer_params, window_pair

LAYER = AttentionParams(num_heads=8, num_kv_heads=2, head_size=64)
SPEC = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)


def test_defaults():
    assert (LAYER.value_head_size, LAYER.softmax_scale, LAYER.group_size, LAYER.soft_cap) == (64, 0.125, 4, None)
    assert (LAYER.causal, LAYER.window, LAYER.alibi_slopes, LAYER.sinks) == (True, (-1, -1), None, None)
    assert AttentionParams(8, 2, 64, head_size_v=32).softmax_scale == 0.125
    assert replace(LAYER, logits_soft_cap=0).soft_cap is None
    assert replace(LAYER, scale=2).softmax_scale == 2.0


def test_hashable_and_equal_by_value_even_from_lists():
    given = [0.5] * 8
    listed = replace(LAYER, alibi_slopes=given, sinks=given, window=[3, 0])
    assert hash(listed) == hash(replace(LAYER, alibi_slopes=tuple(given), sinks=tuple(given), window=(3, 0)))
    given[0] = 9.0
    assert listed.alibi_slopes == (0.5,) * 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_heads", 3),
        ("num_kv_heads", 0),
        ("num_heads", -8),
        ("num_heads", 8.0),
        ("head_size", 0),
        ("head_size", True),
        ("head_size_v", 0),
        ("scale", float("nan")),
        ("scale", float("inf")),
        ("window", (1,)),
        ("window", (1, 2, 3)),
        ("window", (1.5, 0)),
        ("window", (2**62, 0)),
        ("logits_soft_cap", -1.0),
        ("logits_soft_cap", float("inf")),
        ("logits_soft_cap", float("nan")),
        ("alibi_slopes", (0.5,) * 2),
        ("alibi_slopes", (float("inf"),) * 8),
        ("sinks", (0.5,) * 9),
        ("sinks", (float("nan"),) * 8),
        ("sinks", (float("inf"),) * 8),
        ("attn_chunk_size", 0),
        ("attn_chunk_lookback", -1),
    ],
)
def test_fields_that_mean_nothing_are_named(field, value):
    with pytest.raises(ReferenceArgumentError) as refusal:
        replace(LAYER, **{field: value})
    assert refusal.value.argument == field
    assert str(refusal.value).startswith(field)
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, AttncheckError)


def test_window_pair():
    assert window_pair(2048) == (2047, 0)
    assert window_pair(2048, bidirectional=True) == (2047, 2047)
    assert window_pair(1) == (0, 0)
    assert window_pair(None) == window_pair(None, bidirectional=True) == (-1, -1)
    for nothing in (0, -1, 2.5, True):
        with pytest.raises(ReferenceArgumentError, match="sliding_window"):
            window_pair(nothing)


def test_precision():
    assert Precision() == Precision(torch.float64, None, None)
    kernel = Precision.kernel(torch.float16)
    assert (kernel.compute, kernel.prob, kernel.out) == (torch.float32, torch.float16, torch.float16)
    assert hash(kernel) == hash(Precision.kernel(torch.float16))
    for wrong in ({"compute": torch.int32}, {"compute": None}, {"prob": torch.int8}, {"out": torch.float8_e4m3fn}):
        with pytest.raises(ReferenceArgumentError, match=f"precision.{next(iter(wrong))}"):
            Precision(**wrong)


def test_layer_params_resolve_a_spec():
    fields = {"head_size_v": 32, "scale": 0.3, "logits_soft_cap": 20.0}
    spec = replace(SPEC, **fields, sliding_window=128, alibi=tuple(x / 10 for x in range(8)), sinks=True)
    params = layer_params(spec)
    of_spec = {"alibi_slopes": spec.alibi_slopes, "sinks": spec.sink_logits}
    assert params == replace(LAYER, **fields, **of_spec, window=(127, 0))
    assert params.alibi_slopes == tuple((torch.arange(8) / 10).tolist())  # as a float32 kernel has them
    assert layer_params(replace(SPEC, attn_chunk_size=32)).attn_chunk_size == 32


@pytest.mark.parametrize("causal", [None, True, False])
@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_a_window_follows_the_causal_flag_of_the_call(causal, attn_type):
    spec = replace(SPEC, attn_type=attn_type, sliding_window=16)
    params = layer_params(spec, causal=causal)
    assert params.causal == (attn_type == AttentionType.DECODER if causal is None else causal)
    assert params.window == ((15, 0) if params.causal else (15, 15))
    assert layer_params(SPEC, causal=causal).window == (-1, -1)
