"""A case as text: its hash, its outline, several as one file, and their JSON schema."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml
from inline_snapshot import snapshot

from attncheck.cases.grammar import parse_batch
from attncheck.cases.loader import load_file, load_suite, suite_file, suite_names
from attncheck.cases.model import Case, Suite, Tolerance
from attncheck.cases.outline import keys_of, shape_of
from attncheck.cases.schema import json_schema
from attncheck.cases.yaml_text import suite_yaml
from attncheck.reference.spec import BACKEND_CHECKS, LayerSpec
from attncheck.reference.step_spec import PATHS, BatchSpec, CacheSpec, PaddingSpec, PathSpec, RequestSpec, StridesSpec

LAYER = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64)
CACHE = CacheSpec()


def case(text="q5s37_3q1s200", layer=LAYER, cache=CACHE):
    return Case(suite="s", id="i", layer=layer, cache=cache, batch=BatchSpec(requests=parse_batch(text)))


def test_equal_questions_have_equal_hashes():
    listed = (RequestSpec(query_len=5, seq_len=37), RequestSpec(query_len=1, seq_len=200, count=3))
    assert replace(case(), batch=BatchSpec(requests=listed)).hash == case().hash
    assert case("q5s37_q1s200_2q1s200").hash == case("q5s37_3q1s200").hash
    assert case("q7s7").hash == case("q7").hash
    assert case(layer=replace(LAYER, dtype="bfloat16")).hash == case().hash
    assert case(cache=CacheSpec(block_size=16, k_scale=1.0)).hash == case().hash


def test_labels_do_not_count():
    other = replace(
        case(),
        suite="t",
        id="j",
        checks=("numerics",),
        tolerance=Tolerance(factor=2.0, reason="why"),
        description="d",
        origin="f:1",
        notes=("n",),
    )
    assert other.hash == case().hash
    assert hash(replace(case(), origin="a:1")) == hash(case())


def test_what_is_set_changes_the_hash():
    base = case()
    batch = base.batch
    others = [
        case("q5s38_3q1s200"),
        case("3q1s200_q5s37"),
        case(layer=replace(LAYER, sliding_window=4)),
        case(layer=replace(LAYER, scale=0.5)),
        case(cache=CacheSpec(layout="HND")),
        replace(base, inputs=("needles",)),
        replace(base, inputs=()),
        replace(base, after=(batch,)),
        replace(base, layers=(LAYER,)),
        replace(base, strides=StridesSpec(key="transposed")),
        replace(base, strides=StridesSpec(value="transposed")),
        replace(base, batch=replace(batch, padding=PaddingSpec(tokens=1))),
        replace(base, batch=replace(batch, path=PathSpec(name="spec_decode"))),
        replace(base, batch=replace(batch, requests=(RequestSpec(query_len=5, seq_len=37, shared_prefix=16),))),
    ]
    hashes = {other.hash for other in [base, *others]}
    assert len(hashes) == len(others) + 1


def test_a_suite_has_a_hash_of_its_cases():
    suite = Suite(name="s", description="", cases=(case(),), path=Path("s.yaml"))
    assert (len(suite), list(suite)) == (1, [case()])
    renamed = replace(suite, cases=(replace(case(), id="j"),))
    changed = replace(suite, cases=(case("q5"),))
    assert len({suite.hash, renamed.hash, changed.hash}) == 3
    assert replace(suite, name="t").hash == suite.hash


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


LAYER_TEXT = "{num_heads: 6, num_kv_heads: 2, head_size: 64}"


def case_of(folder, text, *, layer=LAYER_TEXT, batch="q5s20_2q1s9"):
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


def test_a_file_of_cases_reads_back_as_these_cases(tmp_path):
    for name in ("smoke", "mla", "fp8_kv"):
        cases = load_suite(name).cases
        path = tmp_path / f"{name}.yaml"
        path.write_text(suite_yaml(name, "all of it", cases))
        read = load_file(path)
        assert [(case.id, case.hash, case.checks) for case in read] == [(c.id, c.hash, c.checks) for c in cases]


def test_defaults_hold_what_all_cases_share_and_a_weight_is_read(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(
        "suite: two\n"
        "defaults: {layer: {num_heads: 8, num_kv_heads: 2, head_size: 64}}\n"
        "cases:\n"
        "- {id: a, batch: 2q1s30, weight: 2.5}\n"
        "- {id: b, batch: q9, layer: {sliding_window: 4}}\n"
    )
    cases = load_file(path).cases
    assert [case.weight for case in cases] == [2.5, None]
    document = yaml.safe_load(suite_yaml("two", "", cases))
    assert document["defaults"] == {"layer": {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}}
    assert document["cases"][0] == {"id": "a", "weight": 2.5, "batch": "2q1s30"}
    assert document["cases"][1]["layer"] == {"sliding_window": 4}


SCHEMA_FILE = suite_file("smoke").parent / "schema.json"


def schema_keys(value):
    if isinstance(value, dict):
        return set(value).union(*(schema_keys(item) for item in value.values()))
    return set().union(*(schema_keys(item) for item in value)) if isinstance(value, list) else set()


def test_the_file_beside_the_suites_is_up_to_date():
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema(), "write it again: attncheck list schema > schema.json"


def test_every_suite_names_the_schema():
    for name in suite_names():
        assert suite_file(name).read_text().startswith("# yaml-language-server: $schema=./schema.json\n"), name


def test_nothing_is_required_and_nothing_dangles():
    schema = json_schema()
    assert "required" not in schema_keys(schema)
    text = json.dumps(schema)
    for name in schema["$defs"]:
        assert f'"#/$defs/{name}"' in text
    assert text.count('"$ref"') == sum(text.count(f'"#/$defs/{name}"') for name in schema["$defs"])


def test_it_has_every_key_and_name():
    schema = json_schema()
    case = schema["properties"]["cases"]["items"]["properties"]
    for kind in (LayerSpec, CacheSpec):
        assert list(schema["$defs"][kind.__name__]["properties"]) == [field.name for field in fields(kind)]
    assert case["checks"]["items"]["enum"] == list(BACKEND_CHECKS)
    named, with_options = schema["$defs"]["Path"]["anyOf"]
    assert set(named["enum"]) | set(with_options["properties"]) == set(PATHS)
    assert {"layer.sliding_window", "cache.block_size", "batch", "layer"} <= set(case["matrix"]["properties"])
