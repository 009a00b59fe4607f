"""Whole examinations through the bridge: what vLLM's CPU backend gets right of each kind, and what is found in it."""

import pytest
import torch

import attncheck

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

SUITE = """
suite: bridge
defaults:
  layer: {num_heads: 4, num_kv_heads: 2, head_size: 64, dtype: float32}
  cache: {block_size: 32, layout: HND}
cases:
  - {id: decode, batch: q1s40_q1s3_q1s90}
  - {id: prefill, batch: q33_q5}
  - {id: mixed, batch: q1s40_q6s61_q33, matrix: {layer.dtype: [float16, bfloat16]}}
  - {id: window, batch: q1s90_q6s61_q33, layer: {sliding_window: 17}}
  - {id: one-head-for-all, batch: q1s90_q33, layer: {num_kv_heads: 1}}
  - {id: alibi, batch: q1s90_q6s61, layer: {alibi: true}}
  - {id: not-causal, batch: q6s61, layer: {causal: false}}
  - {id: shared, batch: q1s90, layer: {kv_sharing: true}}
  - {id: drafts, batch: 2q4s90, path: {spec_decode: {num_speculative_tokens: 3}}}
  - {id: encoder, batch: q33_q5, layer: {attn_type: encoder_only}}
  - {id: cross, batch: [{query_len: 3, seq_len: 3, encoder_len: 40}], layer: {attn_type: encoder_decoder}}
  - {id: soft-cap, batch: q1s90, layer: {logits_soft_cap: 30.0}, inputs: [coordinates, views]}
  - {id: soft-cap-far-exceeded, batch: q1s90, layer: {logits_soft_cap: 1.0}}
  - {id: fp8, batch: q1s90_q33, cache: {kv_cache_dtype: fp8_e4m3, k_scale: 0.5, v_scale: 2.0}}
  - {id: sinks, batch: q1s90, layer: {sinks: true}}
  - {id: small-pages, batch: q1s90, cache: {block_size: 16}}
  - {id: tokens-first, batch: q1s90, cache: {layout: NHD}}
  - {id: narrow-values, batch: q1s90, layer: {head_size_v: 32}}
  - {id: tree, batch: 2q3s90, path: {tree: {parents: [-1, 0, 0]}}}
"""

# Faults of vLLM's kernels for AVX-512. Those for AVX2 have other arithmetic, and none for FP8 caches.
HAS_AVX512 = torch.cpu._is_avx512_supported()
OVERFLOWS = {"soft-cap-far-exceeded"} if HAS_AVX512 else set()
TRUNCATES = {"fp8"} if HAS_AVX512 else set()
UNAVAILABLE = set() if HAS_AVX512 else {"fp8"}
UNDECLARED = {"sinks", "small-pages", "tokens-first", "narrow-values", "tree"}


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    path = tmp_path_factory.mktemp("bridge") / "bridge.yaml"
    path.write_text(SUITE, encoding="utf-8")
    found = attncheck.examine("vllm:CPU_ATTN", suite=str(path), device="cpu").records
    return {(record.case_id, record.check): record for record in found}


def with_outcome(records, check, outcome):
    return {case for (case, name), record in records.items() if name == check and record.outcome == outcome}


def test_answers_are_right_but_where_its_soft_cap_overflows(records):
    everything = {case for case, _ in records}
    assert with_outcome(records, "numerics", "unsupported") == UNDECLARED
    assert with_outcome(records, "numerics", "failed") == OVERFLOWS
    assert with_outcome(records, "numerics", "unavailable") == UNAVAILABLE
    assert with_outcome(records, "numerics", "passed") == everything - UNDECLARED - OVERFLOWS - UNAVAILABLE


def test_what_it_writes_is_judged_in_a_layout_that_was_learned(records):
    # The builder of encoder layers writes into the slot mapping: docs/upstream/cpu-attn-encoder-slot-mapping.
    assert with_outcome(records, "cache_write", "failed") == {*TRUNCATES, "encoder"}
    assert records["encoder", "cache_write"].summary == "inputs were changed: metadata.slot_mapping"
    assert all("truncated" in records[case, "cache_write"].meaning for case in TRUNCATES)
    assert {"decode", "prefill", "mixed.float16", "window", "cross"} <= with_outcome(records, "cache_write", "passed")


def test_what_it_does_not_declare_is_refused_or_answered_right(records):
    assert with_outcome(records, "refusals", "passed") >= UNDECLARED
    notes = {case: " ".join(records[case, "refusals"].notes) for case in UNDECLARED}
    assert "answered right" in notes["sinks"]
    for case, refusal in {
        "small-pages": "block_size 16: kernels of CPU_ATTN take multiples of 32",
        "tokens-first": "layout NHD: kernels of CPU_ATTN read HND",
        "narrow-values": "head_size_v 32",
        "tree": "tree of drafts",
    }.items():
        assert refusal in notes[case]
