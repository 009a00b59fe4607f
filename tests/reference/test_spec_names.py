"""The table of modifiers: which fields of a layer it names, and which of them are on."""

from dataclasses import fields

import pytest

from attncheck.reference.spec import FEATURES, MODIFIERS, LayerSpec

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_size": 16}
ON = {name: modifier.ordinary for name, modifier in MODIFIERS.items()}
OFF = {"sliding_window": None, "logits_soft_cap": 0.0, "alibi": False, "sinks": False, "attn_chunk_size": None}


def test_modifiers_are_fields_of_a_layer_and_have_features():
    assert set(MODIFIERS) <= {field.name for field in fields(LayerSpec)}
    assert {modifier.feature for modifier in MODIFIERS.values()} <= set(FEATURES)
    assert LayerSpec(**SIZES).modifiers == ()


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_modifier_is_on_or_off(name):
    assert LayerSpec(**SIZES, **{name: ON[name]}).modifiers == (name,)
    assert LayerSpec(**SIZES, **(ON | {name: OFF.get(name)})).modifiers == tuple(other for other in ON if other != name)


def test_windows_slopes_and_chunks_depend_on_positions():
    assert LayerSpec(**SIZES, **ON).position_modifiers == ("sliding_window", "alibi", "attn_chunk_size")
    assert LayerSpec(**SIZES, **OFF).position_modifiers == ()
