"""The right answers: a pure-torch ground truth of every attention path, float64 unless told otherwise.

Everything public is importable from here and loaded on first use (PEP 562), so that a module which wants only the
shared words of ``attncheck.reference.spec`` loads no torch.

>>> from attncheck.reference import AttentionParams, paged_attention
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attncheck.reference.builder import AttentionMetadataBuilder
    from attncheck.reference.metadata import CommonAttentionMetadata
    from attncheck.reference.paged import paged_attention
    from attncheck.reference.params import AttentionParams, Precision, layer_params, visible, window_pair
    from attncheck.reference.spec import AttentionCGSupport, AttentionType, BatchSpec, CacheSpec, LayerSpec
    from attncheck.reference.varlen import varlen_attention

_HOME = {
    "AttentionCGSupport": "spec",
    "AttentionMetadataBuilder": "builder",
    "AttentionParams": "params",
    "AttentionType": "spec",
    "BatchSpec": "spec",
    "CacheSpec": "spec",
    "CommonAttentionMetadata": "metadata",
    "LayerSpec": "spec",
    "Precision": "params",
    "layer_params": "params",
    "paged_attention": "paged",
    "varlen_attention": "varlen",
    "visible": "params",
    "window_pair": "params",
}
"""Where each public name lives. A test holds this table, the imports above and the modules together."""

__all__ = [
    "AttentionCGSupport",
    "AttentionMetadataBuilder",
    "AttentionParams",
    "AttentionType",
    "BatchSpec",
    "CacheSpec",
    "CommonAttentionMetadata",
    "LayerSpec",
    "Precision",
    "layer_params",
    "paged_attention",
    "varlen_attention",
    "visible",
    "window_pair",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
