"""The built-in suites: complete, without repetition, cheap, and stable over time."""

import pytest

from attncheck.cases.loader import load_suite, suite_names
from attncheck.reference.spec import AttentionType

# A changed hash orphans every recorded result and every expected failure of a case.
SUITES = {
    "smoke": "ed35796d23e7",
    "alibi": "71505b6cf34b",
    "block_sizes": "35351d63cc51",
    "cascade": "3351102d6bb1",
    "causal_conv1d": "76c438f7f469",
    "chunked_prefill": "733c6e770aa1",
    "dcp": "04f673936494",
    "decode": "8078ffde402f",
    "encoder": "8733a9c430aa",
    "fp8_kv": "d51e7ecafc16",
    "fp8_query": "80f2023546f5",
    "gqa": "0cccf16e805d",
    "head_sizes": "59837fa43f7c",
    "hybrid": "8228cdaf8c41",
    "indexer": "d92ec7ff8edd",
    "interpreted": "639934efaf4a",
    "kv_sharing": "ff67d4d301ae",
    "limits": "577b9aaaa8dc",
    "local": "144bc9741069",
    "long_rows": "1ce58cb1cca9",
    "low_bit_kv": "c800f688512b",
    "merge": "1b2b8f122ce6",
    "micro_batch": "311177f6f436",
    "mixed": "214145cf27ef",
    "mla": "9e54ea138398",
    "mm_prefix": "294b8bbbdb91",
    "named_batches": "678bf4a7c20a",
    "output_quant": "682c102e11b3",
    "padding": "cde5d24e5c93",
    "pcp": "e6e09cd0b7f2",
    "prefill": "b087b047726a",
    "ranks": "39541d7e3c08",
    "sinks": "3d9739651f39",
    "sliding_window": "f04fec351388",
    "soft_cap": "c410293cda0f",
    "sparse": "70d355d0b427",
    "spec_decode": "940261f330ca",
    "split_kv": "1c252c8b0ab1",
    "state": "7143a49d8e15",
    "strides": "d29a9a830529",
    "tables": "683d57d58395",
    "vllm_interpreted": "2d314583afa1",
    "vllm_latent": "552378198733",
    "vllm_state": "278f50de6f5f",
    "xformers": "8df251944f73",
}
CHEAP = [name for name in SUITES if name != "named_batches"]


def cases(*names):
    for name in names or SUITES:
        yield from load_suite(name)


def lengths(batch):
    return [(request.query_len, request.total_len) for request in batch]


def test_these_are_the_suites():
    assert suite_names() == list(SUITES)


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_stays_and_has_distinct_questions_under_distinct_names(name):
    suite = load_suite(name)
    assert (suite.name, suite.hash) == (name, SUITES[name])
    assert suite.description
    assert len({case.id for case in suite}) == len(suite)
    assert len({case.hash for case in suite}) == len(suite)
    assert len(suite) <= (80 if name != "smoke" else 105)
    assert suite.notes == ()


@pytest.mark.parametrize("name", CHEAP)
def test_a_suite_describes_each_case_and_stays_cheap(name):
    suite = load_suite(name)
    assert all(case.description for case in suite)
    products = [
        request.query_len * max(request.total_len, request.encoder_len or 0) * case.layer.num_heads
        for case in suite
        if case.batch.path.name != "recurrence"  # such a layer has no scores
        for request in case.batch
    ]
    assert sum(products) < (8e6 if name != "smoke" else 2e6)  # scores in all; 8e6: under two seconds of float64
    assert max(products, default=0) < 2.2e6


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


def test_the_named_batches():
    suite = load_suite("named_batches")
    assert [case.id for case in suite] == list(NAMED)
    for case in suite:
        seq_lens, query_lens = NAMED[case.id]
        assert lengths(case.batch) == list(zip(query_lens, seq_lens, strict=True)), case.id
        is_encoder = "encoder" in case.id
        assert (case.layer.attn_type is AttentionType.ENCODER_ONLY) == is_encoder
        assert case.layer.is_causal != is_encoder
        assert case.batch.path.name == ("encoder_only" if is_encoder else "paged")
