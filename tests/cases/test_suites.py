"""The built-in suites: complete, without repetition, cheap, and stable over time."""

from collections.abc import Iterator
from itertools import combinations, product

import pytest

from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.model import Case
from attncheck.reference.spec import AttentionType, BatchSpec, RequestSpec

SUITES = [
    "smoke",
    "alibi",
    "block_sizes",
    "cascade",
    "causal_conv1d",
    "chunked_prefill",
    "dcp",
    "decode",
    "encoder",
    "fp8_kv",
    "gqa",
    "head_sizes",
    "interpreted",
    "kv_sharing",
    "limits",
    "local",
    "long_rows",
    "merge",
    "micro_batch",
    "mixed",
    "mla",
    "named_batches",
    "output_quant",
    "padding",
    "prefill",
    "sinks",
    "sliding_window",
    "soft_cap",
    "spec_decode",
    "split_kv",
    "strides",
    "tables",
    "vllm_interpreted",
    "vllm_latent",
    "xformers",
]
CHEAP = [name for name in SUITES if name != "named_batches"]


def cases(*names: str) -> Iterator[Case]:
    for name in names or SUITES:
        yield from load_suite(name)


def lengths(batch: BatchSpec) -> list[tuple[int, int]]:
    return [(request.query_len, request.total_len) for request in batch]


def test_these_are_the_suites() -> None:
    assert suite_names() == SUITES


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_has_distinct_questions_under_distinct_names(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
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


def test_the_suite_for_interpreters_is_smaller() -> None:
    for case in cases("interpreted"):
        assert case.layer.num_heads * case.layer.head_size <= 512
        assert case.batch.num_tokens <= 60
        assert sum(total_len for _, total_len in lengths(case.batch)) * case.layer.num_kv_heads <= 480


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


# A changed hash orphans every recorded result and every expected failure of the case.
PINNED = {
    "smoke/decode.bfloat16": "30502eed1b66",
    "smoke/window-prefill.7": "588aad7cbab8",
    "smoke/padded-mixed": "0e44652b7507",
    "smoke/cross": "50743df3badb",
    "named_batches/mixed_medium": "a0503ad2afe8",
    "sinks/own-sinks": "0779dbf84ed9",
    "merge/mixed.bfloat16-64": "3f237320aff7",
    "causal_conv1d/padded-decode.float16": "86cecd1dbfcf",
}


def test_hashes_stay() -> None:
    hashes = {case.key: case.hash for case in cases("smoke", "named_batches", "sinks", "merge", "causal_conv1d")}
    assert {key: hashes[key] for key in PINNED} == PINNED


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


# A kernel of another dtype, layout or group is another kernel: a fault in it is not seen where the modifier meets only
# the usual ones.
SMOKE_CROSSINGS = [
    ("logits_soft_cap", "float16", "HND", 4),
    ("sinks", "float16", "NHD", 1),
    ("alibi", "float32", "NHD", 6),
    ("sliding_window", "float32", "HND", 4),
]


@pytest.mark.parametrize(("modifier", "dtype", "layout", "group"), SMOKE_CROSSINGS)
def test_smoke_has_each_modifier_in_another_kernel(modifier: str, dtype: str, layout: str, group: int) -> None:
    found = [
        case
        for case in cases("smoke")
        if getattr(case.layer, modifier)
        and (case.layer.dtype, case.cache.layout) == (dtype, layout)
        and case.layer.num_heads // case.layer.num_kv_heads == group
    ]
    assert {_kind(request) for case in found for request in case.batch} == {"decode", "extend", "prefill"}


def test_smoke_has_lengths_at_which_kernels_change() -> None:
    batches = [set(lengths(case.batch)) for case in cases("smoke")]
    decodes = set().union(*batches)
    assert decodes >= {(1, length) for length in (128, 256, 512, 513, 640, 1024, 1025)}
    assert any(8 in rows and max(rows) > 8 for rows in ({query_len for query_len, _ in batch} for batch in batches))
    chunks = [b for b in batches if any(query_len > 128 for query_len, _ in b)]
    assert any(query_len == 1 and total_len > 512 for batch in chunks for query_len, total_len in batch)
    padded = [case for case in cases("smoke") if case.batch.padding.requests]
    assert any(
        all(t % case.cache.block_size == case.cache.block_size - 1 for _, t in lengths(case.batch)) for case in padded
    )


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


@pytest.mark.parametrize("name", MODIFIERS)
def test_a_modifier_meets_every_dtype_in_the_other_layout_in_batches_of_one_kind(name: str) -> None:
    pure = [list(_factors(case)) for case in cases(name) if case.cache.layout == "HND"]
    covered = {(factors[0]["dtype"], factors[0]["kind"]) for factors in pure if len(factors) == 1}
    assert covered >= set(product(FACTORS["dtype"], {"decode", "extend"}))


def test_a_window_has_rows_that_see_less_because_of_it() -> None:
    for case in cases():
        left, _ = case.layer.window
        if left >= 0:
            assert any(request.total_len > left + 1 for request in case.batch), case.key
        if left >= 0 and not case.layer.is_causal:
            assert any(request.query_len > left + 1 for request in case.batch), case.key


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


def test_many_rows_have_keys_enough_to_be_split() -> None:
    requests = [r for case in cases("long_rows") for r in case.batch if r.query_len > 64 and r.context_len > 512]
    assert len(requests) > 10
    windows = {case.layer.window[0] + 1 for case in cases("long_rows")}
    for edge in (64, 128, 256, 512):
        assert windows & {edge - 1, edge, edge + 1}, edge
    assert max(sum(r.count for r in case.batch.requests if r.total_len > 256) for case in cases("long_rows")) > 128


def test_tables_have_all_that_surrounds_pages_and_rows() -> None:
    batches = [case.batch for case in cases("tables")]
    assert {batch.path.name for batch in batches} == {"paged", "spec_decode", "local", "mla"}
    assert any(b.block_table.null_pages and b.block_table.row_gap and b.block_table.extra_columns for b in batches)
    assert max(b.block_table.extra_columns for b in batches) > 1024
    assert any(b.padding.tokens and b.padding.unmapped_tokens and b.padding.key_rows for b in batches)
    assert any(b.padding.key_rows and not b.padding.query_rows for b in batches)
