"""What a plan step needs of each layer, and whether layers agree."""

import copy
from types import SimpleNamespace

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import PerLayerParameters, get_per_layer_parameters, infer_global_hyperparameters


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
    )
    names = ["c", "n", "a", "b"]
    found = get_per_layer_parameters(vllm_config, names, Impl)
    assert list(found.items()) == [
        ("c", PerLayerParameters(-1, None, 0.5, has_sinks=False)),
        ("a", PerLayerParameters(127, 30.0, 0.125, has_sinks=True)),
        ("b", PerLayerParameters(-1, None, 0.5, has_sinks=False)),
    ]
    assert {(p.has_same_window_lefts, p.has_same_all_params) for p in found.values()} == {(None, None)}
    assert names == ["c", "n", "a", "b"]
    assert get_per_layer_parameters(vllm_config, [], Impl) == {}


@pytest.mark.parametrize(("window", "left"), [((0, 0), 0), ([5, -1], 5), (None, -1)])
def test_the_left_window_counts(window, left):
    found = get_per_layer_parameters(config(a=Impl(scale=1.0, sliding_window=window)), ["a"], Impl)
    assert found["a"].window_left == left


@pytest.mark.parametrize(
    ("impl", "name", "why"),
    [
        (SimpleNamespace(scale=1.0), "a.impl", "instance of Impl"),
        (Impl(), "a.impl", "scale"),
        (Impl(scale=1.0, sliding_window=128), "a.impl.sliding_window", "pair"),
        (Impl(scale=1.0, sliding_window=(1, 2, 3)), "a.impl.sliding_window", "pair"),
        (Impl(scale=1.0, sliding_window=(None, 0)), "a.impl.sliding_window", "integers"),
        (Impl(scale=1.0, sliding_window=(1.5, 0)), "a.impl.sliding_window", "integers"),
    ],
)
def test_impls_that_cannot_be_read_are_refused(impl, name, why):
    with pytest.raises(ReferenceArgumentError, match=why) as refusal:
        get_per_layer_parameters(config(a=impl), ["a"], Impl)
    assert refusal.value.argument == name


def test_an_unknown_layer_is_refused():
    with pytest.raises(ReferenceArgumentError, match="layer_names = 'z'"):
        get_per_layer_parameters(config(), ["n", "z"], Impl)


@pytest.mark.parametrize(
    ("entries", "same_window", "same_all"),
    [
        ([(127, None, 0.5), (127, None, 0.5)], True, True),
        ([(127, None, 0.5), (127, 30.0, 0.5)], True, False),
        ([(127, None, 0.5), (127, None, 0.25)], True, False),
        ([(127, None, 0.5), (127, None, 0.5, True)], True, False),
        ([(127, None, 0.5), (127, 0.0, 0.5)], True, False),
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


def test_no_layer_is_refused():
    with pytest.raises(ReferenceArgumentError, match="per_layer_params"):
        infer_global_hyperparameters({})
