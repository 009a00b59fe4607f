"""What the objects of vLLM mean to an observer, from objects with the same attributes."""

import sys
from types import SimpleNamespace

import pytest
import torch

from attncheck.harness.engine.events import KVGroup, ScheduledRequest
from attncheck.harness.engine.vllm_facts import (
    added_request,
    engine_facts,
    kv_groups,
    layer_facts,
    page_sizes,
    sampled_tokens,
    step_plan,
)
from attncheck.harness.problem.storage import nearest_code, truncated_code
from attncheck.reference import AttentionParams


def request(**given):
    plain = {"req_id": "r", "prompt_token_ids": [1, 2], "prompt_embeds": None, "mm_features": [], "lora_request": None}
    return SimpleNamespace(**plain | given)


@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        ({}, "", None),
        ({"lora_request": SimpleNamespace(lora_name="french")}, "LoRA=french", None),
        ({"prompt_embeds": torch.zeros(2)}, "", "requests with embeddings for tokens"),
        ({"mm_features": [1]}, "", "requests with images or other media"),
    ],
)
def test_a_request_is_followed_or_its_reason_is_given(given, key, reason):
    assert added_request(request(**given)) == ("r", [1, 2], key, reason)


def test_a_plan_has_requests_that_start_start_again_or_go_on():
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
    plan = step_plan(output, {"b"})
    assert plan.requests == (
        ScheduledRequest("a", (), 5),
        ScheduledRequest("b", ((7,), (8,)), 4, starts=True, is_resumed=True),
        ScheduledRequest("c", ((1, 2), (3,)), 32, starts=True),
    )
    assert plan.drafts == {"a": (4, -1)}
    assert plan.block_copies == ((1, 2),)
    made = SimpleNamespace(sampled_token_ids=[[9], [], [5, 6]], req_id_to_index={"b": 0, "c": 1, "a": 2})
    assert sampled_tokens(plan, made) == {"a": (5, 6), "b": (9,), "c": ()}


def test_groups_that_are_not_followed_have_a_reason():
    names = ("FullAttentionSpec", "MambaSpec", "CircularBufferSpec", "SlidingWindowSpec")
    full, mamba, ring, window = (type(name, (), {"block_size": 16})() for name in names)
    uniform, mixed = (
        type("UniformTypeKVCacheSpecs", (), {"block_size": 16, "kv_cache_specs": {"e": full, "f": other}})()
        for other in (window, ring)
    )
    groups = [
        SimpleNamespace(kv_cache_spec=full, layer_names=["a"]),
        SimpleNamespace(kv_cache_spec=mamba, layer_names=["b"]),
        SimpleNamespace(kv_cache_spec=full, layer_names=["c"], is_eagle_group=True),
        *(SimpleNamespace(kv_cache_spec=spec, layer_names=["d"]) for spec in (ring, window, uniform, mixed)),
    ]
    made = kv_groups(SimpleNamespace(kv_cache_groups=groups))
    ring_reason = "layers of the KV-cache spec CircularBufferSpec"
    reasons = [None, "layers of the KV-cache spec MambaSpec", "layers of a drafter"]
    reasons += [ring_reason, None, None, ring_reason]
    assert [group.not_followed for group in made] == reasons


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"_model_forward": None, "_kernel_block_sizes": [16, 64]}, {"a": 16, "b": 64, "c": 64}),
        ({"kernel_block_sizes": [16, 64]}, {"a": 16, "b": 64, "c": 64}),
        ({}, {}),
    ],
)
def test_each_runner_has_a_name_of_its_own_for_the_size_of_a_page(given, sizes):
    groups = [KVGroup(16, ("a",)), KVGroup(128, ("b", "c"))]
    assert page_sizes(SimpleNamespace(**given), groups) == sizes


def test_pages_of_unknown_size_are_not_compared():
    layer = Attention({"do_kv_cache_update": lambda *_: None})
    assert layer_facts(layer, torch.bfloat16, 16).write is not None
    assert layer_facts(layer, torch.bfloat16).write is None


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
    expected = AttentionParams(4, 2, 16, scale=0.25, window=(47, 0), logits_soft_cap=30.0, sinks=(1.0, 1.0, 1.0, 1.0))
    facts = layer_facts(layer, torch.bfloat16, 32)
    assert (facts.params, facts.page_size, facts.not_judged) == (expected, 32, None)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (RSWAAttention(), "layers of the class RSWAAttention"),
        (Attention(attn_type="encoder_only"), "layers of the type encoder_only"),
        (Attention(attn_type="of_next_year"), "layers of the type of_next_year"),
        (Attention(kv_cache_dtype="nvfp4"), "layers with a cache of nvfp4"),
        (Attention({"chunk_lookback": 1}), "layers whose chunks look back"),
        (Attention(use_mm_prefix=True), "layers with prefix ranges of images"),
    ],
)
def test_a_layer_that_the_truth_cannot_express_is_named(layer, reason):
    assert layer_facts(layer, torch.bfloat16).not_judged == reason


def written_by(code):
    """Return a layer whose writer stores the codes that ``code`` gives, in pages of 4 keys and then 4 values."""

    def do_kv_cache_update(layer, key, value, kv_cache, slots):
        for at, rows, scale in ((0, key, 0.5), (4, value, 2.0)):
            codes = code(rows.double() / scale, torch.float8_e4m3fn)
            kv_cache.view(-1, 8, 2, 16)[slots // 4, slots % 4 + at] = codes

    pages = torch.zeros(3, 8, 32, dtype=torch.uint8)
    given = {"kv_cache_dtype": "fp8", "_k_scale_float": 0.5, "_v_scale_float": 2.0, "kv_cache": pages}
    return Attention({"do_kv_cache_update": do_kv_cache_update}, **given)


@pytest.mark.parametrize(("code", "kept"), [(nearest_code, 0.5625), (truncated_code, 0.5)])
def test_fp8_keys_are_judged_by_the_rule_of_the_writer(code, kept):
    layer = written_by(code)
    key, value = layer_facts(layer, torch.bfloat16).code(torch.full((1, 2, 16), 0.55), torch.full((1, 2, 16), 1e6))
    assert key.unique().tolist() == [kept]  # 0.55 / 0.5 is between the codes 1 and 1.125
    assert value.unique().tolist() == [896.0]  # the largest code, 448
    assert not layer.kv_cache.any()


def test_fp8_codes_of_no_known_rule_are_not_judged():
    unknown = "layers whose fp8 codes or scales follow no rule that is known"
    layer = written_by(lambda x, dtype: nearest_code(1.5 * x, dtype))
    assert layer_facts(layer, torch.bfloat16).not_judged == unknown
    layer = written_by(nearest_code)
    layer._k_scale_float = 0.3
    assert layer_facts(layer, torch.bfloat16).not_judged == unknown


def test_several_classes_that_serve_are_one_backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    classes = {"a": "FLASH_ATTN", "b": "FLASHMLA", "c": "FLASH_ATTN"}
    layers = {
        layer: SimpleNamespace(get_attn_backend=lambda name=name: SimpleNamespace(get_name=lambda: name))
        for layer, name in classes.items()
    }
    groups = [
        SimpleNamespace(layer_names=[*names], kv_cache_spec=SimpleNamespace(block_size=16)) for names in ("ab", "c")
    ]
    facts = engine_facts(
        SimpleNamespace(
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
            compilation_config=SimpleNamespace(static_forward_context=layers),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            vllm_config=SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True)),
        )
    )
    assert (facts.backend.name, facts.backend.version) == ("vllm:FLASH_ATTN+FLASHMLA", "0.32.0")
    assert facts.shape == "bfloat16, KV cache auto, blocks of 16 tokens, runner SimpleNamespace V2"
    assert (facts.dtype, facts.is_async) == ("bfloat16", True)
