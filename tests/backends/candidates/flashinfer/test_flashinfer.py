"""Candidate ``flashinfer`` over a stand-in of its library: what is passed to it, planned for graphs, and refused.

The whole examination runs over the stand-in: what fails is how the library is called, never a kernel.
"""

import dataclasses
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from torch import Tensor

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
from attncheck.backends.contract import AttentionBackend, CommonAttentionMetadata, KVCacheSpec
from attncheck.backends.uniform import write_slots
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, RequestSpec

Make = Callable[..., Any]

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


def make_batch(
    requests: Sequence[tuple[int, int]], *, tokens: int | None = None, causal: bool = True
) -> CommonAttentionMetadata:
    """Request ``r`` has pages ``10 r + 1``, ``10 r + 2``, ..."""

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
  - {id: graph, batch: q1s1_q1s17, layer: {num_heads: 1}, cache: {block_size: 32}}
  - {id: encoder, batch: q3s3_q7s7, layer: {attn_type: encoder_only}}
  - {id: cross, batch: [{query_len: 1, seq_len: 5, encoder_len: 9}, {query_len: 6, encoder_len: 3}],
     layer: {attn_type: encoder_decoder}}
  - {id: drafts, batch: q3s9_q3s4, path: {spec_decode: {num_speculative_tokens: 2}}}
  - {id: parts, batch: q1s19_q4s16, path: {split_kv: {parts: 2}}}
  - {id: micro-batches, batch: q1s9_q6s14_q2s7, path: {micro_batch: {cuts: [1, 7]}}}
  - {id: shared-cache, batch: q1s9_q6s14, layer: {kv_sharing: true}}
  - {id: fast-prefill, batch: q1s9_q6s14, path: {fast_prefill: {rows: 1}}}
"""


@pytest.fixture
def examine(library: Any, backend: type[AttentionBackend], tmp_path: Path) -> Callable[..., Any]:
    """``examine(pattern, checks)``: the records of the suite's cases."""
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE, encoding="utf-8")

    def run(pattern: str, checks: list[str]) -> Any:
        return attncheck.examine(backend, str(suite), cases=pattern, checks=checks, device="cpu")

    return run


def assert_passed(found: Any) -> None:
    assert {record.outcome for record in found.records} == {"passed"}, str(found)


def test_every_case_comes_out_right(examine: Make) -> None:
    assert_passed(examine("*", ["numerics", "lse"]))


@pytest.mark.parametrize("pattern", ["decode.NHD-float16", "codes", "padding"])
def test_keys_of_other_requests_do_not_matter_and_the_cache_is_written(examine: Make, pattern: str) -> None:
    assert_passed(examine(pattern, ["containment", "cache_write", "refusals"]))


def test_the_declared_level_of_graphs_holds(examine: Make) -> None:
    assert_passed(examine("graph", ["cudagraph"]))


MIXED = [(1, 5), (1, 8), (3, 3), (1, 9), (4, 20)]
"""Two decodes; what follows the first request of several rows is none, though it has a single row."""

SETTINGS = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "sm_scale": 0.25,
    "window_left": -1,
    "logits_soft_cap": None,
    "q_data_type": torch.float16,
    "kv_data_type": torch.float16,
    "o_data_type": torch.float16,
    "pos_encoding_mode": "NONE",
}


def lists(arguments: dict[str, Any], *names: str) -> list[Any]:
    return [arguments[name].tolist() for name in names]


def test_single_rows_in_front_are_decodes_and_all_others_prefills(library: Any, make_engine: Make) -> None:
    make_engine().build(make_batch(MIXED))
    decode, prefill = (call.arguments for call in library.of("plan"))
    assert lists(decode, "indptr", "indices", "last_page_len") == [[0, 2, 4], [1, 2, 11, 12], [1, 4]]
    assert decode["head_dim"] == 64
    assert decode["page_size"] == prefill["page_size"] == 4
    assert lists(prefill, "qo_indptr", "paged_kv_indptr") == [[0, 3, 4, 8], [0, 1, 4, 9]]
    assert prefill["paged_kv_indices"].tolist() == [21, 31, 32, 33, 41, 42, 43, 44, 45]
    assert prefill["paged_kv_last_page_len"].tolist() == [3, 1, 4]
    assert prefill["head_dim_qk"] == 64
    assert prefill["causal"] is True
    for planned in (decode, prefill):
        assert SETTINGS.items() <= planned.items()


def test_each_part_is_run_with_its_rows_and_the_whole_cache(library: Any, make_engine: Make) -> None:
    engine = make_engine()
    given = engine.forward(engine.build(make_batch(MIXED, tokens=12)), with_lse=True)
    decode, prefill = library.of("run")
    assert (decode.wrapper.name, prefill.wrapper.name) == (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
    )
    for call, rows in ((decode, slice(0, 2)), (prefill, slice(2, 10))):
        for name, whole in (("q", given.query), ("out", given.output), ("lse", given.output_lse)):
            assert call.arguments[name].data_ptr() == whole[rows].data_ptr()
            assert call.arguments[name].shape == whole[rows].shape
        key_cache, value_cache = call.arguments["paged_kv_cache"]
        assert key_cache.data_ptr() == engine.kv_cache[:, 0].data_ptr()
        assert value_cache.data_ptr() == engine.kv_cache[:, 1].data_ptr()
        assert key_cache.shape == value_cache.shape == (80, 4, 2, 64)
        assert call.arguments["return_lse"] is True
        assert call.arguments["k_scale"] is call.arguments["v_scale"] is call.arguments["sinks"] is None
    assert given.output_lse[10:].eq(0).all()
    assert given.output[10:].eq(0).all()


def test_an_encoder_s_keys_are_the_rows_of_the_step(library: Any, make_engine: Make) -> None:
    engine = make_engine(attn_type="encoder_only")
    common = make_batch([(3, 3), (5, 5), (0, 0)], tokens=10, causal=False)
    given = engine.forward(engine.build(common), kv_cache=torch.empty(0, dtype=torch.float16))
    ((plan,), (run,)) = library.of("plan"), library.of("run")
    assert plan.wrapper.name == "BatchPrefillWithRaggedKVCacheWrapper"
    assert lists(plan.arguments, "qo_indptr", "kv_indptr") == [[0, 3, 8], [0, 3, 8]]
    assert plan.arguments["causal"] is False
    for name, whole in (("q", given.query), ("k", given.key), ("v", given.value), ("out", given.output)):
        assert run.arguments[name].data_ptr() == whole.data_ptr()
        assert len(run.arguments[name]) == 8


def test_kernels_are_selected_by_name_and_share_one_workspace(library: Any, make_engine: Make) -> None:
    make_engine(graphs=(2,)).build(make_batch(MIXED))
    constructed = [call.arguments for call in library.of("__init__")]
    assert {arguments["backend"] for arguments in constructed} == {"fa2"}
    assert len({arguments["float_workspace_buffer"].data_ptr() for arguments in constructed}) == 1
    assert constructed[0]["use_tensor_cores"] is True
    assert [arguments["use_cuda_graph"] for arguments in constructed] == [False, False]


def test_wrappers_are_made_once_and_planned_for_every_step(library: Any, make_engine: Make) -> None:
    engine = make_engine()
    for step in (MIXED, MIXED, [(1, 6), (2, 9)]):
        engine.build(make_batch(step))
    assert len(library.of("__init__")) == 2
    assert len(library.of("plan")) == 6


def test_output_with_gaps_is_written_through_one_without(library: Any, make_engine: Make) -> None:
    engine = make_engine()
    wide = torch.zeros(2, 4, 128, dtype=torch.float16)
    given = engine.forward(engine.build(make_batch([(2, 6)])), output=wide[:, :, :64])
    assert given.output.ne(0).any(-1).all()
    assert wide[:, :, 64:].eq(0).all()


def test_the_writer_is_that_of_the_unified_kernel(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attncheck.backends.candidates.flashinfer import FlashInferImpl
    from attncheck.backends.candidates.triton_unified import cache

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(cache, "reshape_and_cache", lambda *rows, **scales: seen.append((*rows, scales)))
    engine = make_engine()
    arguments = [object() for _ in range(5)]
    FlashInferImpl.write(engine.impl, engine.layer, *arguments)
    ((*rows, scales),) = seen
    assert rows == arguments
    assert scales == {"k_scale": engine.layer._k_scale, "v_scale": engine.layer._v_scale}


def test_the_family_of_kernels_that_the_library_chose_is_named(
    library: Any, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the latest plan, whichever was requested."""
    engine = make_engine()
    metadata = engine.build(make_batch(MIXED))
    monkeypatch.setattr(metadata.prefill.planned.wrapper, "_backend", "fa3")
    assert engine.impl.chosen_kernels == set()
    engine.forward(metadata)
    assert engine.impl.chosen_kernels == {
        "fa2 BatchDecodeWithPagedKVCacheWrapper",
        "fa3 BatchPrefillWithPagedKVCacheWrapper",
    }


UNOWNED = 10**6

TABLE = torch.tensor([[7, 2, UNOWNED], [UNOWNED] * 3, [4, 9, UNOWNED], [5, UNOWNED, UNOWNED]], dtype=torch.int32)


def test_pages_of_requests_are_named_by_their_rows_of_the_table() -> None:
    pages = page_indices(TABLE.long(), 4, [0, 1, 2, 3, 0], [5, 0, 8, 1, 4])
    assert lists(vars(pages), "indptr", "last_page_len") == [[0, 2, 2, 4, 5, 6], [1, 0, 4, 1, 4]]
    assert pages.indices.tolist() == [7, 2, 4, 9, 5, 7]
    assert {tensor.dtype for tensor in vars(pages).values()} == {torch.int32}
    assert page_indices(TABLE, 4, [0, 1], [0, 0]).indices.shape == (0,)


BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")


def test_a_decode_of_an_announced_size_is_planned_in_buffers_that_stay(library: Any, make_engine: Make) -> None:
    engine = make_engine(graphs=(2, 4))
    engine.build(make_batch([(1, 5), (1, 9), (1, 1), (1, 24)]))
    (constructed,) = library.of("__init__")
    buffers = [constructed.arguments[name] for name in BUFFERS]
    places = [buffer.data_ptr() for buffer in buffers]
    assert constructed.arguments["use_cuda_graph"] is True
    assert [len(buffer) for buffer in buffers] == [5, 24, 4]
    assert buffers[0].tolist() == [0, 2, 5, 6, 12]
    assert buffers[1][:12].tolist() == [1, 2, 11, 12, 13, 21, 31, 32, 33, 34, 35, 36]
    assert buffers[2].tolist() == [1, 1, 1, 4]

    engine.build(make_batch([(1, 8), (1, 2), (0, 9), (0, 0)], tokens=4))
    assert len(library.of("__init__")) == 1
    assert len(library.of("plan")) == 2
    assert [constructed.arguments[name].data_ptr() for name in BUFFERS] == places
    assert buffers[0].tolist() == [0, 2, 3, 3, 3]
    assert buffers[1][:3].tolist() == [1, 2, 11]
    assert buffers[2].tolist() == [4, 2, 0, 0]


def test_sizes_have_wrappers_of_their_own(library: Any, make_engine: Make) -> None:
    engine = make_engine(graphs=(1, 2))
    for step in ([(1, 5), (1, 9)], [(1, 5)], [(1, 6), (1, 9)], [(1, 2)]):
        engine.build(make_batch(step))
    assert [len(call.arguments[BUFFERS[2]]) for call in library.of("__init__")] == [2, 1]
    assert [call.wrapper for call in library.of("plan")] == [call.wrapper for call in library.of("__init__")] * 2


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [([(1, 5), (1, 9)], 3), ([(1, 5)], 1), ([(2, 5), (0, 0)], 2), ([(1, 5), (2, 9)], 3)],
    ids=["tokens-behind", "no-such-size", "drafts", "mixed"],
)
def test_other_steps_are_planned_without_graphs(
    library: Any, make_engine: Make, requests: list[tuple[int, int]], tokens: int
) -> None:
    make_engine(graphs=(2,)).build(make_batch(requests, tokens=tokens))
    assert not any(call.arguments["use_cuda_graph"] for call in library.of("__init__"))


def test_metadata_of_an_earlier_step_cannot_be_run(make_engine: Make) -> None:
    engine = make_engine()
    earlier = engine.build(make_batch([(1, 5), (2, 7)]))
    later = engine.build(make_batch([(1, 6), (2, 8)]))
    with pytest.raises(RuntimeError) as refused:
        engine.forward(earlier)
    assert str(refused.value) == snapshot(
        "FLASHINFER: attn_metadata of an earlier step: its builder has planned another since"
    )
    engine.forward(later)


def test_what_other_wrappers_were_planned_for_can_still_be_run(make_engine: Make) -> None:
    engine = make_engine()
    decode = engine.build(make_batch([(1, 5)]))
    engine.build(make_batch([(2, 7)]))
    engine.forward(decode)


def test_a_step_that_no_graph_was_announced_for_is_not_captured(
    library: Any, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(graphs=(2,))
    monkeypatch.setattr("attncheck.backends.candidates.flashinfer._is_captured", lambda tensor: True)
    with pytest.raises(RuntimeError) as refused:
        engine.forward(engine.build(make_batch([(2, 5)])))
    assert str(refused.value) == snapshot("FLASHINFER: a graph is captured of a step that was planned for no graph")
    assert library.of("run") == []
    engine.forward(engine.build(make_batch([(1, 5), (1, 6)])))


LAYER = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16")
BATCH = BatchSpec(requests=(RequestSpec(query_len=2, seq_len=9),))


def reasons(batch: BatchSpec = BATCH, cache: CacheSpec = CacheSpec(), **layer: Any) -> list[str]:  # noqa: B008
    return FlashInferBackend.unsupported_reasons(dataclasses.replace(LAYER, **layer), cache, batch)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"sliding_window": 4, "causal": False}, "sliding_window 4 without a causal mask"),
        ({"sliding_window": 4, "attn_type": "encoder_only"}, "sliding_window 4 without a causal mask"),
        ({"scale": 0.0004}, "scale 0.0004: must be at least"),
        ({"alibi": True}, "'alibi' is not declared"),
        ({"sinks": True}, "'sinks' is not declared"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"head_size": 96}, "head_size 96"),
        ({"head_size_v": 128}, "'head_size_v' is not declared"),
    ],
)
def test_a_layer_is_refused_with_the_reason(layer: dict[str, Any], words: str) -> None:
    assert any(words in reason for reason in reasons(**layer)), reasons(**layer)


def test_cross_attention_to_nothing_is_refused_with_the_reason() -> None:
    def reasons_for(encoder_len: int) -> list[str]:
        batch = BatchSpec(requests=(RequestSpec(query_len=2, seq_len=9, encoder_len=encoder_len),))
        return reasons(batch, attn_type="encoder_decoder")

    assert reasons_for(3) == []
    assert reasons_for(0) == ["encoder_len 0: rows of a request without keys"]


@pytest.mark.parametrize(
    ("options", "step", "words"),
    [
        (
            {"sliding_window": 4},
            {"requests": [(2, 9)], "causal": False},
            snapshot("FLASHINFER: a window of 4 keys without a causal mask: there is a left bound only"),
        ),
        (
            {},
            {"requests": [(1, 5), (2, 0)], "causal": False},
            snapshot("FLASHINFER: (query_len, seq_len) (2, 0): rows of a request without keys"),
        ),
        (
            {},
            {"requests": [(1, 0)]},
            snapshot("FLASHINFER: (query_len, seq_len) (1, 0): rows of a request without keys"),
        ),
    ],
)
def test_a_step_is_refused_when_it_is_built(
    library: Any, make_engine: Make, options: dict[str, Any], step: dict[str, Any], words: str
) -> None:
    engine, common = make_engine(**options), make_batch(**step)
    with pytest.raises(NotImplementedError) as refused:
        engine.build(common)
    assert str(refused.value) == words
    assert library.calls == []


def test_more_rows_than_keys_are_refused_before_anything_is_written(library: Any, make_engine: Make) -> None:
    engine = make_engine()
    step = engine.build(make_batch([(3, 2)]))
    with pytest.raises(NotImplementedError) as refused:
        engine.forward(step)
    assert str(refused.value) == snapshot(
        "FLASHINFER: (query_len, seq_len) [(3, 2)]: more rows than keys is not supported"
    )
    assert engine.kv_cache.eq(0).all()
    assert library.of("run") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_output_of_another_dtype_is_refused(make_engine: Make, dtype: torch.dtype) -> None:
    engine = make_engine()
    step = engine.build(make_batch([(1, 5)]))
    with pytest.raises(ValueError, match=f"output has dtype {dtype}, and query torch.float16"):
        engine.forward(step, output=torch.zeros(1, 4, 64, dtype=dtype))
    assert engine.kv_cache.eq(0).all()


def test_a_layer_that_was_planned_for_as_another_is_refused(make_engine: Make) -> None:
    planned, other = make_engine(sliding_window=3), make_engine(sliding_window=4)
    step = planned.build(make_batch([(1, 5)]))
    with pytest.raises(ValueError, match=r"window_left=2.*window_left=3"):
        other.forward(step)


def settings_of(**changes: Any) -> LayerSettings:
    values: dict[str, Any] = {
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


def test_a_scale_that_the_kernels_cannot_do_is_refused(make_engine: Make) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        make_engine(scale=0.0004)


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.float32 is not supported; supported are torch\.float16"):
        settings_of(dtype=torch.float32, kv_dtype=torch.float32)


def test_layers_of_a_group_that_differ_are_refused_by_name(make_engine: Make) -> None:
    first, second = make_engine(), make_engine(logits_soft_cap=30.0)
    layers = {"first": first.layer, "second": second.layer, "third": first.layer}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.float16),
    )
    with pytest.raises(NotImplementedError, match=r"first.*second"):
        group_settings(config, ["first", "second"], FlashInferImpl)
    assert group_settings(config, ["first", "third"], FlashInferImpl) == settings_of(scale=0.25)


def test_a_layer_of_another_backend_is_refused_by_name(make_engine: Make) -> None:
    engine = make_engine()
    engine.layer.impl = SimpleNamespace()
    with pytest.raises(TypeError) as refused:
        group_settings(engine.config, ["layer.0"], FlashInferImpl)
    assert str(refused.value) == snapshot("FLASHINFER: layer.0 must have a FlashInferImpl, and has a SimpleNamespace")


def test_the_workspace_holds_what_the_scheduler_lays_out() -> None:
    recommended = 128 * 2**20
    assert workspace_bytes(settings_of(), 132, 0) == recommended
    # 64 heads over 8, of size 128: 33 parts a KV head (two an SM), each of a tile of 128 rows.
    wide = settings_of(num_heads=64, num_kv_heads=8, head_size=128)
    assert workspace_bytes(wide, 132, 0) >= 64 * 33 * 128 * 129 * 4
    # A graph of 512 requests has tiles of 16 rows: one a request, and as many as all rows fill.
    assert workspace_bytes(wide, 132, 512) >= 64 * (512 * 8 // 16 + 511) * 16 * 129 * 4


def test_the_workspace_is_sized_for_the_largest_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    own = settings_of(num_heads=64, num_kv_heads=8, head_size=128)
    found = FlashInferBuilder._workspace_bytes(own, torch.device("cuda"), 512)
    assert found == workspace_bytes(own, 132, 512) > workspace_bytes(own, 132, 0)


@pytest.fixture
def machine_reasons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """``machine_reasons(version=…, …)``: on a machine where all is well but that."""

    def reasons_of(
        *,
        version: str | None = PINNED,
        capability: tuple[int, int] | None = (9, 0),
        nvcc: bool = True,
        kernels: bool = False,
        broken: tuple[str, ...] = (),
    ) -> list[str]:
        found = {"triton", "flashinfer_jit_cache"} if kernels else {"triton"}
        monkeypatch.setattr(machine, "installed_version", lambda name: version)
        monkeypatch.setattr(machine, "import_reasons", lambda name: list(broken))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in found else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(backend_module.shutil, "which", lambda name: None)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        (tmp_path / "bin").mkdir(exist_ok=True)
        if nvcc:
            (tmp_path / "bin" / "nvcc").touch()
        return FlashInferBackend.unavailable_reasons("cuda")

    return reasons_of


def test_kernels_need_not_be_compiled_where_they_are_installed(machine_reasons: Make) -> None:
    assert machine_reasons(version=f"{PINNED}+cu130") == machine_reasons(nvcc=False, kernels=True) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"version": None}, snapshot("flashinfer-python is not installed")),
        (
            {"version": "0.7.0"},
            snapshot("flashinfer-python 0.7.0 is installed, and what is relied on was read in 0.6.8.post1"),
        ),
        ({"capability": (7, 5)}, snapshot("device cuda: compute capability 7.5, and the kernels need 8.0")),
        ({"capability": None}, snapshot("device cuda: torch finds no GPU")),
        (
            {"nvcc": False},
            snapshot(
                "there is neither nvcc, by which flashinfer compiles its kernels, nor the package flashinfer_jit_cache"
            ),
        ),
        ({"broken": ("it cannot be imported",)}, "it cannot be imported"),
    ],
)
def test_what_is_missing_is_named(machine_reasons: Make, given: dict[str, Any], words: str) -> None:
    (reason,) = machine_reasons(**given)
    assert reason == words


def test_its_version_names_the_packages_of_kernels_and_writer() -> None:
    version = FlashInferBackend.version()
    assert version.startswith("flashinfer-python")
    assert "(fa2), attncheck" in version
    assert "(cache writer)" in version


METHODS = ("__init__", "plan", "run")


@pytest.fixture
def flashinfer() -> Any:
    """The library itself, where it can be imported; it needs no GPU for that."""
    try:
        installed = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed")
    if installed != PINNED:
        pytest.skip(f"{DISTRIBUTION} {installed} is installed, and the stand-in is of {PINNED}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("flashinfer", reason="flashinfer cannot be imported")


def test_the_stand_in_has_the_signatures_of_the_pinned_library(flashinfer: ModuleType, standin: Any) -> None:
    for name in (standin.DECODE, standin.PREFILL, standin.RAGGED):
        for method in METHODS:
            theirs = inspect.signature(getattr(getattr(flashinfer, name), method)).parameters.values()
            ours = standin.signature(name, method).parameters.values()
            assert [(p.name, p.kind, p.default) for p in ours] == [(p.name, p.kind, p.default) for p in theirs]


def test_a_length_without_pages_is_what_the_library_reads(flashinfer: ModuleType) -> None:
    lens = [5, 0, 8, 16, 17]
    pages = page_indices(torch.arange(20).view(5, 4), 8, range(5), lens)
    assert flashinfer.get_seq_lens(pages.indptr, pages.last_page_len, 8).tolist() == lens


@pytest.fixture
def kernels(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The library without kernels, which need a GPU: what it would have called them with, from its own wrappers."""
    called: list[tuple[Any, ...]] = []

    def module(*key: Any) -> Any:
        def called_with(name: str) -> Callable[..., str]:
            return lambda *arguments: called.append((name, key, arguments)) or "the plan"  # type: ignore[func-returns-value]

        return SimpleNamespace(**{name: called_with(name) for name in ("plan", "paged_run", "ragged_run")})

    empty = torch.empty

    def unpinned(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", unpinned)
    for part in (flashinfer.decode, flashinfer.prefill):
        monkeypatch.setattr(part, "get_batch_prefill_module", module)
        monkeypatch.setattr(part, "device_support_pdl", lambda device: False)
    return called


@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "fp8", "layout": "HND"}, {"attn_type": "encoder_only"}])
def test_the_library_s_own_wrappers_take_every_call(
    kernels: list[tuple[Any, ...]],
    flashinfer: ModuleType,
    make_engine: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    is_encoder = "attn_type" in options
    engine = make_engine(graphs=(3,), **options)
    steps = [[(3, 3), (2, 2)]] if is_encoder else [[(1, 5), (3, 9)], [(1, 4), (1, 9), (0, 0)]]
    for step in steps:
        common = make_batch(step, tokens=len(step) if step[-1] == (0, 0) else None, causal=not is_encoder)
        changes = {"kv_cache": torch.empty(0, dtype=torch.float16)} if is_encoder else {}
        engine.forward(engine.build(common), with_lse=True, **changes)
    names = [name for name, *_ in kernels]
    paged = ["plan", "plan", "paged_run", "paged_run", "plan", "paged_run"]
    assert names == (["plan", "ragged_run"] if is_encoder else paged)
    assert {key[0] for _, key, _ in kernels} == {"fa2"}
