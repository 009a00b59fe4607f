"""The probes cover the levels, and every trait of a layer meets every probe."""

from dataclasses import fields, replace
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.harness.checks.cudagraph.probes import (
    ALWAYS,
    PAIRED,
    SINGLE,
    UNIFORM,
    assign_probes,
    probes_of,
    traits_of,
)
from attncheck.reference.spec import AttentionCGSupport, CacheSpec, LayerSpec, MLASpec, OutputQuantSpec

PLAIN = LayerSpec(num_heads=2, num_kv_heads=1, head_size=16)

layers = st.sampled_from(
    [
        PLAIN,
        LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, sliding_window=33),
        LayerSpec(num_heads=2, num_kv_heads=1, head_size=16, attn_chunk_size=48),
    ]
)
caches = st.sampled_from([1, 8, 16, 24, 128]).map(lambda size: CacheSpec(block_size=size))


@given(layers, caches)
def test_probes_are_in_order_and_every_step_fits_its_graph_and_is_of_its_level(layer, cache):
    probes = probes_of(layer, cache)
    values = [probe.level.value for probe in probes]
    assert values == sorted(values)
    assert {probe.level for probe in probes} == set(AttentionCGSupport) - {AttentionCGSupport.NEVER}
    assert len({probe.name for probe in probes}) == len(probes)
    assert {probe.level for probe in probes if probe.name in PAIRED} == {SINGLE, UNIFORM, ALWAYS}
    for probe in probes:
        sizes = [bucket.num_tokens for bucket in probe.buckets]
        assert sizes == sorted(sizes, reverse=True)
        for step in probe.steps:
            assert all(1 <= query_len <= seq_len for query_len, seq_len in step.requests)
            if step.bucket is None:
                continue
            bucket = probe.buckets[step.bucket]
            query_lens = [query_len for query_len, _ in step.requests]
            assert len(query_lens) <= bucket.num_reqs
            assert sum(query_lens) <= bucket.num_tokens
            if probe.level is SINGLE:
                assert set(query_lens) == {1} == {bucket.query_len}
            if probe.level is UNIFORM:
                assert set(query_lens) == {bucket.query_len}
                assert bucket.query_len in {1, 1 + probe.drafts}


def steps(level, layer=PLAIN, block_size=16):
    return [
        (probe, step)
        for probe in probes_of(layer, CacheSpec(block_size=block_size))
        if probe.level is level
        for step in probe.steps
    ]


@pytest.mark.parametrize("level", [SINGLE, UNIFORM, ALWAYS])
def test_every_level_has_every_kind_of_step(level):
    own = steps(level)
    assert any(step.bucket is None for _, step in own)
    assert any(len(probe.buckets) > 1 for probe, _ in own)
    assert any(probe.dummy_lens == "longest" for probe, _ in own)
    replayed = [(probe, step) for probe, step in own if step.bucket is not None]
    padded = [step for probe, step in replayed if len(step.requests) < probe.buckets[step.bucket].num_reqs]
    assert {len(step.requests) % 2 for step in padded} == {0, 1}
    from_short = [step for probe, step in replayed if probe.dummy_lens == "shortest"]
    assert max(seq_len for step in from_short for _, seq_len in step.requests) > 512
    window = replace(PLAIN, sliding_window=100)
    if level is not ALWAYS:  # a graph of many requests replays a batch nearly as large
        assert max(len(step.requests) for probe, step in replayed if probe.buckets[step.bucket].num_reqs > 32) > 32
    lens = [seq_len for _, step in steps(level, window) for _, seq_len in step.requests]
    assert min(lens) <= 100 < max(lens)


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
