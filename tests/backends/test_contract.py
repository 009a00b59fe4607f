"""The defaults of a candidate, and the values of the contract."""

import pytest
import torch

from attncheck.backends.contract import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    Conventions,
    KVCacheSpec,
    MultipleOf,
    QuantKey,
)
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec


class Impl(AttentionImpl):
    def __init__(self, *args, **kwargs):
        self.args = args

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, **scales):
        return output


class Builder(AttentionMetadataBuilder):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata


class Minimal(AttentionBackend):
    """The three members that have no default, and a shape of its own."""

    get_name = staticmethod(lambda: "MINIMAL")
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def test_defaults_of_a_minimal_backend():
    assert Minimal.accept_output_buffer is False
    assert Minimal.forward_includes_kv_cache_update is True
    assert Minimal.features == frozenset()
    assert Minimal.conventions == Conventions()
    assert Minimal.supported_kv_cache_dtypes == ("auto",)
    assert Minimal.supported_layouts == ("NHD",)
    assert [str(kind) for kind in Minimal.supported_attn_types] == ["decoder"]
    assert Minimal.get_supported_dtypes() == [torch.float16, torch.bfloat16]
    assert Minimal.get_supported_head_sizes() == []
    assert Minimal.get_supported_kernel_block_sizes() == [MultipleOf(1)]
    assert (Minimal.functions(), Minimal.version()) == ({}, "")
    impl = Impl(8, 64, 0.125)
    assert impl.fused_output_quant_supported(QuantKey(torch.float8_e4m3fn, None)) is False
    with pytest.raises(NotImplementedError, match="Impl writes the cache in forward"):
        impl.do_kv_cache_update(None, None, None, None, None)
    assert Builder.cudagraph_support is AttentionCGSupport.NEVER
    assert Builder.reorder_batch_threshold is None
    spec = KVCacheSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    assert (spec.head_size_v, spec.sliding_window, spec.attention_chunk_size) == (64, None, None)


def test_what_a_minimal_backend_supports():
    layer, batch = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64), BatchSpec(requests=(RequestSpec(query_len=3),))
    assert Minimal.unsupported_reasons(layer, CacheSpec(), batch) == []
    assert Minimal.kv_cache_codec(layer, CacheSpec()).packing == "split_first"
    assert Minimal.unavailable_reasons("cpu") == Minimal.unavailable_reasons("cuda:3") == []
    (reason,) = Minimal.unavailable_reasons("mps")
    assert "mps" in reason
    assert "cpu, cuda" in reason
    narrow = type("Narrow", (Minimal,), {"get_supported_head_sizes": classmethod(lambda cls: [64, 128])})
    narrow.validate_head_size(64)
    Minimal.validate_head_size(7)
    with pytest.raises(ValueError, match=r"head size 80 is not supported by MINIMAL; supported: \[64, 128\]"):
        narrow.validate_head_size(80)


def test_declarations_in_the_form_of_vllm_are_read():
    class Theirs(AttentionBackend):
        supported_dtypes = (torch.float32,)
        supports_sink = supports_non_causal = classmethod(lambda cls: True)
        supports_attn_type = classmethod(lambda cls, kind: kind in ("decoder", "encoder_only"))
        supports_kv_cache_dtype = classmethod(lambda cls, name: name in (None, "auto", "fp8"))

    class Narrower(Theirs):
        supports_sink = classmethod(lambda cls: False)

    class TheirBuilder(Builder):
        _cudagraph_support = AttentionCGSupport.ALWAYS

    assert Theirs.get_supported_dtypes() == [torch.float32]
    assert Theirs.features == {"sinks", "non_causal", "fp8_kv"}
    assert Narrower.features == {"non_causal", "fp8_kv"}
    assert [str(kind) for kind in Theirs.supported_attn_types] == ["decoder", "encoder_only"]
    assert Theirs.supported_kv_cache_dtypes == ("auto", "fp8")
    assert Theirs.get_kv_cache_shape(7, 16, 2, 64) == (7, 2, 16, 128)
    assert TheirBuilder.cudagraph_support is AttentionCGSupport.ALWAYS
    assert (AttentionBackend.features, Builder.cudagraph_support) == (frozenset(), AttentionCGSupport.NEVER)


def test_conventions_and_multiples_are_closed():
    wrong = [("lse_base", "10"), ("alibi_reference", "key"), ("padded_rows", "nan")]
    for field, value in [*wrong, ("pad_seq_len", -1), ("pad_seq_len", True), ("pad_seq_len", 1.5)]:
        with pytest.raises(ValueError, match=f"{field} = {value!r}"):
            Conventions(**{field: value})
    with pytest.raises(ValueError, match="base = 0: must be at least 1"):
        MultipleOf(0)
