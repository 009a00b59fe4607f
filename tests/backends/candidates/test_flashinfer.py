"""Candidate ``flashinfer`` over a stand-in of its library: what is passed to it, planned for graphs, and refused.

The whole examination runs over the stand-in: what fails is how the library is called, never a kernel.
"""

import dataclasses
import importlib.metadata
import importlib.util
import inspect
import math
import sys
import warnings
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from common_batches import common_metadata
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import attncheck
from attncheck.backends.base import machine
from attncheck.backends.caches.packings import allocate_kv_cache
from attncheck.backends.candidates import flashinfer as backend_module
from attncheck.backends.candidates.flashinfer import (
    DISTRIBUTION,
    PINNED,
    FlashInferBackend,
    FlashInferBuilder,
    FlashInferImpl,
    LayerSettings,
    group_settings,
    page_indices,
    workspace_bytes,
)
from attncheck.backends.contract import KVCacheSpec
from attncheck.backends.uniform import write_slots
from attncheck.reference import AttentionParams, paged_attention, varlen_attention
from attncheck.reference.spec import LayerSpec
from attncheck.reference.step_spec import BatchSpec, CacheSpec, RequestSpec

DECODE, PREFILL, RAGGED = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
)

_SCALES = "q_scale=None, k_scale=None, v_scale=None"
_OUT = "out=None, lse=None, return_lse=False, enable_pdl=None"
_PREFILL_SETTINGS = (
    "head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode='NONE'"
)
_ITEMS = "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None"
_ROPE = "rope_scale=None, rope_theta=None"
_DTYPES = "q_data_type='float16', kv_data_type=None, o_data_type=None"

SIGNATURES = {
    (DECODE, "__init__"): "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
    "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend='auto', "
    "jit_args=None",
    (DECODE, "plan"): "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
    f"pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, {_DTYPES}, data_type=None, sm_scale=None, "
    f"{_ROPE}, non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False",
    (DECODE, "run"): f"q, paged_kv_cache, *args, {_SCALES}, {_OUT}, window_left=None, sinks=None, q_len_per_req=1, "
    "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None",
    (PREFILL, "__init__"): "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, "
    "mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None",
    (PREFILL, "plan"): "qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
    f"num_kv_heads, head_dim_qk, page_size, {_PREFILL_SETTINGS}, use_fp16_qk_reduction=False, sm_scale=None, "
    f"window_left=-1, logits_soft_cap=None, {_ROPE}, {_DTYPES}, non_blocking=True, {_ITEMS}, seq_lens=None, "
    "seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, fixed_split_size=None, "
    "disable_split_kv=False",
    (PREFILL, "run"): f"q, paged_kv_cache, *args, {_SCALES}, {_OUT}, window_left=None, sinks=None, kv_cache_sf=None, "
    "skip_softmax_threshold_scale_factor=None",
    (RAGGED, "__init__"): "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None",
    (RAGGED, "plan"): f"qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, {_PREFILL_SETTINGS}, "
    f"use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None, {_ROPE}, {_DTYPES}, "
    f"non_blocking=True, {_ITEMS}, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None, "
    "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None",
    (RAGGED, "run"): f"q, k, v, *args, {_SCALES}, o_scale=None, {_OUT}",
}
"""Names, order, kinds and defaults of the parameters behind ``self``."""


def signature(wrapper, method):
    """Of a method of the library's."""
    return inspect.signature(eval(f"lambda self, {SIGNATURES[wrapper, method]}: None"))


@dataclass
class Called:
    """A call of a method of ``wrapper``, with its arguments by name."""

    wrapper: "Wrapper"
    method: str
    arguments: dict[str, Any]


class Wrapper:
    """Any of the three: the signatures and checks of flashinfer 0.6.8.post1, and what it documents that it computes.

    Every call is recorded. ``run`` computes by the reference what was planned, from the buffers that the library's
    kernels read: those given to the constructor in graph mode, else those of the latest plan.
    """

    calls: list[Called]

    def __init__(self, *arguments, **keywords):
        self.name = type(self).__name__
        given = self._called("__init__", arguments, keywords)
        self.layout, self.is_graph, self._backend = given["kv_layout"], given["use_cuda_graph"], given["backend"]
        assert given["float_workspace_buffer"].dtype == torch.uint8
        assert self.layout in ("NHD", "HND")
        if self.is_graph:
            assert self.name == DECODE, "no other is made for graphs here"
            self.buffers = tuple(given[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len"))
            assert all(buffer.dtype == torch.int32 for buffer in self.buffers)
            assert len(self.buffers[0]) == len(self.buffers[2]) + 1
            self.offsets = torch.arange(len(self.buffers[0]), dtype=torch.int32)

    def plan(self, *arguments, **keywords):
        self.planned = given = self._called("plan", arguments, keywords)
        if self.name == RAGGED:
            self.offsets, self.keys = given["qo_indptr"].clone(), given["kv_indptr"].clone()
            return
        prefix = "" if self.name == DECODE else "paged_kv_"
        pages = tuple(given[f"{prefix}{name}"] for name in ("indptr", "indices", "last_page_len"))
        _check_pages(*pages, given["page_size"])
        if self.is_graph:
            for buffer, new in zip(self.buffers, pages, strict=True):
                buffer[: len(new)].copy_(new)
            assert len(pages[2]) == len(self.buffers[2]), "a graph's batch size is fixed"
            return
        # As a copy to a device makes them: at new addresses, for each plan.
        self.buffers = tuple(new.clone() for new in pages)
        self.offsets = torch.arange(len(pages[0])).int() if self.name == DECODE else given["qo_indptr"].clone()

    def run(self, *arguments, **keywords):
        given, settings = self._called("run", arguments, keywords), self.planned
        query, out, lse = given["q"], given["out"], given["lse"]
        keys = (given["k"], given["v"]) if self.name == RAGGED else given["paged_kv_cache"]
        _check_tensors(query, *keys, out, settings)
        assert given["return_lse"] == (lse is not None)
        assert len(query) == int(self.offsets[-1])
        params = AttentionParams(
            settings["num_qo_heads"],
            settings["num_kv_heads"],
            settings["head_dim" if self.name == DECODE else "head_dim_qk"],
            scale=settings["sm_scale"] * (given["k_scale"] or 1.0),
            causal=self.name == DECODE or settings["causal"],  # the one row of a request sees all its keys
            window=(settings["window_left"], -1),  # an inclusive distance
            logits_soft_cap=settings["logits_soft_cap"],
        )
        keys = tuple(each.float() for each in keys)  # of codes, their values
        if self.name == RAGGED:
            row_out, row_lse = varlen_attention(query.float(), *keys, self.offsets, self.keys, params)
        else:
            if self.layout == "HND":
                keys = tuple(each.transpose(1, 2) for each in keys)
            row_out, row_lse = paged_attention(query.float(), *keys, *self._tables(), self.offsets, params)
        out.copy_(row_out)
        if given["v_scale"] is not None:
            out.mul_(given["v_scale"])  # behind the kernel, on what it rounded
        if lse is not None:
            assert lse.shape == query.shape[:2]
            assert lse.is_contiguous()
            lse.copy_(row_lse / math.log(2))

    def _tables(self):
        """Block table and lengths of the planned requests."""
        indptr, indices, last_page_len = self.buffers
        pages = [indices[start:end] for start, end in pairwise(indptr.tolist())]
        lens = torch.where(indptr.diff() > 0, (indptr.diff() - 1) * self.planned["page_size"] + last_page_len, 0)
        return pad_sequence(pages, batch_first=True), lens.int()

    def _called(self, method, arguments, keywords):
        bound = signature(self.name, method).bind(self, *arguments, **keywords)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        self.calls.append(Called(self, method, given))
        return given


def _check_pages(indptr, indices, last_page_len, page_size):
    assert {given.dtype for given in (indptr, indices, last_page_len)} == {torch.int32}
    counts = indptr.diff()
    assert indptr[0] == 0
    assert len(last_page_len) == len(counts) > 0
    assert len(indices) == indptr[-1]
    # A request without pages has the length 0: get_seq_lens makes a length of it.
    assert ((last_page_len >= (counts > 0).int()) & (last_page_len <= page_size * (counts > 0))).all()


def _check_tensors(query, key, value, out, settings):
    assert query.dtype == settings["q_data_type"]
    assert key.dtype == value.dtype == settings["kv_data_type"]
    assert out.dtype == settings["o_data_type"]
    assert out.shape == query.shape
    assert out.is_contiguous(), "kernels write by plain offsets"
    assert query.shape[1] == settings["num_qo_heads"]
    assert key.stride() == value.stride()
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1


HEADS, KV_HEADS, SIZE, BLOCK, NUM_BLOCKS = 4, 2, 64, 4, 80


class SmallBuilder(FlashInferBuilder):
    """Without a workspace that nothing here fills."""

    @staticmethod
    def _workspace_bytes(*arguments):
        return 16


class PlainImpl(FlashInferImpl):
    """With a writer that is not interpreted: Triton's has its own tests."""

    def write(self, *arguments):
        write_slots(*arguments)


class OnCPU(FlashInferBackend):
    """The backend over the stand-in."""

    supported_devices = ("cpu",)

    get_impl_cls = staticmethod(lambda: PlainImpl)

    get_builder_cls = staticmethod(lambda: SmallBuilder)

    @classmethod
    def unavailable_reasons(cls, device):
        return []


@pytest.fixture
def calls(monkeypatch):
    """What is called of what ``import flashinfer`` finds; ``calls("plan")``: the calls of a method."""
    library, found = ModuleType("flashinfer"), []
    for name in (DECODE, PREFILL, RAGGED):
        setattr(library, name, type(name, (Wrapper,), {"calls": found}))
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    return lambda method: [call for call in found if call.method == method]


@dataclass
class Engine:
    """One layer of 4 heads over 2, of size 64, on pages of 4 tokens, and its builder."""

    impl: Any
    layer: Any
    builder: Any
    config: Any
    kv_cache: Tensor

    def build(self, common):
        return self.builder.build(common_prefix_len=0, common_attn_metadata=common)

    def forward(self, metadata, *, with_lse=False, **changes):
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
def make_engine(calls):
    """``make_engine(graphs=(4,), sliding_window=3)``: an impl and a builder, as a model runner makes them."""

    def make(
        *,
        graphs=(),
        kv_cache_dtype="auto",
        layout="NHD",
        attn_type="decoder",
        scale=0.25,
        sliding_window=None,
        logits_soft_cap=None,
    ):
        impl = OnCPU.get_impl_cls()(
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
        kv_cache = allocate_kv_cache(OnCPU, sizes, cache, NUM_BLOCKS, "cpu")
        spec = KVCacheSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=kv_cache.dtype)
        builder = OnCPU.get_builder_cls()(spec, ["layer.0"], config, torch.device("cpu"))
        return Engine(impl, layer, builder, config, kv_cache)

    return make


def make_batch(requests, *, tokens=None, causal=True):
    """Request ``r`` has pages ``10 r + 1``, ``10 r + 2``, ..."""
    table = [[10 * request + page + 1 for page in range(6)] for request in range(len(requests))]
    slots = [
        table[request][position // BLOCK] * BLOCK + position % BLOCK
        for request, (query_len, seq_len) in enumerate(requests)
        for position in range(seq_len - query_len, seq_len)
    ]
    num_tokens = len(slots) if tokens is None else tokens
    return common_metadata(
        *zip(*requests, strict=True),
        table=table,
        num_actual_tokens=num_tokens,
        max_query_len=9,
        max_seq_len=24,
        slot_mapping=torch.tensor(slots + [-1] * (num_tokens - len(slots)), dtype=torch.int64),
        causal=causal,
    )


SUITE = """
suite: over_the_stand_in
defaults:
  layer: {num_heads: 2, num_kv_heads: 1, head_size: 64, dtype: float16}
  cache: {block_size: 4, layout: NHD}
cases:
  - {id: decode, batch: q1s1_q1s3_q1s4_q1s5_q1s17, matrix: {cache.layout: [NHD, HND], layer.dtype: [float16, bfloat16]}}
  - {id: mixed, batch: q1s9_q5s12_q1s4_q2s2_q8s8, matrix: {cache.block_size: [1, 4, 16], layer.causal: [true, false]}}
  - {id: window, batch: q1s9_q1s2_q6s14, matrix: {layer.sliding_window: [1, 4, 5]}}
  - {id: soft-cap, batch: q1s9_q6s14, layer: {logits_soft_cap: 3.0, scale: 0.7}}
  - {id: groups, batch: q1s9_q6s14, layer: {num_heads: 6, num_kv_heads: 2, head_size: 128, dtype: bfloat16}}
  - {id: codes, batch: q1s9_q6s14, cache: {kv_cache_dtype: fp8_e4m3, k_scale: 0.37, v_scale: 1.9, layout: HND}}
  - {id: padding, batch: {requests: q1s9_q4s6, padding: {requests: 1, tokens: 3}}}
  - {id: encoder, batch: q3s3_q7s7, layer: {attn_type: encoder_only}}
  - {id: cross, batch: [{query_len: 1, seq_len: 5, encoder_len: 9}, {query_len: 6, encoder_len: 3}],
     layer: {attn_type: encoder_decoder}}
  - {id: drafts, batch: q3s9_q3s4, path: {spec_decode: {num_speculative_tokens: 2}}}
  - {id: parts, batch: q1s19_q4s16, path: {split_kv: {parts: 2}}}
  - {id: micro-batches, batch: q1s9_q6s14_q2s7, path: {micro_batch: {cuts: [1, 7]}}}
  - {id: shared-cache, batch: q1s9_q6s14, layer: {kv_sharing: true}}
  - {id: fast-prefill, batch: q1s9_q6s14, path: {fast_prefill: {rows: 1}}}
  - {id: gaps, batch: q1s9_q6s14, strides: {output: padded}}
"""


@pytest.mark.parametrize(
    ("pattern", "checks"),
    [
        ("*", ["numerics", "lse"]),
        ("decode.NHD-float16", ["containment", "cache_write", "refusals"]),
        ("codes", ["containment", "cache_write", "refusals"]),
        ("padding", ["containment", "cache_write", "refusals"]),
    ],
)
def test_every_case_comes_out_right(pattern, checks, calls, tmp_path):
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE, encoding="utf-8")
    found = attncheck.examine(OnCPU, str(suite), cases=pattern, checks=checks, device="cpu")
    assert {record.outcome for record in found.records} == {"passed"}, str(found)


MIXED = [(1, 5), (1, 8), (3, 3), (1, 9), (4, 20)]
"""Two decodes; what follows the first request of several rows is none, though it has a single row."""


def test_each_part_is_run_with_its_rows_and_the_whole_cache(calls, make_engine):
    engine = make_engine(graphs=(2,))
    engine.build(make_batch([(1, 6), (2, 9)]))
    given = engine.forward(engine.build(make_batch(MIXED, tokens=12)), with_lse=True)
    made = [call.arguments for call in calls("__init__")]
    assert [each["backend"] for each in made] == ["fa2", "fa2"], "made once"
    assert len({each["float_workspace_buffer"].data_ptr() for each in made}) == 1
    decode, prefill = calls("run")
    assert (decode.wrapper.name, prefill.wrapper.name) == (DECODE, PREFILL)
    for call, rows in ((decode, slice(0, 2)), (prefill, slice(2, 10))):
        for name, whole in (("q", given.query), ("out", given.output), ("lse", given.output_lse)):
            assert call.arguments[name].data_ptr() == whole[rows].data_ptr()
            assert call.arguments[name].shape == whole[rows].shape
        assert call.arguments["paged_kv_cache"][0].data_ptr() == engine.kv_cache.data_ptr()
        assert call.wrapper.planned["pos_encoding_mode"] == "NONE"
        assert call.arguments["k_scale"] is call.arguments["v_scale"] is call.arguments["sinks"] is None
    assert not given.output_lse[10:].any()
    assert not given.output[10:].any()


def test_the_writer_is_that_of_the_unified_kernel(make_engine, monkeypatch):
    pytest.importorskip("triton")
    from attncheck.backends.candidates.triton_unified import cache

    seen = []
    monkeypatch.setattr(cache, "reshape_and_cache", lambda *rows, **scales: seen.append((*rows, scales)))
    engine = make_engine()
    arguments = [object() for _ in range(5)]
    FlashInferImpl.write(engine.impl, engine.layer, *arguments)
    assert seen == [(*arguments, {"k_scale": engine.layer._k_scale, "v_scale": engine.layer._v_scale})]


def test_the_family_of_kernels_that_the_library_chose_is_named(make_engine, monkeypatch):
    """That of the latest plan, whichever was requested."""
    engine = make_engine()
    metadata = engine.build(make_batch(MIXED))
    monkeypatch.setattr(metadata.prefill.planned.wrapper, "_backend", "fa3")
    assert engine.impl.chosen_kernels == set()
    engine.forward(metadata)
    assert engine.impl.chosen_kernels == {f"fa2 {DECODE}", f"fa3 {PREFILL}"}


BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")


def test_a_decode_of_an_announced_size_is_planned_in_buffers_that_stay(calls, make_engine):
    engine = make_engine(graphs=(2, 4))
    engine.build(make_batch([(1, 5), (1, 9), (1, 1), (1, 24)]))
    (constructed,) = calls("__init__")
    buffers = [constructed.arguments[name] for name in BUFFERS]
    assert constructed.arguments["use_cuda_graph"] is True
    assert [len(buffer) for buffer in buffers] == [5, 24, 4]
    assert buffers[0].tolist() == [0, 2, 5, 6, 12]
    assert buffers[1][:12].tolist() == [1, 2, 11, 12, 13, 21, 31, 32, 33, 34, 35, 36]
    assert buffers[2].tolist() == [1, 1, 1, 4]

    engine.build(make_batch([(1, 8), (1, 2), (0, 9), (0, 0)], tokens=4))
    assert len(calls("__init__")) == 1
    assert len(calls("plan")) == 2
    assert buffers[0].tolist() == [0, 2, 3, 3, 3]
    assert buffers[1][:3].tolist() == [1, 2, 11]
    assert buffers[2].tolist() == [4, 2, 0, 0]

    engine.build(make_batch([(1, 5), (1, 9)]))  # a size has a wrapper of its own
    assert [len(call.arguments[BUFFERS[2]]) for call in calls("__init__")] == [4, 2]


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [([(1, 5), (1, 9)], 3), ([(1, 5)], 1), ([(2, 5), (0, 0)], 2), ([(1, 5), (2, 9)], 3)],
    ids=["tokens-behind", "no-such-size", "drafts", "mixed"],
)
def test_other_steps_are_planned_without_graphs(requests, tokens, calls, make_engine):
    make_engine(graphs=(2,)).build(make_batch(requests, tokens=tokens))
    assert not any(call.arguments["use_cuda_graph"] for call in calls("__init__"))


def test_only_what_a_wrapper_was_planned_for_last_can_be_run(make_engine):
    engine = make_engine()
    decode = engine.build(make_batch([(1, 5)]))
    earlier = engine.build(make_batch([(2, 7)]))
    engine.forward(decode)  # of another wrapper
    later = engine.build(make_batch([(2, 8)]))
    message = "FLASHINFER: attn_metadata of an earlier step: its builder has planned another since"
    with pytest.raises(RuntimeError, match=message):
        engine.forward(earlier)
    engine.forward(later)


def test_a_step_that_no_graph_was_announced_for_is_not_captured(calls, make_engine, monkeypatch):
    engine = make_engine(graphs=(2,))
    monkeypatch.setattr("attncheck.backends.candidates.flashinfer._is_captured", lambda tensor: True)
    with pytest.raises(RuntimeError, match="a graph is captured of a step that was planned for no graph"):
        engine.forward(engine.build(make_batch([(2, 5)])))
    assert calls("run") == []
    engine.forward(engine.build(make_batch([(1, 5), (1, 6)])))


@pytest.mark.parametrize(
    ("changes", "encoder_len", "words"),
    [
        ({"sliding_window": 4, "causal": False}, None, "sliding_window 4 without a causal mask"),
        ({"scale": 0.0004}, None, "scale 0.0004: must be at least"),
        ({"dtype": "float32"}, None, "dtype float32"),
        ({"head_size_v": 128}, None, "'head_size_v' is not declared"),
        ({"attn_type": "encoder_decoder"}, 0, "encoder_len 0: rows of a request without keys"),
        ({"attn_type": "encoder_decoder"}, 3, None),
    ],
)
def test_a_layer_is_refused_with_the_reason(changes, encoder_len, words):
    layer = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16")
    request = RequestSpec(query_len=2, seq_len=9, encoder_len=encoder_len)
    batch = BatchSpec(requests=(request,))
    reasons = FlashInferBackend.unsupported_reasons(dataclasses.replace(layer, **changes), CacheSpec(), batch)
    assert any(words in reason for reason in reasons) if words else reasons == []


def test_a_step_is_refused_when_it_is_built(calls, make_engine):
    window = "a window of 4 keys without a causal mask: there is a left bound only"
    for options, requests, causal, words in (
        ({"sliding_window": 4}, [(2, 9)], False, window),
        ({}, [(1, 5), (2, 0)], False, "(query_len, seq_len) (2, 0): rows of a request without keys"),
        ({}, [(1, 0)], True, "(query_len, seq_len) (1, 0): rows of a request without keys"),
    ):
        engine = make_engine(**options)
        with pytest.raises(NotImplementedError) as refused:
            engine.build(make_batch(requests, causal=causal))
        assert str(refused.value) == f"FLASHINFER: {words}"
    assert calls("__init__") == []


def test_a_step_is_refused_before_anything_is_written(calls, make_engine):
    engine = make_engine(sliding_window=3)
    step = engine.build(make_batch([(3, 2)]))
    with pytest.raises(NotImplementedError, match=r"\[\(3, 2\)\]: more rows than keys is not supported"):
        engine.forward(step)
    step = engine.build(make_batch([(1, 5)]))
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(ValueError, match=f"output has dtype {dtype}, and query torch.float16"):
            engine.forward(step, output=torch.zeros(1, 4, 64, dtype=dtype))
    assert engine.kv_cache.eq(0).all()
    assert calls("run") == []
    with pytest.raises(ValueError, match=r"window_left=2.*window_left=3"):
        make_engine(sliding_window=4).forward(step)


def settings_of(**changes):
    values = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "scale": 0.125,
        "window_left": -1,
        "logits_soft_cap": None,
        "dtype": torch.float16,
        "kv_dtype": torch.float16,
        "has_cache": True,
    }
    return LayerSettings(**values | changes)


def test_layers_that_the_kernels_cannot_do_and_groups_that_differ_are_refused(make_engine):
    with pytest.raises(ValueError, match="must be at least"):
        make_engine(scale=0.0004)
    with pytest.raises(NotImplementedError, match=r"torch\.float32 is not supported; supported are torch\.float16"):
        settings_of(dtype=torch.float32, kv_dtype=torch.float32)
    first, second = make_engine(), make_engine(logits_soft_cap=30.0)
    other = SimpleNamespace(impl=SimpleNamespace())
    layers = {"first": first.layer, "second": second.layer, "third": first.layer, "other": other}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.float16),
    )
    assert group_settings(config, ["first", "third"], FlashInferImpl) == settings_of(scale=0.25)
    with pytest.raises(NotImplementedError, match=r"first.*second"):
        group_settings(config, ["first", "second"], FlashInferImpl)
    with pytest.raises(TypeError, match="other must have a FlashInferImpl, and has a SimpleNamespace"):
        group_settings(config, ["other"], FlashInferImpl)


def test_the_workspace_holds_what_the_scheduler_lays_out(monkeypatch):
    assert workspace_bytes(settings_of(), 132, 0) == 128 * 2**20  # the recommended size
    # 64 heads over 8, of size 128: 33 parts a KV head (two an SM), each of a tile of 128 rows.
    wide = settings_of(num_heads=64, num_kv_heads=8, head_size=128)
    assert workspace_bytes(wide, 132, 0) >= 64 * 33 * 128 * 129 * 4
    # A graph of 512 requests has tiles of 16 rows: one a request, and as many as all rows fill.
    of_graphs = workspace_bytes(wide, 132, 512)
    assert of_graphs >= 64 * (512 * 8 // 16 + 511) * 16 * 129 * 4
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    assert FlashInferBuilder._workspace_bytes(wide, torch.device("cuda"), 512) == of_graphs


def test_what_a_machine_lacks_is_named(monkeypatch, tmp_path):
    machines = {
        "": {},
        "flashinfer-python is not installed": {"version": None},
        "flashinfer-python 0.7.0 is installed, and what is relied on was read in 0.6.8.post1": {"version": "0.7.0"},
        "device cuda: compute capability 7.5, and the kernels need 8.0": {"capability": (7, 5)},
        "there is neither nvcc, by which flashinfer compiles its kernels, nor the package flashinfer_jit_cache": {
            "found": ("triton",)
        },
    }
    for reason, changes in machines.items():
        given = {"version": f"{PINNED}+cu130", "capability": (9, 0)}
        given |= {"found": ("triton", "flashinfer_jit_cache")} | changes
        for owner, name, answer in (
            (machine, "installed_version", lambda name, given=given: given["version"]),
            (machine, "import_reasons", lambda name: []),
            (importlib.util, "find_spec", lambda name, given=given: name if name in given["found"] else None),
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_capability", lambda device, given=given: given["capability"]),
            (backend_module.shutil, "which", lambda name: None),
        ):
            monkeypatch.setattr(owner, name, answer)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert FlashInferBackend.unavailable_reasons("cuda") == ([reason] if reason else [])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "triton" else None)
    assert FlashInferBackend.unavailable_reasons("cuda") == []
    assert FlashInferBackend.version().startswith(f"flashinfer-python {PINNED}+cu130 (fa2), attncheck")


def test_the_stand_in_is_as_the_pinned_library():
    """The library needs no GPU to be imported."""
    try:
        installed = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed")
    if installed != PINNED:
        pytest.skip(f"{DISTRIBUTION} {installed} is installed, and the stand-in is of {PINNED}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flashinfer = pytest.importorskip("flashinfer", reason="flashinfer cannot be imported")
    for name, method in SIGNATURES:
        theirs = inspect.signature(getattr(getattr(flashinfer, name), method)).parameters.values()
        ours = signature(name, method).parameters.values()
        assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]
    lens = [5, 0, 8, 16, 17]
    pages = page_indices(torch.arange(20).view(5, 4), 8, range(5), lens)
    assert flashinfer.get_seq_lens(pages.indptr, pages.last_page_len, 8).tolist() == lens
