"""Configurations of vLLM's attention benchmarks, as they are: every key honoured or named."""

import time
from pathlib import Path

import pytest

from attncheck.cases.loader import load_file
from attncheck.errors import CaseFileError
from attncheck.reference.spec import MLASpec
from attncheck.reference.step_spec import RequestSpec

FILES = Path(__file__).parent / "vllm"


def load(name):
    return load_file(FILES / f"{name}.yaml")


def not_used(suite):
    start = "not used here: "
    return {note.removeprefix(start).split(" ")[0] for note in suite.notes if note.startswith(start)}


def load_text(tmp_path, text):
    path = tmp_path / "a file (1).yaml"
    path.write_text(text)
    return load_file(path)


MODEL = "model: {num_q_heads: 32, num_kv_heads: 8, head_dim: 128, block_size: 16}\n"


def test_standard_attention():
    suite = load("serving_mix")
    assert suite.name == "serving_mix"
    assert suite.description == "One GPU's share of an 8B model, serving traffic"
    assert [case.id for case in suite] == ["q512", "q2k", "8q1s1k", "64q1s4k", "2q2k_8q1s1k", "q1ks2k", "1q512"]
    case = suite.cases[4]
    assert (case.layer.num_heads, case.layer.num_kv_heads, case.layer.head_size) == (16, 4, 128)
    assert (case.layer.dtype, case.cache.block_size, case.cache.kv_cache_dtype) == ("bfloat16", 16, "auto")
    assert case.batch.requests == (
        RequestSpec(query_len=2048, count=2),
        RequestSpec(query_len=1, seq_len=1024, count=8),
    )
    assert case.batch.path.name == "paged"
    assert case.origin.endswith("serving_mix.yaml:26")
    assert suite.default_backends == ("vllm:FLASH_ATTN", "vllm:TRITON_ATTN", "vllm:FLASHINFER")
    assert suite.default_device == "cuda:0"
    unused = "repeats warmup_iters cuda_graphs profile_memory model.num_layers model.name"
    assert not_used(suite) == set(unused.split())
    assert "examined once, though the file has it twice: q2k" in suite.notes
    assert any(note.startswith("provenance: geometry: model_id: example/model-8b; role: GQA") for note in suite.notes)


def test_latent_attention_with_a_sweep():
    suite = load("latent_decode")
    batches = ("16q1s512", "32q1s8k", "16q4s1k_16q1s1k")
    assert [case.id for case in suite] == [f"{batch}.{heads}" for heads in ("128h", "16h") for batch in batches]
    case = suite.cases[-1]
    assert (case.layer.num_heads, case.layer.num_kv_heads, case.layer.head_size) == (16, 1, 576)
    assert case.layer.mla == MLASpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert case.layer.softmax_scale == 192**-0.5
    assert (case.cache.block_size, case.cache.kv_cache_dtype) == (64, "fp8")
    assert case.batch.path.name == "mla"
    unused = "repeats CUTLASS_MLA FLASH_ATTN_MLA some_new_option model.name model.num_layers model.max_model_len"
    assert not_used(suite) == set(unused.split())


def test_ranges_and_sizes():
    suite = load("threshold_study")
    single = [f"q{n}s1k" for n in range(1, 8)]
    single += [f"q{n}s{kv}k" for n in (8, 16, 24, 32) for kv in (1, 2)]
    ids = [case.id for case in suite]
    assert ids == single + [f"4{text}" for text in single] + [f"64{text}" for text in single]
    assert suite.default_backends == ("vllm:FLASH_ATTN_MLA",)
    assert suite.default_device == "cuda:1"
    assert {case.cache.block_size for case in suite} == {16}
    assert "the model has no block_size: 16 is taken" in suite.notes
    unused = "mode benchmark.repeats benchmark.warmup_iters reorder_batch_thresholds output model.num_layers"
    assert not_used(suite) == set(unused.split())


def test_a_thousand_cases_are_listed_at_once():
    start = time.perf_counter()
    suite = load("geometry_sweep")
    assert time.perf_counter() - start < 2
    assert len(suite) == 18 * 63
    assert suite.cases[0].id == "1q1s512.q32kv32d128"
    assert suite.cases[-1].id == "9q1s3584.q8kv1d64"
    assert len({case.id for case in suite}) == len(suite)
    assert {case.cache.block_size for case in suite} == {16, 32}
    assert suite.default_backends == ("vllm:FLASH_ATTN", "vllm:TRITON_ATTN")


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ("backend: flashmla\n", ("vllm:FLASHMLA",)),
        ("backends: triton\n", ("vllm:TRITON_ATTN",)),
        ("backends: [FLASH_ATTN, flash]\n", ("vllm:FLASH_ATTN",)),
        ("backend: HPC_ATTN\nbackends: [flash]\n", ("vllm:HPC_ATTN",)),
        ("", ()),
    ],
)
def test_backends(tmp_path, backends, expected):
    suite = load_text(tmp_path, f"{MODEL}batch_specs: [q9]\n{backends}")
    assert suite.default_backends == expected
    assert suite.default_device is None
    assert suite.name == "a-file-1-"


def test_labels(tmp_path):
    def ids(sweep):
        suite = load_text(tmp_path, f"{MODEL}batch_specs: [q9]\nmodel_parameter_sweep: {sweep}\n")
        return [case.id for case in suite]

    assert ids("{param_name: head_dim, values: [64, 80]}") == ["q9.64", "q9.80"]
    assert ids("{values: [{head_dim: 64, block_size: 32}]}") == ["q9.64-32"]
    assert ids("{values: [{head_dim: 64}, {head_dim: 80}], label_format: 'x {backend}'}") == ["q9.x", "q9.x-2"]
    assert ids("{values: [{head_dim: 64}], label_format: '{backend}'}") == ["q9.64"]
    assert ids("{values: [{head_dim: 64}], label_format: '{head_dim}: {other}/{backend}'}") == ["q9.64"]


def test_a_latent_model_needs_neither_width_nor_kv_heads(tmp_path):
    ranks = "kv_lora_rank: 32, qk_nope_head_dim: 8, qk_rope_head_dim: 16, v_head_dim: 8"
    suite = load_text(tmp_path, f"model: {{num_q_heads: 4, {ranks}}}\nbatch_specs: [q9]\n")
    layer = suite.cases[0].layer
    assert (layer.head_size, layer.num_kv_heads) == (48, 1)


def test_an_unknown_cache_dtype_is_named(tmp_path):
    suite = load_text(tmp_path, f"{MODEL}batch_specs: [q9]\nkv_cache_dtype: turboquant_k8v4\n")
    assert suite.cases[0].cache.kv_cache_dtype == "auto"
    assert (
        "not used here: kv_cache_dtype (no cache of dtype turboquant_k8v4 is known here: the layer's dtype is taken)"
        in suite.notes
    )


def test_a_file_of_ours_is_never_taken_for_one_of_theirs(tmp_path):
    with pytest.raises(CaseFileError, match="a case file has no key 'batch_specs'"):
        load_text(tmp_path, f"suite: s\nbatch_specs: [q9]\n{MODEL}")


def test_large_batches_for_many_models_are_refused_at_once(tmp_path):
    batch, sizes = "_".join(["q1s2"] * 20_000), ", ".join(str(8 * number) for number in range(1, 301))
    sweep = f"batch_specs: [{batch}]\nmodel_parameter_sweep: {{param_name: head_dim, values: [{sizes}]}}\n"
    with pytest.raises(CaseFileError, match=r":1:1: the cases hold 6000000 requests in all; at most 5000000 a file"):
        load_text(tmp_path, f"{MODEL}{sweep}")
