"""Calls of the library, read as it documents them, compute what the reference does; a wrong argument is noticed.

The whole examination is run over the stand-in: what fails is how the library is called, never a kernel.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attncheck
from attncheck.backends.contract import AttentionBackend, Conventions

SUITE = """
suite: over_the_stand_in
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 64, dtype: float16}
  cache: {block_size: 4, layout: NHD}
cases:
  - {id: decode, batch: q1s1_q1s3_q1s4_q1s5_q1s17, matrix: {cache.layout: [NHD, HND], layer.dtype: [float16, bfloat16]}}
  - {id: mixed, batch: q1s9_q5s12_q1s4_q2s2_q8s8, matrix: {cache.block_size: [1, 4, 16], layer.causal: [true, false]}}
  - {id: window, batch: q1s9_q1s2_q6s14, matrix: {layer.sliding_window: [1, 4, 5]}}
  - {id: soft-cap, batch: q1s9_q6s14, layer: {logits_soft_cap: 3.0, scale: 0.7}}
  - {id: groups, batch: q1s9_q6s14, layer: {num_heads: 6, num_kv_heads: 2, head_size: 128, dtype: bfloat16}}
  - {id: codes, batch: q1s9_q6s14, cache: {kv_cache_dtype: fp8_e4m3, k_scale: 0.37, v_scale: 1.9, layout: HND}}
  - {id: padding, batch: {requests: q1s9_q4s6, padding: {requests: 1, tokens: 3}}}
  - {id: encoder, batch: q3s3_q7s7, layer: {attn_type: encoder_only}}
  - {id: cross, batch: [{query_len: 1, seq_len: 5, encoder_len: 9}, {query_len: 6, encoder_len: 3}],
     layer: {attn_type: encoder_decoder}}
  - {id: drafts, batch: q3s9_q3s4, path: {spec_decode: {num_speculative_tokens: 2}}}
  - {id: parts, batch: q1s19_q4s16, path: {split_kv: {parts: 2}}}
  - {id: micro-batches, batch: q1s9_q6s14_q2s7, path: {micro_batch: {cuts: [1, 7]}}}
  - {id: shared-cache, batch: q1s9_q6s14, layer: {kv_sharing: true}}
  - {id: fast-prefill, batch: q1s9_q6s14, path: {fast_prefill: {rows: 1}}}
"""


@pytest.fixture
def examine(library: Any, backend: type[AttentionBackend], tmp_path: Path) -> Callable[..., Any]:
    """``examine(pattern, checks)``: the records of the suite's cases."""
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE, encoding="utf-8")

    def run(pattern: str, checks: list[str]) -> Any:
        return attncheck.examine(backend, str(suite), cases=pattern, checks=checks, device="cpu")

    return run


def test_every_case_comes_out_right(examine: Callable[..., Any]) -> None:
    found = examine("*", ["numerics", "lse"])
    assert {record.outcome for record in found.records} == {"passed"}, str(found)


@pytest.mark.parametrize("pattern", ["decode.NHD-float16", "codes", "padding"])
def test_keys_of_other_requests_do_not_matter_and_the_cache_is_written(
    examine: Callable[..., Any], pattern: str
) -> None:
    found = examine(pattern, ["containment", "cache_write", "refusals"])
    assert {record.outcome for record in found.records} == {"passed"}, str(found)


FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("window.5", "window_left", lambda left: left + 1),
    ("window.5", "window_left", lambda left: left - 1),
    ("window.1", "window_left", lambda left: -1),
    ("groups", "sm_scale", lambda scale: scale * 1.1),
    ("codes", "sm_scale", lambda scale: scale / 0.37),
    ("soft-cap", "logits_soft_cap", lambda cap: None),
    ("mixed.4-true", "causal", lambda causal: False),
    ("mixed.4-false", "causal", lambda causal: True),
    ("decode.NHD-float16", "last_page_len", lambda lens: (lens - 1).clamp(min=1)),
    ("mixed.4-true", "paged_kv_last_page_len", lambda lens: torch.full_like(lens, 4)),
    ("decode.HND-float16", "indices", lambda indices: indices.flip(0)),
    ("mixed.4-true", "paged_kv_indices", lambda indices: indices.flip(0)),
]


@pytest.mark.parametrize(("pattern", "name", "change"), FAULTS)
def test_a_wrong_argument_is_noticed(
    examine: Callable[..., Any], library: Any, pattern: str, name: str, change: Callable[[Any], Any]
) -> None:
    library.distorted[name] = change
    assert examine(pattern, ["numerics"]).failures


def test_an_lse_to_another_base_is_noticed(
    examine: Callable[..., Any], backend: type[AttentionBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "conventions", Conventions(lse_base="e"))
    assert [record.check for record in examine("groups", ["numerics", "lse"]).failures] == ["lse"]
