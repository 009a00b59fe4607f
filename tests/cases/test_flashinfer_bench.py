"""Workloads of FlashInfer-Bench: lengths from index tensors, sizes from their definition, reasons for the rest."""

import json
import math
import struct

import pytest
from inline_snapshot import snapshot

from attncheck.cases.loader import load_file
from attncheck.errors import CaseFileError
from attncheck.reference.spec import MLASpec
from attncheck.reference.step_spec import RequestSpec

GQA = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128}
MLA = {"num_qo_heads": 16, "head_dim_ckv": 512, "head_dim_kpe": 64}


def define(root, name, op_type, sizes, inputs):
    folder = root / "definitions" / op_type
    folder.mkdir(parents=True, exist_ok=True)
    axes = {key: {"type": "const", "value": value} for key, value in sizes.items()}
    axes["len_indptr"] = {"type": "var"}
    document = {
        "name": name,
        "op_type": op_type,
        "axes": axes,
        "inputs": {key: {"shape": ["len_indptr"], "dtype": dtype} for key, dtype in inputs.items()},
        "outputs": {"output": {"shape": ["len_indptr"], "dtype": "bfloat16"}},
        "reference": "def run(q):\n    return q",
    }
    (folder / f"{name}.json").write_text(json.dumps(document))


def store(path, tensors, dtype="I32"):
    """A safetensors file, written by its format: length of the header, header, numbers."""
    content, header = b"", {}
    for name, numbers in tensors.items():
        packed = struct.pack(f"<{len(numbers)}{'i' if dtype == 'I32' else 'q'}", *numbers)
        header[name] = {
            "dtype": dtype,
            "shape": [len(numbers)],
            "data_offsets": [len(content), len(content) + len(packed)],
        }
        content += packed
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def workload(name, uuid, file, keys, scale=128**-0.5):
    inputs = {"q": {"type": "random"}, "sm_scale": {"type": "scalar", "value": scale}}
    inputs |= {key: {"type": "safetensors", "path": file, "tensor_key": key} for key in keys}
    line = {"definition": name, "solution": None, "evaluation": None}
    return json.dumps(line | {"workload": {"uuid": uuid, "axes": {"len_indptr": 3}, "inputs": inputs}})


def load(root, *lines):
    path = root / "workloads" / "traffic.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return load_file(path)


PAGED = {"q": "bfloat16", "k_cache": "bfloat16", "kv_indptr": "int32", "sm_scale": "float32"}


def test_a_decode_over_pages_of_one_token(tmp_path):
    define(tmp_path, "gqa_paged_decode_h32_kv8_d128_ps1", "gqa_paged", GQA | {"page_size": 1}, PAGED)
    store(tmp_path / "blob" / "a.safetensors", {"kv_indices": [5, 6, 7], "kv_indptr": [0, 37, 38]})
    suite = load(tmp_path, workload("gqa_paged_decode_h32_kv8_d128_ps1", "ab-1", "./blob/a.safetensors", ["kv_indptr"]))
    (case,) = suite
    assert suite.name == "traffic"
    assert case.id == "gqa_paged_decode_h32_kv8_d128_ps1.ab-1"
    assert case.batch.requests == (RequestSpec(query_len=1, seq_len=37), RequestSpec(query_len=1, seq_len=1))
    assert (case.layer.num_heads, case.layer.num_kv_heads, case.layer.head_size) == (32, 8, 128)
    assert (case.layer.dtype, case.layer.scale, case.cache.block_size) == ("bfloat16", None, 1)
    assert case.origin.endswith("traffic.jsonl:1")
    assert any("kv_indices is not read" in note for note in suite.notes)


def test_a_prefill_over_pages_of_64_in_an_fp8_cache(tmp_path):
    name = "gqa_paged_prefill_causal_h32_kv8_d128_ps64"
    inputs = PAGED | {"k_cache": "float8_e4m3fn", "qo_indptr": "int32", "kv_last_page_len": "int32"}
    define(tmp_path, name, "gqa_paged", GQA | {"page_size": 64}, inputs)
    tensors = {"qo_indptr": [0, 10, 10, 15], "kv_indptr": [0, 3, 4, 5], "kv_last_page_len": [7, 1, 64]}
    store(tmp_path / "b.safetensors", tensors, "I64")
    (case,) = load(tmp_path, workload(name, "1", "b.safetensors", list(tensors), scale=0.25))
    # Three pages of which the last holds 7 tokens; a request without new tokens is padding; one full page.
    assert case.batch.requests == (RequestSpec(query_len=10, seq_len=135), RequestSpec(query_len=5, seq_len=64))
    assert case.batch.padding.requests == 1
    assert (case.cache.kv_cache_dtype, case.cache.block_size, case.layer.scale) == ("fp8_e4m3", 64, 0.25)


def test_ragged_keys_are_put_in_pages(tmp_path):
    name = "gqa_ragged_prefill_causal_h32_kv8_d128"
    define(tmp_path, name, "gqa_ragged", GQA, {"q": "float16", "k": "float16", "qo_indptr": "int32"})
    store(tmp_path / "c.safetensors", {"qo_indptr": [0, 4, 6], "kv_indptr": [0, 4, 26]})
    suite = load(tmp_path, workload(name, "1", "c.safetensors", ["qo_indptr", "kv_indptr"]))
    (case,) = suite
    assert case.batch.requests == (RequestSpec(query_len=4), RequestSpec(query_len=2, seq_len=22))
    assert (case.layer.is_causal, case.cache.block_size) == (True, 16)
    assert any("in pages of 16" in note for note in suite.notes)


def test_latent_attention_gets_its_widths_from_the_scale(tmp_path):
    name = "mla_paged_decode_h16_ckv512_kpe64_ps1"
    define(tmp_path, name, "mla_paged", MLA | {"page_size": 1}, {"q_nope": "bfloat16", "ckv_cache": "bfloat16"})
    store(tmp_path / "d.safetensors", {"kv_indptr": [0, 700]})
    (case,) = load(tmp_path, workload(name, "1", "d.safetensors", ["kv_indptr"], scale=1 / math.sqrt(192)))
    assert case.layer.mla == MLASpec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert (case.layer.head_size, case.layer.num_kv_heads, case.batch.path.name) == (576, 1, "mla")


def test_what_cannot_be_read_is_named(tmp_path):
    paged = "gqa_paged_decode_h32_kv8_d128_ps1"
    define(tmp_path, paged, "gqa_paged", GQA | {"page_size": 1}, PAGED)
    define(tmp_path, "pages64", "gqa_paged", GQA | {"page_size": 64}, PAGED)
    define(tmp_path, "gqa_paged_prefill_h32", "gqa_paged", GQA | {"page_size": 1}, PAGED | {"qo_indptr": "int32"})
    define(tmp_path, "gemm_n128", "gemm", {"N": 128}, {"A": "float16"})
    define(tmp_path, "no_heads", "gqa_paged", {"page_size": 1}, PAGED)
    define(tmp_path, "mla", "mla_paged", MLA | {"page_size": 1}, {"q_nope": "bfloat16", "ckv_cache": "bfloat16"})
    store(tmp_path / "a.safetensors", {"kv_indptr": [0, 37, 38], "falls": [3, 2]})
    given = "a.safetensors", ["kv_indptr"]
    falling = workload(paged, "falls", *given).replace('"tensor_key": "kv_indptr"', '"tensor_key": "falls"')
    suite = load(
        tmp_path,
        workload(paged, "good", *given),
        workload("gemm_n128", "1", *given),
        workload("elsewhere", "2", *given),
        workload(paged, "random", "a.safetensors", []),
        workload(paged, "gone", "gone.safetensors", ["kv_indptr"]),
        workload("pages64", "3", *given),
        workload("gqa_paged_prefill_h32", "4", *given),
        workload("no_heads", "5", *given),
        workload("mla", "6", *given, scale=0.09),
        falling,
    )
    assert [case.id for case in suite] == [f"{paged}.good"]
    reasons = [note.split(": ", 2)[2] for note in suite.notes if note.startswith("not read")]
    assert reasons == [
        snapshot("op_type gemm is no paged or ragged attention"),
        snapshot("there is no definitions/.../elsewhere.json"),
        snapshot("kv_indptr is missing, so that lengths are not known"),
        snapshot("gone.safetensors: No such file or directory"),
        snapshot("without kv_last_page_len, pages of 64 tokens do not determine lengths"),
        snapshot("the definition's name gqa_paged_prefill_h32 must contain causal or noncausal"),
        snapshot("the definition no_heads has no constant axis num_qo_heads above 0"),
        snapshot("sm_scale 0.09 is that of no whole width above head_dim_kpe 64"),
        "kv_indptr falls",
    ]


def header(text):
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (struct.pack("<Q", 2**40), "a header of 1099511627776 bytes"),
        (header("{}"), "no tensor 'kv_indptr' among "),
        (header('{"kv_indptr":{"dtype":"F32","data_offsets":[0,4]}}'), "kv_indptr has dtype F32, not int32 or int64"),
        (header('{"kv_indptr":{"dtype":"I32","data_offsets":[0,8]}}'), "kv_indptr is cut off"),
    ],
)
def test_a_damaged_tensor_file_is_a_reason(tmp_path, content, reason):
    name = "gqa_paged_decode_h32_kv8_d128_ps1"
    define(tmp_path, name, "gqa_paged", GQA | {"page_size": 1}, PAGED)
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CaseFileError) as refused:
        load(tmp_path, workload(name, "1", "a.safetensors", ["kv_indptr"]))
    assert str(refused.value).startswith(
        f"{tmp_path}/workloads/traffic.jsonl: no workload of paged or ragged attention: "
    )
    assert f"not read: {name}, workload 1: a.safetensors: {reason}; read are " in str(refused.value)


def test_lines_that_are_no_workload_and_files_in_the_wrong_place(plain, tmp_path):
    define(tmp_path, "d", "gqa_paged", GQA, PAGED)
    with pytest.raises(CaseFileError, match=r"traffic\.jsonl:1: workload: Field required"):
        load(tmp_path, '{"definition": "d"}')
    lone = tmp_path.parent / f"{tmp_path.name}-lone.jsonl"
    lone.write_text("{}\n")
    messages = []
    for path in (tmp_path / "definitions" / "gqa_paged" / "d.json", lone):
        with pytest.raises(CaseFileError) as refused:
            load_file(path)
        messages.append(plain(str(refused.value)))
    assert messages == snapshot(
        [
            "TMP/definitions/gqa_paged/d.json: a definition of FlashInfer-Bench has no batches; give its workloads, a .jsonl file",
            "TMP-lone.jsonl: no folder above the file is called definitions/; keep workloads in their data set",
        ]
    )
