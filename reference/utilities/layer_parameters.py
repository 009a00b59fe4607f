"""Per-layer parameters for kernels that plan ahead, and whether all layers of a group share them."""

from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from attncheck.errors import ReferenceArgumentError


@dataclass
class PerLayerParameters:
    """The parameters of one layer. The last two fields describe a group of layers and do not take part in equality."""

    window_left: int
    """Keys visible to the left of the query's own key; -1 for all."""
    logits_soft_cap: float | None
    """``None`` and 0.0 are different values."""
    sm_scale: float
    """Factor on the scores."""
    has_sinks: bool = False
    has_same_window_lefts: bool | None = field(default=None, compare=False)
    has_same_all_params: bool | None = field(default=None, compare=False)


def get_per_layer_parameters(
    vllm_config: Any, layer_names: list[str], cls_: type[Any]
) -> dict[str, PerLayerParameters]:
    """Return the parameters of every named attention layer, in the order of the names; other layers are skipped.

    vllm_config: ``compilation_config.static_forward_context`` maps names to layers. Of a layer's ``impl``, ``scale`` is
        read, and if present ``sliding_window`` (a pair, of which the left one counts), ``logits_soft_cap`` and
        ``sinks``.
    cls_: the class of which every ``impl`` must be an instance.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` for an unknown name (vLLM skips it), an ``impl`` of another
    class or without ``scale``, or a window that is not a pair of integers.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for name in layer_names:
        if name not in layers:
            raise ReferenceArgumentError("layer_names", name, "a layer of static_forward_context")
    named = {name: layers[name] for name in layer_names}
    return {name: _parameters(name, layer.impl, cls_) for name, layer in named.items() if hasattr(layer, "impl")}


def infer_global_hyperparameters(per_layer_params: dict[str, PerLayerParameters]) -> PerLayerParameters:
    """Return the first layer's parameters with the group fields set, as a new object (vLLM writes into the caller's).

    ``has_same_window_lefts``: all layers have the same ``window_left``. ``has_same_all_params``: all layers are equal.
    Layers may differ. Raise :class:`~attncheck.errors.ReferenceArgumentError` if there is no layer.
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
