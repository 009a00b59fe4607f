"""The probes cover the levels: every kind of batch is among those of its level, and fits its graph."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attncheck.harness.checks.cudagraph.probes import ALWAYS, PAIRED, SINGLE, UNIFORM, Bucket, probes_of
from attncheck.reference.spec import AttentionCGSupport, CacheSpec, LayerSpec

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


def test_single_decodes_grow_over_the_edge_of_a_page_and_beyond_the_graphs():
    first, second, *_ = [step for probe, step in steps(SINGLE) if probe.name == "decode"]
    grown = list(zip(first.requests, second.requests, strict=True))
    assert all(later == earlier + 1 for (_, earlier), (_, later) in grown)
    assert any(earlier % 16 == 0 for (_, earlier), _ in grown)
    without_graph = [(probe, step) for probe, step in steps(SINGLE) if step.bucket is None]
    assert any(len(step.requests) > max(each.num_reqs for each in probe.buckets) for probe, step in without_graph)


@pytest.mark.parametrize("query_len", range(2, 9))
def test_each_uniform_length_has_a_fresh_prompt_and_a_padded_step(query_len):
    graphs = [(probe.buckets[step.bucket], step) for probe, step in steps(UNIFORM) if step.bucket is not None]
    own = [(bucket, step) for bucket, step in graphs if bucket.query_len == query_len]
    assert any((query_len, query_len) in step.requests and any(s > q for q, s in step.requests) for _, step in own)
    assert any(len(step.requests) < bucket.num_reqs for bucket, step in own)


def test_mixed_requests_are_longer_and_fill_more_tiles_than_what_was_captured():
    graphs = [(probe.buckets[step.bucket], step) for probe, step in steps(ALWAYS) if step.bucket is not None]
    longest = max(max(bucket.dummy_query_lens) for bucket, _ in graphs)
    assert max(query_len for _, step in graphs for query_len, _ in step.requests) > longest
    for rows in (16, 32, 64, 128):
        tiles = [
            (
                sum(-(-query_len // rows) for query_len, _ in step.requests),
                sum(-(-query_len // rows) for query_len in bucket.dummy_query_lens),
            )
            for bucket, step in graphs
        ]
        assert any(own > of_dummies for own, of_dummies in tiles)
    assert Bucket(3, 8, None).dummy_query_lens == (2, 2, 4)
