"""Malformed case files: each is refused with its place, its key, and words a person can act on.

The files of ``bad/`` are one mistake each. ``PLACES`` gives for each the line, the column, the key path, and a phrase
of the message.
"""

import re
import time
from pathlib import Path

import pytest
import yaml

from attncheck.cases import yaml_tree
from attncheck.cases.loader import load_file, load_suite
from attncheck.errors import CaseFileError, QuestionError, SeveralMistakesError

BAD = Path(__file__).parent / "bad"

PLACES: dict[str, tuple[int, int, str, str]] = {
    "weight_is_zero": (5, 36, "cases[0].weight", "a weight is a number from 1e-30 to 1e30"),
    "weight_of_a_matrix": (5, 38, "cases[0].weight", "2 cases cannot share one weight"),
    "after_is_a_text": (7, 12, "cases[0].after", "after must be a list of batches, and this is a text"),
    "layer_beside_of_another_dtype": (
        7,
        34,
        "cases[0].layers[0].dtype",
        "layers of one step may differ in scale, sliding_window",
    ),
    "layer_beside_is_a_text": (7, 14, "cases[0].layers[0]", "write {} for a twin"),
    "too_many_layers_beside": (7, 13, "cases[0].layers", "at most 16"),
    "layer_beside_of_no_window": (7, 31, "cases[0].layers[0].sliding_window", "sliding_window must be at least 1"),
    "a_sink_is_a_text": (8, 30, "cases[0].layer.sinks[5]", "an element of sinks must be a number"),
    "alias_bomb": (7, 37, "description[4][7]", "more than 100000 values"),
    "attn_type_unknown": (
        8,
        18,
        "cases[0].layer.attn_type",
        "attn_type must be one of 'decoder', 'encoder', 'encoder_only' or 'encoder_d",
    ),
    "axis_below_a_string": (
        7,
        14,
        "cases[0].matrix.batch.padding.tokens",
        "batch is a text on line 6, so there is no padding.tokens in it",
    ),
    "axis_is_a_number": (
        7,
        32,
        "cases[0].matrix.cache.block_size",
        "the axis cache.block_size must be a list of values, and this is a number",
    ),
    "axis_misspelt": (8, 7, "cases[0].matrix.layer.windw", "no key 'windw', in case a.4"),
    "axis_of_the_id": (7, 14, "cases[0].matrix.id", "a matrix cannot set this key"),
    "batch_is_a_number": (6, 12, "cases[0].batch", "a batch cannot be a number"),
    "batch_lacks_requests": (6, 12, "cases[0].batch", "requests is missing"),
    "block_size_null": (8, 19, "cases[0].cache.block_size", "(found 'null')"),
    "cascade_without_prefix": (6, 12, "cases[0].batch", "a cascade needs a prefix that every request shares"),
    "case_is_a_text": (5, 5, "cases[0]", "a case must be a mapping with an id and a batch, and this is a text"),
    "cases_is_a_mapping": (3, 3, "cases", "cases must be a list of cases, and this is a mapping"),
    "causal_encoder": (7, 46, "cases[0].layer.causal", "attention of type encoder_only is not causal"),
    "causal_is_yes": (8, 15, "cases[0].layer.causal", "causal must be true or false"),
    "checks_is_a_text": (7, 13, "cases[0].checks", "a list of names belongs here, and this is a text"),
    "colon_in_text": (6, 28, "", "quote a text that contains ': '"),
    "control_character": (7, 18, "cases[0].description", "an escape stands for a control character"),
    "cross_lacks_encoder_len": (
        8,
        9,
        "cases[0].batch[1]",
        "in cross attention every request needs the length of its encoder",
    ),
    "cross_with_window": (
        7,
        57,
        "cases[0].layer.sliding_window",
        "in cross attention the positions of queries mean nothing",
    ),
    "custom_tag": (6, 12, "cases[0].batch", "the tag !batch is not allowed"),
    "cut_in_a_request_without_causal": (7, 32, "cases[0].path.micro_batch.cuts", "cut between requests"),
    "cut_past_the_end": (7, 32, "cases[0].path.micro_batch.cuts", "above 0 and below 9"),
    "dcp_with_a_shared_prefix": (6, 56, "cases[0].batch[0].shared_prefix", "ranks that share pages are not laid out"),
    "deep_nesting": (2, 47, "cases" + "[0]" * 39, "nested more than 40 deep"),
    "defaults_is_a_list": (2, 11, "defaults", "defaults must be a mapping, and this is a list"),
    "dtype_bf16": (8, 14, "cases[0].layer.dtype", "one of 'float16', 'bfloat16' or 'float32' (found 'bf16')"),
    "duplicate_key": (7, 45, "cases[0].layer.sliding_window", "this key stands on line 7 already"),
    "empty": (1, 1, "", "the file is empty"),
    "empty_axis": (
        7,
        32,
        "cases[0].matrix.cache.block_size",
        "the axis cache.block_size must be a list of values, and this is an empty on",
    ),
    "empty_batch": (6, 12, "cases[0].batch", "a batch needs a request"),
    "empty_cases": (2, 8, "cases", "cases must be a list of cases, and this is an empty one"),
    "empty_checks": (7, 13, "cases[0].checks", "no check is left"),
    "encoder_len_without_cross": (7, 37, "cases[0].batch[0].encoder_len", "only cross attention reads an encoder"),
    "encoder_path_for_a_decoder": (7, 11, "cases[0].path", "write path: paged"),
    "encoder_with_chunks": (
        7,
        50,
        "cases[0].layer.attn_chunk_size",
        "chunks are defined for decoder layers, not for encoder",
    ),
    "encoder_with_context": (
        6,
        12,
        "cases[0].batch",
        "an encoder has no cache, so all 5 tokens are the whole sequence",
    ),
    "endless_number": (7, 24, "cases[0].layer.num_heads", "a number of 5000 characters"),
    "fast_prefill_of_decodes": (7, 11, "cases[0].path", "no request has more than 1 rows, so none would be left out"),
    "first_block_past_the_pool": (9, 20, "cases[0].cache.first_block", "the pool has only 100 pages"),
    "head_size_is_a_float": (8, 18, "cases[0].layer.head_size", "head_size must be a whole number"),
    "heads_do_not_divide": (8, 21, "cases[0].layer.num_kv_heads", "num_heads 8 is not a multiple of num_kv_heads 3"),
    "heads_is_true": (8, 18, "cases[0].layer.num_heads", "num_heads must be a whole number"),
    "id_is_a_number": (5, 10, "cases[0].id", "id is a text, and this is a number"),
    "id_with_a_glob": (5, 10, "cases[0].id", "id cannot be typed on a command line"),
    "infinite_scale": (8, 14, "cases[0].layer.scale", "scale must be a finite number"),
    "input_named_twice": (7, 30, "cases[0].inputs[2]", "the input is named twice"),
    "interleave_splits_pages": (7, 39, "cases[0].path.dcp.interleave", "give a divisor of block_size 16"),
    "k_scale_below_float32": (7, 43, "cases[0].cache.k_scale", "stay within 1.2e-38 and 3.4e+38"),
    "later_check": (7, 24, "cases[0].checks[1]", "unknown check (found 'accuracy'); known: numerics, lse"),
    "layer_is_a_text": (5, 12, "cases[0].layer", "a layer must be a mapping"),
    "layout_lower": (8, 15, "cases[0].cache.layout", "layout must be one of 'NHD' or 'HND'"),
    "list_as_key": (7, 13, "cases[0].layer", "a key must be a single word"),
    "local_not_causal": (8, 42, "cases[0].layer.causal", "the path local is defined for causal layers"),
    "local_without_chunks": (7, 11, "cases[0].path", "local attention needs the size of its chunks"),
    "matrix_in_defaults": (4, 3, "defaults.matrix", "defaults has no key 'matrix'"),
    "matrix_too_large": (7, 5, "cases[0].matrix", "the file describes 205379 cases"),
    "merge_of_a_text": (7, 13, "cases[0].layer.<<", "<< takes a mapping, and this is a text"),
    "micro_batch_cuts_fall": (7, 32, "cases[0].path.micro_batch.cuts", "give increasing positions above 0 and below 4"),
    "micro_batch_no_cut": (7, 32, "cases[0].path.micro_batch.cuts", "give a row to cut at"),
    "micro_batch_without_cuts": (7, 11, "cases[0].path.micro_batch.cuts", "cuts is missing"),
    "missing_num_heads": (5, 12, "cases[0].layer.num_heads", "num_heads is missing"),
    "misspelt_layer_key": (8, 7, "cases[0].layer.num_head", "did you mean 'num_heads'?"),
    "mla_of_the_wrong_width": (
        9,
        12,
        "cases[0].layer.mla",
        "a latent cache has one KV head of kv_lora_rank + qk_rope_head_dim = 576",
    ),
    "mla_path_without_mla": (7, 11, "cases[0].path", "the layer has no mla"),
    "mla_with_a_window": (7, 61, "cases[0].layer.sliding_window", "not defined for multi-head latent attention"),
    "mla_without_channels": (7, 108, "cases[0].layer.mla.qk_rope_head_dim", "query and key need a channel"),
    "mla_without_rank": (8, 12, "cases[0].layer.mla.kv_lora_rank", "kv_lora_rank is missing"),
    "negative_cap": (8, 24, "cases[0].layer.logits_soft_cap", "logits_soft_cap must be at least 0"),
    "negative_padding": (6, 47, "cases[0].batch.padding.tokens", "tokens must be at least 0"),
    "negative_scale": (8, 16, "cases[0].cache.v_scale", "a scale must be positive"),
    "no_batch": (5, 5, "cases[0]", "batch is missing"),
    "no_cases": (1, 1, "", "cases is missing"),
    "no_id": (5, 5, "cases[0]", "id is missing"),
    "no_layer": (3, 5, "cases[0]", "layer is missing"),
    "no_suite": (1, 1, "", "suite is missing"),
    "not_utf8": (2, 17, "", "save the file as UTF-8"),
    "nul_byte": (3, 10, "", "character U+0000 is not allowed in YAML"),
    "null_pages_without_window": (
        6,
        59,
        "cases[0].batch.block_table.null_pages",
        "no request has a page of 16 tokens that every row's window or chunk has left behind",
    ),
    "number_as_key": (7, 13, "cases[0].layer", "a key must be a text, and this is a number"),
    "old_kv": (6, 12, "cases[0].batch", "write 8q1s1k"),
    "only_comments": (1, 1, "", "the file is empty"),
    "open_bracket": (7, 1, "", "bracket or brace is not closed"),
    "open_quote": (7, 1, "", "quote is not closed"),
    "option_without_a_name": (7, 22, "cases[0].path.split_kv", "write {split_kv: {parts: ...}}"),
    "options_of_a_plain_path": (7, 19, "cases[0].path.paged", "the path paged has no options"),
    "other_yaml": (1, 1, "", "neither a case file nor one of vLLM's attention benchmarks"),
    "output_scale_below_float32": (7, 35, "cases[0].layer.output_quant.scale", "as float32, which cannot hold it"),
    "output_scale_zero": (8, 29, "cases[0].layer.output_quant.scale", "scale must be above 0"),
    "paged_path_for_an_encoder": (8, 11, "cases[0].path", "write path: encoder_only"),
    "path_as_a_list": (7, 11, "cases[0].path", "write a name, or {name: options}"),
    "pool_too_small": (8, 19, "cases[0].cache.num_blocks", "give at least 29"),
    "prefix_inside_a_page": (7, 52, "cases[0].batch[0].shared_prefix", "give a multiple of 16"),
    "prefix_past_the_context": (
        7,
        52,
        "cases[0].batch[0].shared_prefix",
        "only the 15 tokens of context can be shared",
    ),
    "prefix_shared_by_one": (7, 52, "cases[0].batch[0].shared_prefix", "no other request shares it"),
    "python_tag": (6, 12, "cases[0].batch", "python/object/apply:os.system is not allowed"),
    "query_longer_than_total": (6, 12, "cases[0].batch", "write q5s8 for 3 tokens of context"),
    "request_is_a_text": (6, 13, "cases[0].batch[0]", "a list holds requests as mappings"),
    "request_lacks_query_len": (7, 9, "cases[0].batch[0].query_len", "query_len is missing"),
    "request_without_list": (6, 12, "cases[0].batch", "a batch is a list, even of one request"),
    "root_list": (1, 1, "", "a case file is a mapping, and this is a list"),
    "root_text": (1, 1, "", "a case file is a mapping, and this is a text"),
    "same_axis_value_twice": (5, 9, "cases[0].id", "two values of the matrix give this id"),
    "same_id_from_matrix": (8, 10, "cases[1].id", "two cases have this id"),
    "same_id_twice": (7, 10, "cases[2].id", "the first stands on line 5"),
    "scale_beyond_float32": (7, 20, "cases[0].layer.scale", "stay below 3.4e+38"),
    "scale_list_too_short": (8, 16, "cases[0].cache.k_scale", "3 values for 2 KV heads"),
    "self_alias": (5, 34, "cases[0].layer", "*a contains itself"),
    "sink_beyond_float32": (7, 51, "cases[0].layer.sinks", "stay below 3.4e+38"),
    "sinks_is_a_number": (8, 14, "cases[0].layer.sinks", "sinks must be true or false or a list"),
    "spec_decode_of_other_lengths": (6, 12, "cases[0].batch", "give query_len 4"),
    "split_kv_with_a_window": (8, 29, "cases[0].layer.sliding_window", "without the distance to the query"),
    "suite_name_with_blanks": (1, 8, "suite", "suite cannot be typed on a command line"),
    "tab_indentation": (3, 1, "", "indent with blanks"),
    "tokens_in_exponents": (7, 21, "cases[0].batch[0].query_len", "query_len must be a whole number"),
    "tolerance_is_a_number": (7, 16, "cases[0].tolerance", "a tolerance must be a mapping"),
    "tolerance_of_blank_reason": (7, 36, "cases[0].tolerance.reason", "a budget of one's own needs a reason"),
    "tolerance_without_reason": (7, 16, "cases[0].tolerance.reason", "reason is missing"),
    "too_few_slopes": (8, 14, "cases[0].layer.alibi", "2 values for 8 query heads"),
    "too_many_tokens_in_a_list": (8, 21, "cases[0].batch[1].query_len", "query_len must be at most 2147483648"),
    "too_many_tokens_in_a_string": (6, 12, "cases[0].batch", "1000000000000 is too large (at character 2)"),
    "too_many_tokens_in_all": (7, 7, "cases[0].batch", "the batch holds 4294967296 tokens"),
    "tree_not_by_depth": (7, 28, "cases[0].path.tree.parents", "the rows stand at depths [0, 1, 2, 1]"),
    "tree_not_causal": (8, 21, "cases[0].layer.causal", "the path tree is defined for causal layers"),
    "tree_of_other_lengths": (6, 12, "cases[0].batch", "give query_len 4"),
    "tree_with_a_late_parent": (7, 28, "cases[0].path.tree.parents", "row 1 names parent 2"),
    "tree_of_one_branch": (7, 28, "cases[0].path.tree.parents", "give two rows the same parent"),
    "tree_with_two_roots": (7, 28, "cases[0].path.tree.parents", "give -1 to row 0 and an earlier row to every other"),
    "two_documents": (7, 1, "", "a second document begins"),
    "two_paths": (7, 11, "cases[0].path", "one path is asked at a time, and here are 2"),
    "unknown_alias": (7, 12, "cases[0].layer", "nothing before this line is called &nobody"),
    "unknown_case_key": (6, 5, "cases[0].bacth", "did you mean 'batch'?"),
    "unknown_file_key": (2, 1, "default", "did you mean 'defaults'?"),
    "unknown_mla_key": (8, 55, "cases[0].layer.mla.qk_rope_head_dims", "did you mean 'qk_rope_head_dim'?"),
    "unknown_option": (7, 26, "cases[0].path.spec_decode.tokens", "has no key 'tokens'; known: num_speculative_tokens"),
    "unknown_path": (7, 11, "cases[0].path", "did you mean 'paged'?"),
    "upper_k": (6, 12, "cases[0].batch", "write q2k"),
    "vllm_bad_override": (1, 40, "model.num_kv_heads", "num_heads 12 is not a multiple of num_kv_heads 8"),
    "vllm_endless_range": (3, 15, "batch_spec_ranges[0].template", "this template stands for 2000000000 batches"),
    "vllm_heads_do_not_divide": (3, 17, "model.num_kv_heads", "num_heads 32 is not a multiple of num_kv_heads 5"),
    "vllm_missing_heads": (2, 3, "model", "num_q_heads is missing in model, and the sweep does not give it"),
    "vllm_no_batches": (1, 1, "", "the file has no batches"),
    "vllm_old_kv": (4, 5, "batch_specs[1]", "write 4q1s2k"),
    "vllm_old_template": (3, 15, "batch_spec_ranges[0].template", "write q1s1k"),
    "vllm_range_without_stop": (4, 8, "batch_spec_ranges[0].n", "the range of n lacks its stop"),
    "vllm_sizes_of_two_segments": (
        2,
        15,
        "batch_specs[0]",
        "batch_sizes multiplies batches of one segment, and this has more",
    ),
    "vllm_step_zero": (4, 34, "batch_spec_ranges[0].n.step", "step must be a whole number, at least 1"),
    "vllm_sweep_of_numbers": (
        4,
        12,
        "model_parameter_sweep.values[0]",
        "a value must be a mapping of model keys, and this is a number",
    ),
    "vllm_template_field": (
        3,
        15,
        "batch_spec_ranges[0].template",
        "the template has the fields ['m', 'n'], and ranges are given for ['n']",
    ),
    "unmapped_tokens_in_parts": (
        6,
        60,
        "cases[0].batch.padding.unmapped_tokens",
        "not defined for the path split_kv",
    ),
    "stride_form_unknown": (7, 22, "cases[0].strides.query", "query must be one of 'contiguous', 'fused'"),
    "window_zero": (8, 23, "cases[0].layer.sliding_window", "must be at least 1 (found 0)"),
    "zero_count": (6, 12, "cases[0].batch", "a count of 0 asks nothing (at character 1)"),
    "zero_query": (6, 12, "cases[0].batch", "padding: {requests: n}"),
}


def refusal_of(path: Path) -> CaseFileError:
    with pytest.raises(CaseFileError) as caught:
        load_file(path)
    return caught.value


def test_there_is_an_expectation_for_every_file() -> None:
    assert sorted(PLACES) == sorted(path.stem for path in BAD.iterdir())
    assert len(PLACES) >= 45


@pytest.mark.parametrize("name", sorted(PLACES))
def test_refusal(name: str) -> None:
    path = BAD / f"{name}.yaml"
    line, column, key, phrase = PLACES[name]
    error = refusal_of(path)
    assert phrase in str(error)
    assert (error.line, error.column, error.key) == (line, column, key)
    assert str(error).startswith(f"{path}:{line}:{column}: ")
    assert error.allowed
    assert isinstance(error, QuestionError)
    assert len(str(error)) < len(str(path)) + 500
    assert "\n" not in str(error)


def test_without_libyaml_the_same_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    for name, (line, _, key, phrase) in PLACES.items():
        error = refusal_of(BAD / f"{name}.yaml")
        assert phrase in str(error), name
        assert (error.line, error.key) == (line, key), name


def test_refusing_takes_no_time() -> None:
    for name in ("alias_bomb", "matrix_too_large", "vllm_endless_range", "endless_number", "too_many_tokens_in_all"):
        start = time.perf_counter()
        refusal_of(BAD / f"{name}.yaml")
        assert time.perf_counter() - start < 2, name


LAYER = "{num_heads: 8, num_kv_heads: 2, head_size: 64}"


def several(tmp_path: Path, text: str) -> list[tuple[int | None, str]]:
    """(line, key) of each mistake in ``text``."""
    path = tmp_path / "several.yaml"
    path.write_text(text)
    error = refusal_of(path)
    assert isinstance(error, SeveralMistakesError)
    assert str(error).count("\n") == min(len(error.errors), 11) - 1
    assert (error.line, error.key) == (error.errors[0].line, error.errors[0].key)
    return [(each.line, each.key) for each in error.errors]


def test_all_mistakes_of_a_file_are_told_in_the_order_of_its_lines(tmp_path: Path) -> None:
    found = several(
        tmp_path,
        "suite: bad\ncases:\n"
        "  - id: a\n    batch: q5s3\n    checks: [numerix]\n"
        "    layer: {num_heads: 8, num_kv_heads: 2, head_size: -1, dtype: bf16, scal: 2}\n"
        f"  - id: b\n    layer: {LAYER}\n    batch: [{{query_len: x, seq_len: -1}}]\n"
        f"  - id: c\n    layer: {LAYER}\n    batch: q1\n    cache: {{block_size: 0}}\n    path: pagd\n",
    )
    assert found == [
        (4, "cases[0].batch"),
        (5, "cases[0].checks[0]"),
        (6, "cases[0].layer.head_size"),
        (6, "cases[0].layer.dtype"),
        (6, "cases[0].layer.scal"),
        (9, "cases[1].batch[0].query_len"),
        (9, "cases[1].batch[0].seq_len"),
        (13, "cases[2].cache.block_size"),
        (14, "cases[2].path"),
    ]


def test_every_missing_key_is_told_unless_one_is_mistyped(tmp_path: Path) -> None:
    text = "suite: bad\ncases:\n  - {id: a, batch: q1, layer: {num_heads: 8}}\n"
    assert several(tmp_path, text) == [(3, "cases[0].layer.num_kv_heads"), (3, "cases[0].layer.head_size")]
    path = tmp_path / "one.yaml"
    path.write_text(text.replace("num_heads", "num_head"))
    assert refusal_of(path).key == "cases[0].layer.num_head"


def test_a_mistake_that_a_matrix_repeats_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(
        "suite: bad\ndefaults:\n  layer: {num_heads: 0, num_kv_heads: 1, head_size: 8}\ncases:\n"
        "  - {id: a, batch: q1, matrix: {cache.block_size: [16, 32]}}\n  - {id: b, batch: q1}\n"
    )
    assert str(refusal_of(path)).count("num_heads must be above 0") == 1


def test_of_very_many_mistakes_ten_are_told(tmp_path: Path) -> None:
    cases = "".join(f"  - {{id: c{number}, bach: q1}}\n" for number in range(15))
    path = tmp_path / "many.yaml"
    path.write_text(f"suite: bad\ncases:\n{cases}")
    *shown, last = str(refusal_of(path)).splitlines()
    assert len(shown) == 10
    assert last == f"{path}: and 5 more mistakes"


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CaseFileError, match="there is no such file; built-in suites: smoke"):
        load_suite(str(tmp_path / "none.yaml"))


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(CaseFileError, match="this is a directory"):
        load_suite(str(tmp_path))


def test_a_name_no_file_can_have() -> None:
    with pytest.raises(CaseFileError, match="cannot be read"):
        load_suite("a\0b.yaml")


def test_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.yaml"
    path.write_text("# " + "x" * 2000)
    monkeypatch.setattr(yaml_tree, "MAX_BYTES", 1000)
    assert "larger than 1000 bytes" in str(refusal_of(path))


def test_an_endless_file_is_not_read_to_its_end() -> None:
    assert "larger than" in str(refusal_of(Path("/dev/zero")))


def test_aliases_in_a_chain_count_as_deep_as_they_are(tmp_path: Path) -> None:
    chain = "".join(f"  - &a{i} [[[[[*a{i - 1}]]]]]\n" for i in range(1, 200))
    path = tmp_path / "chain.yaml"
    path.write_text(f"suite: bad\ncases:\n  - &a0 x\n{chain}")
    assert "nested more than 40 deep" in str(refusal_of(path))


def test_messages_hold_no_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "escape.yaml"
    path.write_text('suite: "\\x1b[2J"\ncases: []\n')
    assert str(refusal_of(path)).isprintable()


def test_a_text_that_turns_the_direction_of_writing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bidi.yaml"
    for written in ("\u202e", '"\\u202e"', "\u2066", "\x85", "\u2028"):
        path.write_text(f"suite: a\ndescription: {written}\n", encoding="utf-8")
        assert re.search("is not allowed in YAML|an escape stands for a control character", str(refusal_of(path)))


@pytest.mark.parametrize("text", ["!" + "t" * 50_000 + " x", "*" + "a" * 50_000, "{" + "k" * 50_000 + ": [}"])
def test_a_message_about_a_long_word_is_short(tmp_path: Path, text: str) -> None:
    path = tmp_path / "long.yaml"
    path.write_text(f"suite: a\ncases: {text}\n")
    assert len(str(refusal_of(path))) < 3000


@pytest.mark.parametrize(
    "batch", [f"{{requests: [{'{query_len: 1, seq_len: 9},' * 9000}]}}", "_".join(["q1s2"] * 50_000)]
)
def test_cases_that_are_large_and_many_are_refused_at_once(tmp_path: Path, batch: str) -> None:
    path = tmp_path / "large.yaml"
    scales = ", ".join(f"0.{number}" for number in range(1, 300))
    path.write_text(
        f"suite: a\ncases:\n- id: a\n  layer: {LAYER}\n  batch: {batch}\n  matrix: {{layer.scale: [{scales}]}}\n"
    )
    start = time.process_time()
    assert "hold too many values in all" in str(refusal_of(path))
    assert time.process_time() - start < 2
