"""Small models with random weights, for an engine that is given no model.

The weights are larger than usual, so that attention is peaked: a row that depends on few keys shows a key that is
missing or wrong. With the dummy weights of vLLM, attention is nearly uniform, and its errors are small.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 512

_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "dtype": "bfloat16",
}
_GROUPED = _COMMON | {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "full": _GROUPED | {"num_hidden_layers": 2},
    "hybrid": _GROUPED
    | {
        "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "sliding_window": 48,  # no multiple of a block, so that its edge is inside one
    },
    # vLLM's CPU kernel for latent caches takes rows of 512 + 64 values only. All layers are dense.
    "latent": _COMMON
    | {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
    },
}
"""What each model's config states, as transformers names it: full attention, every second layer a window, latent."""


def make_model(folder: Path, kind: str) -> None:
    """Write the config and the weights of the model ``kind`` into ``folder``. Equal calls write equal files."""
    transformers = import_module("transformers")  # a dependency of vLLM
    config = transformers.AutoConfig.for_model(**CONFIGS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
