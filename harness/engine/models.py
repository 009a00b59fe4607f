"""Small models with random weights, for an engine that is given no model.

The weights are larger than usual, so that attention is peaked: a row that depends on few keys shows a key that is
missing or wrong. With the dummy weights of vLLM, attention is nearly uniform, and its errors are small.
"""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from attncheck.errors import QuestionError

VOCAB_SIZE = 512
WINDOW = 48
"""Keys that a row of a layer with a window sees; no multiple of a block, so that its edge is inside one."""

_HIDDEN_SIZE = 256
_LATENT_LAYERS = 2
_COMMON = {
    "hidden_size": _HIDDEN_SIZE,
    "intermediate_size": 256,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_GROUPED = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "full": _COMMON | _GROUPED | {"num_hidden_layers": 2},
    "hybrid": _COMMON
    | _GROUPED
    | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": WINDOW,
    },
    # vLLM's CPU kernel for latent caches takes rows of 512 + 64 values only. All layers are dense.
    "latent": _COMMON
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_hidden_layers": _LATENT_LAYERS,
        "first_k_dense_replace": _LATENT_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 256,
    },
}
"""The ``config.json`` of each model: all layers with full attention, every second one with a window, latent caches."""


def make_model(folder: Path, kind: str) -> None:
    """Write the config and the weights of the model ``kind`` into the existing ``folder``.

    Equal calls write equal files.

    Raises:
        QuestionError: there is no model of this name.
    """
    if kind not in CONFIGS:
        raise QuestionError(f"model {kind!r} is unknown; known: {', '.join(CONFIGS)}, or the folder of a model")
    config = CONFIGS[kind]
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape, spread in _shapes(config):
        ones = torch.ones(shape)
        drawn = ones if spread is None else torch.randn(shape, generator=generator) * spread
        weights[name] = drawn.bfloat16()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # A dependency of vLLM, not of attncheck.
    import_module("safetensors.torch").save_file(weights, folder / "model.safetensors")


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...], float | None]]:
    """Yield the name, shape and standard deviation of each weight. A deviation of None means a weight of ones."""
    yield "model.embed_tokens.weight", (VOCAB_SIZE, _HIDDEN_SIZE), 1.0
    yield "lm_head.weight", (VOCAB_SIZE, _HIDDEN_SIZE), 0.3
    yield "model.norm.weight", (_HIDDEN_SIZE,), None
    projections = _latent(config) if "kv_lora_rank" in config else _grouped(config)
    inner = config["intermediate_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape, spread in projections:
            yield f"{prefix}.self_attn.{name}.weight", shape, spread
        yield f"{prefix}.mlp.gate_proj.weight", (inner, _HIDDEN_SIZE), 0.08
        yield f"{prefix}.mlp.up_proj.weight", (inner, _HIDDEN_SIZE), 0.08
        yield f"{prefix}.mlp.down_proj.weight", (_HIDDEN_SIZE, inner), 0.08
        yield f"{prefix}.input_layernorm.weight", (_HIDDEN_SIZE,), None
        yield f"{prefix}.post_attention_layernorm.weight", (_HIDDEN_SIZE,), None


_Projections = list[tuple[str, tuple[int, ...], float | None]]


def _grouped(config: Mapping[str, Any]) -> _Projections:
    query = config["num_attention_heads"] * config["head_dim"]
    shared = config["num_key_value_heads"] * config["head_dim"]
    return [
        ("q_proj", (query, _HIDDEN_SIZE), 0.08),
        ("k_proj", (shared, _HIDDEN_SIZE), 0.08),
        ("v_proj", (shared, _HIDDEN_SIZE), 0.08),
        ("o_proj", (_HIDDEN_SIZE, query), 0.12),
    ]


def _latent(config: Mapping[str, Any]) -> _Projections:
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    return [
        ("q_proj", (heads * (nope + rope), _HIDDEN_SIZE), 0.08),
        ("kv_a_proj_with_mqa", (rank + rope, _HIDDEN_SIZE), 0.08),
        ("kv_a_layernorm", (rank,), None),
        ("kv_b_proj", (heads * (nope + value), rank), 0.08),
        ("o_proj", (_HIDDEN_SIZE, heads * value), 0.12),
    ]
