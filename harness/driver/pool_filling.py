"""Make pools: find their codec, or have the backend's own writer fill them if there is none.

If ``forward`` includes the cache update, the writer runs as prefills whose outputs are dropped.
"""

import math
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from attncheck.backends.caches.learned_codec import NoCodec, learn_codec
from attncheck.backends.caches.packings import allocate_kv_cache, kv_cache_shape
from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata, KVCacheCodec
from attncheck.harness.driver.construction import construct_builder, construct_impl
from attncheck.harness.driver.foreign_code import wait_for
from attncheck.harness.driver.kv_pool import KVPool
from attncheck.harness.driver.vllm_config import LayerStub
from attncheck.harness.problem.problem import Problem
from attncheck.reference.spec import CacheSpec

_LONGEST = 1024
"""Maximum tokens of a prefill.

A pool has many times as many slots, and attention over all of them would take too long.
"""


class PoolFiller:
    """Store rows in a problem's cache as the layer that fills it would.

    ``cache`` has the scales passed to the layer.
    """

    def __init__(
        self, backend: type[AttentionBackend], problem: Problem, device: torch.device, cache: CacheSpec
    ) -> None:
        self._backend, self._problem, self._device = backend, problem, device
        self._attn_layer = LayerStub(cache, device)
        self._capacity = min(_LONGEST, problem.num_blocks * problem.cache.block_size)
        self._builders: dict[int, Any] = {}

    @cached_property
    def _impl(self) -> Any:
        impl = self._attn_layer.impl = construct_impl(self._backend, self._problem, self._device, writes=True)
        return impl

    def _builder(self, kv_cache: Tensor) -> Any:
        """Return the builder for pools of the size of ``kv_cache``."""
        page = kv_cache_shape(self._backend, self._problem.layer, self._problem.cache.block_size, num_blocks=1)
        num_blocks = kv_cache.numel() // math.prod(page)
        if num_blocks not in self._builders:
            problem, layer = self._problem.in_pool_of(num_blocks), self._attn_layer
            self._builders[num_blocks] = construct_builder(
                self._backend, (problem,), self._device, layer, fills=self._capacity
            )
        return self._builders[num_blocks]

    def write(self, kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` at ``slots``."""
        impl = self._impl
        # Constructing a builder may set attributes of the layer that its writer needs.
        builder = self._builder(kv_cache)
        if not self._backend.forward_includes_kv_cache_update:
            impl.do_kv_cache_update(self._attn_layer, key, value, kv_cache, slots)
            wait_for(self._device, "do_kv_cache_update")
            return
        for first in range(0, len(slots), self._capacity):
            piece = slice(first, first + self._capacity)
            common = _prefill_metadata(slots[piece], self._problem, self._device)
            metadata = builder.build(common_prefix_len=0, common_attn_metadata=common)
            query = key.new_zeros(len(slots[piece]), *self._problem.query.shape[1:])
            output = key.new_zeros(len(query), self._problem.layer.num_heads, self._problem.output_size)
            keywords = {}
            if "lse" in self._backend.features:
                keywords["output_lse"] = torch.zeros(output.shape[:2], device=self._device)
            with torch.no_grad():
                impl.forward(
                    self._attn_layer, query, key[piece], value[piece], kv_cache, metadata, output=output, **keywords
                )
            wait_for(self._device, "forward")


def new_pool(backend: type[AttentionBackend], problem: Problem, device: torch.device, impl: Any) -> KVPool:
    """Return the problem's pool. Raises TypeError if the backend has neither a codec nor a writer."""
    codec = backend.kv_cache_codec(problem.layer, problem.cache)
    if codec is None and not impl.brings_writer:
        raise TypeError(f"{backend.get_name()} brings neither a writer nor a cache codec: who fills its cache?")
    writer = PoolFiller(backend, problem, device, problem.cache).write
    return KVPool(backend, problem, device, _learned(backend, problem, device) if codec is None else codec, writer)


def _learned(backend: type[AttentionBackend], problem: Problem, device: torch.device) -> KVCacheCodec | NoCodec:
    """Return the codec learned from the backend's own writer, or a NoCodec with the reason why none could be learned.

    A codec is learned once per process for each layer and cache.
    """
    layer, cache = problem.layer, problem.cache
    known = _known_layouts(backend, layer, replace(cache, num_blocks=None), device)
    if known:
        return known[0]
    filler = PoolFiller(backend, problem, device, replace(cache, k_scale=1.0, v_scale=1.0))

    def write_latent(kv_cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
        filler.write(kv_cache, slots, key[:, None], value[:, None])

    write = filler.write if layer.mla is None else write_latent
    found = learn_codec(
        write, lambda blocks: allocate_kv_cache(backend, layer, cache, blocks, device), layer, cache, device
    )
    if isinstance(found, NoCodec):
        return NoCodec(f"the backend brings no cache codec, and its writer shows none: {found.reason}")
    known.append(found)
    return found


@lru_cache(maxsize=256)
def _known_layouts(*geometry: Hashable) -> list[KVCacheCodec]:  # noqa: ARG001 (the key of the list)
    """Return the list that holds the codec learned for ``geometry``; it is empty until one is learned."""
    return []


def _prefill_metadata(slots: Tensor, problem: Problem, device: torch.device) -> CommonAttentionMetadata:
    """Return the metadata of one prompt whose keys and values are stored at ``slots``."""
    count, size = len(slots), problem.cache.block_size
    starts, lens = torch.tensor([0, count], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device, copy=True),
        query_start_loc_cpu=starts,
        seq_lens=lens.to(device, copy=True),
        seq_lens_cpu=lens,
        num_computed_tokens_cpu=torch.zeros(1, dtype=torch.int32),
        num_reqs=1,
        num_actual_tokens=count,
        max_query_len=count,
        max_seq_len=count,
        block_table_tensor=torch.arange(-(-count // size), dtype=torch.int32, device=device)[None],
        slot_mapping=slots,
        causal=problem.layer.is_causal,
    )
