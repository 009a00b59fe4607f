"""The stand-in where ``import flashinfer`` finds it, the backend as it would run on a CPU, and an engine around it."""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.candidates.flashinfer import FlashInferBackend, FlashInferBuilder, FlashInferImpl
from attncheck.backends.contract import CommonAttentionMetadata, KVCacheSpec
from attncheck.backends.uniform import write_slots
from attncheck.reference.spec import CacheSpec, LayerSpec

HEADS, KV_HEADS, SIZE, BLOCK, NUM_BLOCKS = 4, 2, 64, 4, 80


class SmallBuilder(FlashInferBuilder):
    """Without a workspace that nothing here fills."""

    @staticmethod
    def _workspace_bytes(*arguments: Any) -> int:
        return 16


class PlainImpl(FlashInferImpl):
    """With a writer that is not interpreted: Triton's has its own tests."""

    def write(self, *arguments: Any) -> None:
        write_slots(*arguments)


class OnCPU(FlashInferBackend):
    """The backend over the stand-in."""

    supported_devices = ("cpu",)

    @staticmethod
    def get_impl_cls() -> type[PlainImpl]:
        return PlainImpl

    @staticmethod
    def get_builder_cls() -> type[SmallBuilder]:
        return SmallBuilder

    @classmethod
    def unavailable_reasons(cls, device: str) -> list[str]:
        return []


@pytest.fixture(scope="session")
def standin() -> ModuleType:
    """The module beside this file; tests are no packages."""
    spec = importlib.util.spec_from_file_location("flashinfer_standin", Path(__file__).parent / "standin.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library(standin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ``import flashinfer`` finds, and every call of it."""
    library = standin.Library()
    monkeypatch.setitem(sys.modules, "flashinfer", library.module())
    return library


@pytest.fixture
def backend() -> type[FlashInferBackend]:
    """The backend, as it would run on a CPU."""
    return OnCPU


@dataclass
class Engine:
    """One layer of 4 heads over 2, of size 64, on pages of 4 tokens, and its builder."""

    impl: Any
    layer: Any
    builder: Any
    config: Any
    kv_cache: Tensor

    def build(self, common: CommonAttentionMetadata) -> Any:
        return self.builder.build(common_prefix_len=0, common_attn_metadata=common)

    def forward(self, metadata: Any, *, with_lse: bool = False, **changes: Any) -> Any:
        """The arguments of ``forward`` after it, by name."""
        tokens = metadata.common.num_actual_tokens
        query, key, value = (torch.randn(tokens, heads, SIZE).half() for heads in (HEADS, KV_HEADS, KV_HEADS))
        given = {"query": query, "key": key, "value": value, "kv_cache": self.kv_cache}
        given["output"] = torch.zeros(tokens, HEADS, SIZE, dtype=torch.float16)
        given |= {"output_lse": torch.zeros(tokens, HEADS)} if with_lse else {}
        given |= changes
        self.impl.forward(self.layer, attn_metadata=metadata, **given)
        return SimpleNamespace(**given)


@pytest.fixture
def make_engine(library: Any, backend: type[FlashInferBackend]) -> Callable[..., Engine]:
    """``make_engine(graphs=(4,), sliding_window=3)``: an impl and a builder, as a model runner makes them."""

    def make(
        *,
        graphs: Sequence[int] = (),
        kv_cache_dtype: str = "auto",
        layout: str = "NHD",
        attn_type: str = "decoder",
        scale: float = 0.25,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
    ) -> Engine:
        impl = backend.get_impl_cls()(
            HEADS, SIZE, scale, KV_HEADS, None, sliding_window, kv_cache_dtype, logits_soft_cap, attn_type
        )
        scales = {"_k_scale": torch.tensor([0.5]), "_v_scale": torch.tensor([2.0])}
        layer = SimpleNamespace(**scales, _k_scale_float=0.5, _v_scale_float=2.0, impl=impl)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(
                cudagraph_capture_sizes=list(graphs), static_forward_context={"layer.0": layer}
            ),
            cache_config=SimpleNamespace(kv_cache_layout=layout),
            model_config=SimpleNamespace(max_model_len=24, dtype=torch.float16),
            speculative_config=None,
        )
        sizes = LayerSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, dtype="float16")
        cache = CacheSpec(block_size=BLOCK, layout=layout, kv_cache_dtype=kv_cache_dtype)
        kv_cache = allocate_kv_cache(backend, sizes, cache, NUM_BLOCKS, "cpu")
        spec = KVCacheSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=kv_cache.dtype)
        builder = backend.get_builder_cls()(spec, ["layer.0"], config, torch.device("cpu"))
        return Engine(impl, layer, builder, config, kv_cache)

    return make


@pytest.fixture
def make_batch() -> Callable[..., CommonAttentionMetadata]:
    """``make_batch([(query_len, seq_len), ...], tokens=…)``: request ``r`` has pages ``10 r + 1``, ``10 r + 2``, ..."""
    return _batch


def _batch(
    requests: Sequence[tuple[int, int]], *, tokens: int | None = None, causal: bool = True
) -> CommonAttentionMetadata:
    def int32(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    starts = [sum(query_len for query_len, _ in requests[:end]) for end in range(len(requests) + 1)]
    lens = [seq_len for _, seq_len in requests]
    table = torch.tensor([[10 * request + page + 1 for page in range(6)] for request in range(len(requests))])
    slots = [
        int(table[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, (query_len, seq_len) in enumerate(requests)
        for position in range(seq_len - query_len, seq_len)
    ]
    num_tokens = starts[-1] if tokens is None else tokens
    return CommonAttentionMetadata(
        query_start_loc=int32(*starts),
        query_start_loc_cpu=int32(*starts),
        seq_lens=int32(*lens),
        seq_lens_cpu=int32(*lens),
        num_computed_tokens_cpu=int32(*(max(s - q, 0) for q, s in requests)),
        num_reqs=len(requests),
        num_actual_tokens=num_tokens,
        max_query_len=9,
        max_seq_len=24,
        block_table_tensor=table.int(),
        slot_mapping=torch.tensor(slots + [-1] * (num_tokens - len(slots)), dtype=torch.int64),
        causal=causal,
    )
