"""Drives the metadata builders of vLLM's classes for layers with a state, such as ``vllm:MAMBA2``.

Model layers call their kernels, with weights and states that no case describes. The builder gets what vLLM's runner
passes: a spec of the state, and for each request the page that holds its state.
"""

from typing import Any, ClassVar

import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.builder import VLLMBuilder
from attncheck.backends.contract import AttentionBackend, AttentionImpl, CommonAttentionMetadata, KVCacheSpec
from attncheck.backends.dtypes import DTYPES
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec


class StateSpaceBuilder(VLLMBuilder):
    """The builder of :attr:`their_backend`."""

    @classmethod
    def spec_of(cls, layer: Any, config: Any, spec: KVCacheSpec) -> Any:
        """Return vLLM's spec of a state with one element."""
        specs = package.module("vllm.v1.kv_cache_interface")
        return specs.MambaSpec(block_size=spec.block_size, shapes=((1,),), dtypes=(spec.dtype,))

    def _translated(self, metadata: CommonAttentionMetadata) -> Any:
        common = super()._translated(metadata)
        common.block_table_tensor = common.block_table_tensor[:, :1]
        return common


class _NoImpl(AttentionImpl[Any]):
    """Placeholder: there is no impl, since the layers of models call the kernels."""

    def __init__(self, *_arguments: object, **_keywords: object) -> None:
        raise NotImplementedError("vLLM's layers with a state call their kernels themselves, and not by an impl")

    def forward(self, *_arguments: object, **_keywords: object) -> torch.Tensor:
        """See the contract."""
        raise NotImplementedError


class StateSpaceBackend(AttentionBackend):
    """A class of vLLM's for layers with a state; :func:`state_space_backend` creates the one that can be driven."""

    builder_only = True
    supported_dtypes = tuple(DTYPES.values())
    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """See the contract."""
        raise NotImplementedError("a layer with a state has no cache of keys and values")

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; only the batch of a case is used."""
        reasons = super().unsupported_reasons(layer, cache, batch)
        others = [] if batch.path.name == "paged" else [f"path {batch.path.name}: its builder is given plain steps"]
        return [*reasons, *others]

    @classmethod
    def version(cls) -> str:
        """Return vLLM's version."""
        return package.version()


def state_space_backend(theirs: type[Any]) -> type[StateSpaceBackend]:
    """Return the candidate for a class of vLLM's for layers with a state."""
    parts = {"their_backend": theirs, "__module__": __name__}
    builder = type(f"{theirs.__name__}Builder", (StateSpaceBuilder,), parts)
    members = {
        "supported_layouts": ("NHD", "HND"),
        "supported_devices": (package.platform().device_type,),
        "get_name": staticmethod(theirs.get_name),
        "get_impl_cls": staticmethod(lambda: _NoImpl),
        "get_builder_cls": staticmethod(lambda: builder),
    }
    made = type(theirs.__name__, (StateSpaceBackend,), parts | members)
    made.__doc__ = f"vLLM's {theirs.__module__}.{theirs.__qualname__}."
    return made
