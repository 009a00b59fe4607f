"""The table of modifiers: which fields of a layer it names, and which of them are on."""

from dataclasses import fields

import pytest

from attncheck.reference.spec import FEATURES, MODIFIERS, LayerSpec

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_size": 16}
ON = {
    "sliding_window": 1,
    "logits_soft_cap": 0.5,
    "alibi": (0.0, 0.5),
    "sinks": True,
    "attn_chunk_size": 3,
}
OFF = {"sliding_window": None, "logits_soft_cap": 0.0, "alibi": False, "sinks": False, "attn_chunk_size": None}


def test_modifiers_are_fields_of_a_layer_and_have_features():
    assert set(MODIFIERS) <= {field.name for field in fields(LayerSpec)}
    assert {modifier.feature for modifier in MODIFIERS.values()} <= set(FEATURES)
    assert list(ON) == list(OFF) == list(MODIFIERS)


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_modifier_is_on_or_off(name):
    assert LayerSpec(**SIZES, **(OFF | {name: ON[name]})).modifiers == (name,)
    assert LayerSpec(**SIZES, **(ON | {name: OFF[name]})).modifiers == tuple(other for other in ON if other != name)


def test_windows_slopes_and_chunks_depend_on_positions():
    assert LayerSpec(**SIZES, **ON).position_modifiers == ("sliding_window", "alibi", "attn_chunk_size")
    assert LayerSpec(**SIZES, **OFF).position_modifiers == ()
