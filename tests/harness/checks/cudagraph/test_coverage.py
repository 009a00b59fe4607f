"""Which probes run on each layer: every trait meets every probe, and no layer has none."""

from dataclasses import fields, replace
from itertools import combinations, product

import pytest

from attncheck.cases.loader import load_suite
from attncheck.harness.checks.cudagraph.probes import ALIKE, PAIRED, assign_probes, plainest, probes_of, traits_of
from attncheck.reference.spec import CacheSpec, LayerSpec, MLASpec, OutputQuantSpec

LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16)
CACHE = CacheSpec()
PLAIN = traits_of(LAYER, CACHE)

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


def with_field(name, value):
    if name in {field.name for field in fields(LayerSpec)}:
        return replace(LAYER, **{name: value}), CACHE
    return LAYER, replace(CACHE, **{name: value})


@pytest.mark.parametrize(("name", "value"), [*TRAITS.items(), *NO_TRAITS.items()])
def test_a_field_that_decides_which_code_runs_is_a_trait_and_a_number_is_none(name, value):
    assert (traits_of(*with_field(name, value)) != PLAIN) is (name in TRAITS)


def test_every_field_is_a_trait_or_known_to_be_none():
    known = {*TRAITS, *NO_TRAITS, "mla", "attn_type"}  # graphs are captured for decoder layers alone
    assert known == {field.name for spec in (LayerSpec, CacheSpec) for field in fields(spec)}


def test_latent_layers_have_a_trait():
    mla = MLASpec(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
    latent = LayerSpec(num_heads=4, num_kv_heads=1, head_size=48, mla=mla)
    assert traits_of(latent, CACHE) - traits_of(replace(latent, mla=None), CACHE) == {("mla", True)}


def test_a_window_of_both_sides_is_another_trait_than_one_of_the_left():
    left, both = (traits_of(replace(LAYER, sliding_window=5, causal=causal), CACHE) for causal in (True, False))
    assert {trait for trait in left ^ both if trait[0] == "sliding_window"} == {
        ("sliding_window", "left"),
        ("sliding_window", "both sides"),
    }


def traits(*words):
    return [frozenset((letter, True) for letter in word) for word in words]


def test_of_layers_with_as_few_traits_the_plainest_has_the_commonest():
    assert plainest(traits("a", "b", "b", "bx")) == 1


def test_the_layer_with_the_fewest_traits_plays_every_probe():
    layers = traits("pxy", "pa", "pb")
    assert plainest(layers) == 1
    assert assign_probes(layers, ["one", "two", "three"])[1] == {"one", "two", "three"}


@pytest.mark.parametrize(
    "layers",
    [traits("p", "pa", "pb", "pab", "p", "pc"), traits("pa", "pb", "pc"), traits("p"), traits("p", "p", "p", "p", "p")],
)
def test_every_trait_meets_every_probe_and_every_layer_plays_one(layers):
    probes = [f"probe {number}" for number in range(7)]
    assigned = assign_probes(layers, probes)
    met = {(trait, probe) for own, names in zip(layers, assigned, strict=True) for trait, probe in product(own, names)}
    assert met == set(product(frozenset().union(*layers), probes))
    assert all(assigned)


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


def test_every_trait_meets_one_of_probes_that_are_alike_and_they_take_turns():
    layers = traits("p", "pa", "pb", "pc", "pd")
    plain, *others = assign_probes(layers, ["other", "two", "three", "four"], alike=[{"two", "three", "four"}])
    assert plain == {"other", "two", "three", "four"}
    assert sorted(sorted(own - {"other"}) for own in others) == [["four"], ["three"], ["two"], ["two"]]
    assert all("other" in own for own in others)


@pytest.mark.parametrize("layers", [traits("p", "pa", "pb", "pab", "pac"), traits("pa", "pab", "pabc", "pc", "pbc")])
def test_every_pair_of_traits_meets_the_paired_probes(layers):
    assigned = assign_probes(layers, ["one", "two", "three"], ["two"])
    pairs = {pair for own in layers for pair in combinations(sorted(own), 2)}
    met = {
        pair
        for own, names in zip(layers, assigned, strict=True)
        for pair in combinations(sorted(own), 2)
        if "two" in names
    }
    assert met == pairs


def test_the_layers_of_smoke_share_less_than_half_of_all_runs():
    cases = [case for case in load_suite("smoke").cases if case.layer.attn_type == "decoder"]
    layers = list(dict.fromkeys((case.layer, replace(case.cache, num_blocks=None, first_block=None)) for case in cases))
    probes = [probe.name for probe in probes_of(*layers[0])]
    assigned = assign_probes([traits_of(*each) for each in layers], probes, PAIRED, ALIKE)
    assert sum(map(len, assigned)) < len(layers) * len(probes) / 2
