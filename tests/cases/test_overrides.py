"""Suites with other defaults: what is replaced, what is kept, what is refused."""

import pytest
from inline_snapshot import snapshot

from attncheck.cases.keys import split_variant, with_defaults
from attncheck.cases.loader import load_suite
from attncheck.errors import CaseFileError, UnknownNameError
from attncheck.reference.step_spec import CacheSpec

SUITE = """\
suite: t
defaults:
  layer: {num_heads: 8, num_kv_heads: 2, head_size: 64}
  cache: {block_size: 16}
cases:
  - {id: plain, batch: q1s40}
  - {id: own, batch: q1s40, cache: {block_size: 8}}
  - {id: axis, batch: q1s40, matrix: {cache.block_size: [32, 64]}}
"""

SHARED = "  - {id: shared, batch: [{query_len: 1, seq_len: 40, shared_prefix: 16, count: 2}]}\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(SUITE, encoding="utf-8")
    return str(path)


def test_a_default_is_replaced_in_cases_that_do_not_set_it(file):
    suite = load_suite(with_defaults(file, ["cache.block_size=128", "layer.head_size=96"]))
    assert {case.id: case.cache.block_size for case in suite} == {"plain": 128, "own": 8, "axis.32": 32, "axis.64": 64}
    assert {case.layer.head_size for case in suite} == {96}
    assert {case.layer.num_heads for case in suite} == {8}
    plain = load_suite(file)
    assert [case.id for case in plain] == [case.id for case in suite]
    assert not {case.hash for case in plain} & {case.hash for case in suite}
    assert suite.hash != plain.hash


def test_a_built_in_suite_is_varied_by_name():
    ref = with_defaults("decode", ["cache.block_size=64", "cache.layout=HND"])
    assert ref == "decode{cache.block_size: 64, cache.layout: HND}"
    assert split_variant(ref) == ("decode", "{cache.block_size: 64, cache.layout: HND}")
    suite = load_suite(ref)
    assert suite.name == "decode"
    assert {case.cache.layout for case in suite if case.id.startswith("ragged")} == {"HND"}
    assert with_defaults(ref, ["layer.head_size=96"]) == ref[:-1] + ", layer.head_size: 96}"
    assert with_defaults("decode", []) == "decode"
    nested = "decode{layer.mla: {kv_lora_rank: 64}}"
    assert with_defaults(nested, ["cache.block_size=32"]) == f"{nested[:-1]}, cache.block_size: 32}}"
    assert with_defaults("decode{ }", ["cache.block_size=32"]) == "decode{cache.block_size: 32}"


def test_a_case_that_an_override_makes_invalid_is_left_out_and_named(plain, tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text(SUITE + SHARED, encoding="utf-8")
    assert [case.id for case in load_suite(str(path))][-1] == "shared"
    suite = load_suite(f"{path}{{cache.block_size: 24}}")
    assert [case.id for case in suite] == ["plain", "own", "axis.32", "axis.64"]
    (note,) = suite.notes
    assert plain(note) == snapshot(
        "shared is left out, since it is invalid with these defaults: shared_prefix must be whole pages of 24 tokens (found 16)"
    )


def test_a_suite_of_which_no_case_is_left_and_a_mistake_of_the_file_are_refused(tmp_path):
    path = tmp_path / "t.yaml"
    head, _, _ = SUITE.partition("  - {id: plain")
    for text, key in (
        (head + SHARED, "cases[0].batch[0].shared_prefix"),
        (SUITE + "  - {id: typo, batch: q1s9, layer: {slidin_window: 3}}\n", "cases[3].layer.slidin_window"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(CaseFileError) as refused:
            load_suite(f"{path}{{cache.block_size: 24}}")
        assert refused.value.key == key


def test_lists_are_values_too(file):
    suite = load_suite(with_defaults(file, ["cache.kv_cache_dtype=fp8", "cache.k_scale=[0.5, 0.25]"]))
    assert suite.cases[0].cache.k_scale == (0.5, 0.25)


@pytest.mark.parametrize(
    ("braces", "column", "phrase"),
    [
        ("{batch: q1}", 2, "braces cannot replace this key (found 'batch'); a dotted key below layer or cache"),
        ("{block_size: 32}", 2, "did you mean cache.block_size?"),
        ("{cache.block_sise: 3}", 2, "in case page-edges.float16-NHD; did you mean 'block_size'?"),
        ("{cache.block_size: many}", 20, "block_size must be a whole number, in case page-edges.float16-NHD"),
        ("{cache.block_size: 1, cache.block_size: 2}", 23, "this key is on line 1 already; keep one of the two"),
        ("{cache.block_size}", 2, "a default needs a value"),
        ("{cache.block_size: 1, cache.block_size.x: 2}", 23, "so there is no x in it; write block_size as a mapping"),
    ],
)
def test_what_cannot_be_a_default_is_refused_by_the_suites_name(braces, column, phrase):
    with pytest.raises(CaseFileError) as caught:
        load_suite(f"decode{braces}")
    assert str(caught.value).startswith(f"decode{braces}:1:{column}: ")
    assert phrase in str(caught.value)


def test_an_unknown_suite_is_named_without_its_braces():
    with pytest.raises(UnknownNameError, match="'decod'"):
        load_suite("decod{cache.block_size: 3}")


BENCH = """
batch_specs: [q1s1k]
kv_cache_dtype: fp8
model: {num_q_heads: 8, num_kv_heads: 2, head_dim: 64, block_size: 16}
"""


def bench(tmp_path, braces, more=""):
    path = tmp_path / "bench.yaml"
    path.write_text(BENCH + more, encoding="utf-8")
    return list(load_suite(f"{path}{braces}").cases)


def test_the_model_of_a_benchmark_file_is_its_default(tmp_path):
    (case,) = bench(
        tmp_path, "{cache.block_size: 32, cache.layout: HND, layer.head_size: 96, cache.kv_cache_dtype: auto}"
    )
    assert (case.cache.block_size, case.cache.layout, case.cache.kv_cache_dtype) == (32, "HND", "auto")
    assert (case.layer.head_size, case.layer.num_heads) == (96, 8)
    assert bench(tmp_path, "")[0].cache == CacheSpec(block_size=16, kv_cache_dtype="fp8")


def test_a_value_of_a_benchmarks_sweep_is_kept(tmp_path):
    sweep = "model_parameter_sweep: {values: [{head_dim: 128, block_size: 64}, {num_q_heads: 4}]}"
    first, second = bench(tmp_path, "{cache.block_size: 32, layer.head_size: 96}", sweep)
    assert (first.layer.head_size, first.cache.block_size) == (128, 64)
    assert (second.layer.head_size, second.cache.block_size, second.layer.num_heads) == (96, 32, 4)


def test_a_wrong_default_of_a_benchmark_file_is_named_where_it_was_written(tmp_path):
    with pytest.raises(CaseFileError, match=r"\{cache\.layout: DNH\}.*layout must be"):
        bench(tmp_path, "{cache.layout: DNH}")


def test_the_pages_that_cases_leave_out_are_listed(tmp_path):
    path = tmp_path / "bench.yaml"
    path.write_text(BENCH.replace("block_size: 16", "block_size: 8"), encoding="utf-8")
    assert load_suite(str(path)).page_defaults == {"cache.block_size": "8", "cache.layout": "NHD"}
    assert load_suite(f"{path}{{cache.block_size: 32}}").page_defaults == {"cache.layout": "NHD"}
    assert load_suite("decode{cache.layout: HND}").page_defaults == {"cache.block_size": "16"}
