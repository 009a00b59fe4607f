"""Parameters: what they default to, and what a layer spec makes of them."""

from dataclasses import replace

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    AttentionType,
    LayerSpec,
    MLAParams,
    layer_params,
    mla_params,
    window_pair,
)
from attncheck.reference.spec import MLASpec

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


def test_window_pair():
    assert window_pair(2048) == (2047, 0)
    assert window_pair(2048, bidirectional=True) == (2047, 2047)
    assert window_pair(1) == (0, 0)
    assert window_pair(None) == window_pair(None, bidirectional=True) == (-1, -1)


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


SIZES = {"kv_lora_rank": 6, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 2}
LATENT = MLAParams(3, **SIZES)
LATENT_SPEC = LayerSpec(num_heads=3, num_kv_heads=1, head_size=10, mla=MLASpec(**SIZES))


def test_params_of_a_latent_layer():
    assert mla_params(LATENT_SPEC) == replace(LATENT, scale=1 / 3)
    assert mla_params(LATENT_SPEC, causal=False) == replace(LATENT, scale=1 / 3, causal=False)
    assert mla_params(replace(LATENT_SPEC, scale=0.5, causal=False)) == replace(LATENT, scale=0.5, causal=False)
    assert len({LATENT, replace(LATENT), replace(LATENT, scale=0.5)}) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"head_size_v": 6},
        {"sliding_window": 4},
        {"logits_soft_cap": 5.0},
        {"alibi": True},
        {"sinks": (0.0, 1.0, 2.0)},
        {"attn_chunk_size": 4},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"mla": None},
    ],
)
def test_a_layer_that_is_not_latent_attention(change):
    with pytest.raises(ReferenceArgumentError) as refusal:
        mla_params(replace(LATENT_SPEC, **change))
    assert refusal.value.argument == f"layer.{next(iter(change))}"


def test_latent_attention_has_no_other_parameters():
    with pytest.raises(ReferenceArgumentError, match=r"layer\.mla"):
        layer_params(LATENT_SPEC)
