"""Latent attention that means nothing is refused by name, before anything is computed."""

from dataclasses import replace

import pytest
import torch

from attncheck.errors import ReferenceArgumentError
from attncheck.reference import (
    AttentionParams,
    AttentionType,
    LayerSpec,
    MLAParams,
    layer_params,
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_latent_attention,
    mla_params,
)
from attncheck.reference.spec import MLASpec

LAYER = MLAParams(3, kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=2)
SPEC = LayerSpec(
    num_heads=3,
    num_kv_heads=1,
    head_size=10,
    mla=MLASpec(kv_lora_rank=6, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=2),
)
E4M3 = torch.float8_e4m3fn


def question():
    """Two requests of 2 and 1 rows over 6 and 3 keys, pages of 4."""
    return {
        "q_nope": torch.zeros(3, 3, 5),
        "q_pe": torch.zeros(3, 3, 4),
        "kv_cache": torch.zeros(5, 4, 10),
        "w_uk": torch.zeros(6, 3, 5),
        "w_uv": torch.zeros(6, 3, 2),
        "block_table": torch.tensor([[1, 2], [4, 99]]),
        "seq_lens": torch.tensor([6, 3]),
        "query_start_loc": torch.tensor([0, 2, 3]),
        "params": LAYER,
    }


QUERY = [
    ({"q_pe": torch.zeros(3, 3, 5)}, "q_pe.shape"),
    ({"q_pe": torch.zeros(2, 3, 4)}, "q_pe.shape"),
    ({"q_pe": torch.zeros(3, 3, 4, dtype=torch.int64)}, "q_pe.dtype"),
    ({"q_pe": torch.zeros(3, 3, 4, device="meta")}, "q_pe.device"),
]
SHARED = [
    ({"kv_cache": torch.zeros(5, 4, 1, 10)}, "kv_cache.shape"),
    ({"kv_cache": torch.zeros(5, 4, 9)}, "kv_cache.shape"),
    ({"kv_cache": torch.zeros(5, 0, 10)}, "kv_cache.shape"),
    ({"kv_cache": torch.zeros(5, 4, 10, dtype=torch.uint8)}, "kv_cache.dtype"),
    ({"block_table": torch.tensor([[1], [4]])}, "block_table.shape"),
    ({"block_table": torch.tensor([[1, 2]])}, "block_table.shape"),
    ({"block_table": torch.tensor([[1, 5], [4, 0]])}, "block_table[0, 1]"),
    ({"seq_lens": torch.tensor([6, -1])}, "seq_lens[1]"),
    ({"seq_lens": torch.tensor([6])}, "seq_lens.shape"),
    ({"query_start_loc": torch.tensor([0, 2, 4])}, "query_start_loc[-1]"),
    ({"query_start_loc": torch.tensor([0, 3, 2])}, "query_start_loc"),
    ({"params": None}, "params"),
    ({"params": AttentionParams(3, 1, 10)}, "params"),
    ({"q_tile": 0}, "q_tile"),
    ({"kv_tile": 1.5}, "kv_tile"),
]
UNABSORBED = [
    ({"q_nope": torch.zeros(3, 3, 6)}, "q_nope.shape"),
    ({"q_nope": torch.zeros(3, 2, 5)}, "q_nope.shape"),
    ({"q_nope": torch.zeros(3, 3, 5).to(E4M3)}, "q_nope.dtype"),
    ({"w_uk": torch.zeros(3, 6, 5)}, "w_uk.shape"),
    ({"w_uk": torch.zeros(6, 3, 2)}, "w_uk.shape"),
    ({"w_uv": torch.zeros(6, 3, 5)}, "w_uv.shape"),
    ({"w_uv": torch.zeros(6, 3, 2).to(E4M3)}, "w_uv.dtype"),
    ({"w_uv": torch.zeros(6, 3, 2, device="meta")}, "w_uv.device"),
]
RANGES = [({"kv_range": span}, "kv_range") for span in ((4, 2), (-1, 2), (1, 2, 3), (0, 2.0), (0, True), 5)]


CHUNKED = [({"workspace": 0}, "workspace"), ({"workspace": None}, "workspace")]
LATENT = [({"q_latent": torch.zeros(3, 3, 5)}, "q_latent.shape")]


def sound_question(function):
    sound = question()
    if function is mla_attention_chunked:
        return {**sound, "workspace": 2}
    if function is mla_latent_attention:
        kept = {name: value for name, value in sound.items() if name not in ("q_nope", "w_uk", "w_uv")}
        return {**kept, "q_latent": torch.zeros(3, 3, 6)}
    return sound


@pytest.mark.parametrize(
    ("function", "table"),
    [
        (mla_attention_naive, QUERY + SHARED + UNABSORBED + RANGES),
        (mla_attention_absorbed, QUERY + SHARED + UNABSORBED + RANGES),
        (mla_attention_chunked, QUERY + SHARED + UNABSORBED + CHUNKED),
        (mla_latent_attention, QUERY + SHARED + RANGES + LATENT),
    ],
)
def test_arguments_that_do_not_fit(function, table):
    sound = sound_question(function)
    function(**sound)
    for change, argument in table:
        with pytest.raises(ReferenceArgumentError) as refusal:
            function(**{**sound, **change})
        assert refusal.value.argument == argument, change


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), "1", torch.ones(3), torch.ones(5, 4), torch.tensor(1)])
@pytest.mark.parametrize("function", [mla_attention_naive, mla_attention_absorbed])
def test_a_scale_of_codes(function, scale):
    sound = question()
    function(**sound, k_scale=scale)  # of a cache that is no code: ignored
    sound["kv_cache"] = sound["kv_cache"].to(E4M3)
    with pytest.raises(ReferenceArgumentError, match="k_scale"):
        function(**sound, k_scale=scale)


def test_the_message_of_a_scale_states_what_would_be_right():
    with pytest.raises(ReferenceArgumentError) as refusal:
        mla_attention_naive(**{**question(), "kv_cache": torch.zeros(5, 4, 10).to(E4M3)}, k_scale=torch.ones(3))
    assert str(refusal.value) == "k_scale.shape = (3,): must be one element"


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
        ({"v_head_dim": 2.0}, "v_head_dim"),
        ({"qk_nope_head_dim": -1}, "qk_nope_head_dim"),
        ({"qk_rope_head_dim": True}, "qk_rope_head_dim"),
        ({"qk_nope_head_dim": 0, "qk_rope_head_dim": 0}, "qk_nope_head_dim + qk_rope_head_dim"),
        ({"scale": float("nan")}, "scale"),
    ],
)
def test_params(change, argument):
    with pytest.raises(ReferenceArgumentError) as refusal:
        replace(LAYER, **change)
    assert refusal.value.argument == argument


def test_params_of_a_layer():
    assert mla_params(SPEC) == replace(LAYER, scale=1 / 3)
    assert mla_params(SPEC, causal=False) == replace(LAYER, scale=1 / 3, causal=False)
    assert mla_params(replace(SPEC, scale=0.5, causal=False)) == replace(LAYER, scale=0.5, causal=False)
    assert len({LAYER, replace(LAYER), replace(LAYER, scale=0.5)}) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"head_size_v": 6},
        {"sliding_window": 4},
        {"logits_soft_cap": 5.0},
        {"alibi": True},
        {"sinks": (0.0, 1.0, 2.0)},
        {"attn_chunk_size": 4},
        {"attn_type": AttentionType.ENCODER_ONLY},
    ],
)
def test_a_layer_that_is_not_latent_attention(change):
    with pytest.raises(ReferenceArgumentError) as refusal:
        mla_params(replace(SPEC, **change))
    assert refusal.value.argument == f"layer.{next(iter(change))}"


def test_each_kind_of_layer_has_its_own_parameters():
    with pytest.raises(ReferenceArgumentError, match=r"layer\.mla"):
        layer_params(SPEC)
    with pytest.raises(ReferenceArgumentError, match=r"layer\.mla"):
        mla_params(LayerSpec(num_heads=3, num_kv_heads=1, head_size=10))
