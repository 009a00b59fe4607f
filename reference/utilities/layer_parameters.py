"""What a kernel that plans ahead must know of each layer, and whether all layers of a group agree on it."""

from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from attncheck.errors import ReferenceArgumentError


@dataclass
class PerLayerParameters:
    """The settings of one layer. The last two fields are verdicts on a group, and no part of equality."""

    window_left: int
    """Keys visible to the left of the query's own; -1: all."""
    logits_soft_cap: float | None
    """``None`` and 0.0 are two things."""
    sm_scale: float
    """Multiplies the scores."""
    has_sinks: bool = False
    has_same_window_lefts: bool | None = field(default=None, compare=False)
    has_same_all_params: bool | None = field(default=None, compare=False)


def get_per_layer_parameters(
    vllm_config: Any, layer_names: list[str], cls_: type[Any]
) -> dict[str, PerLayerParameters]:
    """The parameters of every named attention layer, in the order of the names; other layers are left out.

    vllm_config: ``compilation_config.static_forward_context`` maps names to layers. Read from a layer's ``impl``:
        ``scale``, and where there are such ``sliding_window`` (a pair, the left one counts), ``logits_soft_cap`` and
        ``sinks``.
    cls_: what every ``impl`` must be an instance of.

    Raises :class:`~attncheck.errors.ReferenceArgumentError` for an unknown name (skipped by vLLM), an ``impl`` of
    another class or without ``scale``, and a window that is no pair of integers.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        if name not in layers:
            raise ReferenceArgumentError("layer_names", name, "a layer of static_forward_context")
    named = {name: layers[name] for name in layer_names}
    return {name: _parameters(name, layer.impl, cls_) for name, layer in named.items() if hasattr(layer, "impl")}


def infer_global_hyperparameters(per_layer_params: dict[str, PerLayerParameters]) -> PerLayerParameters:
    """The first layer's parameters with the verdicts filled in; a new object (vLLM writes into the caller's).

    ``has_same_window_lefts``: all layers have one ``window_left``; ``has_same_all_params``: they are all equal. Layers
    that differ are no error; no layer is: :class:`~attncheck.errors.ReferenceArgumentError`.
    """
    if not per_layer_params:
        raise ReferenceArgumentError("per_layer_params", per_layer_params, "of at least one layer")
    first, *others = per_layer_params.values()
    return replace(
        first,
        has_same_window_lefts=all(other.window_left == first.window_left for other in others),
        has_same_all_params=all(other == first for other in others),
    )


def _parameters(name: str, impl: Any, cls_: type[Any]) -> PerLayerParameters:
    if not isinstance(impl, cls_):
        raise ReferenceArgumentError(f"{name}.impl", type(impl), f"an instance of {cls_.__name__}")
    if not hasattr(impl, "scale"):
        raise ReferenceArgumentError(f"{name}.impl", type(impl), "one with a scale")
    window = getattr(impl, "sliding_window", None)
    if window is not None and not (
        isinstance(window, (tuple, list)) and len(window) == 2 and all(isinstance(end, Integral) for end in window)
    ):
        raise ReferenceArgumentError(f"{name}.impl.sliding_window", window, "None or a pair of integers (left, right)")
    return PerLayerParameters(
        window_left=-1 if window is None else int(window[0]),
        logits_soft_cap=getattr(impl, "logits_soft_cap", None),
        sm_scale=impl.scale,
        has_sinks=getattr(impl, "sinks", None) is not None,
    )
