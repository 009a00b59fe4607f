"""Long rows in bounded memory: no tensor of a call grows with the number of keys, or with rows times keys."""

from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from attncheck.reference import (
    AttentionParams,
    MLAParams,
    dcp_rank_attention,
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_latent_attention,
    paged_attention,
)

HEADS, KV_HEADS, SIZE, KEYS, Q_TILE, KV_TILE = 4, 2, 8, 8192, 16, 128
PLAIN = AttentionParams(HEADS, KV_HEADS, SIZE)
MODIFIED = AttentionParams(HEADS, KV_HEADS, SIZE, window=(5000, 0), alibi_slopes=(0.1,) * HEADS, sinks=(0.0,) * HEADS)
LATENT = MLAParams(HEADS, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
KEY_TILE = 8 * max(KV_HEADS * SIZE, HEADS * 12) * KV_TILE  # latent attention projects a key of 12 for each head


class LargestResult(TorchFunctionMode):
    """The most storage any result of an operation has, storages that existed before left out."""

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.bytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def cache(*shape):
    return torch.zeros(KEYS // 16, 16, *shape, dtype=torch.bfloat16)


def latent(rows):
    weights = torch.zeros(16, HEADS, 8), torch.zeros(16, HEADS, 8)
    return torch.zeros(rows, HEADS, 8), torch.zeros(rows, HEADS, 4), cache(20), *weights


def absorbed(rows):
    return torch.zeros(rows, HEADS, 16), torch.zeros(rows, HEADS, 4), cache(20)


def paged(rows):
    return torch.zeros(rows, HEADS, SIZE), cache(KV_HEADS, SIZE), cache(KV_HEADS, SIZE)


@pytest.mark.parametrize(
    ("function", "arguments", "layer"),
    [
        pytest.param(paged_attention, paged(1), PLAIN, id="decode"),
        pytest.param(paged_attention, paged(40), MODIFIED, id="modified"),
        pytest.param(partial(dcp_rank_attention, dcp_size=4, dcp_rank=3), paged(40), MODIFIED, id="rank"),
        pytest.param(mla_attention_naive, latent(40), LATENT, id="naive"),
        pytest.param(mla_attention_absorbed, latent(40), LATENT, id="absorbed"),
        pytest.param(partial(mla_attention_chunked, workspace=3000), latent(40), LATENT, id="chunked"),
        pytest.param(mla_latent_attention, absorbed(40), LATENT, id="latent"),
    ],
)
def test_no_result_is_larger_than_a_tile(function, arguments, layer):
    rows, tables = len(arguments[0]), (torch.arange(KEYS // 16)[None], torch.tensor([KEYS]))
    starts = torch.tensor([0, rows])
    with LargestResult(*arguments, *tables, starts) as largest:
        function(*arguments, *tables, starts, layer, q_tile=Q_TILE, kv_tile=KV_TILE)
    scores, result = 8 * HEADS * min(rows, Q_TILE) * KV_TILE, 8 * rows * HEADS * 20
    assert largest.bytes <= max(scores, KEY_TILE, result)
