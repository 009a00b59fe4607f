"""Our own candidates against the reference, on batches small enough to see through."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.candidates.flex_attention.packing import Call
from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.backends.paged import PagedBackend
from attncheck.reference.spec import (
    AttentionType,
    BatchSpec,
    CacheSpec,
    LayerSpec,
    RequestSpec,
)

CANDIDATES = (ReferenceBackend, SDPABackend, FlexBackend)
PLAIN = LayerSpec(num_heads=6, num_kv_heads=2, head_size=24, dtype="float32", scale=0.3)
MIXED = [(1, 5), (1, 33), (7, 19), (20, 20), (3, 48)]

LAYERS = {
    "plain": {},
    "mha": {"num_kv_heads": 6},
    "mqa": {"num_kv_heads": 1},
    "window": {"sliding_window": 9},
    "window of one key": {"sliding_window": 1},
    "wide window": {"sliding_window": 500},
    "cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi": True},
    "alibi and window": {"alibi": True, "sliding_window": 6},
    "alibi and cap": {"alibi": True, "logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "sinks of none": {"sinks": (float("-inf"), 0.5, 2.0, -1.0, 3.0, float("-inf"))},
    "sinks, window, cap": {"sinks": True, "sliding_window": 5, "logits_soft_cap": 3.0},
    "not causal": {"causal": False},
    "not causal, window": {"causal": False, "sliding_window": 4},
    "not causal, alibi": {"causal": False, "alibi": True},
    "chunks": {"attn_chunk_size": 16},
    "not causal, chunks": {"causal": False, "attn_chunk_size": 16},
    "narrow values": {"head_size_v": 16},
    "wide values": {"head_size_v": 40, "sliding_window": 9},
    "head size 80": {"head_size": 80},
    "scale 0": {"scale": 0.0},
    "negative scale": {"scale": -0.2},
    "encoder only": {"attn_type": AttentionType.ENCODER_ONLY},
    "encoder": {"attn_type": AttentionType.ENCODER, "num_kv_heads": 6},
    "encoder only, window": {"attn_type": AttentionType.ENCODER_ONLY, "sliding_window": 3},
    "encoder only, alibi": {"attn_type": AttentionType.ENCODER_ONLY, "alibi": True},
    "cross": {"attn_type": AttentionType.ENCODER_DECODER},
}


def declares(backend: type[PagedBackend], layer: LayerSpec, cache: CacheSpec) -> bool:
    batch = BatchSpec(requests=(RequestSpec(query_len=1),))
    return not backend.unsupported_reasons(layer, cache, batch)


def assert_right(step, tolerance=2e-6) -> None:
    rows = step.num_rows
    out = step.output[:rows].double()
    limit = tolerance * max(1.0, float(step.truth.abs().max()))
    assert torch.isfinite(out).all()
    assert float((out - step.truth[:rows]).abs().max()) <= limit
    if "lse" in step.backend.features:
        lse, truth = step.output_lse[:rows].double(), step.truth_lse[:rows]
        assert torch.equal(torch.isneginf(lse), torch.isneginf(truth))
        seen = torch.isfinite(truth)
        assert torch.allclose(lse[seen], truth[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("modifiers", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("backend", CANDIDATES)
def test_answers_like_the_reference(backend, modifiers, layout, make_step):
    layer, cache = replace(PLAIN, **modifiers), CacheSpec(block_size=8, layout=layout)
    if not declares(backend, layer, cache):
        pytest.skip("not declared")
    requests = MIXED
    if layer.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        requests = [(n, n) for n, _ in MIXED]
    step = make_step(backend, layer, requests, cache=cache, gain=2.0)
    assert step.run() is step.output
    assert_right(step)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", CANDIDATES)
@pytest.mark.parametrize("modifiers", ["plain", "alibi", "sinks", "window", "narrow values"])
def test_half_precision(backend, modifiers, dtype, make_step):
    layer = replace(PLAIN, dtype=dtype, **LAYERS[modifiers])
    if not declares(backend, layer, CacheSpec()):
        pytest.skip("not declared")
    step = make_step(backend, layer, MIXED)
    step.run()
    step.output_lse = step.output_lse.double()
    assert_right(step, tolerance=torch.finfo(getattr(torch, dtype)).eps)


@pytest.mark.parametrize("block_size", [1, 5, 16, 128])
@pytest.mark.parametrize("backend", CANDIDATES)
def test_any_page_size(backend, block_size, make_step):
    requests = [(1, 5), (4, 9), (6, 6)] if block_size == 1 else MIXED
    step = make_step(backend, PLAIN, requests, cache=CacheSpec(block_size=block_size))
    step.run()
    assert_right(step)


@pytest.mark.parametrize("backend", CANDIDATES)
def test_padding_is_left_alone(backend, make_step):
    step = make_step(backend, PLAIN, MIXED, padding=(3, 5))
    step.output[step.num_rows :] = 0.25
    before = step.query.clone(), step.common.slot_mapping.clone()
    step.run()
    assert_right(step)
    assert (step.output[step.num_rows :] == 0.25).all()
    assert torch.equal(step.query.isnan(), before[0].isnan())
    assert torch.equal(step.common.slot_mapping, before[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("backend", CANDIDATES)
def test_writes_exactly_the_mapped_slots(backend, layout, make_step):
    layer, cache = replace(PLAIN, dtype="bfloat16"), CacheSpec(block_size=8, layout=layout)
    step = make_step(backend, layer, MIXED, cache=cache, padding=(1, 4))
    codec = backend.kv_cache_codec(layer, cache)
    expected = step.kv_cache.clone()
    slots = step.common.slot_mapping[step.common.slot_mapping >= 0]
    codec.write(expected, slots, step.key[: len(slots)], step.value[: len(slots)])
    step.run()
    assert torch.equal(step.kv_cache.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", CANDIDATES)
def test_rows_that_see_nothing_are_zero(backend, causal, make_step):
    """More rows than keys, and no keys at all."""
    layer = replace(PLAIN, causal=causal)
    step = make_step(backend, layer, [(4, 2), (1, 0), (2, 7), (3, 0)])
    step.run()
    assert_right(step)
    assert (step.output[4] == 0).all()
    if causal:
        assert (step.output[:2] == 0).all()
    if "lse" in backend.features:
        assert torch.isneginf(step.output_lse[4]).all()


@pytest.mark.parametrize("backend", [b for b in CANDIDATES if "sinks" in b.features])
def test_a_sink_is_all_an_empty_row_has(backend, make_step):
    step = make_step(backend, replace(PLAIN, sinks=True), [(3, 1), (2, 0)])
    step.run()
    assert_right(step)
    assert torch.allclose(step.output_lse[0], torch.tensor(step.layer.sink_logits))


@pytest.mark.parametrize("backend", CANDIDATES)
def test_a_step_without_keys_and_one_without_rows(backend, make_step):
    step = make_step(backend, PLAIN, [(2, 0), (1, 0)])
    step.run()
    assert (step.output == 0).all()
    idle = make_step(backend, PLAIN, [(1, 3)])
    idle.common.query_start_loc_cpu.zero_()
    idle.common.query_start_loc.zero_()
    idle.common.slot_mapping = torch.full((1,), -1)
    idle.run()
    assert idle.output.isnan().all()


@pytest.mark.parametrize("backend", CANDIDATES)
def test_pages_a_window_has_freed_are_not_read(backend, make_step):
    layer, cache = replace(PLAIN, sliding_window=5), CacheSpec(block_size=4)
    step = make_step(backend, layer, [(1, 30), (3, 22)], cache=cache)
    expected = step.truth
    freed = step.common.block_table_tensor[0, :6]  # positions 0 to 23; the row at 29 sees 25 to 29
    codec = backend.kv_cache_codec(layer, cache)
    slots = (freed.long()[:, None] * 4 + torch.arange(4)).flatten()
    poison = torch.full((len(slots), 2, 24), torch.nan)
    codec.write(step.kv_cache, slots, poison, poison)
    step.common.block_table_tensor[0, :6] = 0
    step.run()
    assert torch.allclose(step.output.double(), expected, atol=1e-5)


@pytest.mark.parametrize("backend", CANDIDATES)
def test_cross_attention_writes_the_encoder_once(backend, make_step):
    layer = replace(PLAIN, attn_type=AttentionType.ENCODER_DECODER)
    step = make_step(backend, layer, [(1, 13), (5, 2), (2, 30)], first_steps=[False, True, False])
    assert len(step.common.slot_mapping) == 2
    step.run()
    assert_right(step)
    later = make_step(backend, layer, [(1, 13), (5, 2)], first_steps=[False, False])
    later.run(key=None, value=None)
    assert_right(later)


@pytest.mark.parametrize("backend", CANDIDATES)
def test_a_layer_that_shares_its_cache_writes_nothing(backend, make_step):
    step = make_step(backend, PLAIN, MIXED)
    codec = backend.kv_cache_codec(PLAIN, step.cache)
    slots = step.common.slot_mapping
    codec.write(step.kv_cache, slots, step.key[: len(slots)], step.value[: len(slots)])
    before = step.kv_cache.clone()
    impl = backend.get_impl_cls()(6, 24, 0.3, 2, None, None, "auto", None, "decoder", "layer.0")
    step.impl = lambda: impl
    step.run(key=None, value=None)
    assert_right(step)
    assert torch.equal(step.kv_cache.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("backend", CANDIDATES)
def test_profiling_returns_zeros(backend, make_step):
    step = make_step(backend, PLAIN, MIXED)
    out = step.run(attn_metadata=None, kv_cache=torch.empty(0))
    assert out is step.output
    assert (out == 0).all()


@pytest.mark.parametrize("backend", CANDIDATES)
def test_large_scores_stay_finite(backend, make_step):
    step = make_step(backend, PLAIN, MIXED, gain=3000.0)
    step.run()
    assert torch.isfinite(step.output).all()
    assert float((step.output.double() - step.truth).abs().max()) < 1e-2


@pytest.mark.parametrize("scores", [1, 500, 4000])
def test_flex_packs_and_cuts_without_a_difference(scores, make_step, monkeypatch):
    monkeypatch.setattr("attncheck.backends.candidates.flex_attention.backend._EAGER_SCORES", scores)
    requests = [(1, 5), (3, 48)] if scores == 1 else MIXED
    step = make_step(FlexBackend, replace(PLAIN, alibi=True, sliding_window=11), requests)
    step.run()
    assert_right(step)


@pytest.mark.parametrize("modifiers", ["plain", "alibi and cap", "sinks", "narrow values"])
def test_flex_adds_rows_as_where_it_is_compiled_without_a_difference(modifiers, make_step, monkeypatch):
    of_heads = Call.of_heads
    monkeypatch.setattr(Call, "of_heads", lambda call, group, multiple: of_heads(call, group, 256))
    step = make_step(FlexBackend, replace(PLAIN, **LAYERS[modifiers]), MIXED)
    step.run()
    assert_right(step)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [0.3, (0.5, 2.0)], ids=["tensor", "head"])
def test_the_reference_reads_what_its_fp8_cache_holds(kv_cache_dtype, scale, make_step):
    cache = CacheSpec(block_size=8, kv_cache_dtype=kv_cache_dtype, k_scale=scale, v_scale=0.7)
    step = make_step(ReferenceBackend, PLAIN, MIXED, cache=cache)
    assert step.kv_cache.dtype == torch.uint8
    step.run()
    codec = ReferenceBackend.kv_cache_codec(PLAIN, cache)
    table, lens = step.common.block_table_tensor, step.common.seq_lens_cpu
    keys = [(table[r].long()[:, None] * 8 + torch.arange(8)).flatten()[: lens[r]] for r in range(len(lens))]
    first = codec.read(step.kv_cache, keys[0])
    scores = torch.einsum("hd,khd->hk", step.query[0].double(), first[0].double().repeat_interleave(3, dim=1)) * 0.3
    expected = torch.einsum("hk,khd->hd", scores.softmax(1), first[1].double().repeat_interleave(3, dim=1))
    assert torch.allclose(step.output[0].double(), expected, atol=1e-5)
    worst = 0.15 if kv_cache_dtype == "fp8" else 0.3
    assert 0 < float((step.output.double() - step.truth).abs().max()) < worst * float(step.truth.abs().max())


def test_a_cache_of_another_float_dtype_is_converted_by_the_reference(make_step):
    cache = CacheSpec(block_size=8, kv_cache_dtype="bfloat16")
    step = make_step(ReferenceBackend, PLAIN, MIXED, cache=cache)
    step.run()
    assert step.kv_cache.dtype == torch.bfloat16
    assert float((step.output.double() - step.truth).abs().max()) < 0.02


def test_scales_mean_nothing_to_a_float_cache(make_step):
    for backend in CANDIDATES:
        step = make_step(backend, PLAIN, MIXED, cache=CacheSpec(k_scale=0.3, v_scale=(2.0, 5.0)))
        step.run()
        assert_right(step)


@pytest.mark.parametrize(("backend", "kernels"), [(FlexBackend, {"eager"}), (ReferenceBackend, set())])
def test_the_version_of_flex_attention_on_a_cpu_states_that_nothing_was_compiled(backend, kernels, make_step):
    step = make_step(backend, PLAIN, MIXED)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert impl.chosen_kernels == kernels
