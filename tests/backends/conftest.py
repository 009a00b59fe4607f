"""One step as a model runner would hand it over: rows, context in the cache, padding, NaN wherever no row reads."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata, KVCacheSpec
from attncheck.backends.dtypes import DTYPES, cache_dtype
from attncheck.cases.model import Case
from attncheck.harness.driver.step import make_step as make_step_of
from attncheck.harness.problem.problem import build_problem
from attncheck.reference import layer_params, varlen_attention
from attncheck.reference.spec import AttentionType, LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, PaddingSpec, RequestSpec, StridesSpec

CPU = torch.device("cpu")
NUM_BLOCKS = 40
DEFAULT_CACHE = CacheSpec()


def attn_layer(cache=DEFAULT_CACHE):
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

    def impl(self):
        layer = self.layer
        extra = {}
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

    def builder(self):
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

    def run(self, **changes):
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
            return self.impl().forward(**arguments)

    @property
    def num_rows(self):
        return int(self.common.query_start_loc_cpu[-1])


@pytest.fixture
def refusals(plain):
    """``refusals(call, questions, error)``: the messages that ``call`` raises, one a question."""

    def messages(call, questions, error=ValueError):
        found = []
        for question in questions:
            with pytest.raises(error) as refused:
                call(question)
            found.append(plain(str(refused.value)))
        return found

    return messages


@pytest.fixture
def make_step():
    """``make_step(backend, layer, [(query_len, seq_len), ...], cache=..., padding=(requests, tokens), gain=...)``."""
    return _make_step


def _make_step(backend, layer, requests, *, cache=DEFAULT_CACHE, padding=(0, 0), gain=1.0):
    """For cross attention ``seq_len`` is the encoder's, whose rows come along. Block 0 is of no request."""
    length = "encoder_len" if layer.attn_type == AttentionType.ENCODER_DECODER else "seq_len"
    batch = BatchSpec(
        requests=tuple(RequestSpec(query_len=query_len, **{length: own}) for query_len, own in requests),
        padding=PaddingSpec(requests=padding[0], tokens=padding[1]),
    )
    pool = replace(cache, num_blocks=NUM_BLOCKS)
    problem = build_problem(Case(suite="step", id="step", layer=layer, cache=pool, batch=batch, inputs=()), seed=0)
    problem = replace(problem, query=gain * problem.query)
    given = make_step_of(problem, CPU, strides=StridesSpec(query="fused", key="fused", value="fused"))
    common = given.common_metadata()
    common.max_query_len += 3
    common.max_seq_len += 50
    ends = problem.cu_seqlens_q.int(), problem.cu_seqlens_k.int()
    truth, lse = varlen_attention(problem.query, problem.keys, problem.values, *ends, layer_params(layer))

    kv_cache = allocate_kv_cache(backend, layer, cache, NUM_BLOCKS, "cpu")
    if problem.has_pool:
        if kv_cache.is_floating_point():
            kv_cache.fill_(torch.nan)
        codec = backend.kv_cache_codec(layer, cache)
        old = problem.old_keys
        codec.write(kv_cache, problem.key_slots[old], problem.keys[old], problem.values[old])
    output = torch.full((*given.query.shape[:2], layer.value_head_size), torch.nan, dtype=problem.dtype)
    return Step(
        backend=backend,
        layer=layer,
        cache=cache,
        query=given.query,
        key=given.key,
        value=given.value,
        kv_cache=kv_cache,
        common=common,
        truth=truth,
        truth_lse=lse,
        output=output,
        output_lse=torch.full(given.query.shape[:2], torch.nan),
    )
