"""Long rows in bounded memory: no tensor of a call grows with the number of keys, or with rows times keys."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attncheck.reference import (
    AttentionParams,
    MLAParams,
    Precision,
    dcp_rank_attention,
    mla_attention_absorbed,
    mla_attention_chunked,
    mla_attention_naive,
    mla_latent_attention,
    paged_attention,
)

HEADS, KV_HEADS, SIZE, KEYS, Q_TILE, KV_TILE = 4, 2, 8, 32_768, 16, 512


class LargestResult(TorchDispatchMode):
    """The most storage any result of an operation has, storages that existed before left out."""

    def __init__(self, *known):
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(HEADS, KV_HEADS, SIZE),
        AttentionParams(HEADS, KV_HEADS, SIZE, window=(9000, 0), alibi_slopes=(0.1,) * HEADS, sinks=(0.0,) * HEADS),
    ],
    ids=["plain", "modified"],
)
@pytest.mark.parametrize("rows", [1, 40])
def test_no_result_is_larger_than_a_tile(params, rows):
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(KEYS // 16, 16, KV_HEADS, SIZE, generator=generator).to(torch.bfloat16)
    table = torch.randperm(KEYS // 16, generator=generator)[None]
    query = torch.randn(rows, HEADS, SIZE, generator=generator)
    starts, lens = torch.tensor([0, rows]), torch.tensor([KEYS])
    with LargestResult(query, cache, table, starts, lens) as largest:
        paged_attention(query, cache, cache, table, lens, starts, params, q_tile=Q_TILE, kv_tile=KV_TILE)
    scores = 8 * HEADS * min(rows, Q_TILE) * KV_TILE
    key_tile, page_ids, result = 8 * KV_HEADS * KV_TILE * SIZE, 8 * KEYS // 16, 8 * rows * HEADS * SIZE
    assert largest.bytes <= max(scores, key_tile, page_ids, result)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_holds_no_more_than_a_tile(rank):
    layer = AttentionParams(HEADS, KV_HEADS, SIZE, window=(30_000, 0), alibi_slopes=(0.1,) * HEADS)
    cache = torch.zeros(KEYS // 64, 16, KV_HEADS, SIZE, dtype=torch.bfloat16)
    query, table = torch.zeros(40, HEADS, SIZE), torch.arange(KEYS // 64)[None]
    starts, lens = torch.tensor([0, 40]), torch.tensor([KEYS])
    options = {"dcp_size": 4, "dcp_rank": rank, "q_tile": Q_TILE, "kv_tile": KV_TILE}
    with LargestResult(query, cache, table, starts, lens) as largest:
        dcp_rank_attention(query, cache, cache, table, lens, starts, layer, **options)
    assert largest.bytes <= 8 * max(HEADS * Q_TILE * KV_TILE, 40 * HEADS * SIZE)


@pytest.mark.parametrize("form", ["naive", "absorbed", "latent", "chunked"])
def test_latent_attention_projects_a_tile_at_a_time(form):
    layer = MLAParams(HEADS, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    cache = torch.zeros(KEYS // 16, 16, 20, dtype=torch.bfloat16)
    q_nope, q_pe, q_latent = (torch.zeros(40, HEADS, size) for size in (8, 4, 16))
    weights = torch.zeros(16, HEADS, 8), torch.zeros(16, HEADS, 8)
    tables = torch.arange(KEYS // 16)[None], torch.tensor([KEYS]), torch.tensor([0, 40])
    tiles = {"q_tile": Q_TILE, "kv_tile": KV_TILE}
    forms = {"naive": mla_attention_naive, "absorbed": mla_attention_absorbed}
    with LargestResult(q_nope, q_pe, q_latent, cache, *weights, *tables) as largest:
        if form == "latent":
            mla_latent_attention(q_latent, q_pe, cache, *tables, layer, **tiles)
        elif form == "chunked":
            mla_attention_chunked(q_nope, q_pe, cache, *weights, *tables, layer, workspace=10_000, **tiles)
        else:
            forms[form](q_nope, q_pe, cache, *weights, *tables, layer, **tiles)
    scores, key_tile, result = HEADS * Q_TILE * KV_TILE, HEADS * 12 * KV_TILE, 40 * HEADS * 20
    assert largest.bytes <= 8 * max(scores, key_tile, result)


def test_a_late_needle_among_32k_keys_is_found():
    cache = torch.zeros(KEYS // 16, 16, 1, 2, dtype=torch.float64)
    cache[-1, -1, 0] = torch.tensor([KEYS - 1, 1.0]).log()
    values = torch.zeros_like(cache)
    values[-1, -1] = 1.0
    params = AttentionParams(1, 1, 2, scale=1.0)
    query = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    table, lens, starts = torch.arange(KEYS // 16)[None], torch.tensor([KEYS]), torch.tensor([0, 1])
    for precision, room in ((Precision(), 1e-6), (Precision.kernel(torch.bfloat16), 1e-2)):
        out, _ = paged_attention(query, cache, values, table, lens, starts, params, precision=precision)
        assert (out - 0.5).abs().max() < room
