"""What ``xformers_vllm`` declares, and what its constructor takes: vLLM's facts, the doubtful ones included."""

import pytest
import torch

from attncheck.backends import registry
from attncheck.backends.candidates.xformers.backend import library_reasons
from attncheck.backends.candidates.xformers_vllm.backend import XFormersAttentionBackend, XFormersAutoBackend
from attncheck.backends.contract import AttentionCGSupport, AttentionType
from attncheck.errors import BackendLoadError

if reasons := library_reasons("cpu"):
    pytest.skip("; ".join(reasons), allow_module_level=True)

from attncheck.backends.candidates.xformers_vllm.builder import XFORMERS_AVAILABLE
from attncheck.backends.candidates.xformers_vllm.impl import XFormersAttentionImpl


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


@pytest.mark.parametrize("size", [24, 100, 512])
def test_a_head_size_that_is_not_listed_is_refused_with_the_way_out(size):
    XFormersAttentionBackend.validate_head_size(80)
    for refuse in (XFormersAttentionBackend.validate_head_size, lambda size: impl(head_size=size)):
        with pytest.raises(ValueError, match=rf"head size {size} .* XFormersAttention; .*32, 40.*FlexAttention"):
            refuse(size)


def test_what_vllm_s_selection_would_believe_is_declared():
    assert XFormersAttentionBackend.features == {"sliding_window", "logits_soft_cap", "fp8_kv"}
    assert "fp8_e5m2" in XFormersAttentionBackend.supported_kv_cache_dtypes
    assert XFormersAttentionBackend.supported_layouts == ("NHD",)


def test_what_the_constructor_keeps():
    plain = impl()
    assert (plain.scale, plain.num_queries_per_kv, plain.kv_cache_dtype) == (1.0, 4, "auto")
    assert isinstance(plain.scale, float)
    assert (plain.sliding_window, plain.logits_soft_cap) == ((-1, -1), 0)
    assert plain.alibi_slopes is plain.kv_sharing_target_layer_name is None
    assert impl(sliding_window=8).sliding_window == (7, 0)
    assert impl(logits_soft_cap=5.0).logits_soft_cap == 5.0


def test_what_the_constructor_takes_without_a_word():
    assert impl(num_heads=7).num_queries_per_kv == 3
    assert impl(kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    assert impl(sliding_window=0).sliding_window == (-1, 0)


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
