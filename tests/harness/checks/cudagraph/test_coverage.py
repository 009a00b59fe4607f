"""Which probes run on each layer: every trait meets every probe, and no layer has none."""

from dataclasses import fields, replace
from itertools import combinations, product

import pytest

from attncheck.harness.checks.cudagraph.probes import assign_probes, plainest, traits_of
from attncheck.reference.spec import CacheSpec, LayerSpec, MLASpec, OutputQuantSpec

LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16)
CACHE = CacheSpec()


TRAITS = {
    "dtype": "float16",
    "head_size_v": 8,
    "causal": False,
    "sliding_window": 5,
    "logits_soft_cap": 9.0,
    "alibi": True,
    "sinks": True,
    "sinks_dtype": "float32",
    "attn_chunk_size": 8,
    "kv_sharing": True,
    "output_quant": OutputQuantSpec(scale=1.0),
    "block_size": 32,
    "layout": "HND",
    "kv_cache_dtype": "fp8",
    "k_scale": (1.0, 2.0),
    "v_scale": (1.0, 2.0),
    "q_scale": (1.0, 2.0),
}
"""Fields of a layer or a cache that are traits, with a value that is another than the default."""

NO_TRAITS = {"num_heads": 8, "num_kv_heads": 4, "head_size": 32, "scale": 0.5, "num_blocks": 99, "first_block": 3}


def traits_with(layer=LAYER, **fields_of_the_cache):
    return traits_of(layer, replace(CACHE, **fields_of_the_cache))


def test_fields_that_decide_which_code_runs_are_traits_and_numbers_are_none():
    of_layers = {field.name for field in fields(LayerSpec)}
    for name, value in (TRAITS | NO_TRAITS).items():
        own = {name: value}
        found = traits_with(replace(LAYER, **own)) if name in of_layers else traits_with(**own)
        assert (found != traits_with()) is (name in TRAITS), name
    known = {*TRAITS, *NO_TRAITS, "mla", "attn_type"}  # graphs are captured for decoder layers alone
    assert known == of_layers | {field.name for field in fields(CacheSpec)}


def test_latent_layers_have_a_trait_and_a_window_of_both_sides_is_another_than_one_of_the_left():
    mla = MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    latent = LayerSpec(num_heads=4, num_kv_heads=1, head_size=48, mla=mla)
    assert traits_with(latent) - traits_with(replace(latent, mla=None)) == {("mla", True)}
    left, both = (traits_with(replace(LAYER, sliding_window=5, causal=causal)) for causal in (True, False))
    assert {("sliding_window", "left"), ("sliding_window", "both sides")} <= left ^ both


def traits(*words):
    return [frozenset((letter, True) for letter in word) for word in words]


@pytest.mark.parametrize(
    ("layers", "probes", "paired", "expected"),
    [
        (("p", "pa", "pa", "pa"), "123456", "", ("123456", "14", "25", "36")),  # layers with equal traits share evenly
        (("p", "pa", "pab"), "123", "", ("123", "1", "123")),  # one layer covers what two would
        (("p", "p", "p", "p"), "123", "13", ("123", "1", "3", "1")),  # layers that no probe needs
        (("p", "pa", "pb", "pab"), "12", "", ("12", "1", "2", "12")),
        (("p", "pa", "pb", "pab"), "12", "2", ("12", "2", "2", "12")),  # a pair that no layer has alone
        (("p", "pa"), "", "", ("", "")),
    ],
)
def test_layers_share_probes_as_evenly_as_their_traits_allow(layers, probes, paired, expected):
    assert assign_probes(traits(*layers), list(probes), list(paired)) == tuple(map(frozenset, expected))


@pytest.mark.parametrize(
    "layers", ["p pa pb pab p pc", "pa pb pc", "p", "p p p p p", "p pa pb pab pac", "pa pab pabc pc pbc"]
)
def test_every_trait_meets_every_probe_and_every_pair_the_paired_one(layers):
    layers = traits(*layers.split())
    probes = [f"probe {number}" for number in range(7)]
    assigned = assign_probes(layers, probes, ["probe 1"])
    met = {(trait, probe) for own, names in zip(layers, assigned, strict=True) for trait, probe in product(own, names)}
    assert met == set(product(frozenset().union(*layers), probes))
    assert all(assigned)
    playing = [own for own, names in zip(layers, assigned, strict=True) if "probe 1" in names]
    pairs_of_all, pairs_met = (
        {pair for own in some for pair in combinations(sorted(own), 2)} for some in (layers, playing)
    )
    assert pairs_met == pairs_of_all


def test_every_trait_meets_one_of_probes_that_are_alike_and_they_take_turns():
    layers = traits("p", "pa", "pb", "pc", "pd")
    plain, *others = assign_probes(layers, ["other", "two", "three", "four"], alike=[{"two", "three", "four"}])
    assert plain == {"other", "two", "three", "four"}
    assert sorted(sorted(own - {"other"}) for own in others) == [["four"], ["three"], ["two"], ["two"]]
    assert all("other" in own for own in others)


def test_the_plainest_layer_has_the_fewest_traits_and_of_those_the_commonest():
    assert plainest(traits("pxy", "pa", "pb")) == 1
    assert plainest(traits("a", "b", "b", "bx")) == 1
