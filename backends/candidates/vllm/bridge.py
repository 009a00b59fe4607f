"""``vllm:CPU_ATTN`` and its like: a class of vLLM's as a candidate, examined by what vLLM says of it.

Must not know: how vLLM's objects are made, what a case asks.
"""

from typing import Any, ClassVar

import torch

from attncheck.backends.caches.codecs import KVCacheCodec
from attncheck.backends.candidates.vllm import availability, interpreted, package
from attncheck.backends.candidates.vllm.builder import VLLMBuilder
from attncheck.backends.candidates.vllm.cache import cache_shape, kernel_block_sizes, layouts, stride_order
from attncheck.backends.candidates.vllm.claims import Claims, claims_of
from attncheck.backends.candidates.vllm.configuration import configuration_problems
from attncheck.backends.candidates.vllm.impl import VLLMImpl
from attncheck.backends.candidates.vllm.selection import select
from attncheck.backends.candidates.vllm.writer import missing_operators
from attncheck.backends.contract import AttentionBackend, MultipleOf
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec


class VLLMBackend(AttentionBackend):
    """A backend of the installed vLLM; :meth:`from_argument` makes the class that can be driven."""

    accept_output_buffer = True
    their_backend: ClassVar[type[Any]]
    """vLLM's class."""

    claims: ClassVar[Claims]

    @classmethod
    def from_argument(cls, argument: str) -> "type[VLLMBackend]":
        """The candidate for a name of vLLM's, for ``module:Class``, or for ``path/to/file.py:Class``.

        Raises:
            ImportError: vLLM, or a library that the backend needs, cannot be imported.
            ValueError: no such class, or one that the bridge cannot drive.
        """
        theirs = select(argument)
        claims = claims_of(theirs)
        parts = {"their_backend": theirs, "__module__": __name__}
        impl = type(f"{theirs.__name__}Impl", (VLLMImpl,), parts)
        builder = type(f"{theirs.__name__}Builder", (VLLMBuilder,), parts)
        declared = {
            "claims": claims,
            "forward_includes_kv_cache_update": getattr(theirs, "forward_includes_kv_cache_update", True),
            "features": claims.features,
            "supported_kv_cache_dtypes": claims.kv_cache_dtypes,
            "supported_layouts": layouts(theirs),
            "supported_attn_types": claims.attn_types,
            "supported_devices": (package.platform().device_type,),
            "get_name": staticmethod(theirs.get_name),
            "get_impl_cls": staticmethod(lambda: impl),
            "get_builder_cls": staticmethod(lambda: builder),
        }
        made = type(theirs.__name__, (cls,), parts | declared)
        made.__doc__ = f"vLLM's {theirs.__module__}.{theirs.__qualname__}."
        return made

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, *, head_size_v: int | None = None
    ) -> tuple[int, ...]:
        """See the contract; of vLLM's spec of the cache."""
        value_size = head_size if head_size_v is None else head_size_v
        return cache_shape(cls.their_backend, num_blocks, block_size, num_kv_heads, head_size, value_size)

    @classmethod
    def get_kv_cache_stride_order(cls, cache_layout: str = "NHD") -> tuple[int, ...]:
        """See the contract; of the layouts that vLLM's class reads."""
        return stride_order(cls.their_backend, cache_layout)

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        """See the contract."""
        return list(cls.claims.dtypes)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """See the contract."""
        return list(cls.claims.head_sizes)

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """See the contract."""
        return kernel_block_sizes(cls.their_backend)

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        """See the contract; what vLLM says of the machine, else what a plain layer and its writer say here."""
        reasons = availability.unavailable_reasons(cls.their_backend, device)
        if cls.claims.trouble:
            reasons = reasons or [cls.claims.trouble]
        return reasons or missing_operators(cls)

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; what Triton's interpreter would get wrong in the backend's place."""
        return interpreted.gaps(layer, cache) if availability.is_interpreted(cls.their_backend) else []

    @classmethod
    def required_environment(cls, device: str) -> dict[str, str]:
        """See the contract; a variable of Triton's, for kernels of Triton on a CPU."""
        return availability.required_environment(cls.their_backend, device)

    @classmethod
    def default_suite(cls, device: str) -> str:
        """See the contract; a small one where kernels are interpreted."""
        return availability.default_suite(cls.their_backend, device)

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; what the declarations say, and what vLLM's own check of a configuration says besides."""
        reasons = super().unsupported_reasons(layer, cache, batch)
        return [*reasons, *configuration_problems(cls.their_backend, layer, cache, told=bool(reasons))]

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """None, so that the backend's own writer is watched: vLLM says nowhere what lies where in a page.

        A shape says nothing: keys of the CPU's cache are transposed within one that a usual packing has.
        """
        return None

    @classmethod
    def version(cls) -> str:
        """Of vLLM; it tells where its kernels are interpreted."""
        return availability.version(cls.their_backend)
