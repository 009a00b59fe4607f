"""Our own candidates against the reference, on batches small enough to see through."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.flex_attention.backend import FlexBackend
from attncheck.backends.candidates.flex_attention.packing import Call
from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.candidates.torch_sdpa import SDPABackend
from attncheck.reference.spec import (
    AttentionType,
    CacheSpec,
    LayerSpec,
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
def test_profiling_returns_zeros(backend, make_step):
    step = make_step(backend, PLAIN, MIXED)
    out = step.run(attn_metadata=None, kv_cache=torch.empty(0))
    assert out is step.output
    assert (out == 0).all()


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


def test_a_cache_of_another_float_dtype_is_converted_by_the_reference(make_step):
    cache = CacheSpec(block_size=8, kv_cache_dtype="bfloat16")
    step = make_step(ReferenceBackend, PLAIN, MIXED, cache=cache)
    step.run()
    assert step.kv_cache.dtype == torch.bfloat16
    assert float((step.output.double() - step.truth).abs().max()) < 0.02


@pytest.mark.parametrize(("backend", "kernels"), [(FlexBackend, {"eager"}), (ReferenceBackend, set())])
def test_the_version_of_flex_attention_on_a_cpu_states_that_nothing_was_compiled(backend, kernels, make_step):
    step = make_step(backend, PLAIN, MIXED)
    impl = step.impl()
    step.impl = lambda: impl
    step.run()
    assert impl.chosen_kernels == kernels
