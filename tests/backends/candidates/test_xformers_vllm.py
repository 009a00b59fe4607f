"""``xformers_vllm``: vLLM's facts, the doubtful ones included; a step worked by hand; and its expectation file.

A run with that file examines its results: each of its faults is found, and none besides.
"""

from dataclasses import replace
from itertools import pairwise
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
DECODES = [(1, 5), (1, 17)]


def impl(**changes):
    arguments = {
        "num_heads": 8,
        "head_size": 64,
        "scale": 1,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    return XFormersAttentionImpl(**arguments | changes)


def test_facts():
    backend = XFormersAttentionBackend
    assert backend.get_name() == "XFORMERS_VLLM_V1"
    assert backend.accept_output_buffer
    assert backend.get_supported_dtypes() == [torch.float16, torch.bfloat16]
    assert backend.get_supported_head_sizes() == list(range(32, 264, 8))
    assert len(backend.get_supported_head_sizes()) == 29
    assert backend.get_kv_cache_shape(4, 48, 2, 64) == (2, 4, 48, 2, 64)
    assert not backend.use_cascade_attention(16, some="thing")
    assert backend.get_builder_cls().cudagraph_support is AttentionCGSupport.NEVER
    assert XFORMERS_AVAILABLE
    with pytest.raises(NotImplementedError):
        backend.get_kv_cache_stride_order()
    with pytest.raises(ValueError, match="block_size 8"):
        backend.get_kv_cache_shape(4, 8, 2, 64)
    assert backend.features == {"sliding_window", "logits_soft_cap", "fp8_kv"}
    assert "fp8_e5m2" in backend.supported_kv_cache_dtypes
    assert backend.supported_layouts == ("NHD",)


@pytest.mark.parametrize("size", [24, 100, 512])
def test_a_head_size_that_is_not_listed_is_refused_with_the_way_out(size):
    XFormersAttentionBackend.validate_head_size(80)
    for refuse in (XFormersAttentionBackend.validate_head_size, lambda size: impl(head_size=size)):
        with pytest.raises(ValueError, match=rf"head size {size} .* XFormersAttention; .*32, 40.*FlexAttention"):
            refuse(size)


def test_what_the_constructor_keeps():
    plain = impl()
    assert (plain.scale, plain.num_queries_per_kv, plain.kv_cache_dtype) == (1.0, 4, "auto")
    assert isinstance(plain.scale, float)
    assert (plain.sliding_window, plain.logits_soft_cap) == ((-1, -1), 0)
    assert plain.alibi_slopes is plain.kv_sharing_target_layer_name is None
    assert impl(sliding_window=8).sliding_window == (7, 0)
    assert impl(logits_soft_cap=5.0).logits_soft_cap == 5.0
    assert impl(num_heads=7).num_queries_per_kv == 3
    assert impl(kv_cache_dtype="fp8").kv_cache_dtype == "fp8"


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": [0.5] * 8},
        {"kv_sharing_target_layer_name": "layer.0"},
        {"attn_type": AttentionType.ENCODER_ONLY},
        {"attn_type": "encoder_decoder"},
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
    assert XFormersAutoBackend.get_impl_cls().names_operator is False
    assert "(decode: triton split-K)" in XFormersAttentionBackend.version()
    assert "(decode: automatic dispatch)" in XFormersAutoBackend.version()
    with pytest.raises(BackendLoadError, match="only 'auto' can follow"):
        registry.load("xformers_vllm:triton")


def test_the_operands_of_the_decode_call(make_step, monkeypatch):
    layer = replace(PLAIN, num_heads=8, head_size=64)
    step = make_step(XFormersAttentionBackend, layer, DECODES)
    seen = {}

    def attention(query, key, value, **options):
        seen.update(options, shapes=(query.shape, key.shape, value.shape), strides=key.stride())
        return torch.zeros_like(query)

    monkeypatch.setattr(impl_module, "memory_efficient_attention_forward", attention)
    pool = torch.zeros(2, 10, 16, 2, 64)
    step.run(
        kv_cache=pool, attn_metadata=step.builder().build(0, replace(step.common, slot_mapping=torch.tensor([-1, -1])))
    )
    assert seen["shapes"] == ((1, 2, 2, 4, 64), (1, 160, 2, 4, 64), (1, 160, 2, 4, 64))
    assert seen["strides"] == (20480, 128, 64, 0, 1)
    assert (seen["p"], seen["scale"], seen["op"].BLOCK_N) == (0.0, 0.3, 16)
    assert seen["attn_bias"].k_seqinfo.seqlen.tolist() == [5, 17]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"output": None}, ValueError),
        ({"output_scale": torch.ones(1)}, NotImplementedError),
        ({"output_block_scale": torch.ones(1)}, NotImplementedError),
    ],
)
def test_what_forward_refuses_at_once(changes, error, make_step):
    step = make_step(XFormersAttentionBackend, PLAIN, DECODES)
    before = step.kv_cache.clone()
    with pytest.raises(error):
        step.run(**changes)
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
    step = make_step(backend, PLAIN, DECODES)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    step.run()
    assert impl.chosen_kernels == {name}
    assert dispatched == ([] if name == "requested" else [((1, 2, 2, 2, 32), False)])


STARTS, LENS = [0, 1, 2, 5, 25], [5, 17, 3, 36]


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def common(starts, lens):
    table = torch.arange(len(lens) * 3, dtype=torch.int32).view(len(lens), 3)
    query_lens = [end - start for start, end in pairwise(starts)]
    return CommonAttentionMetadata(
        query_start_loc=int32(starts),
        query_start_loc_cpu=int32(starts),
        seq_lens=int32(lens),
        seq_lens_cpu=int32(lens),
        num_computed_tokens_cpu=int32([s - q for s, q in zip(lens, query_lens, strict=True)]),
        num_reqs=len(lens),
        num_actual_tokens=starts[-1],
        max_query_len=max(query_lens),
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=torch.arange(starts[-1]) + 100,
    )


@pytest.fixture
def builder():
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16)
    return XFormersAttentionMetadataBuilder(spec, ["layer.0"], None, torch.device("cpu"))


def numbers(view):
    return {
        "tokens": view.num_actual_tokens,
        "starts": view.query_start_loc.tolist(),
        "lens": view.seq_lens.tolist(),
        "longest": (view.max_query_len, view.max_seq_len),
        "table": view.block_table[:, 0].tolist(),
        "slots": (len(view.slot_mapping), int(view.slot_mapping[0])),
        "counters": (view.num_prefills, view.num_decodes, view.num_prefill_tokens, view.num_decode_tokens),
    }


def test_a_mixed_step_is_split_and_seen_in_two_views(builder):
    step = builder.build(0, common(STARTS, LENS))
    assert (step.num_decodes, step.num_prefills, step.num_decode_tokens, step.num_prefill_tokens) == (2, 2, 2, 23)
    assert (builder.block_size, builder._num_decodes, builder._num_decode_tokens) == (16, 2, 2)
    prefill, decode = step.prefill_metadata, step.decode_metadata
    assert numbers(prefill) == {
        "tokens": 23,
        "starts": [0, 3, 23],
        "lens": [3, 36],
        "longest": (20, 36),
        "table": [6, 9],
        "slots": (23, 102),
        "counters": (0, 0, 0, 0),
    }
    assert numbers(decode) == {
        "tokens": 2,
        "starts": [0, 1, 2],
        "lens": [5, 17],
        "longest": (1, 17),
        "table": [0, 3],
        "slots": (2, 100),
        "counters": (0, 0, 0, 0),
    }
    assert prefill.attn_bias is None
    assert decode.attn_bias is step.attn_bias
    assert step.prefill_metadata is prefill
    assert step.decode_metadata is decode
    assert prefill.prefill_metadata is prefill.decode_metadata is decode.decode_metadata is None
    assert (step.attn_bias.page_size, step.attn_bias.block_tables.tolist()) == (16, [[0, 1, 2], [3, 4, 5]])
    assert step.attn_bias.k_seqinfo.seqlen.tolist() == [5, 17]


def test_a_step_of_one_kind_has_one_view(builder):
    prompts = builder.build(0, common([0, 3, 23], [3, 36]))
    assert prompts.attn_bias is prompts.decode_metadata is None
    assert prompts.prefill_metadata.num_actual_tokens == 23
    decodes = builder.build(7, common([0, 1, 2], [5, 17]), fast_build=True)
    assert decodes.prefill_metadata is None
    assert decodes.decode_metadata.num_actual_tokens == 2


def test_decodes_are_moved_to_the_front(builder):
    ids = ["long", "short"]

    def swap_states(i, j):
        ids[i], ids[j] = ids[j], ids[i]

    batch = SimpleNamespace(req_ids=ids, swap_states=swap_states)
    scheduled = SimpleNamespace(num_scheduled_tokens={"long": 5, "short": 1})
    assert builder.reorder_batch(batch, scheduled)
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
