"""The common metadata and the builder base behave as vLLM's."""

from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attncheck.reference import AttentionCGSupport, AttentionMetadataBuilder, CommonAttentionMetadata

FIELDS = [
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "seq_lens_cpu",
    "num_computed_tokens_cpu",
    "num_reqs",
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "block_table_tensor",
    "slot_mapping",
    "causal",
    "logits_indices_padded",
    "num_logits_indices",
    "encoder_seq_lens",
    "dcp_local_seq_lens",
]


def test_sixteen_fields_in_order_stored_as_given():
    assert [f.name for f in fields(CommonAttentionMetadata)] == FIELDS
    values = [object() for _ in range(11)]
    batch = CommonAttentionMetadata(*values)
    assert [getattr(batch, name) for name in FIELDS[:11]] == values
    assert batch.causal is True
    assert [getattr(batch, name) for name in FIELDS[12:]] == [None] * 4
    assert CommonAttentionMetadata(*values, False).causal is False
    batch.num_reqs = 7
    assert batch.num_reqs == 7


class Echo(AttentionMetadataBuilder[tuple]):
    def __init__(self, *args):
        super().__init__(*args)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_prefix_len, common_attn_metadata, fast_build


def builder(config=None):
    return Echo("spec", ["layer.0"], config, torch.device("cpu"))


def test_builder_stores_its_arguments_as_they_are():
    names, config, device = ["a", "b"], object(), torch.device("cpu")
    echo = Echo("spec", names, config, device)
    assert (echo.kv_cache_spec, echo.device) == ("spec", device)
    assert echo.layer_names is names
    assert echo.vllm_config is config


def test_builder_defaults():
    assert AttentionMetadataBuilder.cudagraph_support is AttentionCGSupport.NEVER
    assert AttentionMetadataBuilder.reorder_batch_threshold is None
    assert AttentionMetadataBuilder.__abstractmethods__ == {"__init__", "build"}
    assert builder().build_for_cudagraph_capture("m") == (0, "m", False)
    assert builder().build_for_drafting("m", 3) == (0, "m", True)
    assert builder().use_cascade_attention(512, np.array([1, 1]), 8, 2, False, False, False, 108) is False


def test_a_level_is_that_of_the_class_unless_a_configuration_has_its_own():
    class Steady(Echo):
        cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    class Choosy(Steady):
        @classmethod
        def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
            level = super().get_cudagraph_support(vllm_config, kv_cache_spec)
            return level if vllm_config == "small" and kv_cache_spec == "pages" else AttentionCGSupport.NEVER

    assert AttentionMetadataBuilder.get_cudagraph_support(object(), object()) is AttentionCGSupport.NEVER
    assert Steady.get_cudagraph_support(vllm_config=None, kv_cache_spec=None) is AttentionCGSupport.UNIFORM_BATCH
    assert Choosy.get_cudagraph_support("small", "pages") is AttentionCGSupport.UNIFORM_BATCH
    assert Choosy.get_cudagraph_support("large", "pages") is AttentionCGSupport.NEVER


def test_capture_leaves_fast_build_alone():
    class Strict(Echo):
        def build(self, **keywords):
            return keywords

    strict = Strict("spec", [], None, torch.device("cpu"))
    assert strict.build_for_cudagraph_capture("m") == {"common_prefix_len": 0, "common_attn_metadata": "m"}
    assert strict.build_for_drafting("m", draft_index=1) == {
        "common_prefix_len": 0,
        "common_attn_metadata": "m",
        "fast_build": True,
    }


def test_builders_that_lack_a_method_cannot_be_made():
    class NoBuild(AttentionMetadataBuilder[int]):
        def __init__(self):
            pass

    class NoInit(AttentionMetadataBuilder[int]):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            return 1

    for kind in (NoBuild, NoInit, AttentionMetadataBuilder):
        with pytest.raises(TypeError, match="abstract"):
            kind()


@pytest.mark.parametrize(
    ("arguments", "speculative", "threshold"),
    [
        ((), None, 1),
        ((1, True), SimpleNamespace(num_speculative_tokens=3), 4),
        ((4, True), SimpleNamespace(num_speculative_tokens=1), 4),
        ((2, False), SimpleNamespace(num_speculative_tokens=7), 2),
        ((None, True), SimpleNamespace(num_speculative_tokens=3), None),
        ((1, True), SimpleNamespace(num_speculative_tokens=None), 1),
        ((1, True), SimpleNamespace(num_speculative_tokens=0), 1),
        ((5, True), None, 5),
    ],
)
def test_reorder_threshold(arguments, speculative, threshold):
    echo = builder(SimpleNamespace(speculative_config=speculative))
    echo._init_reorder_batch_threshold(*arguments)
    assert echo.reorder_batch_threshold == threshold
    assert Echo.reorder_batch_threshold is None


def test_reorder_threshold_reads_the_config_only_where_it_matters():
    for arguments in ((None, True), (3, False), ()):
        builder(config=object())._init_reorder_batch_threshold(*arguments)
    with pytest.raises(AttributeError):
        builder(config=object())._init_reorder_batch_threshold(3, True)
