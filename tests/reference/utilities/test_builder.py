"""The common metadata, the builder base and classes made from a backend; layouts, layer parameters, constants."""

import copy
from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common_batches import refused

from attncheck import reference
from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    PerLayerParameters,
    get_kv_cache_layout,
    get_per_layer_parameters,
    infer_global_hyperparameters,
    is_valid_kv_cache_layout,
    set_kv_cache_layout,
    subclass_attention_backend,
    subclass_attention_metadata,
)
from attncheck.reference.utilities import builder


class Echo(AttentionMetadataBuilder[tuple]):
    def __init__(self, *args):
        super().__init__(*args)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_prefix_len, common_attn_metadata, fast_build


def echo_of(config=None):
    return Echo("spec", ["layer.0"], config, torch.device("cpu"))


def test_builder_defaults():
    class Steady(Echo):
        cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    assert AttentionMetadataBuilder.get_cudagraph_support(object(), object()) is AttentionCGSupport.NEVER
    assert Steady.get_cudagraph_support(vllm_config=None, kv_cache_spec=None) is AttentionCGSupport.UNIFORM_BATCH
    assert AttentionMetadataBuilder.reorder_batch_threshold is None
    assert AttentionMetadataBuilder.__abstractmethods__ == {"__init__", "build"}
    assert echo_of().build_for_cudagraph_capture("m") == (0, "m", False)
    assert echo_of().build_for_drafting("m", 3) == (0, "m", True)
    assert echo_of().use_cascade_attention(512, np.array([1, 1]), 8, 2, False, False, False, 108) is False


@pytest.mark.parametrize(
    ("arguments", "speculative", "threshold"),
    [
        ((), None, 1),
        ((1, True), SimpleNamespace(num_speculative_tokens=3), 4),
        ((2, False), SimpleNamespace(num_speculative_tokens=7), 2),
        ((3, False), ..., 3),  # the config is not read
        ((1, True), SimpleNamespace(num_speculative_tokens=None), 1),
        ((5, True), None, 5),
    ],
)
def test_reorder_threshold(arguments, speculative, threshold):
    echo = echo_of(object() if speculative is ... else SimpleNamespace(speculative_config=speculative))
    echo._init_reorder_batch_threshold(*arguments)
    assert echo.reorder_batch_threshold == threshold
    assert Echo.reorder_batch_threshold is None


class Impl:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class Special(Impl):
    """A subclass of the requested class."""


def config(**impls):
    layers = {name: SimpleNamespace(impl=impl) for name, impl in impls.items()} | {"n": SimpleNamespace()}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_parameters_of_the_named_layers_in_their_order():
    vllm_config = config(
        a=Special(sliding_window=(127, 0), logits_soft_cap=30.0, scale=0.125, sinks=torch.zeros(2)),
        b=Impl(scale=0.5),
        c=Impl(sliding_window=(-1, -1), logits_soft_cap=None, sinks=None, scale=0.5),
        d=Impl(sliding_window=[0, -1], scale=0.5),
        e=Impl(sliding_window=None, scale=0.5),
    )
    names = ["c", "n", "a", "b", "d", "e"]
    found = get_per_layer_parameters(vllm_config, names, Impl)
    assert list(found.items()) == [
        ("c", PerLayerParameters(-1, None, 0.5, has_sinks=False)),
        ("a", PerLayerParameters(127, 30.0, 0.125, has_sinks=True)),
        ("b", PerLayerParameters(-1, None, 0.5, has_sinks=False)),
        ("d", PerLayerParameters(0, None, 0.5, has_sinks=False)),
        ("e", PerLayerParameters(-1, None, 0.5, has_sinks=False)),
    ]
    assert {(p.has_same_window_lefts, p.has_same_all_params) for p in found.values()} == {(None, None)}
    assert names == ["c", "n", "a", "b", "d", "e"]
    assert get_per_layer_parameters(vllm_config, [], Impl) == {}


@pytest.mark.parametrize(
    ("impl", "name", "why"),
    [
        (SimpleNamespace(scale=1.0), "a.impl", "instance of Impl"),
        (Impl(scale=1.0, sliding_window=128), "a.impl.sliding_window", "pair"),
        (Impl(scale=1.0, sliding_window=(1, 2, 3)), "a.impl.sliding_window", "pair"),
        (Impl(scale=1.0, sliding_window=(1.5, 0)), "a.impl.sliding_window", "integers"),
    ],
)
def test_impls_that_cannot_be_read_are_refused(impl, name, why):
    with pytest.raises(ReferenceArgumentError, match=why) as refusal:
        get_per_layer_parameters(config(a=impl), ["a"], Impl)
    assert refusal.value.argument == name


def test_unknown_layers_and_none_are_refused():
    with pytest.raises(ReferenceArgumentError, match="layer_names = 'z'"):
        get_per_layer_parameters(config(), ["n", "z"], Impl)
    assert refused(infer_global_hyperparameters, {}) == "per_layer_params"


@pytest.mark.parametrize(
    ("entries", "same_window", "same_all"),
    [
        ([(127, None, 0.5), (127, None, 0.5)], True, True),
        ([(127, None, 0.5), (127, 30.0, 0.5)], True, False),
        ([(127, None, 0.5), (127, None, 0.25)], True, False),
        ([(-1, None, 0.5, True), (127, None, 0.5)], False, False),
        ([(1, None, 0.5), (1, None, 0.5), (2, None, 0.5)], False, False),
        ([(-1, 30.0, 0.5, True)], True, True),
    ],
)
def test_the_first_layer_decides_for_all_with_a_verdict(entries, same_window, same_all):
    layers = {str(i): PerLayerParameters(*entry) for i, entry in enumerate(entries)}
    before = copy.deepcopy(layers)
    result = infer_global_hyperparameters(layers)
    assert result == PerLayerParameters(*entries[0])
    assert (result.has_same_window_lefts, result.has_same_all_params) == (same_window, same_all)
    assert result is not layers["0"]
    assert layers == before
    assert all(p.has_same_window_lefts is p.has_same_all_params is None for p in layers.values())


@pytest.fixture
def fresh(monkeypatch):
    """Start as a process that has not read the layout yet."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(builder, "_KV_CACHE_LAYOUT_OVERRIDE", None)
    get_kv_cache_layout.cache_clear()
    yield
    get_kv_cache_layout.cache_clear()


def test_two_layouts_are_valid_to_the_letter():
    values = ("NHD", "HND", "nhd", "", "LBNHC", " NHD")
    assert [is_valid_kv_cache_layout(value) for value in values] == [True, True, False, False, False, False]


@pytest.mark.usefixtures("fresh")
def test_the_first_answer_stays_and_an_override_hides_the_environment(monkeypatch):
    assert get_kv_cache_layout() == "NHD"
    get_kv_cache_layout.cache_clear()
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert get_kv_cache_layout() == "HND"
    assert set_kv_cache_layout("NHD") is None
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "nhd")
    assert get_kv_cache_layout() == "HND"
    get_kv_cache_layout.cache_clear()
    assert get_kv_cache_layout() == "NHD"
    set_kv_cache_layout(None)
    get_kv_cache_layout.cache_clear()
    with pytest.raises(ReferenceArgumentError, match="VLLM_KV_CACHE_LAYOUT = 'nhd'"):
        get_kv_cache_layout()


@pytest.mark.parametrize("value", ["nhd", "", 3])
@pytest.mark.usefixtures("fresh")
def test_an_unknown_override_is_refused_and_not_stored(value):
    set_kv_cache_layout("HND")
    with pytest.raises(ReferenceArgumentError, match="cache_layout"):
        set_kv_cache_layout(value)
    assert reference._KV_CACHE_LAYOUT_OVERRIDE == "HND"


class Bk:
    word = "inherited"

    get_builder_cls = staticmethod(lambda: int)


@dataclass
class Meta:
    a: int
    b: int = 3


def test_a_backend_with_another_builder():
    local = subclass_attention_backend("Local", Bk, str)
    assert (local.__name__, local.__bases__) == ("LocalBk", (Bk,))
    assert local.get_builder_cls() is local().get_builder_cls() is str
    assert Bk.get_builder_cls() is int
    assert local.word == "inherited"
    assert local.__module__ == __name__
    assert subclass_attention_backend("Local", Bk, str) is not local


def test_metadata_with_more_fields():
    given = list(KV_SHARING_FAST_PREFILL_METADATA_FIELDS)
    fast = subclass_attention_metadata("Fast", Meta, KV_SHARING_FAST_PREFILL_METADATA_FIELDS)
    assert given == KV_SHARING_FAST_PREFILL_METADATA_FIELDS
    assert (fast.__name__, fast.__bases__, fast.__module__) == ("FastMeta", (Meta,), __name__)
    assert [field.name for field in fields(fast)] == ["a", "b", "logits_indices_padded", "num_logits_indices"]
    values = [
        (m.a, m.b, m.logits_indices_padded, m.num_logits_indices)
        for m in (fast(1), fast(1, 2, num_logits_indices=4), fast(1, 2, "x", 5))
    ]
    assert values == [(1, 3, None, 0), (1, 2, None, 4), (1, 2, "x", 5)]
    assert fast(1) == fast(1, 3)
    assert [field.name for field in fields(Meta)] == ["a", "b"]


def test_what_cannot_be_extended_is_refused():
    for kind in (int, Meta(1), None):
        assert refused(subclass_attention_metadata, "Fast", kind, []) == "metadata_cls"
    with pytest.raises(TypeError):
        subclass_attention_metadata("Fast", Meta, [("c", int)])


def test_graph_support_has_four_unordered_levels():
    assert {level.name: level.value for level in AttentionCGSupport} == {
        "NEVER": 0,
        "UNIFORM_SINGLE_TOKEN_DECODE": 1,
        "UNIFORM_BATCH": 2,
        "ALWAYS": 3,
    }
    with pytest.raises(TypeError):
        _ = AttentionCGSupport.NEVER < AttentionCGSupport.ALWAYS
