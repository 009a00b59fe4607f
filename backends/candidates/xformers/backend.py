"""The declarations of candidate ``xformers``. Imports neither xformers nor Triton.

Decodes use the library's Triton split-K operator, which supports neither window nor soft cap. Layers with either use
attncheck's own unified kernel, as do all requests of several rows, for which the library has no paged operator.
"""

from typing import TYPE_CHECKING

import torch

from attncheck.backends import interpreter
from attncheck.backends.candidates.triton_unified.backend import LARGEST_HEAD_SIZE
from attncheck.backends.candidates.triton_unified.triton_backend import InterpretedBackend
from attncheck.backends.candidates.xformers import availability
from attncheck.backends.contract import Conventions, MultipleOf
from attncheck.backends.paged import PagedBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.xformers.impl import XFormersBuilder, XFormersImpl, XFormersMetadata


class XFormersBackend(InterpretedBackend, PagedBackend):
    """Backend whose pages have tokens before heads, with keys and values in two halves of the cache.

    The library requires the pool as one run of tokens.
    """

    features = frozenset({"sliding_window", "logits_soft_cap", "lse", "short_keys"})
    conventions = Conventions(padded_rows="finite", sync_free_build=True)
    supported_layouts = ("NHD",)

    get_name = staticmethod(lambda: "XFORMERS")

    @staticmethod
    def get_impl_cls() -> type["XFormersImpl"]:
        from attncheck.backends.candidates.xformers.impl import XFormersImpl

        return XFormersImpl

    @staticmethod
    def get_builder_cls() -> type["XFormersBuilder"]:
        from attncheck.backends.candidates.xformers.impl import XFormersBuilder

        return XFormersBuilder

    @staticmethod
    def get_metadata_cls() -> type["XFormersMetadata"]:
        from attncheck.backends.candidates.xformers.impl import XFormersMetadata

        return XFormersMetadata

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        """Return the operator's dtypes, and float32 if it is interpreted, which multiplies float32 exactly."""
        half = [torch.float16, torch.bfloat16]
        return [*half, torch.float32] if interpreter.is_interpreted() else half

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return the operator's head sizes, up to the limit of the kernel for other rows."""
        from attncheck.backends.candidates.xformers.operator import supported_head_sizes

        return [size for size in supported_head_sizes() if size <= LARGEST_HEAD_SIZE]

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[int | MultipleOf]:
        """Return the page sizes that a tile of the operator divides."""
        return [MultipleOf(16)]

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return [*super().unavailable_reasons(device), *availability.unavailable_reasons(device)]

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """Add a reason for bfloat16 layers that use the operator, since the interpreter multiplies it wrongly.

        attncheck's own kernel works around that.
        """
        reasons = super().unavailable_case_reasons(device, layer, cache, batch)
        is_operators = layer.sliding_window is None and layer.soft_cap is None
        has_gap = interpreter.is_interpreted() and layer.dtype == "bfloat16" and is_operators
        return [interpreter.BFLOAT16_GAP, *reasons] if has_gap else reasons

    @classmethod
    def version(cls) -> str:
        return availability.version()
