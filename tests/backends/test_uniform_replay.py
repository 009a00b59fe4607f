"""What a captured graph does with a uniform step: the calls of the first one again, over tensors that were refilled.

The first step is what a model runner captures with: rows of NaN, slots of -1, lengths that are the query length. Its
metadata serves all later ones, so that a number from the host would be the wrong one.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.backends.base.gathering import encode_fp8
from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder
from attncheck.backends.dtypes import FP8_DTYPES
from attncheck.reference import kv_cache_views, layer_params, paged_attention
from attncheck.reference.spec import AttentionType, CacheSpec, LayerSpec

PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, dtype="float32", scale=0.3)
PAGES = CacheSpec(block_size=8)
BUCKET, LONGEST = 4, 60

BATCHES = ([60, 9, 33, 60], [5, 8, 7, 16], [48, 5], [], [60])
"""Lengths of later steps: longer and shorter, on page borders, fewer requests than were captured, none at all."""

SIGNALLING = 0x7FA1
"""A NaN of bfloat16 that arithmetic would make another one."""


class Graph:
    """SDPA's step as it is captured, for ``BUCKET`` requests of ``query_len`` rows; :meth:`replay` makes it another."""

    def __init__(self, make_step, layer, query_len, cache=PAGES, *, sharing=False, tree=None):
        self.make_step, self.layer, self.cache, self.query_len = make_step, layer, cache, query_len
        self.step = self.step_for([LONGEST if self.has_cache else query_len] * BUCKET)
        common = self.step.common
        for tensor in (self.step.query, self.step.key, self.step.value, self.step.output):
            tensor.fill_(torch.nan)
        common.slot_mapping.fill_(-1)
        common.block_table_tensor.zero_()
        common.max_query_len, common.max_seq_len = query_len, common.block_table_tensor.shape[1] * cache.block_size
        for twin in (common.seq_lens, common.seq_lens_cpu):
            twin.fill_(query_len)
        config = SimpleNamespace(speculative_config=SimpleNamespace(speculative_token_tree=tree))
        builder = SDPABuilder(self.step.builder().kv_cache_spec, ["layer.0"], config, torch.device("cpu"))
        self.metadata = builder.build_for_cudagraph_capture(common)
        self.impl = self.step.impl()
        if sharing:
            self.impl.kv_sharing_target_layer_name = "layer.1"
            self.step.key = self.step.value = None
        self.k_scale, self.v_scale = (torch.tensor(scale).reshape(-1) for scale in (cache.k_scale, cache.v_scale))

    @property
    def has_cache(self):
        return self.layer.attn_type != AttentionType.ENCODER_ONLY

    def step_for(self, lens, seed=0):
        """A step for these lengths alone, padded to the bucket; in cross attention one that brings no encoder rows."""
        padding = (BUCKET - len(lens), (BUCKET - len(lens)) * self.query_len)
        requests = [(self.query_len, seq_len) for seq_len in lens]
        options = {"cache": self.cache, "padding": padding, "first_steps": [False] * len(lens), "seed": seed}
        return self.make_step(SDPABackend, self.layer, requests, **options)

    def call(self, **changes):
        step = self.step
        layer = SimpleNamespace(_k_scale=self.k_scale, _v_scale=self.v_scale)
        arguments = {"output": step.output, "attn_metadata": self.metadata} | changes
        with torch.no_grad():
            self.impl.forward(layer, step.query, step.key, step.value, step.kv_cache, **arguments)

    def refill(self, lens, seed=1):
        """Another batch of the same class in the same memory; its own step, and what the cache is to hold after it."""
        mine, other = self.step, self.step_for(lens, seed)
        real = len(lens) * self.query_len
        expected, slots = other.kv_cache.clone(), other.common.slot_mapping[:real]
        if self.has_cache:
            rows = (slots >= 0).nonzero().flatten()
            codec = SDPABackend.kv_cache_codec(self.layer, self.cache)
            codec.write(expected, slots[rows], other.key[rows], other.value[rows])
        mine.kv_cache.copy_(other.kv_cache if mine.key is not None else expected)
        for name in ("query", "key", "value"):
            if getattr(mine, name) is not None:
                getattr(mine, name).copy_(getattr(other, name))
        for name in ("seq_lens", "query_start_loc", "slot_mapping"):
            getattr(mine.common, name).copy_(getattr(other.common, name))
        table = mine.common.block_table_tensor.fill_(10**6)  # there is no such block
        for request, seq_len in enumerate(lens):
            pages = -(-seq_len // self.cache.block_size)
            table[request, :pages] = other.common.block_table_tensor[request, :pages]
        mine.output.fill_(torch.nan)
        return other, expected

    def replay(self, lens, *, seed=1, tolerance=2e-6):
        """Refilled and called again: compared with the truth of the batch that is in there now."""
        other, expected = self.refill(lens, seed)
        self.call()
        self.compare(other.truth, expected, tolerance)

    def compare(self, truth, cache, tolerance=2e-6):
        assert torch.allclose(self.step.output[: len(truth)].double(), truth, rtol=tolerance, atol=tolerance)
        assert (self.step.output[len(truth) :] == 0).all()
        if self.has_cache:
            held = self.step.kv_cache.contiguous().view(torch.uint8)
            assert torch.equal(held, cache.contiguous().view(torch.uint8))


LAYERS = {
    "plain": {},
    "mha": {"num_kv_heads": 6},
    "mqa": {"num_kv_heads": 1},
    "window": {"sliding_window": 9},
    "window of one key": {"sliding_window": 1},
    "wide window": {"sliding_window": 500},
    "alibi": {"alibi": True},
    "alibi and window": {"alibi": True, "sliding_window": 6},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "sliding_window": 4},
    "not causal, alibi": {"causal": False, "alibi": True},
    "wide values": {"head_size_v": 40},
    "narrow values, window": {"head_size_v": 16, "sliding_window": 9},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.2},
}


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("modifiers", LAYERS.values(), ids=LAYERS.keys())
def test_later_steps_compute_from_what_the_tensors_hold(modifiers, layout, query_len, make_step):
    graph = Graph(make_step, replace(PLAIN, **modifiers), query_len, CacheSpec(block_size=8, layout=layout))
    for seed, lens in enumerate(BATCHES):
        graph.replay(lens, seed=seed)


@pytest.mark.parametrize("modifiers", ["plain", "alibi", "window"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype, modifiers, make_step):
    graph = Graph(make_step, replace(PLAIN, dtype=dtype, **LAYERS[modifiers]), 2)
    for lens in BATCHES:
        graph.replay(lens, tolerance=torch.finfo(getattr(torch, dtype)).eps)


@pytest.mark.parametrize("causal", [True, False])
def test_more_rows_than_keys(causal, make_step):
    """Under a causal mask the first rows are before the first key, see nothing and are 0; they have no slot."""
    graph = Graph(make_step, replace(PLAIN, causal=causal), 4)
    graph.replay([2, 60, 1])
    assert bool((graph.step.output[:2] == 0).all()) is causal


def test_a_padding_request_is_known_by_its_rows(make_step):
    """A length of its own does not make it real; its pages hold NaN."""
    graph = Graph(make_step, PLAIN, 2)
    other, cache = graph.refill([60, 9])
    graph.step.common.seq_lens[2:] = 7
    graph.step.common.block_table_tensor[2:] = 0
    graph.call()
    graph.compare(other.truth, cache)


def test_capture_leaves_the_cache_alone(make_step):
    """No row has a slot, and slot 0 must keep even the NaN it holds."""
    graph = Graph(make_step, replace(PLAIN, dtype="bfloat16"), 2)
    bits = graph.step.kv_cache.view(torch.int16).fill_(SIGNALLING)
    graph.call()
    assert (bits == SIGNALLING).all()


@pytest.mark.parametrize("scales", [(0.3, 0.07), ((0.05, 0.5), (2.7, 0.3))])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_a_cache_of_codes(kind, scales, make_step):
    layer = replace(PLAIN, sliding_window=20)
    graph = Graph(
        make_step, layer, 2, CacheSpec(block_size=8, kv_cache_dtype=kind, k_scale=scales[0], v_scale=scales[1])
    )
    graph.step.kv_cache.fill_(0xFF)  # NaN in both formats
    graph.call()
    assert (graph.step.kv_cache == 0xFF).all()
    for lens in BATCHES[:3]:
        other, expected = graph.refill(lens)
        views = kv_cache_views(expected.view(FP8_DTYPES[kind]), SDPABackend.packing, layer.head_size)
        batch = other.common.block_table_tensor, other.common.seq_lens, other.common.query_start_loc
        rows = other.query[: 2 * len(lens)]
        truth, _ = paged_attention(
            rows, *views, *batch, layer_params(layer), k_scale=graph.k_scale, v_scale=graph.v_scale
        )
        graph.call()
        graph.compare(truth, expected, tolerance=2e-5)


def test_an_output_of_codes(make_step):
    graph, scale = Graph(make_step, PLAIN, 2), torch.tensor([0.003])
    other, _ = graph.refill([33, 7])
    codes = torch.ones(graph.step.output.shape).to(torch.float8_e4m3fn)
    graph.call(output=codes, output_scale=scale)
    graph.call()
    expected = encode_fp8(graph.step.output, scale, codes.dtype)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    assert torch.allclose(graph.step.output[: len(other.truth)].double(), other.truth, atol=2e-6)


def test_a_layer_that_shares_its_cache(make_step):
    graph = Graph(make_step, PLAIN, 2, sharing=True)
    for lens in BATCHES:
        graph.replay(lens)


def test_drafts_of_a_tree_see_their_ancestors(make_step):
    """Two branches after the root; the truth of a row is that of a chain of its ancestors alone."""
    graph = Graph(make_step, PLAIN, 4, tree="[(0,), (1,), (1, 0)]")
    for lens in ([60, 12], [4, 20, 33]):
        other, cache = graph.refill(lens)
        views = kv_cache_views(cache, SDPABackend.packing, PLAIN.head_size)
        truth = other.truth.clone()
        for request, seq_len in enumerate(lens):
            table = other.common.block_table_tensor[request].long()
            position = torch.arange(seq_len)
            stored = [view[table[position // 8], position % 8] for view in views]
            for row, ancestors in enumerate([(0,), (0, 1), (0, 2), (0, 2, 3)]):
                seen = [*range(seq_len - 4), *(seq_len - 4 + one for one in ancestors)]
                keys, values = (rows[seen].double().repeat_interleave(3, dim=1) for rows in stored)
                scores = 0.3 * torch.einsum("hd,khd->hk", other.query[4 * request + row].double(), keys)
                truth[4 * request + row] = torch.einsum("hk,khd->hd", scores.softmax(1), values)
        graph.call()
        graph.compare(truth, cache)


def test_cross_attention(make_step):
    graph = Graph(make_step, replace(PLAIN, attn_type=AttentionType.ENCODER_DECODER), 2)
    for lens in BATCHES:
        graph.replay(lens)


@pytest.mark.parametrize("modifiers", ["plain", "window", "alibi"])
def test_an_encoder_has_its_keys_from_the_step(modifiers, make_step):
    graph = Graph(make_step, replace(PLAIN, attn_type=AttentionType.ENCODER_ONLY, **LAYERS[modifiers]), 9)
    for count in (4, 2, 0):
        graph.replay([9] * count)


class NoHost(TorchDispatchMode):
    """Refuses what reads a tensor on the host, copies from there, or has a shape that follows from contents."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        indices = args[1] if name.startswith("index") else ()
        masks = [index for index in indices if isinstance(index, torch.Tensor) and index.dtype == torch.bool]
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "equal"):
            raise AssertionError(f"{func} cannot be captured")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("modifiers", ["plain", "alibi and window"])
def test_after_a_first_run_nothing_comes_from_the_host(modifiers, kv_cache_dtype, query_len, make_step):
    cache = CacheSpec(block_size=8, kv_cache_dtype=kv_cache_dtype)
    graph = Graph(make_step, replace(PLAIN, **LAYERS[modifiers]), query_len, cache)
    graph.call()
    with NoHost():
        graph.call()
        with pytest.raises(AssertionError) as refused:
            torch.tensor([1.0])
        assert str(refused.value) == snapshot("aten.lift_fresh.default cannot be captured")
