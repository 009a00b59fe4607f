"""The codec of a backend of vLLM's, learned from its own writer: vLLM says nowhere what lies where in a page.

Must not know: how learning works, what is judged by a codec.
"""

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from attncheck.backends.codecs import coding_of
from attncheck.backends.declarations import has_cache
from attncheck.backends.learned_codec import NoCodec, learn_codec
from attncheck.backends.packings import allocate_kv_cache
from attncheck.backends.placed_codec import PlacedCodec
from attncheck.backends.vllm.writer import device, writer_of
from attncheck.reference.spec import CacheSpec, LayerSpec

if TYPE_CHECKING:
    from attncheck.backends.vllm.bridge import VLLMBackend

_REMEMBERED = 64


def codec_of(backend: "type[VLLMBackend]", layer: LayerSpec, cache: CacheSpec) -> PlacedCodec | None:
    """The codec for a layer's cache; None where there is no cache, or no writer apart from ``forward`` to watch.

    None also for values of another size than keys, which no impl is made for, and where the writer makes no layout.
    """
    if not has_cache(layer) or backend.forward_includes_kv_cache_update or layer.value_head_size != layer.head_size:
        return None
    # Nothing else of a layer decides where a row lies.
    plain_layer = LayerSpec(
        num_heads=layer.num_kv_heads,
        num_kv_heads=layer.num_kv_heads,
        head_size=layer.head_size,
        dtype=layer.dtype,
    )
    plain_cache = CacheSpec(block_size=cache.block_size, layout=cache.layout, kv_cache_dtype=cache.kv_cache_dtype)
    learned = _learned(backend, plain_layer, plain_cache)
    return None if isinstance(learned, NoCodec) else replace(learned, coding=coding_of(layer, cache))


@lru_cache(maxsize=_REMEMBERED)
def _learned(backend: "type[VLLMBackend]", layer: LayerSpec, cache: CacheSpec) -> PlacedCodec | NoCodec:
    def allocate(num_blocks: int) -> Tensor:
        return allocate_kv_cache(backend, layer, cache, num_blocks, device())

    return learn_codec(writer_of(backend, layer, cache), allocate, layer, cache, device())
