"""``forward`` of ``xformers_vllm``, its real operator interpreted: what is right, and what is known to be wrong."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.xformers.backend import library_reasons
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend, XFormersAutoBackend
from attncheck.reference.spec import CacheSpec, LayerSpec

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers_vllm import impl as impl_module

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=32, dtype="float32", scale=0.3)
DECODES = [(1, 5), (1, 17)]


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


def test_the_profiling_call_touches_nothing(make_step):
    step = make_step(XFormersAttentionBackend, PLAIN, DECODES)
    assert step.run(attn_metadata=None, kv_cache=torch.empty(0)) is step.output
    assert step.output.isnan().all()


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


@pytest.mark.parametrize(
    ("layer", "cache", "padding", "error", "message"),
    [
        ({"head_size": 80}, {}, (0, 0), ValueError, "Embed dim 80 not supported"),
        ({}, {"kv_cache_dtype": "fp8"}, (0, 0), ValueError, "should either all have the same dtype"),
        ({}, {}, (1, 1), ValueError, "Expected total 2 queries not 3"),
    ],
)
def test_what_the_library_refuses_after_the_cache_was_written(layer, cache, padding, error, message, make_step):
    step = make_step(
        XFormersAttentionBackend, replace(PLAIN, **layer), DECODES, cache=CacheSpec(**cache), padding=padding
    )
    before = step.kv_cache.clone()
    with pytest.raises(error, match=message):
        step.run()
    assert not torch.equal(step.kv_cache.view(torch.uint8), before.view(torch.uint8))


def test_a_flat_output_fails_when_it_is_written(make_step):
    """Although it is documented as [tokens, heads * head size]."""
    step = make_step(XFormersAttentionBackend, PLAIN, DECODES)
    with pytest.raises(RuntimeError):
        step.run(output=step.output.flatten(1))


NAMED = "triton_splitKF"


@pytest.mark.parametrize(
    ("requests", "layer", "page_size", "is_considered"),
    [
        ([(1, 5)] * 2, {}, 16, True),
        ([(1, 5)] * 33, {}, 16, False),
        ([(1, 5)] * 2, {"num_heads": 2}, 16, False),
        ([(1, 5)] * 2, {"num_heads": 128, "num_kv_heads": 64}, 16, False),
        ([(1, 5)] * 2, {"head_size": 80}, 16, True),
        ([(1, 5)] * 2, {}, 128, True),
    ],
    ids=["plain", "33 decodes", "no group", "64 KV heads", "head size 80", "large pages"],
)
def test_the_library_s_own_dispatch_finds_no_operator(requests, layer, page_size, is_considered, make_step):
    """Beyond the device, of which each objects: split-K is not even on the list for many a batch."""
    layer = replace(PLAIN, dtype="float16", **layer)
    step = make_step(XFormersAutoBackend, layer, requests, cache=CacheSpec(block_size=page_size))
    with pytest.raises(NotImplementedError, match="No operator found") as caught:
        step.run()
    message = str(caught.value)
    assert (NAMED in message) == is_considered
    assert ("page_size=16, cls.BLOCK_N=64" in message) == (is_considered and page_size == 16)
    assert ("Embed dim 80 not supported" in message) == (layer.head_size == 80)


def test_a_pool_of_fewer_than_256_slots_keeps_split_k_off_the_list(make_step):
    step = make_step(XFormersAutoBackend, replace(PLAIN, dtype="float16"), DECODES)
    step.common.slot_mapping.fill_(-1)
    with pytest.raises(NotImplementedError, match="No operator found") as caught:
        step.run(kv_cache=torch.zeros(2, 15, 16, 2, 32, dtype=torch.float16))
    assert NAMED not in str(caught.value)


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


def test_the_kernel_of_prefills_is_named_too(make_step):
    step = make_step(XFormersAttentionBackend, PLAIN, [(1, 5), (3, 3)])
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert impl.chosen_kernels == {"paged_triton_splitK_n16", "attncheck's unified_attention"}
