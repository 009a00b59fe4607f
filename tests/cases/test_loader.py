"""Loading suites: merging, matrices, paths, positions, selection."""

from dataclasses import replace

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_file, load_suite, select, suite_file, suite_names
from attncheck.errors import CaseFileError, UnknownNameError
from attncheck.reference.spec import AttentionType
from attncheck.reference.step_spec import FastPrefillOptions, RequestSpec, StridesSpec

HEAD = """\
suite: t
defaults:
  layer: {num_heads: 8, num_kv_heads: 2, head_size: 64}
cases:
"""


def load(tmp_path, text):
    path = tmp_path / "t.yaml"
    path.write_text(text, encoding="utf-8")
    return load_file(path)


def one(tmp_path, case):
    (case_,) = load(tmp_path, f"{HEAD}  - {{id: a, {case}}}\n").cases
    return case_


EXAMPLE = """\
suite: sliding_window
description: decode, extend and prefill across a window's edges
defaults:
  layer: {num_heads: 8, num_kv_heads: 2, head_size: 64, dtype: bfloat16}
  cache: {block_size: 16, layout: NHD}
cases:
  - id: extend-across-the-edge
    batch: q5s37_3q1s200
    layer: {sliding_window: 128}
    matrix: {layer.dtype: [float16, bfloat16], cache.block_size: [16, 32]}
    checks: [numerics, containment]
"""


def test_the_example_of_the_design(tmp_path):
    suite = load(tmp_path, EXAMPLE)
    assert (suite.name, suite.description) == (
        "sliding_window",
        "decode, extend and prefill across a window's edges",
    )
    assert [case.id for case in suite] == [
        f"extend-across-the-edge.{dtype}-{pages}" for dtype in ("float16", "bfloat16") for pages in (16, 32)
    ]
    case = suite.cases[1]
    assert (case.layer.dtype, case.cache.block_size) == ("float16", 32)
    assert (case.layer.sliding_window, case.layer.num_heads, case.cache.layout) == (128, 8, "NHD")
    assert case.batch.requests == (
        RequestSpec(query_len=5, seq_len=37),
        RequestSpec(query_len=1, seq_len=200, count=3),
    )
    assert case.checks == ("numerics", "containment")
    assert case.key == "sliding_window/extend-across-the-edge.float16-32"
    assert case.origin.endswith("t.yaml:7")


def test_every_form_of_a_batch(tmp_path):
    string = one(tmp_path, "batch: q5s37_2q3")
    listed = one(tmp_path, "batch: [{query_len: 5, seq_len: 37}, {query_len: 3, count: 2}]")
    mapped = one(tmp_path, "batch: {requests: q5s37_2q3, padding: {requests: 2, tokens: 4}}")
    assert string.batch == listed.batch
    assert mapped.batch.requests == string.batch.requests
    assert (mapped.batch.padding.requests, mapped.batch.padding.tokens) == (2, 4)
    inner = one(tmp_path, "batch: {requests: [{query_len: 5, seq_len: 37}, {query_len: 3, count: 2}]}")
    assert inner.batch == string.batch


def test_a_case_is_laid_over_the_defaults_key_by_key(tmp_path):
    text = HEAD.replace("head_size: 64}", "head_size: 64, scale: 0.5, sliding_window: 9}")
    case = load(tmp_path, f"{text}  - {{id: a, batch: q20, layer: {{scale: 2, sliding_window: null}}}}\n").cases[0]
    assert (case.layer.scale, case.layer.sliding_window, case.layer.head_size) == (2.0, None, 64)


def test_defaults_of_other_keys_are_replaced(tmp_path):
    text = HEAD.replace("cases:", "  batch: q7\n  checks: [numerics, lse]\n  path: {fast_prefill: {rows: 2}}\ncases:")
    suite = load(tmp_path, f"{text}  - id: a\n  - {{id: b, batch: q9, checks: [lse], path: paged}}\n")
    a, b = suite.cases
    assert (a.batch.num_tokens, a.checks) == (7, ("numerics", "lse"))
    assert a.batch.path.options == FastPrefillOptions(rows=2)
    assert (b.batch.num_tokens, b.checks, b.batch.path.name) == (9, ("lse",), "paged")


def test_axis_values_in_ids(tmp_path):
    axes = (
        "layer.scale: [0.5, 1e-3, 1e+3, null], layer.sinks: [true, [1,2,3,4,5,6,7,8]], "
        "layer: [{alibi: true}], batch: [q9, 2q8_q4s9, [{query_len: 3}]]"
    )
    ids = [case.id for case in load(tmp_path, f"{HEAD}  - {{id: a, matrix: {{{axes}}}}}\n")]
    assert len(ids) == 4 * 2 * 3
    assert ids[:4] == ["a.0.5-true-v1-q9", "a.0.5-true-v1-2q8_q4s9", "a.0.5-true-v1-v3", "a.0.5-v2-v1-q9"]
    assert ids[-1] == "a.null-v2-v1-v3"
    assert "a.1e-3-true-v1-q9" in ids
    assert "a.1e3-true-v1-q9" in ids


def test_every_other_key(tmp_path):
    case = one(
        tmp_path,
        "batch: 2q1s40, description: why, inputs: [views, needles], tolerance: {factor: 2, reason: because}, "
        "strides: {key: transposed, output: padded}, "
        "layer: {attn_type: decoder, causal: false, logits_soft_cap: 30, kv_sharing: true, alibi: [1,2,3,4,5,6,7,8], "
        "output_quant: {scale: 0.5}}, "
        "cache: {kv_cache_dtype: fp8, k_scale: [0.5, 2], v_scale: 3, num_blocks: 40, first_block: 20}",
    )
    assert case.layer.attn_type is AttentionType.DECODER
    assert case.layer.output_quant.scale == 0.5
    assert case.cache.k_scale == (0.5, 2.0)
    assert case.inputs == ("needles", "views")
    assert case.strides == StridesSpec(query="fused", key="transposed", value="fused", output="padded")
    assert (case.tolerance.factor, case.tolerance.reason) == (2.0, "because")
    assert case.description == "why"
    hash(case)


def test_batches_before_and_layers_beside(tmp_path):
    case = one(
        tmp_path,
        "batch: 2q4s40, path: spec_decode, layer: {sliding_window: 8}, "
        "after: [2q4s20, [{query_len: 30}], {requests: q4s9, padding: {tokens: 2}}], "
        "layers: [{}, {sliding_window: null, logits_soft_cap: 5.0}]",
    )
    assert [[(r.query_len, r.total_len) for r in batch] for batch in case.after] == [
        [(4, 20)] * 2,
        [(30, 30)],
        [(4, 9)],
    ]
    assert [batch.path.name for batch in case.after] == ["spec_decode", "paged", "spec_decode"]
    assert case.after[2].padding.tokens == 2
    assert case.layers == (case.layer, replace(case.layer, sliding_window=None, logits_soft_cap=5.0))


def test_yaml_1_2_scalars(tmp_path):
    case = one(tmp_path, "batch: [{query_len: 010, seq_len: 0x10}], layer: {scale: 1e-2}, description: on")
    assert (case.batch.max_query_len, case.batch.max_seq_len, case.layer.scale) == (10, 16, 0.01)
    assert case.description == "on"


def test_a_mistake_in_a_matrix_is_shown_where_it_was_written(tmp_path):
    with pytest.raises(CaseFileError) as caught:
        one(tmp_path, "batch: q9, matrix: {cache.block_size: [16, -2]}")
    place = (5, 56, "cases[0].matrix.cache.block_size[1]")
    assert (caught.value.line, caught.value.column, caught.value.key) == place


def test_a_case_that_breaks_an_inherited_value_is_named(plain, tmp_path):
    with pytest.raises(CaseFileError) as mistake:
        one(tmp_path, "batch: q5, layer: {num_heads: 7}")
    assert plain(str(mistake.value)) == snapshot(
        "TMP/t.yaml:3:39: defaults.layer.num_kv_heads: num_heads 7 is not a multiple of num_kv_heads 2, in case a of line 5 (found 2); it must divide num_heads 7"
    )


def test_names_and_files(plain, tmp_path):
    assert suite_names()[0] == "smoke"
    assert load_suite("smoke").path == suite_file("smoke")
    path = tmp_path / "t.yaml"
    path.write_text(EXAMPLE)
    assert load_suite(str(path)).name == "sliding_window"
    with pytest.raises(UnknownNameError) as refused:
        load_suite("smok")
    assert plain(str(refused.value)) == snapshot("unknown suite 'smok'; did you mean 'smoke'? (known: ...)")
    with pytest.raises(UnknownNameError):
        suite_file("../loader")


def test_select(tmp_path):
    names = ("decode", "decode.1", "decode.2", "prefill")
    cases = load(tmp_path, HEAD + "".join(f"  - {{id: {name}, batch: q9}}\n" for name in names)).cases

    def ids(*patterns):
        return [case.id for case in select(cases, patterns)]

    assert ids() == list(names)
    assert ids("decode") == ["decode"]
    assert ids("t/decode") == ["decode"]
    assert ids("decode*") == ["decode", "decode.1", "decode.2"]
    assert ids("t/*.[12]") == ["decode.1", "decode.2"]
    assert ids("prefill", "decode") == ["decode", "prefill"]
    assert ids("Decode") == []
    assert ids("u/*") == []
