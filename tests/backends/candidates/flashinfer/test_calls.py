"""The calls of the library, argument by argument; what is expected is written out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Make = Callable[..., Any]

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


def test_single_rows_in_front_are_decodes_and_all_others_prefills(
    library: Any, make_engine: Make, make_batch: Make
) -> None:
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


def test_each_part_is_run_with_its_rows_and_the_whole_cache(library: Any, make_engine: Make, make_batch: Make) -> None:
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


def test_no_lse_is_requested_where_none_is_needed(library: Any, make_engine: Make, make_batch: Make) -> None:
    engine = make_engine()
    engine.forward(engine.build(make_batch([(1, 5)])))
    (run,) = library.of("run")
    assert run.arguments["lse"] is None
    assert run.arguments["return_lse"] is False


def test_a_page_of_layout_hnd_has_its_heads_in_front(library: Any, make_engine: Make, make_batch: Make) -> None:
    engine = make_engine(layout="HND")
    engine.forward(engine.build(make_batch([(1, 5), (2, 7)])))
    assert {call.arguments["kv_layout"] for call in library.of("__init__")} == {"HND"}
    for run in library.of("run"):
        for cache, stored in zip(run.arguments["paged_kv_cache"], engine.kv_cache.unbind(1), strict=True):
            assert cache.shape == (80, 2, 4, 64)
            assert cache.stride() == (1024, 256, 64, 1)
            assert cache.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize(("window", "left"), [(1, 0), (7, 6), (None, -1)])
def test_a_window_of_so_many_keys_reaches_back_one_less(
    library: Any, make_engine: Make, make_batch: Make, window: int | None, left: int
) -> None:
    make_engine(sliding_window=window).build(make_batch(MIXED))
    assert [call.arguments["window_left"] for call in library.of("plan")] == [left, left]


def test_cap_and_scale_are_the_layer_s(library: Any, make_engine: Make, make_batch: Make) -> None:
    make_engine(logits_soft_cap=30.0, scale=0.7).build(make_batch(MIXED))
    for call in library.of("plan"):
        assert (call.arguments["logits_soft_cap"], call.arguments["sm_scale"]) == (30.0, 0.7)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)],
)
def test_codes_are_read_as_what_they_are_by_the_layer_s_scales(
    library: Any, make_engine: Make, make_batch: Make, name: str, dtype: torch.dtype
) -> None:
    engine = make_engine(kv_cache_dtype=name)
    assert engine.kv_cache.dtype == torch.uint8
    engine.forward(engine.build(make_batch(MIXED)))
    assert {call.arguments["kv_data_type"] for call in library.of("plan")} == {dtype}
    for run in library.of("run"):
        assert {cache.dtype for cache in run.arguments["paged_kv_cache"]} == {dtype}
        assert (run.arguments["k_scale"], run.arguments["v_scale"]) == (0.5, 2.0)


def test_a_step_without_a_causal_mask_is_planned_without(library: Any, make_engine: Make, make_batch: Make) -> None:
    make_engine().build(make_batch([(2, 7)], causal=False))
    (plan,) = library.of("plan")
    assert plan.arguments["causal"] is False


def test_padding_requests_of_an_eager_step_are_left_out(library: Any, make_engine: Make, make_batch: Make) -> None:
    make_engine().build(make_batch([(1, 5), (2, 6), (0, 0), (0, 0)], tokens=7))
    decode, prefill = (call.arguments for call in library.of("plan"))
    assert decode["indptr"].tolist() == [0, 2]
    assert lists(prefill, "qo_indptr", "paged_kv_indptr") == [[0, 2], [0, 2]]


def test_a_request_without_rows_is_not_looked_at(library: Any, make_engine: Make, make_batch: Make) -> None:
    make_engine().build(make_batch([(2, 6), (0, 9), (3, 4)]))
    (plan,) = (call.arguments for call in library.of("plan"))
    assert lists(plan, "qo_indptr", "paged_kv_indices") == [[0, 2, 5], [1, 2, 21]]


def test_an_encoder_s_keys_are_the_rows_of_the_step(library: Any, make_engine: Make, make_batch: Make) -> None:
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


def test_kernels_are_selected_by_name_and_share_one_workspace(
    library: Any, make_engine: Make, make_batch: Make
) -> None:
    make_engine(graphs=(2,)).build(make_batch(MIXED))
    constructed = [call.arguments for call in library.of("__init__")]
    assert {arguments["backend"] for arguments in constructed} == {"fa2"}
    assert len({arguments["float_workspace_buffer"].data_ptr() for arguments in constructed}) == 1
    assert constructed[0]["use_tensor_cores"] is True
    assert [arguments["use_cuda_graph"] for arguments in constructed] == [False, False]


def test_wrappers_are_made_once_and_planned_for_every_step(library: Any, make_engine: Make, make_batch: Make) -> None:
    engine = make_engine()
    for step in (MIXED, MIXED, [(1, 6), (2, 9)]):
        engine.build(make_batch(step))
    assert len(library.of("__init__")) == 2
    assert len(library.of("plan")) == 6


def test_output_with_gaps_is_written_through_one_without(library: Any, make_engine: Make, make_batch: Make) -> None:
    engine = make_engine()
    wide = torch.zeros(2, 4, 128, dtype=torch.float16)
    given = engine.forward(engine.build(make_batch([(2, 6)])), output=wide[:, :, :64])
    assert given.output.ne(0).any(-1).all()
    assert wide[:, :, 64:].eq(0).all()


def test_the_writer_is_that_of_the_unified_kernel(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from attncheck.backends.candidates.flashinfer.backend import FlashInferImpl
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
    library: Any, make_engine: Make, make_batch: Make, monkeypatch: pytest.MonkeyPatch
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
