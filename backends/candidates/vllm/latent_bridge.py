"""Candidates for vLLM's classes of layers with a latent cache, such as ``vllm:CPU_MLA``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from attncheck.backends.caches.codecs import default_codec
from attncheck.backends.caches.packings import packed_shape
from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.builder import VLLMBuilder
from attncheck.backends.candidates.vllm.cache import cache_shape
from attncheck.backends.candidates.vllm.config import their_config
from attncheck.backends.candidates.vllm.interpreted import launches_triton
from attncheck.backends.candidates.vllm.latent_layers import LatentSizes
from attncheck.backends.contract import AttentionBackend, KVCacheCodec, KVCacheSpec
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, SpecDecodeOptions


class VLLMLatentBuilder(VLLMBuilder):
    """The builder of a latent backend of vLLM's."""

    @classmethod
    def their_config(cls, plain: Any, layers: Mapping[str, Any], spec: KVCacheSpec) -> Any:
        """Return the config of a model whose layers have the sizes of ``layers``, or rows of ``spec.head_size``."""
        found = [LatentSizes.of(layer) for layer in layers.values()]
        sizes = found[0] if found else LatentSizes.of_row(spec.head_size)
        return their_config(plain, layers, model=sizes.model())

    @classmethod
    def their_builder(cls, spec: KVCacheSpec) -> type[Any]:
        """Return the class of vLLM's builder, with the prefill workspace of ``spec`` rounded up to whole pages.

        If ``spec`` has none, vLLM derives it from the config: thousands of rows, also whole pages.
        """
        theirs = super().their_builder(spec)
        rows = spec.chunked_prefill_workspace_size
        if rows is None:
            return theirs
        whole = -(-rows // spec.block_size) * spec.block_size
        members = {"determine_chunked_prefill_workspace_size": staticmethod(lambda _config: whole)}
        return type(theirs.__name__, (theirs,), members | {"__module__": theirs.__module__})


class LatentCache(AttentionBackend):
    """The cache members of a candidate for a latent class; they precede those of :class:`VLLMBackend`.

    vLLM's ``[blocks, 1, block size, row]`` becomes ``[blocks, block size, row]`` for its layer, which has one layout.
    """

    their_backend: ClassVar[type[Any]]

    @classmethod
    def is_mla(cls) -> bool:
        """See the contract."""
        return True

    @classmethod
    def get_kv_cache_shape(cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
        """See the contract."""
        if num_kv_heads != 1:
            raise ValueError(f"num_kv_heads {num_kv_heads}: a latent cache has one")
        cache_shape(cls.their_backend, num_blocks, block_size, 1, head_size, head_size)  # refuses unsupported pages
        return packed_shape("latent", num_blocks, block_size, 1, head_size, head_size)

    @classmethod
    def unsupported_reasons(cls, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract; also refuse batches that vLLM's runner never builds for such a layer here."""
        reasons = super().unsupported_reasons(layer, cache, batch)
        if layer.mla is None:
            return reasons
        is_decode, on_cpu = _is_decode(batch, cls.their_backend.get_builder_cls()), package.platform().is_cpu()
        has_graphs = not on_cpu or launches_triton(cls.their_backend)
        reasons += _padding_reasons(batch, is_decode, has_graphs=has_graphs)
        if not (layer.is_causal or _is_uniform(batch)):
            reasons.append("causal false with rows of several lengths: vLLM's blocks without a causal mask have one")
        return reasons

    @classmethod
    def unavailable_case_reasons(cls, device: str, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> list[str]:
        """See the contract. If no interpreted kernel writes the cache, its FP8 dtype is no reason."""
        dtype = cache.kv_cache_dtype
        if not dtype.startswith("fp8") or dtype not in cls.supported_kv_cache_dtypes:
            return super().unavailable_case_reasons(device, layer, cache, batch)
        known = cache if cls.get_impl_cls().brings_writer else replace(cache, kv_cache_dtype="auto")
        reasons = super().unavailable_case_reasons(device, layer, known, batch)
        is_decode = _is_decode(batch, cls.their_backend.get_builder_cls())
        if package.platform().is_cpu() and not is_decode and any(request.context_len > 0 for request in batch):
            reasons = [*reasons, f"kv_cache_dtype {dtype}: a CPU build of vLLM gathers no context of codes for prompts"]
        return reasons

    @classmethod
    def kv_cache_codec(cls, layer: LayerSpec, cache: CacheSpec) -> KVCacheCodec | None:
        """Return None, so that the layout is learned from the backend's writer; without one, the usual latent codec."""
        return None if cls.get_impl_cls().brings_writer else default_codec(cls, layer, cache)

    @classmethod
    def get_kv_cache_stride_order(cls, cache_layout: str = "NHD") -> tuple[int, ...]:
        """See the contract."""
        return (0, 1, 2)


def _is_uniform(batch: BatchSpec) -> bool:
    return len({request.query_len for request in batch}) == 1


def _is_decode(batch: BatchSpec, builder: type[Any]) -> bool:
    """Return whether vLLM's ``builder`` treats all requests as decodes: all of one length, at most 1 + drafts."""
    path = batch.path.options
    takes_drafts = getattr(getattr(builder, "query_len_support", None), "name", "SINGLE_ONLY") != "SINGLE_ONLY"
    drafts = path.num_speculative_tokens if isinstance(path, SpecDecodeOptions) and takes_drafts else 0
    return _is_uniform(batch) and batch.max_query_len <= 1 + drafts


def _padding_reasons(batch: BatchSpec, is_decode: bool, *, has_graphs: bool) -> list[str]:
    """Return why no step of vLLM's has the padding of ``batch``.

    Full graphs hold only decodes, one request per ``max_query_len`` rows. ``has_graphs``: the pieces between the calls
    of a backend may be graphs, whose padding rows no metadata count.
    """
    padding, reasons = batch.padding, []
    if (padding.requests or padding.tokens) and not (
        is_decode and padding.tokens == padding.requests * batch.max_query_len
    ):
        reasons.append(
            f"{padding.requests} padding requests and {padding.tokens} padding tokens: vLLM pads decodes of one length "
            "alone, a request for each"
        )
    if (padding.unmapped_tokens or padding.key_rows) and not has_graphs:
        reasons.append("rows that no slot is for: vLLM's runner pads no rows on a CPU")
    return reasons
