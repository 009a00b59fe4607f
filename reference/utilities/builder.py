"""What a backend computes from the common metadata once per step, and the settings it depends on.

The base class of metadata builders, parameters that kernels plan with, the memory order of a cache's axes, and classes
derived from a backend or its metadata class. The behaviour is vLLM's.
"""

import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, is_dataclass, make_dataclass, replace
from functools import lru_cache
from numbers import Integral
from types import new_class
from typing import Any, ClassVar, Generic, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference.spec import AttentionCGSupport
from attncheck.reference.step_spec import Layout
from attncheck.reference.utilities.metadata import CommonAttentionMetadata

M = TypeVar("M")
"""The metadata type a builder produces."""


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Converts one step's common metadata into the metadata of a backend's ``forward``.

    One builder serves one group of layers that share a KV-cache spec. ``__init__`` (whose body subclasses call) and
    ``build`` are abstract.
    """

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    """The CUDA-graph support of the backend; cascade attention is never in a graph. If it depends on the configuration,
    :meth:`get_cudagraph_support` returns it, and this is the level for an unknown configuration.
    """

    reorder_batch_threshold: int | None = None
    """The batch must have requests of at most this query length first; ``None`` if its order does not matter."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Read the level from ``_cudagraph_support`` as well, which is its name in vLLM."""
        super().__init_subclass__(**keywords)
        if "_cudagraph_support" in vars(cls):
            cls.cudagraph_support = vars(cls)["_cudagraph_support"]

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the level for layers of this config and spec; by default :attr:`cudagraph_support` for all.

        Override it if a level holds for some configurations only. Callers use it before they create a builder.
        """
        return cls.cudagraph_support

    @abstractmethod
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Store the four arguments unchanged (the list is not copied). Any object is accepted."""
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    def _init_reorder_batch_threshold(
        self, reorder_batch_threshold: int | None = 1, supports_spec_as_decode: bool = False
    ) -> None:
        """Set the instance's ``reorder_batch_threshold``; the class attribute stays.

        A backend that decodes speculated tokens (``supports_spec_as_decode``) treats requests of up to 1 +
        ``num_speculative_tokens`` rows as decodes, so the threshold is raised to that. ``None`` stays ``None``. The
        config is read only for a threshold with the flag set.
        """
        threshold = reorder_batch_threshold
        if threshold is not None and supports_spec_as_decode:
            speculative = self.vllm_config.speculative_config
            if speculative is not None and speculative.num_speculative_tokens is not None:
                threshold = max(threshold, 1 + speculative.num_speculative_tokens)
        self.reorder_batch_threshold = threshold

    @abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """Return the backend's metadata for this step.

        ``common_prefix_len``: length of the prefix that all requests share, 0 for none. ``fast_build``: prefer a quick
        build over fast execution, because few layers or iterations use the result, as in drafting. Must not change the
        common metadata, because several builders get the same object.
        """
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Return the metadata for a graph capture. An override must end in ``self.build`` or in this method."""
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> M:
        """Return the metadata for drafting speculated tokens.

        ``draft_index`` is for overrides: the position in a chain of drafts, or the level in a tree of drafts.
        """
        return self.build(common_prefix_len=0, common_attn_metadata=common_attn_metadata, fast_build=True)

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: npt.NDArray[np.int32],
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
    ) -> bool:
        """Return whether the shared prefix should be computed once for all requests; False unless overridden."""
        return False


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

    vllm_config: ``compilation_config.static_forward_context`` maps names to layers. A layer's ``impl`` has ``scale``.
        It may have ``sliding_window``, ``logits_soft_cap`` and ``sinks``. The first number of the window counts.
    cls_: the class of the layers' impls.

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


logger = logging.getLogger(__name__)

KVCacheLayoutType = Layout
"""``"NHD"`` or ``"HND"``."""

_KV_CACHE_LAYOUT_OVERRIDE: KVCacheLayoutType | None = None

_VARIABLE = "VLLM_KV_CACHE_LAYOUT"


def is_valid_kv_cache_layout(value: str) -> bool:
    """Return whether the value is exactly ``"NHD"`` or ``"HND"``."""
    return value in get_args(KVCacheLayoutType)


def set_kv_cache_layout(cache_layout: KVCacheLayoutType | None) -> None:
    """Store an override of the layout; ``None`` removes it.

    A value already returned by :func:`get_kv_cache_layout` stays cached until its ``cache_clear()``. Raise
    :class:`~attncheck.errors.ReferenceArgumentError` for another layout.
    """
    global _KV_CACHE_LAYOUT_OVERRIDE  # noqa: PLW0603  # vLLM's callers set the layout of the process
    if cache_layout is not None:
        _require_layout("cache_layout", cache_layout)
    _KV_CACHE_LAYOUT_OVERRIDE = cache_layout
    logger.info("KV cache layout override: %s", cache_layout)


@lru_cache
def get_kv_cache_layout() -> str:
    """Return the override, else the environment's ``VLLM_KV_CACHE_LAYOUT``, else ``"NHD"``.

    The first result is cached until ``get_kv_cache_layout.cache_clear()``. Raise
    :class:`~attncheck.errors.ReferenceArgumentError` for another value of the environment variable, also an empty one.
    An error is not cached, and an override makes the variable unused.
    """
    if _KV_CACHE_LAYOUT_OVERRIDE is not None:
        return _KV_CACHE_LAYOUT_OVERRIDE
    layout = os.environ.get(_VARIABLE)
    if layout is None:
        return "NHD"
    _require_layout(_VARIABLE, layout)
    return layout


def _require_layout(name: str, value: str) -> None:
    if not is_valid_kv_cache_layout(value):
        raise ReferenceArgumentError(name, value, " or ".join(get_args(KVCacheLayoutType)))


def subclass_attention_backend(
    name_prefix: str, attention_backend_cls: type[Any], builder_cls: type[AttentionMetadataBuilder[M]]
) -> type[Any]:
    """Return a new subclass, named with ``name_prefix``, whose ``get_builder_cls()`` returns ``builder_cls``.

    ``get_builder_cls`` is static and can be called on the class or an instance (in vLLM on the class only). Every call
    creates another class. Its ``__module__`` is that of the original.
    """

    def get_builder_cls() -> type[AttentionMetadataBuilder[M]]:
        return builder_cls

    name = name_prefix + attention_backend_cls.__name__
    members = {"get_builder_cls": staticmethod(get_builder_cls), "__module__": attention_backend_cls.__module__}
    return new_class(name, (attention_backend_cls,), exec_body=lambda body: body.update(members))


def subclass_attention_metadata(name_prefix: str, metadata_cls: Any, fields: list[tuple[str, Any, Any]]) -> type[Any]:
    """Return a new dataclass, named with ``name_prefix``, with the fields of ``metadata_cls`` and then the given ones.

    fields: ``(name, type, default)``. A field whose name ``metadata_cls`` already has is replaced in place. The
        ``__module__`` of the class is that of the original.

    Raise :class:`~attncheck.errors.ReferenceArgumentError` if ``metadata_cls`` is not a dataclass. Fields that a
    dataclass cannot have (one without default after one with) raise its own ``TypeError``.
    """
    if not (isinstance(metadata_cls, type) and is_dataclass(metadata_cls)):
        raise ReferenceArgumentError("metadata_cls", metadata_cls, "a dataclass")
    made = make_dataclass(name_prefix + metadata_cls.__name__, fields, bases=(metadata_cls,))
    made.__module__ = metadata_cls.__module__
    return made
