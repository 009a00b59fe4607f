"""The outline of a case: keys differ where questions do, and the shape names what a reader looks for."""

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_suite, suite_names
from attncheck.cases.outline import keys_of, shape_of


@pytest.mark.parametrize("name", suite_names())
def test_cases_of_a_suite_differ_in_keys_and_in_shape(name):
    cases = load_suite(name).cases
    for outlines in ([tuple(sorted(keys_of(case).items())) for case in cases], [shape_of(case) for case in cases]):
        alike = [case.id for case, own in zip(cases, outlines, strict=True) if outlines.count(own) > 1]
        assert alike == []
    for case in cases:
        assert "\n" not in shape_of(case)
        assert len(shape_of(case)) < 300
        keys = keys_of(case)
        assert all(type(value) in (bool, int, float, str) for value in keys.values())
        assert case.layer.has_cache or not any(key.startswith("cache.") for key in keys)
        assert keys["layer.group_size"] * keys["layer.num_kv_heads"] == keys["layer.num_heads"]
        assert keys["batch.num_requests"] == len(list(case.batch))


LAYER = "{num_heads: 6, num_kv_heads: 2, head_size: 64}"


def case_of(folder, text, *, layer=LAYER, batch="q5s20_2q1s9"):
    path = folder / "mine.yaml"
    text = text if "batch: " in text else f"    batch: {batch}\n{text}"
    path.write_text(f"suite: mine\ndefaults:\n  layer: {layer}\ncases:\n  - id: one\n{text}")
    (case,) = load_suite(str(path))
    return case


def test_company_is_named(tmp_path):
    case = case_of(tmp_path, "    after: [q9, 2q1s40]\n    layers: [{sliding_window: 4, scale: 0.5}, {}]\n")
    assert shape_of(case) == snapshot(
        "6 heads, 2 KV heads (group 3), head size 64, bfloat16, pages of 16 NHD, batch q5s20_2q1s9, after q9, 2q1s40, beside scale 0.5 sliding_window 4, a layer like it"
    )
    assert keys_of(case)["after"] == "q9, 2q1s40"
    assert keys_of(case)["layers"] == snapshot("scale 0.5 sliding_window 4, a layer like it")


def test_the_plain_case(tmp_path):
    case = case_of(tmp_path, "")
    assert shape_of(case) == (
        snapshot("6 heads, 2 KV heads (group 3), head size 64, bfloat16, pages of 16 NHD, batch q5s20_2q1s9")
    )
    assert keys_of(case) == {
        "layer.num_heads": 6,
        "layer.num_kv_heads": 2,
        "layer.group_size": 3,
        "layer.head_size": 64,
        "layer.dtype": "bfloat16",
        "cache.block_size": 16,
        "cache.layout": "NHD",
        "batch.num_requests": 3,
        "batch.max_query_len": 5,
        "batch.max_seq_len": 20,
        "batch.min_seq_len": 9,
        "batch has a decode": True,
        "batch has a prefill with context": True,
    }


@pytest.mark.parametrize(
    ("text", "keys", "words"),
    [
        ("    layer: {sliding_window: 9}", {"layer.sliding_window": 9}, "sliding_window 9"),
        ("    layer: {sinks: true}", {"layer.sinks": True}, "sinks True"),
        ("    cache: {kv_cache_dtype: fp8}", {"cache.kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        (
            "    batch: {requests: q5s20_2q1s9, padding: {requests: 1, tokens: 4}}",
            {"batch is padded": True, "batch.padding.requests": 1, "batch.padding.tokens": 4},
            "padded by 1 request and 4 tokens",
        ),
        (
            "    strides: {key: padded}",
            {
                "strides.query": "fused",
                "strides.key": "padded",
                "strides.value": "fused",
                "strides.output": "contiguous",
            },
            "query fused, key padded, value fused, output contiguous",
        ),
        (
            "    path: {split_kv: {parts: 3}}",
            {"path": "split_kv", "path.parts": 3},
            "path split_kv (parts 3)",
        ),
    ],
)
def test_what_is_given_is_a_key_of_its_own(tmp_path, text, keys, words):
    plain, given = case_of(tmp_path, ""), case_of(tmp_path, text)
    assert {name: value for name, value in keys_of(given).items() if name not in keys_of(plain)} == keys
    assert f", {words}" in shape_of(given)
    assert words not in shape_of(plain)


def test_slopes_are_spelled_out_while_they_are_few(tmp_path):
    few = case_of(tmp_path, "    layer: {alibi: [0.5, 0.25, 0.125, 1, 2, 3]}")
    assert keys_of(few)["layer.alibi"] == "[0.5, 0.25, 0.125, 1.0, 2.0, 3.0]"
    many = case_of(tmp_path, "", layer="{num_heads: 10, num_kv_heads: 2, head_size: 64, alibi: [1,2,3,4,5,6,7,8,9,1]}")
    assert keys_of(many)["layer.alibi"] == "10 values"


def test_a_batch_that_no_line_holds_is_described_by_its_sizes(tmp_path):
    batch = "_".join(f"q{length}s{length + 100}" for length in range(1, 12))
    assert shape_of(case_of(tmp_path, "", batch=batch)) == snapshot(
        "6 heads, 2 KV heads (group 3), head size 64, bfloat16, pages of 16 NHD, batch of 11 requests, 66 new tokens, seq_len up to 111"
    )
