"""``xformers_vllm``: vLLM's facts, the doubtful ones included; and its expectation file.

A run with that file examines its results: each of its faults is found, and none besides.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends import registry
from attncheck.backends.candidates.xformers.backend import library_reasons
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend, XFormersAutoBackend
from attncheck.backends.contract import AttentionCGSupport, AttentionType, CommonAttentionMetadata, KVCacheSpec
from attncheck.cases.loader import load_suite
from attncheck.errors import BackendLoadError
from attncheck.harness.run.expectations import load_expectations
from attncheck.reference.spec import LayerSpec

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers_vllm import impl as impl_module
from attncheck.backends.candidates.xformers_vllm.builder import XFORMERS_AVAILABLE, XFormersAttentionMetadataBuilder
from attncheck.backends.candidates.xformers_vllm.impl import XFormersAttentionImpl

EXPECTED = Path(__file__).parents[3] / "docs" / "expected" / "xformers-vllm.yaml"
PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", scale=0.3)


def impl(**changes):
    return XFormersAttentionImpl(**{"num_heads": 8, "head_size": 64, "scale": 1, "num_kv_heads": 2} | changes)


def test_facts():
    backend = XFormersAttentionBackend
    assert backend.get_name() == "XFORMERS_VLLM_V1"
    assert backend.get_supported_head_sizes() == list(range(32, 264, 8))
    assert backend.get_kv_cache_shape(4, 48, 2, 64) == (2, 4, 48, 2, 64)
    assert not backend.use_cascade_attention(16, some="thing")
    assert backend.get_builder_cls().cudagraph_support is AttentionCGSupport.NEVER
    assert XFORMERS_AVAILABLE
    with pytest.raises(NotImplementedError):
        backend.get_kv_cache_stride_order()
    with pytest.raises(ValueError, match="block_size 8"):
        backend.get_kv_cache_shape(4, 8, 2, 64)
    backend.validate_head_size(80)
    for refuse in (backend.validate_head_size, lambda size: impl(head_size=size)):
        with pytest.raises(ValueError, match=r"head size 100 .* XFormersAttention; .*32, 40.*FlexAttention"):
            refuse(100)
    assert backend.features == {"sliding_window", "logits_soft_cap", "fp8_kv"}
    assert "fp8_e5m2" in backend.supported_kv_cache_dtypes
    plain = impl()
    assert (plain.scale, plain.num_queries_per_kv, plain.kv_cache_dtype) == (1.0, 4, "auto")
    assert (plain.sliding_window, plain.logits_soft_cap) == ((-1, -1), 0)
    assert impl(sliding_window=8).sliding_window == (7, 0)
    assert impl(num_heads=7).num_queries_per_kv == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": [0.5] * 8},
        {"kv_sharing_target_layer_name": "layer.0"},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"sinks": torch.zeros(4)},
        {"head_size_v": 128},
    ],
)
def test_what_the_constructor_refuses(changes):
    with pytest.raises(NotImplementedError):
        impl(**changes)


def test_it_runs_only_when_named_and_auto_is_its_one_variant():
    assert "xformers_vllm" not in registry.builtin_names()
    assert registry.load("xformers_vllm").backend is XFormersAttentionBackend
    assert registry.load("xformers_vllm:auto").backend is XFormersAutoBackend
    assert "(decode: triton split-K)" in XFormersAttentionBackend.version()
    assert "(decode: automatic dispatch)" in XFormersAutoBackend.version()
    with pytest.raises(BackendLoadError, match="only 'auto' can follow"):
        registry.load("xformers_vllm:triton")


@pytest.mark.parametrize("name", ["output", "output_scale", "output_block_scale"])
def test_what_forward_refuses_at_once(name, make_step):
    step = make_step(XFormersAttentionBackend, PLAIN, [(1, 5), (1, 17)])
    before = step.kv_cache.clone()
    with pytest.raises(ValueError if name == "output" else NotImplementedError):
        step.run(**{name: None if name == "output" else torch.ones(1)})
    assert torch.equal(step.kv_cache.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize(("backend", "name"), [(XFormersAttentionBackend, "requested"), (XFormersAutoBackend, "found")])
def test_the_operator_that_ran_is_named(backend, name, make_step, monkeypatch):
    """The library's choice is read once a shape, after a call that has succeeded."""
    requested, dispatched = SimpleNamespace(NAME="requested"), []

    def attend(query, key, value, *, attn_bias, p, scale, op):
        assert op is (requested if name == "requested" else None)
        return query

    def dispatch(given, needs_gradient):
        dispatched.append((given.query.shape, needs_gradient))
        return SimpleNamespace(NAME="found")

    monkeypatch.setattr(impl_module, "operator_for", lambda page_size: requested)
    monkeypatch.setattr(impl_module, "memory_efficient_attention_forward", attend)
    monkeypatch.setattr(impl_module, "_dispatch_fw", dispatch)
    step = make_step(backend, PLAIN, [(1, 5), (1, 17)])
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    step.run()
    assert impl.chosen_kernels == {name}
    assert dispatched == ([] if name == "requested" else [((1, 2, 2, 2, 32), False)])


def test_a_mixed_step_is_seen_in_two_views_and_decodes_are_moved_to_the_front():
    def int32(*numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16)
    builder = XFormersAttentionMetadataBuilder(spec, ["layer.0"], None, torch.device("cpu"))
    starts, lens, table = int32(0, 1, 2, 5, 25), int32(5, 17, 3, 36), int32(*range(12)).view(4, 3)
    computed, slots = int32(4, 16, 0, 16), torch.arange(25) + 100
    step = builder.build(0, CommonAttentionMetadata(starts, starts, lens, lens, computed, 4, 25, 20, 36, table, slots))
    assert (step.num_decodes, step.num_prefills, step.num_decode_tokens, step.num_prefill_tokens) == (2, 2, 2, 23)
    prefill, decode = step.prefill_metadata, step.decode_metadata
    assert (prefill.query_start_loc.tolist(), prefill.seq_lens.tolist()) == ([0, 3, 23], [3, 36])
    assert (decode.query_start_loc.tolist(), decode.seq_lens.tolist()) == ([0, 1, 2], [5, 17])
    assert (prefill.max_query_len, prefill.max_seq_len, decode.max_query_len, decode.max_seq_len) == (20, 36, 1, 17)
    assert step.prefill_metadata is prefill
    assert prefill.attn_bias is None
    assert (step.attn_bias.page_size, step.attn_bias.block_tables.tolist()) == (16, [[0, 1, 2], [3, 4, 5]])
    ids = ["long", "short"]

    def swap_states(i, j):
        ids[i], ids[j] = ids[j], ids[i]

    scheduled = SimpleNamespace(num_scheduled_tokens={"long": 5, "short": 1})
    assert builder.reorder_batch(SimpleNamespace(req_ids=ids, swap_states=swap_states), scheduled)
    assert ids == ["short", "long"]
    assert builder.reorder_batch_threshold == 1


def test_every_entry_is_about_a_case_of_a_shipped_suite():
    cases = [case for name in ("interpreted", "xformers") for case in load_suite(name)]
    for entry in load_expectations(EXPECTED):
        wanted = entry.expectation
        assert wanted.backend in ("xformers_vllm", "xformers_vllm:auto")
        found = [case for case in cases if wanted.fits_case(case.suite, case.id)]
        assert any(case.checks is None or wanted.check in case.checks for case in found), str(entry)


@pytest.mark.parametrize(
    ("backend", "cases", "expected"),
    [
        (
            "xformers_vllm",
            ["window-mixed", "soft-cap-alone", "head-size-without-operator.80", "padded-decode", "mixed"],
            "PASSED WITH 6 KNOWN FAULTS: 5 cases failed as expected\n",
        ),
        ("xformers_vllm:auto", ["decode"], "PASSED WITH 1 KNOWN FAULT: 1 case failed as expected\n"),
    ],
)
@pytest.mark.slow
def test_a_run_falls_short_as_foreseen(backend, cases, expected, shell, tmp_path):
    chosen = " ".join(f"--case {case}" for case in cases)
    command = (
        f"attncheck run --backend {backend} --suite xformers {chosen} --expect {EXPECTED} --device cpu --in-process"
    )
    code, printed = shell(f"TRITON_INTERPRET=1 {command}", tmp_path)
    assert code == 0, printed
    assert expected in printed, printed
