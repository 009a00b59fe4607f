"""The built-in suites: complete, without repetition, cheap, and stable over time."""

from collections.abc import Iterator
from itertools import combinations, product

import pytest

from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.model import Case
from attncheck.reference.spec import AttentionType, BatchSpec, RequestSpec

# A changed hash orphans every recorded result and every expected failure of a case.
SUITES = {
    "smoke": "c182a5408515",
    "alibi": "71505b6cf34b",
    "block_sizes": "35351d63cc51",
    "cascade": "3351102d6bb1",
    "causal_conv1d": "ae068f40238c",
    "chunked_prefill": "733c6e770aa1",
    "dcp": "dfc2b2c0d1f0",
    "decode": "117990bc9b2e",
    "encoder": "8733a9c430aa",
    "fp8_kv": "0a0a1ad846bd",
    "gqa": "0cccf16e805d",
    "head_sizes": "6c955379e3d1",
    "interpreted": "aec08066e777",
    "kv_sharing": "ff67d4d301ae",
    "limits": "577b9aaaa8dc",
    "local": "144bc9741069",
    "long_rows": "1ce58cb1cca9",
    "merge": "1b2b8f122ce6",
    "micro_batch": "311177f6f436",
    "mixed": "214145cf27ef",
    "mla": "48a2e67e5dfa",
    "named_batches": "678bf4a7c20a",
    "output_quant": "682c102e11b3",
    "padding": "f3b4bda13e36",
    "prefill": "c6b8c990bf9c",
    "sinks": "e098e7bbe6f7",
    "sliding_window": "0cc4aa524033",
    "soft_cap": "fc84bc25fa10",
    "spec_decode": "4bd38d93926d",
    "split_kv": "1c252c8b0ab1",
    "strides": "d29a9a830529",
    "tables": "683d57d58395",
    "vllm_interpreted": "2d314583afa1",
    "vllm_latent": "552378198733",
    "xformers": "8df251944f73",
}
CHEAP = [name for name in SUITES if name != "named_batches"]


def cases(*names: str) -> Iterator[Case]:
    for name in names or SUITES:
        yield from load_suite(name)


def lengths(batch: BatchSpec) -> list[tuple[int, int]]:
    return [(request.query_len, request.total_len) for request in batch]


def test_these_are_the_suites() -> None:
    assert suite_names() == list(SUITES)


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_stays_and_has_distinct_questions_under_distinct_names(name: str) -> None:
    suite = load_suite(name)
    assert (suite.name, suite.hash) == (name, SUITES[name])
    assert suite.description
    assert len({case.id for case in suite}) == len(suite)
    assert len({case.hash for case in suite}) == len(suite)
    assert len(suite) <= 80
    assert suite.notes == ()


@pytest.mark.parametrize("name", CHEAP)
def test_a_suite_describes_each_case_and_stays_cheap(name: str) -> None:
    suite = load_suite(name)
    assert all(case.description for case in suite)
    products = [
        request.query_len * max(request.total_len, request.encoder_len or 0) * case.layer.num_heads
        for case in suite
        for request in case.batch
    ]
    assert sum(products) < 8e6  # scores in all: under two seconds for the float64 truth of a suite
    assert max(products) < 2.2e6


def test_smoke_is_small() -> None:
    for case in cases("smoke"):
        if case.id == "far-keys":
            assert (case.batch.num_tokens, case.layer.num_heads, case.checks) == (2, 1, ("numerics",))
            continue
        assert case.batch.max_seq_len <= 1100
        assert case.batch.num_tokens <= 150
        assert sum(total_len for _, total_len in lengths(case.batch)) * case.layer.num_kv_heads <= 4500


# `seq_lens` and query lengths of vLLM's backend test, as its authors tabulate them.
NAMED = {
    "small_decode": ([32, 40], [1, 1]),
    "small_prefill": ([32, 40], [8, 8]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": ([128, 256, 512, 1024] * 2, [1] * 8),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "mixed_medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": ([2048] * 32, [1] * 32),
    "large_prefill": ([4096] * 8, [32] * 8),
    "mixed_large": ([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
    "small_encoder_prefill": ([32, 64, 128, 256], [32, 64, 128, 256]),
    "medium_encoder_prefill": ([256, 512, 1024, 2048], [256, 512, 1024, 2048]),
}


def test_the_named_batches() -> None:
    suite = load_suite("named_batches")
    assert [case.id for case in suite] == list(NAMED)
    for case in suite:
        seq_lens, query_lens = NAMED[case.id]
        assert lengths(case.batch) == list(zip(query_lens, seq_lens, strict=True)), case.id
        is_encoder = "encoder" in case.id
        assert (case.layer.attn_type is AttentionType.ENCODER_ONLY) == is_encoder
        assert case.layer.is_causal != is_encoder
        assert case.batch.path.name == ("encoder_only" if is_encoder else "paged")


def test_smoke_has_every_modifier_and_shape() -> None:
    smoke = list(cases("smoke"))
    layers = [case.layer for case in smoke]
    assert {layer.dtype for layer in layers} == {"float16", "bfloat16", "float32"}
    assert {layer.attn_type for layer in layers} == set(AttentionType)
    assert {layer.num_heads // layer.num_kv_heads for layer in layers} >= {1, 4, 5, 7, 8}
    assert {layer.head_size for layer in layers} >= {64, 80, 128}
    assert {case.cache.layout for case in smoke} == {"NHD", "HND"}
    assert {case.cache.block_size for case in smoke} >= {1, 8, 16, 128}
    assert any(layer.scale for layer in layers)
    assert any(layer.value_head_size < layer.head_size for layer in layers)
    assert any(layer.value_head_size > layer.head_size for layer in layers)
    assert any(layer.alibi and layer.soft_cap and layer.sliding_window for layer in layers)
    assert any(layer.sinks and layer.soft_cap and layer.sliding_window for layer in layers)
    assert any(layer.attn_type == "decoder" and not layer.is_causal and layer.sliding_window for layer in layers)
    assert any(case.cache.k_scale != 1 != case.cache.v_scale for case in smoke)
    assert any(case.batch.padding.requests and case.batch.padding.tokens for case in smoke)
    assert any(case.batch.padding.tokens and not case.batch.padding.requests for case in smoke)
    assert any(request.shared_prefix for case in smoke for request in case.batch)
    assert any(request.context_len < 0 for case in smoke for request in case.batch)
    assert any((layer.num_heads, layer.num_kv_heads) in {(24, 3), (20, 5)} for layer in layers)
    assert any(layer.logits_soft_cap and layer.head_size == 256 for layer in layers)
    assert any(layer.head_size == 80 and layer.dtype == "float16" for layer in layers)
    for modifier in ("sliding_window", "logits_soft_cap", "alibi", "sinks"):
        modified = [case for case in smoke if getattr(case.layer, modifier)]
        kinds = {kind for case in modified for kind in map(_kind, case.batch)}
        assert kinds >= {"decode", "extend", "prefill"}, modifier


def _kind(request: RequestSpec) -> str:
    return "decode" if request.query_len == 1 else "prefill" if request.context_len == 0 else "extend"


def test_the_dimensions_that_bugs_live_in_are_covered() -> None:
    selected = list(cases(*CHEAP))
    layers = [case.layer for case in selected]
    assert {layer.num_heads // layer.num_kv_heads for layer in layers} >= {1, 2, 4, 5, 7, 8, 16}
    assert {layer.head_size for layer in layers} >= {64, 72, 80, 96, 128, 192, 256}
    assert {case.cache.block_size for case in selected} >= {1, 2, 8, 16, 32, 64, 128, 256, 544}
    assert {layer.window for layer in layers} >= {(0, 0), (15, 0), (16, 0), (127, 0), (7, 7), (15, 15)}
    assert {request.query_len for case in cases("decode") for request in case.batch} >= set(range(1, 9))
    decodes = {request.total_len for case in cases("decode") for request in case.batch if request.query_len == 1}
    assert {length % 16 for length in decodes} == set(range(16))
    for tile in (16, 32, 64, 128, 256):
        assert decodes >= {tile - 1, tile, tile + 1}
        prompts = {r.query_len for case in cases("prefill") for r in case.batch if r.context_len == 0}
        assert prompts >= {tile - 1, tile, tile + 1}
    assert any(case.cache.first_block is not None and case.cache.first_block > 2**16 for case in selected)
    heads = {(layer.num_heads, layer.num_kv_heads) for layer in layers}
    assert heads >= {(40, 8), (48, 8), (64, 8), (128, 8)}
    assert decodes >= {8192, 8193}
    assert any(len(list(case.batch)) > 128 for case in cases("decode"))
    assert prompts >= {256, 512}
    assert max(prompts) > 1024
    rows = [case.batch.num_tokens for case in cases("prefill") if case.batch.max_query_len <= 128]
    assert max(rows) > 1024
    assert {case.batch.num_tokens for case in cases("chunked_prefill") if len(list(case.batch)) == 1} >= {128, 129}
    ragged = [case for case in selected if case.batch.max_seq_len >= 100 * min(t for _, t in lengths(case.batch) if t)]
    assert len(ragged) >= 3


MODIFIERS = {"alibi": "alibi", "sinks": "sinks", "soft_cap": "logits_soft_cap", "sliding_window": "sliding_window"}
FACTORS = {
    "dtype": {"float16", "bfloat16", "float32"},
    "layout": {"NHD", "HND"},
    "kind": {"decode", "extend", "prefill"},
    "group": {"1", "4", "all"},
    "block_size": {16, 32},
    "head_size": {64, 128},
}


def _factors(case: Case) -> Iterator[dict[str, object]]:
    """What a case sets for each factor, once a kind of its queries."""
    layer, cache = case.layer, case.cache
    group = "all" if layer.num_kv_heads == 1 else str(layer.num_heads // layer.num_kv_heads)
    for kind in {_kind(request) for request in case.batch}:
        yield {
            "dtype": layer.dtype,
            "layout": cache.layout,
            "kind": kind,
            "group": group,
            "block_size": cache.block_size,
            "head_size": layer.head_size,
        }


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_modifier_meets_every_pair_of_dimensions(name: str) -> None:
    covered = [factors for case in cases(name) if getattr(case.layer, MODIFIERS[name]) for factors in _factors(case)]
    for one, other in combinations(FACTORS, 2):
        missing = set(product(FACTORS[one], FACTORS[other])) - {(f[one], f[other]) for f in covered}
        assert not missing, (one, other)


def test_smoke_passes_the_limits_that_cost_little() -> None:
    smoke = {case.id: case for case in cases("smoke")}
    assert smoke["far-keys"].batch.max_seq_len > 2**16
    cache, layer = smoke["far-elements"].cache, smoke["far-elements"].layer
    assert (cache.first_block or 0) * cache.block_size * layer.head_size < 2**31
    assert ((cache.first_block or 0) + 10) * cache.block_size * layer.head_size > 2**31
    assert smoke["null-pages"].batch.block_table.null_pages
    assert smoke["null-pages"].batch.block_table.row_gap
    assert smoke["unmapped-rows"].batch.padding.unmapped_tokens
    assert any(r.query_len > 64 and r.context_len > 512 for r in smoke["long-rows"].batch)


def test_limits_are_passed_by_some_case() -> None:
    selected = list(cases("limits"))
    highest = [(case, (case.cache.first_block or 0)) for case in selected]
    assert max(case.batch.max_seq_len for case in selected) > 2**16
    assert any(2**15 < case.batch.max_seq_len < 2**16 for case in selected)
    assert max(case.batch.num_tokens for case in selected) > 2**16
    assert max(case.batch.num_requests * case.layer.num_heads for case in selected) > 2**16
    assert any(first < 2**24 < first + 10 for _, first in highest)
    assert any(first < 2**15 < first + 10 for _, first in highest)
    assert any(first < 2**16 < first + 10 for _, first in highest)
    slots = [(case, first * case.cache.block_size) for case, first in highest]
    assert any(first < 2**31 < first + 3 * case.cache.block_size for case, first in slots)
    for layout in ("NHD", "HND"):
        elements = [
            first * case.layer.num_kv_heads * case.layer.head_size
            for case, first in slots
            if case.cache.layout == layout and case.cache.kv_cache_dtype == "auto"
        ]
        assert any(2**31 - 2**12 < number < 2**31 for number in elements)
