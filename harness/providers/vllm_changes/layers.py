"""Departures of vLLM in functions on layers, and in the classes derived for them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from attncheck.reference import PerLayerParameters


def skip_unknown(target: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that ignores names without a layer."""

    def parameters(vllm_config: Any, layer_names: list[str], cls_: type[Any]) -> dict[str, Any]:
        there = vllm_config.compilation_config.static_forward_context
        return target(vllm_config, [name for name in layer_names if name in there], cls_)

    return parameters


def write_into_first(target: Callable[..., PerLayerParameters]) -> Callable[..., PerLayerParameters]:
    """Return a function that writes its verdicts into the caller's first entry, and returns that."""

    def inferred(per_layer_params: dict[str, PerLayerParameters]) -> PerLayerParameters:
        verdicts = target(per_layer_params)
        first = next(iter(per_layer_params.values()))
        first.has_same_window_lefts = verdicts.has_same_window_lefts
        first.has_same_all_params = verdicts.has_same_all_params
        return first

    return inferred


def unbound_builder(target: Callable[..., type[Any]]) -> Callable[..., type[Any]]:
    """Return a function whose classes have a ``get_builder_cls`` that fails on an instance."""

    def derived(name_prefix: str, attention_backend_cls: type[Any], builder_cls: type[Any]) -> type[Any]:
        made = target(name_prefix, attention_backend_cls, builder_cls)
        made.get_builder_cls = lambda: builder_cls
        return made

    return derived


def skips_plain_layers(function: Any) -> bool:
    """Return whether a layer with an ``impl``, but without vLLM's base class, is ignored."""
    layers = {"layer": SimpleNamespace(impl=SimpleNamespace(scale=1.0))}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return not function(config, ["layer"], SimpleNamespace)
