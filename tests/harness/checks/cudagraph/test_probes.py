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


def test_each_level_has_probes_that_meet_pairs_of_traits():
    paired = [probe for probe in probes_of(PLAIN, CacheSpec()) if probe.name in PAIRED]
    assert len(paired) == len(PAIRED)
    assert {probe.level for probe in paired} == {SINGLE, UNIFORM, ALWAYS}


def steps(level, layer=PLAIN, block_size=16):
    return [
        (probe, step)
        for probe in probes_of(layer, CacheSpec(block_size=block_size))
        if probe.level is level
        for step in probe.steps
    ]


@pytest.mark.parametrize("query_len", range(2, 9))
def test_each_uniform_length_has_a_fresh_prompt_and_a_padded_step(query_len):
    own = [
        (probe.buckets[step.bucket], step)
        for probe, step in steps(UNIFORM)
        if step.bucket is not None and probe.buckets[step.bucket].query_len == query_len
    ]
    assert any((query_len, query_len) in step.requests and any(s > q for q, s in step.requests) for _, step in own)
    assert any(len(step.requests) < bucket.num_reqs for bucket, step in own)


def test_decodes_grow_over_the_edge_of_a_page():
    first, second, *_ = [step for probe, step in steps(SINGLE) if probe.name == "decode"]
    grown = list(zip(first.requests, second.requests, strict=True))
    assert all(later == earlier + 1 for (_, earlier), (_, later) in grown)
    assert any(earlier % 16 == 0 for (_, earlier), _ in grown)


def test_a_prefill_is_longer_than_anything_captured():
    longest = max(max(bucket.dummy_query_lens) for probe, _ in steps(ALWAYS) for bucket in probe.buckets)
    replayed = max(q for probe, step in steps(ALWAYS) if step.bucket is not None for q, _ in step.requests)
    assert replayed > longest


@pytest.mark.parametrize("level", [SINGLE, UNIFORM])
def test_a_graph_of_many_requests_replays_a_batch_nearly_as_large(level):
    batch_sizes = [len(step.requests) for probe, step in steps(level) if probe.buckets[step.bucket or 0].num_reqs > 32]
    assert max(batch_sizes) > 32


def test_a_step_without_a_graph_has_more_requests_than_any_graph():
    assert any(
        step.bucket is None and len(step.requests) > max(bucket.num_reqs for bucket in probe.buckets)
        for probe, step in steps(SINGLE)
    )


def test_graphs_of_one_number_of_requests_differ_in_their_rows():
    (buckets,) = {probe.buckets for probe, _ in steps(UNIFORM) if probe.name == "verify and draft"}
    assert len({bucket.num_reqs for bucket in buckets}) == 1
    assert [bucket.query_len for bucket in buckets] == [4, 1]


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_requests_fill_more_tiles_than_the_dummies(rows):
    def tiles(query_lens):
        return sum(-(-query_len // rows) for query_len in query_lens)

    graphs = [(probe.buckets[step.bucket], step) for probe, step in steps(ALWAYS) if step.bucket is not None]
    assert any(tiles(q for q, _ in step.requests) > tiles(bucket.dummy_query_lens) for bucket, step in graphs)


def test_dummy_tokens_are_shared_out():
    assert Bucket(4, 24, None).dummy_query_lens == (6, 6, 6, 6)
    assert Bucket(3, 8, None).dummy_query_lens == (2, 2, 4)
    assert Bucket(2, 6, 3).dummy_query_lens == (3, 3)


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
    lens = [seq_len for _, step in steps(level, window) for _, seq_len in step.requests]
    assert min(lens) <= 100 < max(lens)
