"""One step as a model runner would hand it over: rows, context in the cache, padding, NaN wherever no row reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata, KVCacheSpec
from attncheck.backends.dtypes import DTYPES, cache_dtype
from attncheck.reference import layer_params, paged_attention, varlen_attention
from attncheck.reference.spec import AttentionType, CacheSpec, LayerSpec

NUM_BLOCKS = 40
DEFAULT_CACHE = CacheSpec()


def attn_layer(cache: CacheSpec = DEFAULT_CACHE) -> Any:
    """What ``forward`` may read of a layer."""
    scales = {name: getattr(cache, name) for name in ("q_scale", "k_scale", "v_scale")}
    tensors = {f"_{name}": torch.tensor(scale).reshape(-1) for name, scale in scales.items()}
    return SimpleNamespace(**tensors, **{f"_{name}_float": 1.0 for name in scales})


@dataclass
class Step:
    """A backend's step: the arguments of ``build`` and ``forward``, and what the reference answers."""

    backend: type[AttentionBackend]
    layer: LayerSpec
    cache: CacheSpec
    query: Tensor
    key: Tensor | None
    value: Tensor | None
    kv_cache: Tensor
    common: CommonAttentionMetadata
    truth: Tensor
    truth_lse: Tensor
    output: Tensor
    output_lse: Tensor

    def impl(self) -> Any:
        layer = self.layer
        extra: dict[str, Any] = {}
        if layer.sink_logits is not None:
            extra["sinks"] = torch.tensor(layer.sink_logits, dtype=DTYPES[layer.sinks_dtype or layer.dtype])
        if layer.value_head_size != layer.head_size:
            extra["head_size_v"] = layer.value_head_size
        return self.backend.get_impl_cls()(
            layer.num_heads,
            layer.head_size,
            layer.softmax_scale,
            layer.num_kv_heads,
            None if layer.alibi_slopes is None else list(layer.alibi_slopes),
            layer.sliding_window,
            self.cache.kv_cache_dtype,
            layer.logits_soft_cap,
            str(layer.attn_type),
            None,
            **extra,
        )

    def builder(self) -> Any:
        layer = self.layer
        spec = KVCacheSpec(
            block_size=self.cache.block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=cache_dtype(layer, self.cache),
            head_size_v=layer.head_size_v,
            sliding_window=layer.sliding_window,
            attention_chunk_size=layer.attn_chunk_size,
        )
        return self.backend.get_builder_cls()(spec, ["layer.0"], None, torch.device("cpu"))

    def run(self, **changes: Any) -> Tensor:
        """``forward`` with the step's arguments, some of them changed; the output."""
        arguments = {
            "layer": attn_layer(self.cache),
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "kv_cache": self.kv_cache,
            "output": self.output,
        } | ({"output_lse": self.output_lse} if "lse" in self.backend.features else {})
        arguments |= changes
        if "attn_metadata" not in arguments:
            builder = self.builder()
            arguments["attn_metadata"] = builder.build(common_prefix_len=0, common_attn_metadata=self.common)
        with torch.no_grad():
            result: Tensor = self.impl().forward(**arguments)
        return result

    @property
    def num_rows(self) -> int:
        return int(self.common.query_start_loc_cpu[-1])


StepMaker = Callable[..., Step]


def _int32(numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.fixture
def refusals(plain: Callable[[str], str]) -> Callable[..., list[str]]:
    """``refusals(call, questions, error)``: the messages that ``call`` raises, one a question."""

    def messages(
        call: Callable[[Any], object], questions: Sequence[Any], error: type[Exception] = ValueError
    ) -> list[str]:
        found = []
        for question in questions:
            with pytest.raises(error) as refused:
                call(question)
            found.append(plain(str(refused.value)))
        return found

    return messages


@pytest.fixture
def make_step() -> StepMaker:
    """``make_step(backend, layer, [(query_len, seq_len), ...], cache=..., padding=(requests, tokens), gain=...)``."""
    return _make_step


def _make_step(
    backend: type[AttentionBackend],
    layer: LayerSpec,
    requests: Sequence[tuple[int, int]],
    *,
    cache: CacheSpec = DEFAULT_CACHE,
    padding: tuple[int, int] = (0, 0),
    gain: float = 1.0,
) -> Step:
    """For cross attention ``seq_len`` is the encoder's, whose rows come along."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, layer.dtype)
    heads, kv_heads, size, size_v = layer.num_heads, layer.num_kv_heads, layer.head_size, layer.value_head_size
    is_cross = layer.attn_type == AttentionType.ENCODER_DECODER
    has_pool = is_cross or layer.attn_type == AttentionType.DECODER
    rows = sum(query_len for query_len, _ in requests)
    tokens = rows + padding[1]

    # Where every position lies: blocks in a shuffled order, never block 0.
    block_size = cache.block_size
    free = (torch.randperm(NUM_BLOCKS - 1, generator=generator) + 1).tolist()
    widest = max([-(-seq_len // block_size) for _, seq_len in requests] + [1]) + 1
    table = torch.zeros(len(requests) + padding[0], widest, dtype=torch.int32)
    slots: list[list[int]] = []
    for index, (_, seq_len) in enumerate(requests):
        pages = [free.pop() for _ in range(-(-seq_len // block_size))]
        table[index, : len(pages)] = _int32(pages)
        slots.append([pages[p // block_size] * block_size + p % block_size for p in range(seq_len)])
    flat = [slot for owned in slots for slot in owned]
    pool_key = torch.full((NUM_BLOCKS * block_size, kv_heads, size), torch.nan, dtype=dtype)
    pool_value = torch.full((NUM_BLOCKS * block_size, kv_heads, size_v), torch.nan, dtype=dtype)
    pool_key[flat] = torch.randn(len(flat), kv_heads, size, generator=generator).to(dtype)
    pool_value[flat] = torch.randn(len(flat), kv_heads, size_v, generator=generator).to(dtype)

    # Which of them are new, and where the new rows' K/V come from: slices of one fused tensor.
    if is_cross:
        new = flat
    else:
        new = []
        for (query_len, seq_len), owned in zip(requests, slots, strict=True):
            unseen = max(query_len - seq_len, 0)  # rows that have no key of their own
            new += [-1] * unseen + owned[seq_len - query_len + unseen :]
    key_rows = max(len(new) + padding[1], tokens)
    widths = (heads * size, kv_heads * size, kv_heads * size_v)
    fused = torch.full((key_rows, sum(widths)), torch.nan, dtype=dtype)
    fused_query, fused_key, fused_value = fused.split(list(widths), dim=1)
    fused_query[:rows] = (gain * torch.randn(rows, heads * size, generator=generator)).to(dtype)
    stored = torch.tensor(new, dtype=torch.int64)
    live = stored >= 0
    fused_key[: len(new)][live] = pool_key[stored[live]].flatten(1)
    fused_value[: len(new)][live] = pool_value[stored[live]].flatten(1)
    query = fused_query[:tokens].unflatten(1, (heads, size))
    key = fused_key.unflatten(1, (kv_heads, size))
    value = fused_value.unflatten(1, (kv_heads, size_v))

    starts = [0]
    for query_len, _ in requests:
        starts.append(starts[-1] + query_len)
    starts += [rows] * padding[0]
    seq_lens = [seq_len for _, seq_len in requests] + [0] * padding[0]
    slot_mapping = torch.tensor(new + ([] if is_cross else [-1] * padding[1]), dtype=torch.int64)
    common = CommonAttentionMetadata(
        query_start_loc=_int32(starts),
        query_start_loc_cpu=_int32(starts),
        seq_lens=_int32(seq_lens),
        seq_lens_cpu=_int32(seq_lens),
        num_computed_tokens_cpu=_int32([max(s - q, 0) for q, s in requests] + [0] * padding[0]),
        num_reqs=len(seq_lens),
        num_actual_tokens=tokens,
        max_query_len=max((query_len for query_len, _ in requests), default=0) + 3,
        max_seq_len=max(seq_lens) + 50,
        block_table_tensor=table if has_pool else torch.zeros(len(seq_lens), 1, dtype=torch.int32),
        slot_mapping=slot_mapping if has_pool else torch.full((tokens,), -1),
        causal=layer.is_causal,
        encoder_seq_lens=_int32(seq_lens).numpy() if is_cross else None,
    )
    params = layer_params(layer)
    if has_pool:
        shape = (NUM_BLOCKS, block_size, kv_heads, -1)
        truth, lse = paged_attention(
            query[:rows], pool_key.view(shape), pool_value.view(shape), table, common.seq_lens, _int32(starts), params
        )
    else:
        ends = _int32(starts)
        truth, lse = varlen_attention(query[:rows], key[:rows], value[:rows], ends, ends, params)

    kv_cache = allocate_kv_cache(backend, layer, cache, NUM_BLOCKS, "cpu")
    if has_pool:
        if kv_cache.is_floating_point():
            kv_cache.fill_(torch.nan)
        codec = backend.kv_cache_codec(layer, cache)
        assert codec is not None
        context = torch.tensor([slot for slot in flat if slot not in set(new)], dtype=torch.int64)
        codec.write(kv_cache, context, pool_key[context], pool_value[context])
    return Step(
        backend=backend,
        layer=layer,
        cache=cache,
        query=query,
        key=key,
        value=value,
        kv_cache=kv_cache,
        common=common,
        truth=truth,
        truth_lse=lse,
        output=torch.full((tokens, heads, size_v), torch.nan, dtype=dtype),
        output_lse=torch.full((tokens, heads), torch.nan),
    )
