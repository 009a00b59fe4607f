"""flash-attn as a candidate: the arguments of its functions, by a stand-in that has their signatures."""

import importlib.metadata
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

import attncheck
from attncheck.backends.base import machine
from attncheck.backends.candidates import flash_attention as backend_module
from attncheck.backends.candidates.flash_attention import FlashAttnBackend
from attncheck.reference.spec import AttentionType, BatchSpec, CacheSpec, LayerSpec, RequestSpec

PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, dtype="float16", scale=0.3)
BATCHES = {
    "mixed": [(1, 5), (1, 300), (7, 19), (20, 20), (3, 515)],
    "decode": [(1, 5), (1, 300), (1, 256), (1, 0), (1, 513)],
    "verify": [(3, 5), (3, 2), (3, 300), (3, 3)],
    "prompts of one length": [(17, 17), (17, 270)],
}
LAYERS = {
    "plain": {},
    "mha": {"num_kv_heads": 6},
    "mqa": {"num_kv_heads": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "window": {"sliding_window": 9},
    "window of one key": {"sliding_window": 1},
    "window wider than all": {"sliding_window": 5000},
    "cap": {"logits_soft_cap": 2.0},
    "cap and window": {"logits_soft_cap": 2.0, "sliding_window": 9},
    "alibi": {"alibi": True},
    "alibi and cap": {"alibi": True, "logits_soft_cap": 1.5},
    "not causal": {"causal": False},
    "not causal, window, cap": {"causal": False, "sliding_window": 4, "logits_soft_cap": 3.0},
    "head size 80": {"head_size": 80},
    "encoder only": {"attn_type": AttentionType.ENCODER_ONLY},
    "encoder": {"attn_type": AttentionType.ENCODER, "num_kv_heads": 6},
    "encoder only, window": {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window": 3},
    "cross": {"attn_type": AttentionType.ENCODER_DECODER},
}
ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def from_position_zero(step):
    """By how much a bias of ``slope * j`` raises the log-sum-exp above one of ``slope * (j - position)``."""
    if step.layer.alibi_slopes is None:
        return 0.0
    ends, lens = step.common.query_start_loc_cpu.tolist(), step.common.seq_lens_cpu.tolist()
    positions = [
        length - (end - row)
        for start, end, length in zip(ends, ends[1:], lens, strict=False)
        for row in range(start, end)
    ]
    return torch.tensor(positions)[:, None] * torch.tensor(step.layer.alibi_slopes, dtype=torch.float64)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("modifiers", LAYERS.values(), ids=LAYERS.keys())
def test_the_call_of_the_library_has_the_values_of_the_question(
    modifiers, batch, layout, make_written_step, flash_attn_calls, assert_right
):
    layer, cache = replace(PLAIN, **modifiers), CacheSpec(block_size=256, layout=layout)
    requests = [(n, n) for n, _ in batch] if layer.attn_type in ENCODERS else batch
    step = make_written_step(FlashAttnBackend, layer, requests, cache=cache, padding=(2, 3), gain=2.0)
    step.run()
    assert_right(step, from_position_zero(step))
    ((called, given),) = flash_attn_calls
    is_uniform = len({n for n, _ in requests}) == 1 and requests[0][0] <= 16 and layer.attn_type not in ENCODERS
    assert called == ("flash_attn_with_kvcache" if is_uniform else "flash_attn_varlen_func")
    assert (given.get("block_table") is None) == (layer.attn_type in ENCODERS)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 530)), min_size=1, max_size=4),
    is_uniform=st.booleans(),
    sliding_window=st.none() | st.integers(1, 40),
    cap=st.none() | st.sampled_from([1.0, 30.0]),
    causal=st.booleans(),
    padding=st.sampled_from([(0, 0), (1, 4)]),
)
def test_any_lengths_windows_and_caps(
    requests, is_uniform, sliding_window, cap, causal, padding, make_written_step, flash_attn_calls, assert_right
):
    """More rows than keys, and no keys, among them."""
    layer = replace(PLAIN, head_size=16, sliding_window=sliding_window, logits_soft_cap=cap, causal=causal)
    if is_uniform:
        requests = [(requests[0][0], length) for _, length in requests]
    step = make_written_step(FlashAttnBackend, layer, requests, padding=padding)
    step.run()
    assert_right(step)


def test_the_arguments_of_a_mixed_step_are_these(make_written_step, flash_attn_calls):
    step = make_written_step(FlashAttnBackend, replace(PLAIN, sliding_window=9), [(2, 300), (5, 5)], padding=(1, 0))
    step.run()
    ((called, given),) = flash_attn_calls
    assert called == "flash_attn_varlen_func"
    assert given["cu_seqlens_q"].tolist() == [0, 2, 7, 7]
    assert given["cu_seqlens_k"].tolist() == [0, 300, 305, 305]
    assert given["block_table"] is step.common.block_table_tensor
    assert given["k"].data_ptr() == step.kv_cache.data_ptr()  # in place
    assert given["k"].shape == given["v"].shape == (40, 256, 2, 24)
    assert given["v"].data_ptr() == step.kv_cache[1].data_ptr()
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (step.common.max_query_len, step.common.max_seq_len)
    assert (given["window_size"], given["causal"], given["softmax_scale"]) == ((8, 0), True, 0.3)
    assert (given["softcap"], given["alibi_slopes"]) == (0.0, None)


def test_the_arguments_of_a_decode_step_are_these(make_written_step, flash_attn_calls):
    layer = replace(PLAIN, alibi=True, logits_soft_cap=7.0)
    step = make_written_step(FlashAttnBackend, layer, [(2, 300), (2, 5)], padding=(1, 3))
    step.run()
    ((called, given),) = flash_attn_calls
    assert called == "flash_attn_with_kvcache"
    assert given["q"].shape == (2, 2, 6, 24)
    assert torch.equal(given["q"][1, 0], step.query[2])
    assert given["cache_seqlens"].tolist() == [300, 5]
    assert torch.equal(given["block_table"], step.common.block_table_tensor[:2])
    assert (given["window_size"], given["causal"], given["softcap"]) == ((-1, -1), True, 7.0)
    assert given["alibi_slopes"].tolist() == pytest.approx(layer.alibi_slopes, rel=1e-7)
    assert not {"k", "v", "rotary_cos"} & set(given)  # nothing is appended, nothing rotated


def test_a_bound_that_is_not_reached_makes_no_step_uniform(make_written_step, flash_attn_calls, assert_right):
    """A graph for any lengths may be captured with equally many rows a request; only its bound differs."""
    step = make_written_step(FlashAttnBackend, PLAIN, [(2, 300), (2, 5)])
    step.common.max_query_len = 4
    step.run()
    assert_right(step)
    assert [called for called, _ in flash_attn_calls] == ["flash_attn_varlen_func"]


def test_rows_that_turn_into_padding_of_a_graph_become_zero(make_written_step, flash_attn_calls):
    """A call for packed queries leaves them unwritten; which rows they are is on the device alone."""
    step = make_written_step(FlashAttnBackend, PLAIN, [(1, 5), (4, 9)], padding=(1, 3))
    metadata = step.builder().build(0, step.common)
    step.run(attn_metadata=replace(metadata, query_start_loc=(0, 1, 5, 8)))
    assert step.output[:5].isfinite().all()
    assert (step.output[5:] == 0).all()
    assert step.output_lse[5:].isneginf().all()


def test_the_sums_are_in_one_buffer_that_is_filled_again(make_written_step, flash_attn_calls):
    longer, shorter = (
        make_written_step(FlashAttnBackend, PLAIN, requests).common for requests in ([(1, 5), (2, 9)], [(3, 4)])
    )
    builder = make_written_step(FlashAttnBackend, PLAIN, [(1, 1)]).builder()
    first = builder.build(0, longer)
    assert first.cu_seq_lens.tolist() == [0, 5, 14]
    second = builder.build(0, shorter)
    assert second.cu_seq_lens.tolist() == [0, 4]
    assert second.cu_seq_lens.data_ptr() == first.cu_seq_lens.data_ptr()
    assert shorter.seq_lens.tolist() == [4]


def test_the_buffer_has_room_for_every_batch_the_config_allows(make_written_step, flash_attn_calls):
    few, most = (make_written_step(FlashAttnBackend, PLAIN, [(1, 5)] * count).common for count in (1, 4))
    step_builder = make_written_step(FlashAttnBackend, PLAIN, [(1, 1)]).builder()
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
    builder = type(step_builder)(step_builder.kv_cache_spec, ["layer.0"], config, torch.device("cpu"))
    assert builder.build(0, few).cu_seq_lens.data_ptr() == builder.build(0, most).cu_seq_lens.data_ptr()


@pytest.mark.parametrize("requests", [[(2, 2), (5, 5)], [(2, 5), (2, 9)]], ids=["mixed", "uniform"])
@pytest.mark.parametrize("modifiers", [{}, {"alibi": True}, {"attn_type": AttentionType.ENCODER_ONLY}])
def test_devices_are_not_mixed(modifiers, requests, make_written_step, flash_attn_calls, on_meta):
    layer = replace(PLAIN, **modifiers)
    on_meta(
        make_written_step(
            FlashAttnBackend, layer, [(q, q) if layer.attn_type in ENCODERS else (q, s) for q, s in requests]
        )
    )


@pytest.mark.parametrize(
    ("modifiers", "reason"),
    [
        ({"scale": 0.0}, snapshot("scale 0: FlashAttention-2 needs one above 0")),
        (
            {"alibi": True, "sliding_window": 4},
            snapshot("ALiBi beside a sliding window: the log-sum-exp is then measured from another place"),
        ),
        ({"sinks": True}, snapshot("the layer has attention sinks: feature 'sinks' is not declared")),
        (
            {"head_size": 20},
            snapshot(
                "head_size 20: supported are 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184, 192, 200, 208, 216, 224, 232, 240, 248, 256"
            ),
        ),
        ({"dtype": "float32"}, snapshot("dtype float32: supported are float16, bfloat16")),
    ],
)
def test_what_the_kernels_cannot_do_is_declared_and_refused(modifiers, reason, make_step, flash_attn_calls):
    layer, cache = replace(PLAIN, **modifiers), CacheSpec(block_size=256)
    (found,) = FlashAttnBackend.unsupported_reasons(layer, cache, BatchSpec(requests=(RequestSpec(query_len=1),)))
    assert found == reason
    step = make_step(FlashAttnBackend, layer, [(1, 3)], cache=cache)
    with pytest.raises((ValueError, NotImplementedError)):
        step.run()
    assert step.output.isnan().all()
    assert not flash_attn_calls


def test_a_bias_of_later_keys_is_refused(make_step, flash_attn_calls):
    layer, cache = replace(PLAIN, alibi=True, causal=False), CacheSpec(block_size=256)
    reasons = FlashAttnBackend.unsupported_reasons(layer, cache, BatchSpec(requests=(RequestSpec(query_len=1),)))
    assert reasons == snapshot(
        ["the layer has ALiBi slopes and is not causal: feature 'alibi_non_causal' is not declared"]
    )
    with pytest.raises(NotImplementedError) as refused:
        make_step(FlashAttnBackend, layer, [(1, 3)], cache=cache).run()
    assert str(refused.value) == snapshot("FLASH_ATTN: ALiBi without a causal mask is not supported")
    assert not flash_attn_calls


@pytest.mark.parametrize("block_size", [16, 128, 272])
def test_pages_are_multiples_of_256_tokens(block_size):
    cache, batch = CacheSpec(block_size=block_size), BatchSpec(requests=(RequestSpec(query_len=1),))
    reason = f"block_size {block_size}: supported are multiples of 256"
    assert FlashAttnBackend.unsupported_reasons(PLAIN, cache, batch) == [reason]
    with pytest.raises(ValueError, match=reason):
        FlashAttnBackend.get_kv_cache_shape(4, block_size, 2, 24)
    assert not FlashAttnBackend.unsupported_reasons(PLAIN, CacheSpec(block_size=512), batch)


@pytest.mark.parametrize(
    ("installed", "reason"),
    [("", "flash-attn is not installed"), ("2.7.4.post1", "flash-attn 2.7.4.post1: written against 2.8")],
)
def test_without_a_library_that_was_read_the_backend_is_unavailable(installed, reason, monkeypatch):
    monkeypatch.setattr(backend_module, "library_version", lambda: installed)
    assert FlashAttnBackend.unavailable_reasons("cpu") == [snapshot("device cpu: the backend runs on cuda"), reason]


def test_a_library_that_does_not_import_is_a_reason(monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol")

    monkeypatch.setattr(backend_module, "library_version", lambda: "2.8.3.post1")
    monkeypatch.setattr(machine.importlib, "import_module", broken)
    assert backend_module.missing_library_reasons() == []
    assert machine.import_reasons("flash_attn") == snapshot(
        ["flash_attn cannot be imported: ImportError: undefined symbol"]
    )


def test_the_version_is_that_of_the_library_too(monkeypatch):
    monkeypatch.setattr(attncheck, "__version__", "0.1", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", {"flash-attn": "2.8.3"}.__getitem__)
    assert FlashAttnBackend.version() == "0.1, flash-attn 2.8.3"


@pytest.mark.parametrize(
    ("capability", "reasons"),
    [((7, 5), ["device cuda:0: compute capability 7.5, and the kernels need 8.0"]), ((9, 0), [])],
)
def test_gpus_before_ampere_are_unavailable(capability, reasons, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend_module, "missing_library_reasons", list)
    monkeypatch.setattr(machine, "import_reasons", lambda module: [])
    assert FlashAttnBackend.unavailable_reasons("cuda:0") == reasons


def test_the_stand_ins_have_the_signatures_of_the_installed_library(stand_ins):
    real = pytest.importorskip("flash_attn.flash_attn_interface", reason="flash-attn needs a GPU")
    for function in stand_ins:
        found = inspect.signature(getattr(real, function.__name__)).parameters.values()
        own = inspect.signature(function).parameters.values()
        assert [(p.name, p.default) for p in found] == [(p.name, p.default) for p in own]


@pytest.mark.parametrize(
    ("batch", "kernel"),
    [("decode", "FA2 flash_attn_with_kvcache"), ("mixed", "FA2 flash_attn_varlen_func")],
)
def test_the_function_that_ran_is_named(batch, kernel, make_written_step, flash_attn_calls):
    step = make_written_step(FlashAttnBackend, PLAIN, BATCHES[batch])
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert [f"FA2 {called}" for called, _ in flash_attn_calls] == [kernel]
    assert impl.chosen_kernels == {kernel}
