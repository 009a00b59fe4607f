"""``xformers_vllm``: vLLM's facts, the doubtful ones included; a step in two views; and its expectation file.

A run with that file examines its results: each of its faults is found, and none besides.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends import registry
from attncheck.backends.candidates.xformers.backend import library_reasons
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend, XFormersAutoBackend
from attncheck.backends.contract import AttentionCGSupport, AttentionType
from attncheck.errors import BackendLoadError
from attncheck.reference.spec import LayerSpec

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers_vllm import impl as impl_module
from attncheck.backends.candidates.xformers_vllm.builder import XFORMERS_AVAILABLE
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
    with pytest.raises(ValueError, match=r"head size 100 .* XFormersAttention; .*32, 40.*FlexAttention"):
        impl(head_size=100)


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


def test_a_mixed_step_is_split_and_seen_in_two_views(make_step):
    made = make_step(XFormersAttentionBackend, PLAIN, [(1, 5), (1, 17), (3, 3), (20, 36)])
    step = made.builder().build(0, made.common)
    assert (step.num_decodes, step.num_prefills, step.num_decode_tokens, step.num_prefill_tokens) == (2, 2, 2, 23)
    for view, requests, rows, starts, lens, longest in (
        (step.decode_metadata, slice(0, 2), slice(0, 2), [0, 1, 2], [5, 17], (1, 17)),
        (step.prefill_metadata, slice(2, 4), slice(2, 25), [0, 3, 23], [3, 36], (20, 36)),
    ):
        assert (view.query_start_loc.tolist(), view.seq_lens.tolist()) == (starts, lens)
        assert (view.num_actual_tokens, view.max_query_len, view.max_seq_len) == (starts[-1], *longest)
        assert torch.equal(view.block_table, made.common.block_table_tensor[requests])
        assert torch.equal(view.slot_mapping, made.common.slot_mapping[rows])
        assert view.prefill_metadata is view.decode_metadata is None
    assert step.decode_metadata.attn_bias is step.attn_bias
    assert step.attn_bias.k_seqinfo.seqlen.tolist() == [5, 17]
    assert step.prefill_metadata.attn_bias is None
    assert step.prefill_metadata is step.prefill_metadata
    prompts = make_step(XFormersAttentionBackend, PLAIN, [(3, 3)])
    alone = prompts.builder().build(0, prompts.common)
    assert alone.attn_bias is alone.decode_metadata is None


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
