"""Candidate ``xformers`` by the contract: right answers, who attends to what, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.xformers.backend import XFormersBackend, library_reasons
from attncheck.backends.contract import AttentionCGSupport, CommonAttentionMetadata
from attncheck.reference.spec import AttentionType, BatchSpec, CacheSpec, LayerSpec, OutputQuantSpec, RequestSpec

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers import impl as impl_module

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32", scale=0.3)
MIXED = [(1, 5), (1, 33), (7, 19), (3, 3)]


@pytest.fixture
def attended(monkeypatch):
    """How many rows each of the two kernels was given, call by call."""
    calls = []

    def operator(query, *rest):
        calls.append(("operator", len(query)))

    def kernel(query, *rest, query_start_loc, **options):
        calls.append(("kernel", query_start_loc.tolist()))

    monkeypatch.setattr(impl_module, "paged_decode", operator)
    monkeypatch.setattr(impl_module, "unified_attention", kernel)
    return calls


@pytest.mark.parametrize(
    ("modifiers", "requests", "padding", "expected"),
    [
        ({}, [(1, 5), (1, 9)], (0, 0), [("operator", 2)]),
        ({}, [(1, 5), (1, 9)], (2, 2), [("operator", 2)]),
        ({}, [(1, 5), (4, 9)], (1, 2), [("operator", 1), ("kernel", [0, 4, 4])]),
        ({}, [(4, 9), (1, 5)], (0, 0), [("kernel", [0, 4, 5])]),
        ({"sliding_window": 3}, [(1, 5), (1, 9)], (0, 0), [("kernel", [0, 1, 2])]),
        ({"logits_soft_cap": 3.0}, [(1, 5), (4, 9)], (0, 0), [("kernel", [0, 1, 5])]),
    ],
)
def test_the_operator_attends_to_plain_decodes_in_front(modifiers, requests, padding, expected, make_step, attended):
    make_step(XFormersBackend, replace(PLAIN, **modifiers), requests, padding=padding).run()
    assert attended == expected


@pytest.mark.parametrize(("max_query_len", "expected"), [(1, ("operator", 3)), (3, ("kernel", [0, 1, 2, 3]))])
def test_the_longest_query_to_come_decides_what_a_graph_holds(max_query_len, expected, make_step, attended):
    """Dummies of a mixed graph have one row each, where it has as many tokens as requests."""
    step = make_step(XFormersBackend, PLAIN, [(1, 1), (1, 1), (1, 1)])
    common = replace(step.common, max_query_len=max_query_len)
    step.run(attn_metadata=step.builder().build_for_cudagraph_capture(common))
    assert attended == [expected]
    assert XFormersBackend.get_builder_cls().cudagraph_support is AttentionCGSupport.ALWAYS


def test_build_reads_nothing_from_the_device(make_step):
    step = make_step(XFormersBackend, PLAIN, MIXED)
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    unreadable = {name: getattr(step.common, name).to("meta") for name in names}
    metadata = step.builder().build(0, replace(step.common, **unreadable))
    assert metadata.num_decodes == 2
    assert isinstance(metadata.common, CommonAttentionMetadata)


def test_a_length_beyond_the_table_is_refused(make_step):
    step = make_step(XFormersBackend, PLAIN, [(1, 5), (1, 20)])
    longer = torch.tensor([5, 49], dtype=torch.int32)
    common = replace(step.common, seq_lens=longer, seq_lens_cpu=longer)
    with pytest.raises(ValueError) as refused:
        step.builder().build(0, common)
    assert str(refused.value) == snapshot("XFORMERS: seq_len 49 exceeds the 48 slots of a table row")
    assert "seq_len" in str(refused.value)
    assert "49" in str(refused.value)
    assert "48" in str(refused.value)


@pytest.mark.parametrize(
    ("layer", "cache"),
    [
        ({"alibi": True}, {}),
        ({"sinks": True}, {}),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}),
        ({"attn_type": AttentionType.ENCODER_DECODER}, {}),
        ({"kv_sharing": True}, {}),
        ({"output_quant": OutputQuantSpec(scale=0.5)}, {}),
        ({"causal": False}, {}),
        ({"head_size": 80}, {}),
        ({"head_size": 512}, {}),
        ({}, {"block_size": 8}),
        ({}, {"layout": "HND"}),
        ({}, {"kv_cache_dtype": "fp8"}),
    ],
)
def test_the_rest_is_not_declared(layer, cache):
    batch = BatchSpec(requests=(RequestSpec(query_len=1, seq_len=5),))
    assert not XFormersBackend.unsupported_reasons(PLAIN, CacheSpec(), batch)
    assert XFormersBackend.unsupported_reasons(replace(PLAIN, **layer), CacheSpec(**cache), batch)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"alibi_slopes": [0.5] * 4}, NotImplementedError),
        ({"attn_type": AttentionType.ENCODER_ONLY}, NotImplementedError),
        ({"kv_cache_dtype": "fp8"}, NotImplementedError),
        ({"kv_sharing_target_layer_name": "other"}, NotImplementedError),
        ({"sinks": torch.zeros(4)}, NotImplementedError),
        ({"head_size": 80}, ValueError),
        ({"num_kv_heads": 3}, ValueError),
        ({"sliding_window": 0}, ValueError),
    ],
)
def test_a_layer_that_is_not_declared_is_refused(changes, error):
    with pytest.raises(error):
        XFormersBackend.get_impl_cls()(**{"num_heads": 4, "head_size": 16, "scale": 0.3, "num_kv_heads": 2} | changes)


def test_a_step_that_cannot_be_served_is_refused_before_anything_changes(make_step):
    step = make_step(XFormersBackend, PLAIN, MIXED)
    before = step.kv_cache.clone()
    heads_first = step.kv_cache.transpose(2, 3).contiguous().transpose(2, 3)
    for changes, error in (
        ({"kv_cache": heads_first}, ValueError),
        ({"kv_cache": torch.empty(0)}, ValueError),
        ({"output": step.output.flatten(1)}, ValueError),
        ({"output_scale": torch.ones(1)}, NotImplementedError),
        ({"output": None}, ValueError),
    ):
        with pytest.raises(error):
            step.run(**changes)
    assert torch.equal(step.kv_cache.view(torch.int32), before.view(torch.int32))
    assert step.output.isnan().all()


def test_the_profiling_call_answers_zeros(make_step):
    step = make_step(XFormersBackend, PLAIN, MIXED)
    assert not step.run(attn_metadata=None).any()


def test_pages_that_no_tile_divides_have_no_cache():
    assert XFormersBackend.get_kv_cache_shape(4, 48, 2, 64) == (2, 4, 48, 2, 64)
    with pytest.raises(ValueError) as refused:
        XFormersBackend.get_kv_cache_shape(4, 8, 2, 64)
    assert str(refused.value) == snapshot("XFORMERS: block_size 8: supported are multiples of 16")
    assert "block_size" in str(refused.value)
    assert "16" in str(refused.value)


@pytest.mark.parametrize(("modifiers", "is_available"), [({}, False), ({"sliding_window": 3}, True)])
def test_bfloat16_is_available_where_the_interpreter_can_multiply_it(modifiers, is_available, monkeypatch):
    layer, batch = replace(PLAIN, dtype="bfloat16", **modifiers), BatchSpec(requests=(RequestSpec(query_len=1),))
    arguments = ("cpu", layer, CacheSpec(), batch)
    assert XFormersBackend.unsupported_reasons(*arguments[1:]) == []
    assert (XFormersBackend.unavailable_case_reasons(*arguments) == []) == is_available
    monkeypatch.delenv("TRITON_INTERPRET")
    assert XFormersBackend.unavailable_case_reasons(*arguments) == []


@pytest.mark.parametrize(
    ("modifiers", "requests", "expected"),
    [
        ({}, [(1, 5), (1, 9)], {"paged_triton_splitK_n16"}),
        ({}, [(1, 5), (4, 9)], {"paged_triton_splitK_n16", "attncheck's unified_attention"}),
        ({"sliding_window": 3}, [(1, 5), (1, 9)], {"attncheck's unified_attention"}),
    ],
)
def test_the_kernels_that_ran_are_named(modifiers, requests, expected, make_step, attended):
    step = make_step(XFormersBackend, replace(PLAIN, **modifiers), requests)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert impl.chosen_kernels == expected
