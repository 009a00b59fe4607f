"""Our own latent attention in Triton, as a candidate: what it declares. Must not know: kernels, launches."""

from typing import TYPE_CHECKING

from attncheck.backends.candidates.triton_unified.declarations import TritonBackend
from attncheck.backends.contract import Conventions
from attncheck.backends.latent import LatentBackend
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.candidates.triton_mla.builder import TritonMLABuilder, TritonMLAMetadata
    from attncheck.backends.candidates.triton_mla.impl import TritonMLAImpl

LARGEST_RANK, LARGEST_ROTARY = 1024, 128
"""Tiles of queries and keys have to fit the memory of a multiprocessor."""


class TritonMLABackend(TritonBackend, LatentBackend):
    """Latent rows of up to 1024 numbers and 128 rotated ones, any other size; one launch for any batch.

    The workspace of a layer is not used: no context is up-projected.
    """

    conventions = Conventions(padded_rows="untouched", sync_free_build=True)

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA"

    @staticmethod
    def get_impl_cls() -> type["TritonMLAImpl"]:
        from attncheck.backends.candidates.triton_mla.impl import TritonMLAImpl

        return TritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type["TritonMLABuilder"]:
        from attncheck.backends.candidates.triton_mla.builder import TritonMLABuilder

        return TritonMLABuilder

    @staticmethod
    def get_metadata_cls() -> type["TritonMLAMetadata"]:
        from attncheck.backends.candidates.triton_mla.builder import TritonMLAMetadata

        return TritonMLAMetadata

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        reasons = super().unsupported_reasons(layer, cache, batch)
        if layer.mla is not None:
            reasons += too_large(layer.mla.kv_lora_rank, layer.mla.qk_rope_head_dim)
        return reasons


def too_large(kv_lora_rank: int, qk_rope_head_dim: int) -> list[str]:
    """What speaks against a cache row of these sizes."""
    sizes = (("kv_lora_rank", kv_lora_rank, LARGEST_RANK), ("qk_rope_head_dim", qk_rope_head_dim, LARGEST_ROTARY))
    return [f"{name} {size}: supported are sizes up to {limit}" for name, size, limit in sizes if size > limit]
