"""A failing case gets as small as its fault allows, and keeps what the fault needs."""

from dataclasses import replace

import pytest
from made_cases import make_case

from attncheck.cases.consistency import implied_path
from attncheck.cases.loader import load_suite
from attncheck.harness.fuzz.shrink import shrink, size_in_words
from attncheck.reference.spec import AttentionType, LayerSpec, MLASpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, PaddingSpec, PathSpec, RequestSpec, SplitKVOptions

LARGE = make_case(
    *((1, 90), (5, 64), (40, 40), (1, 200), (2, 33)),
    padding=(2, 3),
    cache={"block_size": 32, "layout": "HND", "kv_cache_dtype": "fp8", "k_scale": (0.5, 0.25, 1.0, 2.0)},
    num_heads=12,
    num_kv_heads=4,
    head_size=96,
    dtype="float16",
    sliding_window=31,
    logits_soft_cap=30.0,
    sinks=tuple(float(head) for head in range(12)),
)


def test_what_always_fails_becomes_the_smallest_case_there_is():
    found = shrink(LARGE, lambda _: True, limit_s=60)
    layer = LayerSpec(num_heads=1, num_kv_heads=1, head_size=1)
    assert found.is_finished
    assert (found.case.layer, found.case.cache) == (layer, CacheSpec())
    assert found.case.batch == BatchSpec(requests=(RequestSpec(query_len=1),))


def test_what_the_fault_needs_is_kept():
    def fails(case):
        return case.cache.layout == "HND" and case.layer.num_kv_heads >= 3 and case.batch.max_seq_len >= 61

    found = shrink(LARGE, fails, limit_s=60).case
    assert found.layer == LayerSpec(num_heads=3, num_kv_heads=3, head_size=1)
    assert found.cache == CacheSpec(layout="HND")
    assert found.batch == BatchSpec(requests=(RequestSpec(query_len=1, seq_len=61),))


def test_two_requests_of_which_one_is_a_prompt_are_kept():
    def fails(case):
        lengths = [each.query_len for each in case.batch]
        return 1 in lengths and any(length > 7 for length in lengths)

    found = shrink(LARGE, fails, limit_s=60).case
    assert sorted((each.query_len, each.total_len) for each in found.batch) == [(1, 1), (8, 8)]


def test_options_of_a_path_get_smaller():
    split = replace(LARGE.batch, path=PathSpec(name="split_kv", options=SplitKVOptions(parts=7)), padding=PaddingSpec())
    case = replace(LARGE, layer=replace(LARGE.layer, sliding_window=None), batch=split)
    found = shrink(case, lambda each: each.batch.path.name == "split_kv", limit_s=60).case
    assert found.batch.path.options == SplitKVOptions(parts=1)


def test_a_latent_layer_stays_one_and_gets_smaller():
    mla = MLASpec(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    layer = LayerSpec(num_heads=4, num_kv_heads=1, head_size=80, mla=mla)
    case = make_case((3, 40), layer=layer, path="mla")
    found = shrink(case, lambda each: each.layer.mla is not None, limit_s=60)
    small = found.case.layer.mla
    assert (found.case.layer.num_heads, small.kv_lora_rank, small.v_head_dim) == (1, 1, 1)
    assert found.case.layer.head_size == 1 + small.qk_rope_head_dim


@pytest.mark.parametrize("kind", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER])
def test_another_kind_of_layer_becomes_a_decoder(kind):
    layer = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, attn_type=kind)
    encoder_len = 20 if kind == AttentionType.ENCODER_DECODER else None
    request = RequestSpec(query_len=5, encoder_len=encoder_len)
    case = make_case(request, layer=layer, path=implied_path(layer).name)
    keys = encoder_len or 5
    found = shrink(
        case, lambda each: each.batch.max_seq_len + (each.batch.requests[0].encoder_len or 0) >= keys, limit_s=60
    )
    assert found.case.layer.attn_type == AttentionType.DECODER
    assert found.case.batch.requests == (RequestSpec(query_len=1, seq_len=keys),)


def test_no_step_is_begun_behind_the_limit():
    found = shrink(LARGE, lambda _: True, limit_s=0)
    assert (found.tried, found.is_finished, found.case) == (0, False, LARGE)


@pytest.mark.parametrize("case", load_suite("smoke").cases[::9], ids=lambda case: case.id)
def test_every_case_can_be_made_small(case):
    found = shrink(case, lambda _: True, limit_s=60)
    assert found.is_finished
    assert found.case.batch.num_tokens == found.case.batch.num_requests == 1


def test_a_size_is_described_in_words():
    assert size_in_words(LARGE) == "5 requests, 49 new tokens, 427 keys, 12 heads of 96, 10 fields that are not default"
