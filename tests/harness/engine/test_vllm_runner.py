"""What the objects of vLLM mean to an observer, from objects with the same attributes."""

from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.engine.events import ContinuedRequest, StartedRequest
from attncheck.harness.engine.observer import EngineObserver
from attncheck.harness.engine.vllm_runner import Hooks, added_request, kv_groups, layer_facts, sampled_tokens, step_plan
from attncheck.reference import AttentionParams


def request(**given):
    return SimpleNamespace(**{"request_id": "r", "prompt_token_ids": [1, 2], "mm_features": []} | given)


@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        ({}, "", None),
        ({"lora_request": SimpleNamespace(lora_name="french"), "cache_salt": "s"}, "LoRA=french salt=s", None),
        ({"prompt_embeds": torch.zeros(2)}, "", "requests with embeddings for tokens"),
        ({"mm_features": [1]}, "", "requests with images or other media"),
        ({"resumable": True}, "", "requests whose prompt is streamed"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "", "requests whose keys a KV connector transfers"),
    ],
)
def test_a_request_is_followed_or_its_reason_is_given(given, key, reason):
    assert added_request(request(**given)) == ("r", [1, 2], key, reason)


def test_a_plan_has_resumed_requests_among_the_started_ones():
    cached = SimpleNamespace(
        req_ids=["a", "b"], resumed_req_ids={"b"}, new_block_ids=[None, ([7], [8])], num_computed_tokens=[5, 4]
    )
    new = SimpleNamespace(req_id="c", block_ids=([1, 2], [3]), num_computed_tokens=32)
    output = SimpleNamespace(
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"a": 3, "b": 1, "c": 9},
        scheduled_spec_decode_tokens={"a": [4, -1]},
        kv_cache_block_copies=[(1, 2)],
    )
    plan = step_plan(output)
    assert plan.started == (
        StartedRequest("c", ((1, 2), (3,)), 32),
        StartedRequest("b", ((7,), (8,)), 4, resumed=True),
    )
    assert plan.continued == (ContinuedRequest("a", (), 5),)
    assert plan.drafts == {"a": (4, -1)}
    assert plan.block_copies == ((1, 2),)
    made = SimpleNamespace(sampled_token_ids=[[9], [], [5, 6]], req_id_to_index={"b": 0, "c": 1, "a": 2})
    assert sampled_tokens(output, made) == {"a": (5, 6), "b": (9,), "c": ()}


def test_groups_that_are_not_followed_have_a_reason():
    full, mamba = (type(name, (), {"block_size": 16})() for name in ("FullAttentionSpec", "MambaSpec"))
    groups = [
        SimpleNamespace(kv_cache_spec=full, layer_names=["a"]),
        SimpleNamespace(kv_cache_spec=mamba, layer_names=["b"]),
        SimpleNamespace(kv_cache_spec=full, layer_names=["c"], is_eagle_group=True),
    ]
    made = kv_groups(SimpleNamespace(kv_cache_groups=groups))
    reasons = [None, "layers with a state instead of keys", "layers of a drafter"]
    assert [group.not_followed for group in made] == reasons


class Attention:
    """The attributes of vLLM's class of this name that are read."""

    num_heads, num_kv_heads, head_size, head_size_v = 4, 2, 16, 16
    sliding_window, kv_cache_dtype, attn_type = None, "auto", "decoder"

    def __init__(self, impl=(), **given):
        self.impl = SimpleNamespace(**{"scale": 0.25, "logits_soft_cap": 0} | dict(impl))
        vars(self).update(given)


class RSWAAttention(Attention):
    """A class that is not known."""


def test_the_settings_of_a_layer():
    layer = Attention({"sinks": torch.ones(4).bfloat16(), "logits_soft_cap": 30.0}, sliding_window=48)
    expected = AttentionParams(
        4, 2, 16, 16, scale=0.25, window=(47, 0), logits_soft_cap=30.0, sinks=(1.0, 1.0, 1.0, 1.0)
    )
    facts = layer_facts(layer, 32)
    assert (facts.params, facts.page_size, facts.not_judged) == (expected, 32, None)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (RSWAAttention(), "layers of the class RSWAAttention"),
        (Attention(attn_type="encoder_only"), "layers of the type encoder_only"),
        (Attention(kv_cache_dtype="nvfp4"), "layers with a cache of nvfp4"),
        (Attention({"chunk_lookback": 1}), "layers whose chunks look back"),
        (Attention(use_mm_prefix=True), "layers with prefix ranges of images"),
    ],
)
def test_a_layer_that_the_truth_cannot_express_is_named(layer, reason):
    assert layer_facts(layer).not_judged == reason


def test_fp8_keys_get_the_values_of_their_codes():
    layer = Attention(kv_cache_dtype="fp8", _k_scale_float=0.5, _v_scale_float=2.0)
    key, value = layer_facts(layer).code(torch.full((1, 2, 16), 0.55), torch.full((1, 2, 16), 1e6))
    assert key.unique().tolist() == [0.5625]  # 0.55 / 0.5 is nearest to the code 1.125
    assert value.unique().tolist() == [896.0]  # the largest code, 448


def test_two_steps_in_flight_stop_the_observer():
    observer = EngineObserver()
    hooks = Hooks(observer)
    hooks._plan = object()
    runner = SimpleNamespace()
    observer.engine_starts([], {})
    hooks._guarded(hooks._step_begins, runner, SimpleNamespace(finished_req_ids=(), total_num_scheduled_tokens=1))
    assert "a step begins before the last one has ended" in observer.failure
